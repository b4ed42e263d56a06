"""Run folders made by the store alone, to be damaged by tests. Version N of a fragment has the value N everywhere, so a state
says where it is from."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from islands import small_model
from torch import nn

import skerry
from skerry.checksum import file_checksum
from skerry.config import SyncConfig
from skerry.core import records
from skerry.core.messages import Merge
from skerry.core.standing import Standing
from skerry.durable import DISK
from skerry.syncer import snapshots
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.good_copies import GoodCopies
from skerry.syncer.storage.store import RunStore
from skerry.tensors.merge import FragmentState

SYNC = SyncConfig(fragments=3, every=3)
NEWEST, CUT, GOOD = 7, 4, 3
"""The newest version of each fragment, the one in the snapshot, and the step of the good copy."""
SESSIONS = {"a": ("s", 0, 3, 7)}
SQLITE = ("tape.sqlite", "tape.sqlite-wal", "tape.sqlite-shm")


def with_fixed_tensors() -> nn.Module:
    model = small_model()
    model.register_buffer("classes", torch.tensor([3, 1, 2]))
    return model


def merge(store: RunStore, fragment: int, version: int, value: float | None = None) -> None:
    numel = store.identity.layout.fragments[fragment].numel
    values = torch.full((numel,), float(version if value is None else value))
    state = FragmentState(values, {"momentum": torch.full((numel,), 0.5)})
    order = Merge(fragment, version, 3 * version, (), 0.5, 0.5, 1.0, tokens=10 * version)
    entry = TapeEntry(float(version), records.Merged(fragment, version, 3 * version, (), 0.5, 0.5, 1.0))
    standing = Standing(3 * version, 10 * version, "running", SESSIONS)
    store.commit([store.write(order, state)], standing, [entry])


def merge_all(store: RunStore, version: int) -> None:
    for fragment in range(SYNC.fragments):
        merge(store, fragment, version)


def take_snapshot(store: RunStore, number: int, islands: dict[str, str] | None = None) -> Path:
    partial = store.folder / "snapshots" / f".{number:06d}.partial"
    store.cut(partial)
    facts = {"number": number, "step": 3, "tokens": 10, "islands": {"a": "kept"} if islands is None else islands}
    snapshots._finish(partial, store.folder / "snapshots" / f"{number:06d}", facts, DISK)
    return store.folder / "snapshots" / f"{number:06d}"


@contextlib.contextmanager
def fast_disk() -> Iterator[Path]:
    """A folder that is fast to sync, where there is such a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def make_runs(place: Path) -> dict[str, Path]:
    """A run as a crash leaves it, as an orderly end leaves it, and its tape as it was two versions ago."""
    folder = skerry.create(place / "made", with_fixed_tensors(), SYNC)
    store = RunStore(folder)
    notes = [TapeEntry(0.0, records.Repaired(f"{number} " + "x" * 300)) for number in range(150)]
    store.commit([], Standing(), notes)  # so that the tape has many pages
    for version in range(1, NEWEST + 1):
        merge_all(store, version)
        if version == GOOD:
            GoodCopies(folder).keep(GOOD, [torch.full((f.numel,), -1.0) for f in store.identity.layout.fragments])
        if version == CUT:
            take_snapshot(store, 1)
        if version == NEWEST - 2:
            (place / "older").mkdir()
            with contextlib.closing(sqlite3.connect(place / "older" / "tape.sqlite")) as copy:
                store._database.backup(copy)
    store._copy_standing(Standing(3 * NEWEST, 10 * NEWEST, "running", SESSIONS))
    copy_of(folder, place / "crashed")
    store.close()
    return {"crashed": place / "crashed", "closed": folder, "older": place / "older"}


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*-shm"))
    return target


@contextlib.contextmanager
def a_copy_of(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        yield copy_of(folder, Path(place) / "run")


def file_of(folder: Path, fragment: int, version: int = NEWEST) -> Path:
    return folder / "fragments" / f"{fragment:04d}-{version:08d}.safetensors"


def flip(path: Path, at: float | int = 0.75) -> Path:
    """As another file of the same name: one with two names is damaged under one of them."""
    data = bytearray(path.read_bytes())
    data[at if isinstance(at, int) else int(len(data) * at)] ^= 4
    path.unlink()
    path.write_bytes(data)
    return path


def rot(path: Path) -> None:
    """One byte in place, under all names of the file."""
    with path.open("r+b") as file:
        file.seek(-3, 2)
        last = file.read(1)[0]
        file.seek(-3, 2)
        file.write(bytes([last ^ 4]))


def states_of(folder: Path) -> tuple[list[float], list[int], list[str]]:
    """The value of each fragment, its version, and what was said."""
    store = RunStore(folder)
    try:
        states, progress, _ = store.load()
        assert all(len(set(state.values.tolist())) == 1 for state in states)
        assert all("\n" not in line and line.isprintable() for line in store.problems), store.problems
        return [float(state.values[0]) for state in states], [found.version for found in progress], store.problems
    finally:
        store.close()


def values_of(folder: Path) -> list[float]:
    return states_of(folder)[0]


def contents(folder: Path, *without: str) -> dict[str, int]:
    """Checksums of all files, by name."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: file_checksum(path) for name, path in files.items() if path.name not in without}


def written_over(folder: Path) -> dict[str, int]:
    """Checksums of all files but those that every process writes over."""
    return contents(folder, "lock", "standing.json", *SQLITE)


NEWEST_OF_ALL = [float(NEWEST)] * SYNC.fragments


def spoil(path: Path, how: str) -> None:
    if how == "deleted":
        path.unlink()
    elif how == "flipped":
        flip(path, 0.5)
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(folder: Path, *commands: str) -> None:
    """The tape, by a hand that knows nothing of seals."""
    with contextlib.closing(sqlite3.connect(folder / "tape.sqlite")) as database, database:
        for command in commands:
            database.execute(command)
