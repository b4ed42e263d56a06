"""The run folder as files: what lies where, and how it is read, by the syncer and by others beside it.

run.json                 the run's identity, model and settings; written once, last of all when a run is created
fixed.safetensors        tensors nobody trains
fragments/FFFF-VVVVVVVV.safetensors   values and outer momentum of one version of one fragment
tape.sqlite              which versions count, the order of all decisions, where the run stands
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from skerry.config import SyncConfig, from_json
from skerry.core.checksum import checksum
from skerry.core.codec import raw_bytes
from skerry.core.fragment import Fragment, Layout, TensorSpec, split
from skerry.core.merge import FragmentState
from skerry.core.standing import Standing
from skerry.core.tensor_file import as_parts
from skerry.durable import write_durably
from skerry.errors import StoreError

FORMAT = 4


@dataclass(frozen=True)
class RunIdentity:
    run_id: str
    fixed_checksum: int
    layout: Layout
    sync: SyncConfig
    job_json: str


def read_identity(folder: Path) -> RunIdentity:
    try:
        data = json.loads((folder / "run.json").read_text())
        if data["format"] != FORMAT:
            raise StoreError(f"{folder} has run format {data['format']}, this Skerry reads {FORMAT}")
        specs = [TensorSpec(name, tuple(shape), dtype, rule) for name, shape, dtype, rule in data["tensors"]]
        sync = from_json(SyncConfig, json.dumps(data["sync"]))
        job = json.dumps(data["job"]) if data["job"] is not None else ""
        return RunIdentity(data["run_id"], data["fixed_checksum"], split(specs, sync.fragments), sync, job)
    except FileNotFoundError:
        raise StoreError(f"{folder} holds no run (there is no run.json)") from None
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{folder / 'run.json'} cannot be read: {error}") from None


def read_model(folder: Path) -> dict[str, Tensor]:
    """The run's newest tensors by name, in their own types. Safe beside a running syncer; fragments may differ in age."""
    identity = read_identity(folder)
    layout = identity.layout
    flat = {s.name: torch.empty(s.numel, dtype=torch.float32) for s in layout.tensors if s.rule != "fixed"}
    with reading(folder) as database:
        for fragment in layout.fragments:
            values = _read_newest(folder, database, fragment).values
            for piece, part in zip(fragment.pieces, torch.split(values, [p.numel for p in fragment.pieces]), strict=True):
                flat[layout.tensors[piece.tensor].name][piece.start : piece.stop] = part
    fixed = load(read_fixed(folder, identity))
    tensors = {}
    for spec in layout.tensors:
        tensor = fixed[spec.name] if spec.rule == "fixed" and spec.numel else flat.get(spec.name, torch.empty(0))
        tensors[spec.name] = tensor.reshape(spec.shape).to(getattr(torch, spec.dtype))
    return tensors


def read_values(folder: Path, layout: Layout) -> list[Tensor]:
    """The newest values of every fragment. Safe beside a running syncer."""
    with reading(folder) as database:
        return [_read_newest(folder, database, fragment).values for fragment in layout.fragments]


def read_standing(folder: Path) -> Standing:
    with reading(folder) as database:
        row = database.execute("SELECT data FROM standing").fetchone()
    return Standing.from_json(json.loads(row["data"])) if row else Standing()


def read_tape(folder: Path, kinds: Sequence[str], see: Callable[[str, dict[str, Any]], None]) -> Standing:
    """Show what is on the tape of these kinds, entry by entry, and give where the run stood at that moment. Safe beside a
    running syncer."""
    with reading(folder) as database:
        database.execute("BEGIN")  # both of one moment
        row = database.execute("SELECT data FROM standing").fetchone()
        wanted = ", ".join("?" * len(kinds))
        for entry in database.execute(f"SELECT kind, data FROM tape WHERE kind IN ({wanted}) ORDER BY seq", kinds):
            see(entry["kind"], json.loads(entry["data"]))
    return Standing.from_json(json.loads(row["data"])) if row else Standing()


def read_span_s(folder: Path) -> float:
    """Seconds from the start of training to the end of the run, by the tape."""
    with reading(folder) as database:
        query = "SELECT max(CASE kind WHEN 'ended' THEN at END) - min(CASE kind WHEN 'began' THEN at END) AS span FROM tape"
        span = database.execute(query).fetchone()["span"]
    return float(span) if span is not None else 0.0


def _read_newest(folder: Path, database: sqlite3.Connection, fragment: Fragment) -> FragmentState:
    for _ in range(100):
        newest = newest_row(database, fragment.index)
        with contextlib.suppress(FileNotFoundError):
            # A running syncer may replace the file between our two looks; then there is a newer row.
            return read_version(folder, fragment, newest, missing_is_damage=False)
    raise StoreError(f"fragment {fragment.index} changes faster than it can be read")


def newest_row(database: sqlite3.Connection, fragment: int) -> sqlite3.Row:
    query = "SELECT version, step, file, checksum FROM versions WHERE fragment = ? ORDER BY version DESC LIMIT 1"
    row: sqlite3.Row | None = database.execute(query, (fragment,)).fetchone()
    if row is None:
        raise StoreError(f"the tape knows no version of fragment {fragment}; the run folder is incomplete")
    return row


def read_fixed(folder: Path, identity: RunIdentity) -> bytes:
    path = folder / "fixed.safetensors"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from None
    if checksum(data) != identity.fixed_checksum:
        raise StoreError(f"{path} is damaged: its content does not match the run's checksum")
    return data


def file_name(fragment: int, version: int, attempt: int | str = 0) -> str:
    return f"{fragment:04d}-{version:08d}{f'-{attempt}' if attempt else ''}.safetensors"


def state_checksum(state: FragmentState) -> int:
    found = 0
    for tensor in _tensors(state).values():
        found = checksum(raw_bytes(tensor), found)
    return found


def _tensors(state: FragmentState) -> dict[str, Tensor]:
    found = {"values": state.values, "momentum": state.momentum}
    return found if state.shown is None else {**found, "shown": state.shown}


def write_version(folder: Path, file: str, state: FragmentState) -> None:
    write_durably(folder / "fragments" / file, *as_parts(_tensors(state)))


def read_version(
    folder: Path, fragment: Fragment, row: sqlite3.Row | dict[str, Any], missing_is_damage: bool = True
) -> FragmentState:
    path = folder / "fragments" / row["file"]
    try:
        tensors = load_file(path)
        state = FragmentState(tensors["values"], tensors["momentum"], tensors.get("shown"))
    except FileNotFoundError:
        if not missing_is_damage:
            raise
        raise StoreError(f"{path} is missing, but the tape counts on it") from None
    except (OSError, SafetensorError, KeyError) as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    if state.values.shape != (fragment.numel,) or state_checksum(state) != row["checksum"]:
        raise StoreError(f"{path} is damaged: its content does not match the tape's checksum")
    return state


def connect(folder: Path, mode: str = "rw") -> sqlite3.Connection:
    uri = f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode={mode}"
    # Calls come from the syncer's store thread and its main thread, never at once.
    database = sqlite3.connect(uri, uri=True, timeout=30.0, check_same_thread=False)
    database.row_factory = sqlite3.Row
    if mode != "ro":
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error:
            database.close()
            raise
    return database


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    try:
        with contextlib.closing(connect(folder, mode="ro")) as database:
            yield database
    except sqlite3.Error as error:
        raise StoreError(f"{folder / 'tape.sqlite'} cannot be read: {error}") from None
