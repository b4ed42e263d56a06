"""Finds a state to continue from when a fragment's newest version is lost: in `fragments/`, snapshots, `aside/` or a good copy.

Changes nothing.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skerry.core.standing import Standing
from skerry.errors import StoreError
from skerry.syncer.storage import database as db
from skerry.syncer.storage.good_copies import GoodCopies
from skerry.syncer.storage.run_folder import RunIdentity, read_identity, snapshot_folders
from skerry.syncer.storage.version_file import Proven, label_of, newest_proven, numbers_of, prove, read_version
from skerry.tensors.fragments import Fragment
from skerry.tensors.merge import FragmentState, outer_optimizer

KEPT_VERSIONS = 2
"""Version files kept per fragment: the newest, and the previous one for concurrent readers."""


@dataclass(frozen=True)
class Source:
    """An intact state of a fragment."""

    read: Callable[[], FragmentState]
    version: int
    """-1 for a good copy, which belongs to no version."""
    round: int
    tokens: int
    description: str
    file: str = ""
    """Its file name if it is in `fragments/` and can stay there."""


def same_bytes(folder: Path, identity: RunIdentity, fragment: Fragment, row: sqlite3.Row) -> Proven | None:
    """Find another intact file with the content that this row names, in a snapshot or in `aside/`."""
    for path in version_paths(folder):
        labelled = label_of(path) if (numbers_of(path.name) or (-1,))[0] == fragment.index else None
        if labelled is not None and labelled[1] == row["checksum"]:
            proven = prove(path, identity.run_id, fragment)
            if proven is not None:
                return proven
    return None


def newest_source(
    folder: Path, identity: RunIdentity, fragment: Fragment, database: sqlite3.Connection, below: int | None = None
) -> Source | None:
    """Find the newest state that verifies against the tape, its own label, or a snapshot's tape; else a good copy."""
    found = [
        *_by_rows(folder, fragment, db.version_rows(database, fragment.index, KEPT_VERSIONS), below),
        *_by_label(folder, identity, fragment, below),
        *_by_snapshots(folder, identity, fragment, below),
    ]
    return max(found, key=lambda source: source.version, default=None) or _good_copy(folder, identity, fragment)


def _by_rows(folder: Path, fragment: Fragment, rows: Sequence[sqlite3.Row], below: int | None, where: str = "") -> list[Source]:
    for row in rows:
        if below is None or row["version"] < below:
            with contextlib.suppress(StoreError):
                read_version(folder, fragment, row)
                read, description = partial(read_version, folder, fragment, dict(row)), f"version {row['version']}{where}"
                return [Source(read, row["version"], row["round"], 0, description, "" if where else row["file"])]
    return []


def _by_label(folder: Path, identity: RunIdentity, fragment: Fragment, below: int | None) -> list[Source]:
    proven = newest_proven(version_paths(folder), identity.run_id, fragment, below)
    if proven is None:
        return []
    parts = proven.path.relative_to(folder).parts
    where = "" if parts[0] == "fragments" else f" in {'/'.join(parts[:2])}"
    label, read = proven.label, partial(_read_again, proven.path, identity.run_id, fragment)
    file = proven.path.name if parts[0] == "fragments" else ""
    return [Source(read, label.version, label.round, label.tokens, f"version {label.version}{where}", file)]


def _by_snapshots(folder: Path, identity: RunIdentity, fragment: Fragment, below: int | None) -> list[Source]:
    found: list[Source] = []
    for snapshot in snapshot_folders(folder):
        with contextlib.suppress(StoreError):
            if read_identity(snapshot).run_id == identity.run_id:
                rows = db.ask(snapshot, lambda database: db.version_rows(database, fragment.index, 1))
                found += _by_rows(snapshot, fragment, rows, below, f" in snapshots/{snapshot.name}")
    return found


def _good_copy(folder: Path, identity: RunIdentity, fragment: Fragment) -> Source | None:
    good = GoodCopies(folder)
    for step in good.steps():
        with contextlib.suppress(StoreError):
            good.read(step, fragment.index)
            return Source(partial(_read_good, good, step, identity, fragment), -1, step, 0, f"the good copy of step {step}")
    return None


def _read_again(path: Path, run_id: str, fragment: Fragment) -> FragmentState:
    proven = prove(path, run_id, fragment)
    if proven is None:
        raise StoreError(f"{path} has changed since it was checked")
    return proven.state


def _read_good(good: GoodCopies, step: int, identity: RunIdentity, fragment: Fragment) -> FragmentState:
    return FragmentState.fresh(good.read(step, fragment.index), outer_optimizer(identity.sync))


def version_paths(folder: Path) -> list[Path]:
    """Every file that may hold a version: in `fragments/`, in snapshots and in `aside/`."""
    folders = [folder / "fragments", *(snapshot / "fragments" for snapshot in snapshot_folders(folder))]
    return [path for parent in (*folders, *sorted((folder / "aside").glob("*"))) for path in versions_in(parent)]


def versions_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def highest_number(paths: Sequence[Path], fragment: int) -> int:
    numbers = [numbers_of(path.name) for path in paths]
    return max((found[1] for found in numbers if found is not None and found[0] == fragment), default=0)


def highest_seen(folder: Path, fragment: int, database: sqlite3.Connection, standing: Standing | None = None) -> int:
    """The highest version number that this fragment is known to have used."""
    rows = db.version_rows(database, fragment, 1)
    floors = standing.floors if standing is not None else ()
    floor = floors[fragment] if fragment < len(floors) else 0
    return max(highest_number(version_paths(folder), fragment), rows[0]["version"] if rows else 0, floor)
