"""Writing the run folder (run_folder.py says what lies where): what the syncer must never lose.

A version's file is written beside, synced and renamed before the row that makes it count is committed, so at any crash the
newest row names a whole file. A commit that fails may all the same be found done after a crash, so its file is left as it is
until another commit has succeeded; the next try gets a name of its own. Nothing here decides anything.

Opening removes nothing before everything that the tape names was found whole; recovery.py says what happens if it is not.
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


@dataclass(frozen=True)
class Written:
    """A version whose file is durable but does not count yet."""

    order: Merge
    file: str
    checksum: int
    public: int | None = None
    """Checksum of the values as learners get them."""


class RunStore:
    """The run folder, open for writing by one process at a time. `write` may be called from several threads, the rest from
    one at a time."""

    def __init__(self, folder: Path, disk: Disk = DISK) -> None:
        self.folder, self.disk = folder, disk
        self._doubtful: dict[str, int] = {}
        """Files of commits that failed since the last one that succeeded, with their checksums: a crash may show that they did
        happen."""
        self._names = threading.Lock()
        """Held while the name of a doubtful file is taken again or given up."""
        self._copied_at = -COPY_EVERY_S
        self.said: list[str] = []
        """What was not as it should be when the folder was opened, with what it cost, one line each."""
        if not is_run(folder):
            read_identity(folder)  # says why it is none
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
            """Fragments whose newest version is damaged, and what each can go on from. See `fall_back` and `take_bytes`."""
            self._say(*repaired, *findings.said)
            self._note_count()
            self._tidy(findings.healthy and not self.said)
        except BaseException as error:
            if hasattr(self, "_database"):
                self._database.close()
            os.close(self._lock)
            self._lock = None
            if isinstance(error, (sqlite3.Error, db.Torn)):
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
        """A model without such tensors has a file that can be made again; others may find theirs in a snapshot."""
        with contextlib.suppress(StoreError):
            read_fixed(self.folder, self.identity)
            return
        expected = self.identity.fixed_checksum
        if checksum(save({})) == expected:
            data, source = save({}), "nothing"
        elif (copy := next((p for p in _copies_of_fixed(self.folder) if file_checksum(p) == expected), None)) is not None:
            data, source = copy.read_bytes(), copy.relative_to(self.folder).as_posix()
        else:
            return
        if (self.folder / "fixed.safetensors").exists():
            Aside(self.folder, "repair").move(self.folder / "fixed.safetensors")
        self.disk.write_durably(self.folder / "fixed.safetensors", data)
        self._say(f"fixed.safetensors was missing or damaged and is written again from {source}; nothing is lost")

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.said.append(line)
            log.warning("%s: %s", self.folder, line)

    def _tidy(self, healthy: bool) -> None:
        wanted = self._needed()
        for fragment in self.identity.layout.fragments:
            wanted |= {row["file"] for row in db.version_rows(self._database, fragment.index, KEPT_VERSIONS)}
        tidy(self.folder, wanted, healthy, lambda line: log.info("%s", line))

    def _needed(self) -> set[str]:
        """Files that no row may name and that must stay all the same."""
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
        """The newest state of everything, after what is damaged has been replaced."""
        for fragment in list(self.fallbacks):
            self.fall_back(fragment)
        progress, standing = self.load_progress()
        return self.load_states(), progress, standing

    def load_states(self) -> list[FragmentState]:
        """The newest values and momentum of every fragment."""
        return [self.load_state(fragment) for fragment in range(len(self.identity.layout.fragments))]

    def load_state(self, index: int) -> FragmentState:
        """The newest values and momentum of one fragment."""
        fragment = self.identity.layout.fragments[index]
        try:
            row = db.newest_row(self._database, index)
        except (sqlite3.Error, db.Torn) as error:
            raise StoreError(f"{self.folder / 'tape.sqlite'} cannot be read: {error}") from error
        return read_version(self.folder, fragment, row)

    def load_progress(self) -> tuple[list[FragmentProgress], Standing]:
        """What was decided, without the data."""
        try:
            return self._load_progress()
        except (sqlite3.Error, db.Torn) as error:
            raise StoreError(f"{self.folder / 'tape.sqlite'} cannot be read: {error}") from error

    def _load_progress(self) -> tuple[list[FragmentProgress], Standing]:
        progress = []
        data = db.standing_data(self._database)
        standing = Standing.from_json(data) if data is not None else Standing()
        for fragment in self.identity.layout.fragments:
            newest = db.newest_row(self._database, fragment.index)
            floor = newest["version"] // VERSION_STRIDE * VERSION_STRIDE  # where it went on after a recovery, if it did
            found = FragmentProgress(version=newest["version"], merged_round=newest["round"], floor=floor)
            for row in self._database.execute("SELECT * FROM counted WHERE fragment = ?", (fragment.index,)):
                db.checked("counted", row)
                session = standing.sessions.get(row["learner"])
                if session is not None and session[0] == row["session"]:
                    found.counted[row["learner"]] = Counted(row["version"], row["at_step"], row["samples"])
            progress.append(found)
        return progress, standing

    def newest(self, fragments: Sequence[int]) -> list[tuple[int, int, str, int]]:
        """Of each fragment the version that counts, its file and checksum. What else lies there of it is removed: it is left
        of a process that wrote it and ended before it counted."""
        try:
            rows = [db.version_rows(self._database, fragment, KEPT_VERSIONS) for fragment in fragments]
            wanted = {row["file"] for kept in rows for row in kept} | self._needed()
            beginnings = tuple(file_name(fragment, 0).split("-")[0] + "-" for fragment in fragments)
            for path in (self.folder / "fragments").iterdir():
                if path.name.lstrip(".").startswith(beginnings) and path.name not in wanted:
                    with contextlib.suppress(OSError):  # it takes space, but it is in nobody's way
                        unlink(path)
        except (sqlite3.Error, db.Torn, OSError) as error:
            raise StoreError(f"the newest versions cannot be found: {error}") from error
        return [(row["fragment"], row["version"], row["file"], row["checksum"]) for row, *_ in rows]

    # ------------------------------------------------------------ versions that were damaged

    def fall_back(self, fragment: int) -> int:
        """Go on from the newest older state of this fragment. Returns its new version. Raises StoreError."""
        fallback = self.fallbacks[fragment]
        try:
            with self._database:
                lost = db.newest_row(self._database, fragment)
                made = recovery.fall_back(self.folder, self.identity, self._database, fallback)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"fragment {fragment} cannot go on from {fallback.source.words}: {error}") from error
        self._recovered(fragment, lost["file"])
        self._say(f"fragment {fragment} goes on from {fallback.source.words}: what was merged since then is lost")
        return made

    def take_bytes(self, fragment: int, values: Tensor, source: str) -> None:
        """The lost version of this fragment again, from the values that an island holds, which the caller has found to be
        right. Its momentum is that of the older state. Raises StoreError."""
        fallback = self.fallbacks[fragment]
        try:
            older = fallback.source.read()
            state = FragmentState(values, older.momentum, values if older.shown is not None else None)
            found, file = checksums_of(state), file_name(fragment, fallback.version, "rescued")
            with self._database:
                lost = db.newest_row(self._database, fragment)
                if lost["version"] != fallback.version:
                    raise StoreError(f"fragment {fragment} has gone on from another version")
                label = Label(self.identity.run_id, fragment, fallback.version, lost["round"], fallback.source.tokens)
                write_version(self.folder, file, state, label, found.state, self.disk)
                db.replace_version(self._database, lost, file, found.state)
                record = records.Recovered(fragment, fallback.version, fallback.version, source)
                db.append(self._database, [TapeEntry(time.time(), record)])
                db.count_rows(self._database, new_versions=0)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"version {fallback.version} of fragment {fragment} cannot be written: {error}") from error
        self._recovered(fragment, lost["file"])
        where = f"its momentum from {fallback.source.words}"
        self._say(f"version {fallback.version} of fragment {fragment} comes from {source}, {where}")

    def _recovered(self, fragment: int, damaged: str) -> None:
        del self.fallbacks[fragment]
        self._note_count()
        with contextlib.suppress(OSError):  # it may be missing; and where it lies it is in nobody's way
            Aside(self.folder, "repair").move(self.folder / "fragments" / damaged)

    def fixed_bytes(self) -> bytes:
        return read_fixed(self.folder, self.identity)

    def write(self, order: Merge, state: FragmentState) -> Written:
        """Put a merge's result on disk, where it does not count yet. May be called from several threads."""
        sums = checksums_of(state)
        found = sums.state
        attempt = 0
        with self._names:
            while (file := file_name(order.fragment, order.version, attempt)) in self._doubtful:
                if self._doubtful[file] == found:  # the same again, and a full disk has no room for a copy
                    del self._doubtful[file]
                    return Written(order, file, found, sums.public)
                attempt += 1
        label = Label(self.identity.run_id, order.fragment, order.version, order.round, order.tokens)
        try:
            write_version(self.folder, file, state, label, found, self.disk)
        except OSError as error:
            raise StoreError(f"version {order.version} of fragment {order.fragment} cannot be written: {error}") from error
        return Written(order, file, found, sums.public)

    def written_elsewhere(self, order: Merge, file: str, checksum: int, public: int | None = None) -> Written:
        """A shard has put a merge's result on disk. May be called from several threads."""
        with self._names:
            self._doubtful.pop(file, None)  # tried again with the same file, which must not be removed now
            try:
                size = (self.folder / "fragments" / file).stat().st_size
            except OSError:
                size = -1
        if size < 8 * self.identity.layout.fragments[order.fragment].numel:
            raise StoreError(f"{file}, which a shard wrote, is not in the run folder")
        return Written(order, file, checksum, public)

    def commit(self, merges: Sequence[Written], standing: Standing, entries: Sequence[TapeEntry]) -> None:
        """Make merges count, with everything decided up to them. When this returns, they may be announced."""
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
        self._note_count()
        with self._names:
            # The log of this commit has taken the place of those that failed before it.
            for file in unwanted | self._doubtful.keys():
                with contextlib.suppress(OSError):  # what stays behind is removed when the folder is opened next
                    unlink(self.folder / "fragments" / file)
            self._doubtful.clear()
        if time.monotonic() - self._copied_at >= COPY_EVERY_S:
            with contextlib.suppress(OSError, sqlite3.Error):  # it is a spare, and there will be another
                self._copy_standing(standing)

    def _note_count(self) -> None:
        if self._lock is not None:
            write_count(self._lock, self._generation, db.last_entry(self._database))

    def _copy_standing(self, standing: Standing) -> None:
        self._copied_at = time.monotonic()
        entries = db.last_entry(self._database)
        write_standing_copy(self.folder, self.identity.run_id, self._generation, entries, standing)

    def _insert(self, merge: Written) -> None:
        order = merge.order
        place = (order.fragment, order.version, order.round)
        db.put_version(self._database, *place, merge.file, merge.checksum, merge.public)
        counted = [(order.fragment, s.learner, s.session, order.version, s.at_step, s.samples[1]) for s in order.shares]
        db.put_counted(self._database, counted)

    def cut(self, target: Path) -> None:
        """Everything that counts at this moment, as a run folder elsewhere on the same disk. Files that are never written again
        are linked, after they were found whole. Raises OSError or StoreError."""
        if self.fallbacks:
            raise StoreError(f"fragments {sorted(self.fallbacks)} are damaged and not recovered yet")
        (target / "fragments").mkdir(parents=True, exist_ok=True)
        for fragment in self.identity.layout.fragments:
            try:
                file = db.newest_row(self._database, fragment.index)
            except (sqlite3.Error, db.Torn) as error:
                raise StoreError(f"the tape cannot be read: {error}") from error
            read_version(self.folder, fragment, file)
            _link_or_copy(self.folder / "fragments" / file["file"], target / "fragments" / file["file"])
        (target / "good").mkdir(exist_ok=True)
        for path in (self.folder / "good").glob("step-*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # an old one may just be removed
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
        """A copy of fixed.safetensors that snapshots share: a link to the file itself would be damaged along with it."""
        spare = self.folder / "snapshots" / f"fixed-{self.identity.fixed_checksum:08x}.safetensors"
        if not spare.exists() or file_checksum(spare) != self.identity.fixed_checksum:
            self.disk.write_durably(spare, self.fixed_bytes())
        return spare

    def tape(self) -> list[TapeEntry]:
        return list(db.entries_of(self._database))

    def _outdated(self, order: Merge) -> set[str]:
        """Files of this fragment that nobody needs once this merge counts."""
        rows = db.version_rows(self._database, order.fragment, KEPT_VERSIONS + 1)
        return {row["file"] for row in rows[KEPT_VERSIONS:]} - {row["file"] for row in rows[:KEPT_VERSIONS]}


def _copies_of_fixed(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshots/*/fixed.safetensors"), reverse=True) + sorted(folder.glob("snapshots/fixed-*"))


def _link_or_copy(source: Path, target: Path) -> None:
    """Files that are never written again may have two names; not every file system can do that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        DISK.sync_path(target)


def _sync_tape(folder: Path) -> None:
    """What the last process wrote and did not live to sync can be read now; told to learners, it must not be lost later."""
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
            time.sleep(LOCK_S / 100)  # a reader looks at the lock for a moment
