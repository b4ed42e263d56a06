"""Writing the run folder (run_folder.py says what lies where): what the syncer must never lose.

A version's file is written beside, synced and renamed before the row that makes it count is committed, so at any crash the
newest row names a whole file. A commit that fails may all the same be found done after a crash, so its file is left as it is
until another commit has succeeded; the next try gets a name of its own. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from skerry.config import SyncConfig, to_json
from skerry.core.checksum import checksum
from skerry.core.fragment import Fragment, Layout, TensorSpec, split
from skerry.core.merge import FragmentState
from skerry.core.messages import Merge
from skerry.core.standing import Counted, FragmentProgress, Standing
from skerry.durable import sync_path, unlink, write_durably
from skerry.errors import StoreError
from skerry.syncer.run_folder import (
    FORMAT,
    RunIdentity,
    connect,
    file_name,
    newest_row,
    read_fixed,
    read_identity,
    read_version,
    state_checksum,
    write_version,
)

KEPT_VERSIONS = 2
"""Files of each fragment that stay: the newest, and the one before for readers that are in the middle of it."""

_TAPE_FILES = ("tape.sqlite", "tape.sqlite-wal", "tape.sqlite-shm")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS tape (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS versions (
    fragment INTEGER NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, file TEXT NOT NULL,
    checksum INTEGER NOT NULL, shares TEXT NOT NULL, PRIMARY KEY (fragment, version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counted (
    fragment INTEGER NOT NULL, learner TEXT NOT NULL, session TEXT NOT NULL, version INTEGER NOT NULL,
    upto INTEGER NOT NULL, samples INTEGER NOT NULL, PRIMARY KEY (fragment, learner)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS standing (id INTEGER PRIMARY KEY CHECK (id = 1), data TEXT NOT NULL);
"""


@dataclass(frozen=True)
class TapeEntry:
    at: float
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Written:
    """A version whose file is durable but does not count yet."""

    order: Merge
    file: str
    checksum: int


def gather(layout: Layout, fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    """A fragment's pieces from named tensors, as one flat fp32 vector."""
    pieces = []
    for piece in fragment.pieces:
        flat = tensors[layout.tensors[piece.tensor].name].detach().reshape(-1)
        pieces.append(flat[piece.start : piece.stop].to(device="cpu", dtype=torch.float32))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float32)


def create_run(folder: Path, tensors: Sequence[tuple[TensorSpec, Tensor]], sync: SyncConfig, job_json: str = "") -> RunIdentity:
    """Make a run folder from a model's initial tensors. The run exists once run.json does."""
    if (folder / "run.json").exists():
        raise StoreError(f"{folder} already holds a run")
    specs = [spec for spec, _ in tensors]
    layout = split(specs, sync.fragments)
    named = {spec.name: tensor for spec, tensor in tensors}
    for name, tensor in named.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise StoreError(f"initial weights must be finite, tensor {name!r} is not")
    try:
        _make_folder(folder)
        for name in _TAPE_FILES:
            unlink(folder / name)
        fixed = {layout.tensors[p.tensor].name: named[layout.tensors[p.tensor].name] for p in layout.fixed.pieces}
        fixed_bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in fixed.items()})
        write_durably(folder / "fixed.safetensors", fixed_bytes)
        database = connect(folder, mode="rwc")
        with contextlib.closing(database), database:
            database.executescript(_SCHEMA)
            for fragment in layout.fragments:
                state = FragmentState.fresh(gather(layout, fragment, named))
                file = file_name(fragment.index, 0)
                write_version(folder, file, state)
                row = (fragment.index, file, state_checksum(state))
                database.execute("INSERT INTO versions VALUES (?, 0, 0, ?, ?, '[]')", row)
            _append(database, [TapeEntry(time.time(), "created", {"fragments": len(layout.fragments)})])
        identity = {
            "format": FORMAT,
            "run_id": uuid.uuid4().hex,
            "fixed_checksum": checksum(fixed_bytes),
            "tensors": [[s.name, list(s.shape), s.dtype, s.rule] for s in specs],
            "sync": json.loads(to_json(sync)),
            "job": json.loads(job_json) if job_json else None,
        }
        write_durably(folder / "run.json", json.dumps(identity, indent=1).encode())
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot create a run in {folder}: {error}") from error
    return read_identity(folder)


class RunStore:
    """The run folder, open for writing by one process at a time. `write` may be called from several threads, the rest from
    one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity = read_identity(folder)
        self._doubtful: dict[str, int] = {}
        """Files of commits that failed since the last one that succeeded, with their checksums: a crash may show that they did
        happen."""
        self._names = threading.Lock()
        """Held while the name of a doubtful file is taken again or given up."""
        self._lock: int | None = _lock(folder)
        try:
            self._remove_partial()  # first, because opening the tape may need the space
            _sync_tape(folder)
            self._database = connect(folder)
            self._remove_leftovers(self.identity.layout.fragments)
        except BaseException as error:
            if hasattr(self, "_database"):
                self._database.close()
            os.close(self._lock)
            self._lock = None
            if isinstance(error, sqlite3.Error):
                raise StoreError(f"{folder / 'tape.sqlite'} cannot be read: {error}") from error
            if isinstance(error, OSError):
                raise StoreError(f"{folder} cannot be opened: {error}") from error
            raise

    def close(self) -> None:
        if self._lock is not None:
            self._database.close()
            os.close(self._lock)
            self._lock = None

    def load(self) -> tuple[list[FragmentState], list[FragmentProgress], Standing]:
        """The newest state of everything."""
        progress, standing = self.load_progress()
        return self.load_states(), progress, standing

    def load_states(self) -> list[FragmentState]:
        """The newest values and momentum of every fragment."""
        try:
            newest = [(fragment, newest_row(self._database, fragment.index)) for fragment in self.identity.layout.fragments]
        except sqlite3.Error as error:
            raise StoreError(f"{self.folder / 'tape.sqlite'} cannot be read: {error}") from error
        return [read_version(self.folder, fragment, row) for fragment, row in newest]

    def load_progress(self) -> tuple[list[FragmentProgress], Standing]:
        """What was decided, without the data."""
        try:
            return self._load_progress()
        except sqlite3.Error as error:
            raise StoreError(f"{self.folder / 'tape.sqlite'} cannot be read: {error}") from error

    def _load_progress(self) -> tuple[list[FragmentProgress], Standing]:
        progress = []
        row = self._database.execute("SELECT data FROM standing").fetchone()
        standing = Standing.from_json(json.loads(row["data"])) if row else Standing()
        for fragment in self.identity.layout.fragments:
            newest = newest_row(self._database, fragment.index)
            found = FragmentProgress(version=newest["version"], merged_step=newest["step"])
            for row in self._database.execute("SELECT * FROM counted WHERE fragment = ?", (fragment.index,)):
                session = standing.sessions.get(row["learner"])
                if session is not None and session[0] == row["session"]:
                    found.counted[row["learner"]] = Counted(row["version"], row["upto"], row["samples"])
            progress.append(found)
        return progress, standing

    def newest(self, fragments: Sequence[int]) -> list[tuple[int, int, str, int]]:
        """Of each fragment the version that counts, its file and checksum. What else lies there of it is removed."""
        try:
            rows = [(fragment, newest_row(self._database, fragment)) for fragment in fragments]
            self._remove_partial([file_name(fragment, 0).split("-")[0] for fragment in fragments])
            self._remove_leftovers([self.identity.layout.fragments[fragment] for fragment in fragments])
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"the newest versions cannot be found: {error}") from error
        return [(fragment, row["version"], row["file"], row["checksum"]) for fragment, row in rows]

    def fixed_bytes(self) -> bytes:
        return read_fixed(self.folder, self.identity)

    def write(self, order: Merge, state: FragmentState) -> Written:
        """Put a merge's result on disk, where it does not count yet. May be called from several threads."""
        found = state_checksum(state)
        attempt = 0
        with self._names:
            while (file := file_name(order.fragment, order.version, attempt)) in self._doubtful:
                if self._doubtful[file] == found:  # the same again, and a full disk has no room for a copy
                    del self._doubtful[file]
                    return Written(order, file, found)
                attempt += 1
        try:
            write_version(self.folder, file, state)
        except OSError as error:
            raise StoreError(f"version {order.version} of fragment {order.fragment} cannot be written: {error}") from error
        return Written(order, file, found)

    def written_elsewhere(self, order: Merge, file: str, checksum: int) -> Written:
        """A shard has put a merge's result on disk. May be called from several threads."""
        with self._names:
            self._doubtful.pop(file, None)  # tried again with the same file, which must not be removed now
            try:
                size = (self.folder / "fragments" / file).stat().st_size
            except OSError:
                size = -1
        if size < 8 * self.identity.layout.fragments[order.fragment].numel:
            raise StoreError(f"{file}, which a shard wrote, is not in the run folder")
        return Written(order, file, checksum)

    def commit(self, merges: Sequence[Written], standing: Standing, entries: Sequence[TapeEntry]) -> None:
        """Make merges count, with everything decided up to them. When this returns, they may be announced."""
        files = {merge.file: merge.checksum for merge in merges}
        try:
            with self._database:
                for merge in merges:
                    self._insert(merge)
                self._save_standing(standing)
                _append(self._database, entries)
                unwanted = {file for merge in merges for file in self._outdated(merge.order)}
        except sqlite3.IntegrityError as error:
            raise StoreError(f"the tape cannot be written: {error}") from error
        except sqlite3.Error as error:
            self._doubtful |= files
            raise StoreError(f"the tape cannot be written: {error}") from error
        with self._names:
            # The log of this commit has taken the place of those that failed before it.
            for file in unwanted | self._doubtful.keys():
                with contextlib.suppress(OSError):  # what stays behind is removed when the folder is opened next
                    unlink(self.folder / "fragments" / file)
            self._doubtful.clear()

    def _insert(self, merge: Written) -> None:
        order = merge.order
        shares = json.dumps([asdict(share) for share in order.shares])
        row = (order.fragment, order.version, order.step, merge.file, merge.checksum, shares)
        self._database.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?)", row)
        for share in order.shares:
            counted = (order.fragment, share.name, share.session, order.version, share.upto, share.samples[1])
            self._database.execute("INSERT OR REPLACE INTO counted VALUES (?, ?, ?, ?, ?, ?)", counted)

    def cut(self, target: Path) -> None:
        """Everything that counts at this moment, as a run folder elsewhere on the same disk. Raises OSError or StoreError."""
        files = ["run.json", "fixed.safetensors"]
        try:
            files += [f"fragments/{newest_row(self._database, f.index)['file']}" for f in self.identity.layout.fragments]
        except sqlite3.Error as error:
            raise StoreError(f"the tape cannot be read: {error}") from error
        good = [path.relative_to(self.folder).as_posix() for path in (self.folder / "good").glob("step-*.safetensors")]
        for name in [*files, *good]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(*([FileNotFoundError] if name in good else [])):  # an old one may just be removed
                _link_or_copy(self.folder / name, target / name)
        try:
            with contextlib.closing(sqlite3.connect(target / "tape.sqlite")) as copy:
                self._database.backup(copy)
        except sqlite3.Error as error:
            raise StoreError(f"the tape cannot be copied to {target}: {error}") from error
        sync_path(target / "tape.sqlite")

    def tape(self) -> list[TapeEntry]:
        rows = self._database.execute("SELECT at, kind, data FROM tape ORDER BY seq")
        return [TapeEntry(row["at"], row["kind"], json.loads(row["data"])) for row in rows]

    def _save_standing(self, standing: Standing) -> None:
        self._database.execute(
            "INSERT INTO standing VALUES (1, ?) ON CONFLICT (id) DO UPDATE SET data = excluded.data",
            (json.dumps(standing.to_json()),),
        )

    def _outdated(self, order: Merge) -> list[str]:
        query = "SELECT file FROM versions WHERE fragment = ? AND version = ?"
        rows = self._database.execute(query, (order.fragment, order.version - KEPT_VERSIONS))
        return [row["file"] for row in rows]

    def _remove_partial(self, beginnings: Sequence[str] = ("",)) -> None:
        for beginning in beginnings:
            for path in (self.folder / "fragments").glob(f".{beginning}*.partial"):
                with contextlib.suppress(OSError):
                    unlink(path)

    def _remove_leftovers(self, fragments: Sequence[Fragment]) -> None:
        """Files of versions that never counted, or that should have been removed when the last process died."""
        wanted = set(self._doubtful)
        for fragment in fragments:
            newest_row(self._database, fragment.index)  # raises before anything is removed if the tape does not know the run
            query = "SELECT file FROM versions WHERE fragment = ? ORDER BY version DESC LIMIT ?"
            wanted |= {row["file"] for row in self._database.execute(query, (fragment.index, KEPT_VERSIONS))}
        beginnings = tuple(file_name(fragment.index, 0).split("-")[0] + "-" for fragment in fragments)
        for path in (self.folder / "fragments").iterdir():
            if path.name.startswith(beginnings) and path.name not in wanted:
                with contextlib.suppress(OSError):  # it takes space, but it is in nobody's way
                    unlink(path)


def _link_or_copy(source: Path, target: Path) -> None:
    """Files that are never written again may have two names; not every file system can do that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync_path(target)


def _make_folder(folder: Path) -> None:
    """With its name, and those of the folders made for it, as durable as what will be inside."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    os.makedirs(folder / "fragments", exist_ok=True)
    sync_path(folder)
    for path in made or [folder]:  # one that was there may have been made just before
        with contextlib.suppress(PermissionError):  # a folder that we may not read
            sync_path(path.parent)


def _sync_tape(folder: Path) -> None:
    """What the last process wrote and did not live to sync can be read now; told to learners, it must not be lost later."""
    for name in ("tape.sqlite", "tape.sqlite-wal"):
        with contextlib.suppress(FileNotFoundError):
            sync_path(folder / name)
    sync_path(folder)


def _append(database: sqlite3.Connection, entries: Sequence[TapeEntry]) -> None:
    rows: Iterator[tuple[float, str, str]] = ((entry.at, entry.kind, json.dumps(entry.data)) for entry in entries)
    database.executemany("INSERT INTO tape (at, kind, data) VALUES (?, ?, ?)", rows)


def _lock(folder: Path) -> int:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"{folder / 'lock'} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise StoreError(f"{folder} is in use by another syncer") from None
    return descriptor
