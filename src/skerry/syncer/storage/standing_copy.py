"""Spares for the day the tape is lost: where the run stood a second ago, and how long the tape was. Neither is synced, because
in a power cut the tape itself is safe. Both name the tape's generation: a rebuilt tape starts a new one."""

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
    """Where the run stood after this many entries of the tape."""

    entries: int
    standing: Standing
    generation: str = ""


def write_standing_copy(folder: Path, run_id: str, generation: str, entries: int, standing: Standing) -> None:
    """Raises OSError."""
    text = json.dumps({"run_id": run_id, "generation": generation, "entries": entries, "standing": standing.to_json()})
    DISK.write_whole(folder / "standing.json", json.dumps({"checksum": checksum(text.encode()), "text": text}).encode())


def read_standing_copy(folder: Path, run_id: str, generation: str | None = None) -> StandingCopy | None:
    """None if there is none of this run, or of this generation of its tape if one is given."""
    try:
        outside = json.loads((folder / "standing.json").read_text())
        if outside["checksum"] != checksum(outside["text"].encode()):
            return None
        data = json.loads(outside["text"])
        if data["run_id"] != run_id or generation not in (None, data["generation"]):
            return None
        return StandingCopy(int(data["entries"]), Standing.from_json(data["standing"]), str(data["generation"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_count(lock: int, generation: str, entries: int) -> None:
    """Note in the lock file how long the tape is: whoever finds a shorter one knows that its log is gone."""
    text = f"{generation} {entries:020d}"
    with contextlib.suppress(OSError):
        os.pwrite(lock, f"{text} {checksum(text.encode()):08x}\n".encode(), 0)


def read_count(folder: Path, generation: str) -> int:
    """0 if nothing is known of this generation."""
    found, entries = _read_lock(folder)
    return entries if found == generation else 0


def noted_generations(folder: Path, run_id: str) -> set[str]:
    """Generations of the tape that the spares name."""
    copy = read_standing_copy(folder, run_id)
    return {_read_lock(folder)[0], copy.generation if copy is not None else ""} - {""}


def _read_lock(folder: Path) -> tuple[str, int]:
    try:
        found, entries, seal = (folder / "lock").read_text().split()
        text = f"{found} {entries}"
        return (found, int(entries)) if f"{checksum(text.encode()):08x}" == seal else ("", 0)
    except (OSError, ValueError):
        return "", 0
