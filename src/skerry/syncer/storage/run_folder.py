"""The run folder as files: what lies where, and how it is read, by the syncer and by others beside it.

run.json                 the run's identity, model and settings; written once, last of all when a run is created
fixed.safetensors        tensors nobody trains
fragments/FFFF-VVVVVVVV.safetensors   values and outer momentum of one version of one fragment
tape.sqlite              which versions count, the order of all decisions, where the run stands
standing.json            where the run stood a few seconds ago, for the day the tape is lost
aside/NNNN-WHY/          what an opening found left over or damaged; read only when something else is lost
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
    """This is not what was written to run.json."""


def read_identity(folder: Path) -> RunIdentity:
    """Raises StoreError."""
    path = folder / "run.json"
    try:
        return _parse_identity(path.read_text(), folder)
    except FileNotFoundError:
        raise StoreError(f"{folder} holds no run (there is no run.json)") from None
    except (OSError, UnicodeDecodeError, DamagedIdentity) as error:
        raise StoreError(f"{path} cannot be read: {error}") from None


def _parse_identity(text: str, folder: Path) -> RunIdentity:
    """Raises DamagedIdentity; or StoreError if it is whole but of another release."""
    try:
        data = json.loads(text)
        expected = data.pop("checksum", None)
        if expected is not None and expected != checksum(json.dumps(data).encode()):
            raise DamagedIdentity("its content does not match its checksum")
        if data["format"] != FORMAT:
            raise StoreError(f"{folder} has run format {data['format']}, this Skerry reads {FORMAT}")
        if expected is None:
            raise DamagedIdentity("it has no checksum")
        specs = [TensorSpec(name, tuple(shape), dtype, rule) for name, shape, dtype, rule in data["tensors"]]
        sync = from_json(SyncConfig, json.dumps(data["sync"]))
        job = json.dumps(data["job"]) if data["job"] is not None else ""
        return RunIdentity(data["run_id"], data["fixed_checksum"], split(specs, sync.fragments), sync, job)
    except (StoreError, DamagedIdentity):
        raise
    except Exception as error:  # damaged text can be anything, and be taken for anything
        raise DamagedIdentity(str(error) or repr(error)) from None


def find_identity(folder: Path) -> tuple[RunIdentity, str, str]:
    """The run's identity, its text, and where it was found if not in run.json. Raises StoreError."""
    path = folder / "run.json"
    try:
        text = path.read_text()
        return _parse_identity(text, folder), text, ""
    except FileNotFoundError:
        damage = f"{folder} holds no run (there is no run.json)"
    except (OSError, UnicodeDecodeError, DamagedIdentity) as error:
        damage = f"{path} cannot be read: {error}"
    for text, source in _copies_of_identity(folder):
        with contextlib.suppress(DamagedIdentity, StoreError):
            identity = _parse_identity(text, folder)
            if _may_belong_to(folder, identity):
                return identity, text, source
    raise StoreError(damage)


def _may_belong_to(folder: Path, identity: RunIdentity) -> bool:
    """A tape that was put here by mistake must not make this folder another run."""
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
    """Oldest first, whole or not."""
    return sorted(path for path in (folder / "snapshots").glob("*") if re.fullmatch(r"\d{6,}", path.name))


def is_run(folder: Path) -> bool:
    """Whether a run was ever made here, even if run.json is gone. A creation that was cut short left only version 0."""
    if any((folder / name).exists() for name in ("run.json", "standing.json", "good", "snapshots", "aside")):
        return True
    numbers = [numbers_of(path.name) for path in (folder / "fragments").glob("*")]
    return any(found[1] > 0 for found in numbers if found is not None) or bool(_copies_of_identity(folder))


def identity_text(data: dict[str, Any]) -> str:
    """As run.json has it."""
    plain = json.loads(json.dumps({key: value for key, value in data.items() if key != "checksum"}))
    return json.dumps({**plain, "checksum": checksum(json.dumps(plain).encode())}, indent=1)


def read_model(folder: Path) -> dict[str, Tensor]:
    """The run's newest tensors by name, in their own types. Safe beside a running syncer; fragments may differ in age."""
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
    """The newest values of every fragment. Safe beside a running syncer."""

    def read(database: sqlite3.Connection) -> list[Tensor]:
        return [_read_newest(folder, identity, database, fragment).values for fragment in identity.layout.fragments]

    try:
        return ask(folder, read)
    except StoreError:
        # Without its tape a run is still its files, of which each says which version it is.
        found = [_newest_file(folder, identity, fragment) for fragment in identity.layout.fragments]
        states = [state for state in found if state is not None]
        if len(states) < len(found):
            raise
        log.warning("the tape of %s cannot be read; the newest whole files are used", folder)
        return [state.values for state in states]


def _read_newest(folder: Path, identity: RunIdentity, database: sqlite3.Connection, fragment: Fragment) -> FragmentState:
    row = newest_row(database, fragment.index)
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            # A running syncer may replace the file between our two looks; then there is a newer row.
            try:
                return read_version(folder, fragment, row, missing_is_damage=False)
            except StoreError as error:
                damage = error
                break
        newer = newest_row(database, fragment.index)
        if newer["version"] == row["version"]:
            damage = StoreError(f"{folder / 'fragments' / row['file']} is missing, but the tape counts on it")
            break
        row = newer
    else:
        raise StoreError(f"fragment {fragment.index} changes faster than it can be read")
    # In a copy made while the run went on, files may be older or newer than the tape.
    state = _newest_file(folder, identity, fragment)
    if state is None:
        raise damage
    log.warning("%s; the newest whole file of fragment %d is used", damage, fragment.index)
    return state


def _newest_file(folder: Path, identity: RunIdentity, fragment: Fragment) -> FragmentState | None:
    proven = newest_proven(sorted((folder / "fragments").glob("*")), identity.run_id, fragment)
    return proven.state if proven is not None else None


def read_standing(folder: Path) -> Standing:
    data = ask(folder, standing_data)
    return Standing.from_json(data) if data is not None else Standing()


def read_tape(folder: Path, kinds: Sequence[type[TapeRecord]], see: Callable[[TapeRecord], None]) -> Standing:
    """Show the records of these kinds, one by one, and return where the run stood at that moment. Safe beside a running
    syncer."""

    def read(database: sqlite3.Connection) -> dict[str, Any] | None:
        database.execute("BEGIN")  # both of one moment
        for entry in entries_of(database, kinds):
            see(entry.record)
        return standing_data(database)

    data = ask(folder, read, look_first=True)
    return Standing.from_json(data) if data is not None else Standing()


def read_span_s(folder: Path) -> float:
    """Seconds from the start of training to the end of the run, by the tape."""
    query = "SELECT max(CASE kind WHEN 'ended' THEN at END) - min(CASE kind WHEN 'began' THEN at END) AS span FROM tape"
    span = ask(folder, lambda database: database.execute(query).fetchone()["span"])
    return float(span) if span is not None else 0.0


def read_checksums(folder: Path) -> dict[tuple[int, int], int]:
    """Of every version that ever counted, by fragment and version."""
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
        raise StoreError(f"{path} is damaged: its content does not match the run's checksum")
    return data
