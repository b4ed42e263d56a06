"""Backups for a lost or truncated tape: a recent copy of the standing, and the tape's length.

Neither is synced, because the tape itself survives a power cut. Both name the tape's generation, which changes when the tape is
rebuilt.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from skerry.checksum import checksum
from skerry.core.standing import Standing
from skerry.durable import DISK


@dataclass(frozen=True)
class StandingCopy:
    """The run's standing after this many tape entries."""

    entries: int
    standing: Standing
    generation: str = ""


def write_standing_copy(folder: Path, run_id: str, generation: str, entries: int, standing: Standing) -> None:
    """Write standing.json. Raises OSError."""
    text = json.dumps({"run_id": run_id, "generation": generation, "entries": entries, "standing": standing.to_json()})
    DISK.write_whole(folder / "standing.json", json.dumps({"checksum": checksum(text.encode()), "text": text}).encode())


def read_standing_copy(folder: Path, run_id: str, generation: str | None = None) -> StandingCopy | None:
    """Read standing.json. Returns None if it is missing, damaged, or belongs to another run or (if given) generation."""
    try:
        envelope = json.loads((folder / "standing.json").read_text())
        if envelope["checksum"] != checksum(envelope["text"].encode()):
            return None
        data = json.loads(envelope["text"])
        if data["run_id"] != run_id or generation not in (None, data["generation"]):
            return None
        return StandingCopy(int(data["entries"]), Standing.from_json(data["standing"]), str(data["generation"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_count(lock: int, generation: str, entries: int) -> None:
    """Store the tape's length in the lock file. A tape found shorter than this has lost its log."""
    text = f"{generation} {entries:020d}"
    with contextlib.suppress(OSError):
        os.pwrite(lock, f"{text} {checksum(text.encode()):08x}\n".encode(), 0)


def read_count(folder: Path, generation: str) -> int:
    """Read the tape's length from the lock file. Returns 0 if it is unknown for this generation."""
    found, entries = _read_lock(folder)
    return entries if found == generation else 0


def noted_generations(folder: Path, run_id: str) -> set[str]:
    """Generations of the tape that standing.json and the lock file name."""
    copy = read_standing_copy(folder, run_id)
    return {_read_lock(folder)[0], copy.generation if copy is not None else ""} - {""}


def _read_lock(folder: Path) -> tuple[str, int]:
    """The tape's generation and length, or "" and 0 if unknown."""
    try:
        found, entries, seal = (folder / "lock").read_text().split()
        text = f"{found} {entries}"
        return (found, int(entries)) if f"{checksum(text.encode()):08x}" == seal else ("", 0)
    except (OSError, ValueError):
        return "", 0
