"""The run folder: its files, and how to read them. Safe to use beside a running syncer.

run.json                 the run's identity, model and settings; written once, when creation is complete
fixed.safetensors        tensors that are not trained
fragments/FFFF-VVVVVVVV.safetensors   values and outer optimizer state of one version of one fragment
tape.sqlite              committed versions, all decisions in order, and the run's standing
standing.json            a recent copy of the standing, in case the tape is lost
aside/NNNN-WHY/          damaged and leftover files, moved there when the folder was opened; read only for recovery
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from skerry.checksum import checksum
from skerry.config import SyncConfig, from_json
from skerry.core.schema import TapeRecord
from skerry.core.standing import Standing
from skerry.errors import StoreError
from skerry.syncer.storage.database import ask, entries_of, meta, newest_row, standing_data
from skerry.syncer.storage.version_file import label_of, newest_proven, numbers_of, read_version
from skerry.tensors.fragments import Fragment, Layout, TensorSpec, split
from skerry.tensors.merge import FragmentState

log = logging.getLogger("skerry.storage")

FORMAT = 5


@dataclass(frozen=True)
class RunIdentity:
    run_id: str
    fixed_checksum: int
    layout: Layout
    sync: SyncConfig
    job_json: str


class DamagedIdentity(Exception):
    """run.json does not hold what was written to it."""


def read_identity(folder: Path) -> RunIdentity:
    """Read run.json. Raises StoreError."""
    path = folder / "run.json"
    try:
        return _parse_identity(path.read_text(), folder)
    except FileNotFoundError:
        raise StoreError(f"{folder} holds no run (run.json is missing)") from None
    except (OSError, UnicodeDecodeError, DamagedIdentity) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def _parse_identity(text: str, folder: Path) -> RunIdentity:
    """Raises DamagedIdentity, or StoreError if the text is intact but has another format."""
    try:
        data = json.loads(text)
        expected = data.pop("checksum", None)
        if expected is not None and expected != checksum(json.dumps(data).encode()):
            raise DamagedIdentity("the content does not match its checksum")
        if data["format"] != FORMAT:
            raise StoreError(f"{folder} has run format {data['format']}, this Skerry reads {FORMAT}")
        if expected is None:
            raise DamagedIdentity("the checksum is missing")
        specs = [TensorSpec(name, tuple(shape), dtype, rule) for name, shape, dtype, rule in data["tensors"]]
        sync = from_json(SyncConfig, json.dumps(data["sync"]))
        job = json.dumps(data["job"]) if data["job"] is not None else ""
        return RunIdentity(data["run_id"], data["fixed_checksum"], split(specs, sync.fragments), sync, job)
    except (StoreError, DamagedIdentity):
        raise
    except Exception as error:  # damaged text can fail in any way
        raise DamagedIdentity(str(error) or repr(error)) from None


def find_identity(folder: Path) -> tuple[RunIdentity, str, str]:
    """Find the run's identity. Returns it, its text, and its source if that is not run.json. Raises StoreError."""
    path = folder / "run.json"
    try:
        text = path.read_text()
        return _parse_identity(text, folder), text, ""
    except FileNotFoundError:
        damage = f"{folder} holds no run (run.json is missing)"
    except (OSError, UnicodeDecodeError, DamagedIdentity) as error:
        damage = f"{path} cannot be read: {error}"
    for text, source in _copies_of_identity(folder):
        with contextlib.suppress(DamagedIdentity, StoreError):
            identity = _parse_identity(text, folder)
            if _may_belong_to(folder, identity):
                return identity, text, source
    raise StoreError(damage)


def _may_belong_to(folder: Path, identity: RunIdentity) -> bool:
    """Whether the version files fit this identity. A tape copied here by mistake must not turn the folder into another run."""
    labels = [label_of(path) for path in (folder / "fragments").glob("*.safetensors")]
    known = {found[0].run_id for found in labels if found is not None}
    return not known or identity.run_id in known


def _copies_of_identity(folder: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if (folder / "tape.sqlite").exists():
        with contextlib.suppress(StoreError):
            text = ask(folder, lambda database: meta(database, "identity"))
            found += [(text, "the tape")] if text is not None else []
    for snapshot in reversed(snapshot_folders(folder)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append(((snapshot / "run.json").read_text(), f"snapshot {snapshot.name}"))
    return found


def snapshot_folders(folder: Path) -> list[Path]:
    """Folders of all snapshots, oldest first. Their content is not checked."""
    return sorted(path for path in (folder / "snapshots").glob("*") if re.fullmatch(r"\d{6,}", path.name))


def is_run(folder: Path) -> bool:
    """Whether a run was ever created here, even if run.json is gone since."""
    # An interrupted creation leaves at most version 0 of the fragments.
    if any((folder / name).exists() for name in ("run.json", "standing.json", "good", "snapshots", "aside")):
        return True
    numbers = [numbers_of(path.name) for path in (folder / "fragments").glob("*")]
    return any(found[1] > 0 for found in numbers if found is not None) or bool(_copies_of_identity(folder))


def identity_text(data: dict[str, Any]) -> str:
    """The content of run.json for this identity, with its checksum."""
    plain = json.loads(json.dumps({key: value for key, value in data.items() if key != "checksum"}))
    return json.dumps({**plain, "checksum": checksum(json.dumps(plain).encode())}, indent=1)


def read_model(folder: Path) -> dict[str, Tensor]:
    """Read the run's newest tensors by name, in their own dtypes. Beside a running syncer, fragments may differ in age."""
    identity = read_identity(folder)
    layout = identity.layout
    flat = {s.name: torch.empty(s.numel, dtype=torch.float32) for s in layout.tensors if s.rule != "fixed"}
    for fragment, values in zip(layout.fragments, read_values(folder, identity), strict=True):
        for piece, part in zip(fragment.pieces, torch.split(values, [p.numel for p in fragment.pieces]), strict=True):
            flat[layout.tensors[piece.tensor].name][piece.start : piece.stop] = part
    fixed = load(read_fixed(folder, identity))
    tensors = {}
    for spec in layout.tensors:
        tensor = fixed[spec.name] if spec.rule == "fixed" and spec.numel else flat.get(spec.name, torch.empty(0))
        tensors[spec.name] = tensor.reshape(spec.shape).to(getattr(torch, spec.dtype))
    return tensors


def read_values(folder: Path, identity: RunIdentity) -> list[Tensor]:
    """Read the newest values of every fragment."""

    def read(database: sqlite3.Connection) -> list[Tensor]:
        return [_read_newest(folder, identity, database, fragment).values for fragment in identity.layout.fragments]

    try:
        return ask(folder, read)
    except StoreError:
        # Version files identify themselves, so the tape is not strictly needed.
        found = [_newest_file(folder, identity, fragment) for fragment in identity.layout.fragments]
        states = [state for state in found if state is not None]
        if len(states) < len(found):
            raise
        log.warning("the tape of %s cannot be read; using the newest intact file of each fragment", folder)
        return [state.values for state in states]


def _read_newest(folder: Path, identity: RunIdentity, database: sqlite3.Connection, fragment: Fragment) -> FragmentState:
    row = newest_row(database, fragment.index)
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            # A running syncer may delete the file after we read its row. Then a newer row exists.
            try:
                return read_version(folder, fragment, row, missing_is_damage=False)
            except StoreError as error:
                damage = error
                break
        newer = newest_row(database, fragment.index)
        if newer["version"] == row["version"]:
            damage = StoreError(f"{folder / 'fragments' / row['file']} is missing, but the tape refers to it")
            break
        row = newer
    else:
        raise StoreError(f"fragment {fragment.index} changes faster than it can be read")
    # A folder copied during the run may hold files older or newer than its tape.
    state = _newest_file(folder, identity, fragment)
    if state is None:
        raise damage
    log.warning("%s; using the newest intact file of fragment %d", damage, fragment.index)
    return state


def _newest_file(folder: Path, identity: RunIdentity, fragment: Fragment) -> FragmentState | None:
    proven = newest_proven(sorted((folder / "fragments").glob("*")), identity.run_id, fragment)
    return proven.state if proven is not None else None


def read_standing(folder: Path) -> Standing:
    data = ask(folder, standing_data)
    return Standing.from_json(data) if data is not None else Standing()


def read_tape(folder: Path, kinds: Sequence[type[TapeRecord]], see: Callable[[TapeRecord], None]) -> Standing:
    """Call `see` with each record of these kinds, in order. Returns the run's standing at the same moment."""

    def read(database: sqlite3.Connection) -> dict[str, Any] | None:
        database.execute("BEGIN")  # records and standing must be of the same moment
        for entry in entries_of(database, kinds):
            see(entry.record)
        return standing_data(database)

    data = ask(folder, read, check_first=True)
    return Standing.from_json(data) if data is not None else Standing()


def read_span_s(folder: Path) -> float:
    """Seconds from the start of training to the end of the run, according to the tape. 0 if it has not ended."""
    query = "SELECT max(CASE kind WHEN 'ended' THEN at END) - min(CASE kind WHEN 'began' THEN at END) AS span FROM tape"
    span = ask(folder, lambda database: database.execute(query).fetchone()["span"])
    return float(span) if span is not None else 0.0


def read_checksums(folder: Path) -> dict[tuple[int, int], int]:
    """Checksum of every version ever committed, by fragment and version."""
    query = "SELECT fragment, version, checksum FROM versions"
    rows = ask(folder, lambda database: database.execute(query).fetchall())
    return {(row["fragment"], row["version"]): row["checksum"] for row in rows}


def read_fixed(folder: Path, identity: RunIdentity) -> bytes:
    path = folder / "fixed.safetensors"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    if checksum(data) != identity.fixed_checksum:
        raise StoreError(f"{path} is damaged: the content does not match the run's checksum")
    return data
