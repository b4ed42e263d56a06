"""Writes the run folder (run_folder.py lists its files).

A version's file is written to a temporary name, synced and renamed before its row is committed, so after any crash the newest
row names an intact file. A failed commit may still turn out to have succeeded after a crash, so its file stays until another
commit has succeeded, and a retry uses a new name.

Opening a folder deletes nothing until every file that the tape names was found intact. recovery.py handles damage.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from skerry.checksum import checksum, file_checksum
from skerry.core import records
from skerry.core.messages import Merge
from skerry.core.standing import Standing
from skerry.core.state import Counted, FragmentProgress
from skerry.durable import DISK, Disk, unlink
from skerry.errors import StoreError
from skerry.syncer.storage import database as db
from skerry.syncer.storage import recovery
from skerry.syncer.storage.aside import Aside, free_half_written, tidy
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.recovery import VERSION_STRIDE, Fallback
from skerry.syncer.storage.run_folder import is_run, read_fixed, read_identity
from skerry.syncer.storage.sources import KEPT_VERSIONS
from skerry.syncer.storage.standing_copy import write_count, write_standing_copy
from skerry.syncer.storage.version_file import Label, checksums_of, file_name, read_version, write_version
from skerry.tensors.merge import FragmentState

log = logging.getLogger("skerry.storage")

COPY_EVERY_S = 1.0
"""How often standing.json is written."""
LOCK_S = 0.5
"""How long opening waits for the lock. Readers hold it for a moment."""


@dataclass(frozen=True)
class Written:
    """A version whose file is durable but not committed yet."""

    order: Merge
    file: str
    checksum: int
    public: int | None = None
    """Checksum of the values that learners receive."""


class RunStore:
    """The run folder, opened for writing by one process at a time. `write` and `written_elsewhere` are thread-safe, the other
    methods are not."""

    def __init__(self, folder: Path, disk: Disk = DISK) -> None:
        self.folder, self.disk = folder, disk
        self._doubtful: dict[str, int] = {}
        """Files, with checksums, of commits that failed since the last success. A crash may reveal that they were committed."""
        self._names = threading.Lock()
        """Guards `_doubtful` while a name is reused or its file deleted."""
        self._copied_at = -COPY_EVERY_S
        self.problems: list[str] = []
        """One line per problem found when the folder was opened, with what was lost."""
        if not is_run(folder):
            read_identity(folder)  # raises with the reason
        self._lock: int | None = _lock(folder)
        try:
            self.identity, repaired = recovery.recover_identity(folder)
            self._repair_fixed()
            (folder / "fragments").mkdir(exist_ok=True)
            _sync_tape(folder)
            findings = self._open_run()
            self._database = findings.database
            self._generation = db.meta(self._database, "generation") or ""
            self.fallbacks: dict[int, Fallback] = findings.fallbacks
            """Fragments whose newest version is damaged. Resolve each with `fall_back` or `take_values`."""
            self._report(*repaired, *findings.problems)
            self._write_count()
            self._tidy(findings.healthy and not self.problems)
        except BaseException as error:
            if hasattr(self, "_database"):
                self._database.close()
            os.close(self._lock)
            self._lock = None
            if isinstance(error, (sqlite3.Error, db.DamagedRow)):
                raise StoreError(f"{folder / 'tape.sqlite'} cannot be read: {error}") from error
            if isinstance(error, OSError):
                raise StoreError(f"{folder} cannot be opened: {error}") from error
            raise

    def _open_run(self) -> recovery.Findings:
        try:
            return recovery.open_run(self.folder, self.identity)
        except (sqlite3.Error, OSError):
            free_half_written(self.folder)
            return recovery.open_run(self.folder, self.identity)

    def _repair_fixed(self) -> None:
        """Rewrite a damaged fixed.safetensors: from scratch if the model has no fixed tensors, else from a snapshot."""
        with contextlib.suppress(StoreError):
            read_fixed(self.folder, self.identity)
            return
        expected = self.identity.fixed_checksum
        if checksum(save({})) == expected:
            data, source = save({}), "scratch"
        elif (copy := next((p for p in _copies_of_fixed(self.folder) if file_checksum(p) == expected), None)) is not None:
            data, source = copy.read_bytes(), copy.relative_to(self.folder).as_posix()
        else:
            return
        if (self.folder / "fixed.safetensors").exists():
            Aside(self.folder, "repair").move(self.folder / "fixed.safetensors")
        self.disk.write_durably(self.folder / "fixed.safetensors", data)
        self._report(f"fixed.safetensors was missing or damaged; rewrote it from {source}; nothing is lost")

    def _report(self, *lines: str) -> None:
        for line in lines:
            self.problems.append(line)
            log.warning("%s: %s", self.folder, line)

    def _tidy(self, healthy: bool) -> None:
        wanted = self._needed()
        for fragment in self.identity.layout.fragments:
            wanted |= {row["file"] for row in db.version_rows(self._database, fragment.index, KEPT_VERSIONS)}
        tidy(self.folder, wanted, healthy, lambda line: log.info("%s", line))

    def _needed(self) -> set[str]:
        """Files that must stay even if no row names them."""
        return {fallback.source.file for fallback in self.fallbacks.values()} | self._doubtful.keys()

    def close(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(StoreError, OSError, sqlite3.Error):
                _, standing = self._load_progress()
                self._copy_standing(standing)
            self._database.close()
            os.close(self._lock)
            self._lock = None

    def load(self) -> tuple[list[FragmentState], list[FragmentProgress], Standing]:
        """Load the newest state of everything. Damaged fragments fall back first."""
        for fragment in list(self.fallbacks):
            self.fall_back(fragment)
        progress, standing = self.load_progress()
        return self.load_states(), progress, standing

    def load_states(self) -> list[FragmentState]:
        """Load the newest values and momentum of every fragment."""
        return [self.load_state(fragment) for fragment in range(len(self.identity.layout.fragments))]

    def load_state(self, index: int) -> FragmentState:
        """Load the newest values and momentum of one fragment."""
        fragment = self.identity.layout.fragments[index]
        try:
            row = db.newest_row(self._database, index)
        except (sqlite3.Error, db.DamagedRow) as error:
            raise StoreError(f"{self.folder / 'tape.sqlite'} cannot be read: {error}") from error
        return read_version(self.folder, fragment, row)

    def load_progress(self) -> tuple[list[FragmentProgress], Standing]:
        """Load what was decided, without the tensors."""
        try:
            return self._load_progress()
        except (sqlite3.Error, db.DamagedRow) as error:
            raise StoreError(f"{self.folder / 'tape.sqlite'} cannot be read: {error}") from error

    def _load_progress(self) -> tuple[list[FragmentProgress], Standing]:
        progress = []
        data = db.standing_data(self._database)
        standing = Standing.from_json(data) if data is not None else Standing()
        for fragment in self.identity.layout.fragments:
            newest = db.newest_row(self._database, fragment.index)
            floor = newest["version"] // VERSION_STRIDE * VERSION_STRIDE  # first version after the last recovery, or 0
            fragment_progress = FragmentProgress(version=newest["version"], merged_round=newest["round"], floor=floor)
            for row in self._database.execute("SELECT * FROM counted WHERE fragment = ?", (fragment.index,)):
                db.checked("counted", row)
                session = standing.sessions.get(row["learner"])
                if session is not None and session[0] == row["session"]:
                    fragment_progress.counted[row["learner"]] = Counted(row["version"], row["at_step"], row["samples"])
            progress.append(fragment_progress)
        return progress, standing

    def newest(self, fragments: Sequence[int]) -> list[tuple[int, int, str, int]]:
        """Fragment, version, file and checksum of each newest version. Deletes these fragments' other files, left by a process
        that ended before its version was committed."""
        try:
            rows = [db.version_rows(self._database, fragment, KEPT_VERSIONS) for fragment in fragments]
            wanted = {row["file"] for kept in rows for row in kept} | self._needed()
            prefixes = tuple(file_name(fragment, 0).split("-")[0] + "-" for fragment in fragments)
            for path in (self.folder / "fragments").iterdir():
                if path.name.lstrip(".").startswith(prefixes) and path.name not in wanted:
                    with contextlib.suppress(OSError):  # harmless where it is, apart from the space
                        unlink(path)
        except (sqlite3.Error, db.DamagedRow, OSError) as error:
            raise StoreError(f"cannot find the newest versions: {error}") from error
        return [(row["fragment"], row["version"], row["file"], row["checksum"]) for row, *_ in rows]

    # ------------------------------------------------------------ damaged versions

    def fall_back(self, fragment: int) -> int:
        """Continue a damaged fragment from its newest intact state. Returns its new version. Raises StoreError."""
        fallback = self._lost(fragment)
        try:
            with self._database:
                lost = db.newest_row(self._database, fragment)
                version = recovery.fall_back(self.folder, self.identity, self._database, fallback)
        except (sqlite3.Error, OSError, db.DamagedRow) as error:
            raise StoreError(f"fragment {fragment} cannot continue from {fallback.source.description}: {error}") from error
        self._recovered(fragment, lost["file"])
        self._report(recovery.continues_from(fallback))
        return version

    def take_values(self, fragment: int, values: Tensor, source: str) -> None:
        """Restore a damaged version from an island's values, which the caller has verified. Momentum comes from the older
        state. Raises StoreError."""
        fallback = self._lost(fragment)
        try:
            older = fallback.source.read()
            state = FragmentState(values, older.state, values if older.shown is not None else None)
            sums, file = checksums_of(state), file_name(fragment, fallback.version, "rescued")
            with self._database:
                lost = db.newest_row(self._database, fragment)
                if lost["version"] != fallback.version:
                    raise StoreError(f"fragment {fragment} has continued from another version")
                label = Label(self.identity.run_id, fragment, fallback.version, lost["round"], fallback.source.tokens)
                write_version(self.folder, file, state, label, sums.state, self.disk)
                db.replace_version(self._database, lost, file, sums.state)
                record = records.Recovered(fragment, fallback.version, fallback.version, source)
                db.append(self._database, [TapeEntry(time.time(), record)])
                db.count_rows(self._database, new_versions=0)
        except (sqlite3.Error, OSError, db.DamagedRow) as error:
            raise StoreError(f"version {fallback.version} of fragment {fragment} cannot be written: {error}") from error
        self._recovered(fragment, lost["file"])
        momentum = f"its momentum from {fallback.source.description}"
        self._report(f"recovered version {fallback.version} of fragment {fragment} from {source}, {momentum}")

    def _lost(self, fragment: int) -> recovery.Fallback:
        fallback = self.fallbacks.get(fragment)
        if fallback is None:  # another island was quicker
            raise StoreError(f"fragment {fragment} is already recovered")
        return fallback

    def _recovered(self, fragment: int, damaged: str) -> None:
        del self.fallbacks[fragment]
        self._write_count()
        with contextlib.suppress(OSError):  # it may be missing; and where it lies it is in nobody's way
            Aside(self.folder, "repair").move(self.folder / "fragments" / damaged)

    def fixed_bytes(self) -> bytes:
        return read_fixed(self.folder, self.identity)

    def write(self, order: Merge, state: FragmentState) -> Written:
        """Write a merge's result to disk without committing it. Thread-safe. Raises StoreError."""
        sums = checksums_of(state)
        attempt = 0
        with self._names:
            while (file := file_name(order.fragment, order.version, attempt)) in self._doubtful:
                if self._doubtful[file] == sums.state:  # reuse the same content: a full disk has no room for a copy
                    del self._doubtful[file]
                    return Written(order, file, sums.state, sums.public)
                attempt += 1
        label = Label(self.identity.run_id, order.fragment, order.version, order.round, order.tokens)
        try:
            write_version(self.folder, file, state, label, sums.state, self.disk)
        except OSError as error:
            raise StoreError(f"version {order.version} of fragment {order.fragment} cannot be written: {error}") from error
        return Written(order, file, sums.state, sums.public)

    def written_elsewhere(self, order: Merge, file: str, checksum: int, public: int | None = None) -> Written:
        """Register a version that a shard has written to disk. Thread-safe. Raises StoreError if the file is not there."""
        with self._names:
            self._doubtful.pop(file, None)  # a retry with the same file, which must not be deleted now
            try:
                size = (self.folder / "fragments" / file).stat().st_size
            except OSError:
                size = -1
        if size < 8 * self.identity.layout.fragments[order.fragment].numel:
            raise StoreError(f"{file}, written by a shard, is not in the run folder (is the folder shared?)")
        return Written(order, file, checksum, public)

    def commit(self, merges: Sequence[Written], standing: Standing, entries: Sequence[TapeEntry]) -> None:
        """Commit merges with the standing and the records up to them. Afterwards they may be announced. Raises StoreError."""
        files = {merge.file: merge.checksum for merge in merges}
        try:
            self.disk.before_commit()
            with self._database:
                for merge in merges:
                    self._insert(merge)
                db.put_standing(self._database, standing.to_json())
                db.append(self._database, entries)
                db.count_rows(self._database, new_versions=len(merges))
                unwanted = {file for merge in merges for file in self._outdated(merge.order)}
        except sqlite3.IntegrityError as error:
            raise StoreError(f"the tape cannot be written: {error}") from error
        except (sqlite3.Error, OSError) as error:
            self._doubtful |= files
            raise StoreError(f"the tape cannot be written: {error}") from error
        self._write_count()
        with self._names:
            # This commit has overwritten the failed ones in the log, so no crash can bring them back.
            for file in unwanted | self._doubtful.keys():
                with contextlib.suppress(OSError):  # a leftover is moved aside when the folder is next opened
                    unlink(self.folder / "fragments" / file)
            self._doubtful.clear()
        if time.monotonic() - self._copied_at >= COPY_EVERY_S:
            with contextlib.suppress(OSError, sqlite3.Error):  # only a backup; the next commit writes another
                self._copy_standing(standing)

    def _write_count(self) -> None:
        if self._lock is not None:
            write_count(self._lock, self._generation, db.last_entry(self._database))

    def _copy_standing(self, standing: Standing) -> None:
        self._copied_at = time.monotonic()
        entries = db.last_entry(self._database)
        write_standing_copy(self.folder, self.identity.run_id, self._generation, entries, standing)

    def _insert(self, merge: Written) -> None:
        order = merge.order
        key = (order.fragment, order.version, order.round)
        db.put_version(self._database, *key, merge.file, merge.checksum, merge.public)
        counted = [(order.fragment, s.learner, s.session, order.version, s.at_step, s.samples[1]) for s in order.shares]
        db.put_counted(self._database, counted)

    def cut(self, target: Path) -> None:
        """Copy the committed state to another run folder. Immutable files are verified and hard-linked. Raises OSError or
        StoreError."""
        if self.fallbacks:
            raise StoreError(f"fragments {sorted(self.fallbacks)} are damaged and not yet recovered")
        (target / "fragments").mkdir(parents=True, exist_ok=True)
        for fragment in self.identity.layout.fragments:
            try:
                row = db.newest_row(self._database, fragment.index)
            except (sqlite3.Error, db.DamagedRow) as error:
                raise StoreError(f"the tape cannot be read: {error}") from error
            read_version(self.folder, fragment, row)
            _link_or_copy(self.folder / "fragments" / row["file"], target / "fragments" / row["file"])
        (target / "good").mkdir(exist_ok=True)
        for path in (self.folder / "good").glob("step-*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # an outdated copy may be deleted meanwhile
                _link_or_copy(path, target / "good" / path.name)
        shutil.copyfile(self.folder / "run.json", target / "run.json")
        _link_or_copy(self._spare_fixed(), target / "fixed.safetensors")
        try:
            with contextlib.closing(sqlite3.connect(target / "tape.sqlite")) as copy:
                self._database.backup(copy)
        except sqlite3.Error as error:
            raise StoreError(f"the tape cannot be copied to {target}: {error}") from error
        for name in ("tape.sqlite", "run.json"):
            self.disk.sync_path(target / name)

    def _spare_fixed(self) -> Path:
        """A copy of fixed.safetensors that snapshots link to. A link to the original would share its damage."""
        spare = self.folder / "snapshots" / f"fixed-{self.identity.fixed_checksum:08x}.safetensors"
        if not spare.exists() or file_checksum(spare) != self.identity.fixed_checksum:
            self.disk.write_durably(spare, self.fixed_bytes())
        return spare

    def tape(self) -> list[TapeEntry]:
        return list(db.entries_of(self._database))

    def _outdated(self, order: Merge) -> set[str]:
        """Files of this fragment that are obsolete once this merge is committed."""
        rows = db.version_rows(self._database, order.fragment, KEPT_VERSIONS + 1)
        return {row["file"] for row in rows[KEPT_VERSIONS:]} - {row["file"] for row in rows[:KEPT_VERSIONS]}


def _copies_of_fixed(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshots/*/fixed.safetensors"), reverse=True) + sorted(folder.glob("snapshots/fixed-*"))


def _link_or_copy(source: Path, target: Path) -> None:
    """Hard-link an immutable file; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        DISK.sync_path(target)


def _sync_tape(folder: Path) -> None:
    """Sync what the last process may have written but not synced: once we announce it, a power cut must not take it back."""
    for name in ("tape.sqlite", "tape.sqlite-wal"):
        with contextlib.suppress(FileNotFoundError):
            DISK.sync_path(folder / name)
    DISK.sync_path(folder)


def _lock(folder: Path) -> int:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"{folder / 'lock'} cannot be opened: {error.strerror}") from None
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise StoreError(f"{folder} is in use by another syncer") from None
            time.sleep(LOCK_S / 100)
