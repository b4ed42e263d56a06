"""Writing the run folder (run_folder.py says what lies where): what the syncer must never lose.

A version's file is written beside, synced and renamed before the row that makes it count is committed, so at any crash the
newest row names a whole file. A commit that fails may all the same be found done after a crash, so its file is left as it is
until another commit has succeeded; the next try gets a name of its own. Nothing here decides anything.

Opening removes nothing before everything that the tape names was found whole; recovery.py says what happens if it is not.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from skerry.checksum import checksum
from skerry.config import SyncConfig, to_json
from skerry.core.messages import Merge
from skerry.core.standing import Counted, FragmentProgress, Standing
from skerry.durable import sync_path, unlink, write_durably
from skerry.errors import StoreError
from skerry.syncer.storage import database as db
from skerry.syncer.storage import recovery
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.recovery import KEPT_VERSIONS, VERSION_STRIDE, Fallback
from skerry.syncer.storage.run_folder import FORMAT, RunIdentity, identity_text, parse_identity, read_fixed, read_identity
from skerry.syncer.storage.version_file import Label, checksums_of, file_name, read_version, write_version
from skerry.tensors.fragments import Fragment, Layout, TensorSpec, split
from skerry.tensors.merge import FragmentState

log = logging.getLogger("skerry.storage")

COPY_EVERY_S = 1.0
"""How often standing.json is written."""


@dataclass(frozen=True)
class Written:
    """A version whose file is durable but does not count yet."""

    order: Merge
    file: str
    checksum: int
    public: int | None = None
    """Checksum of the values as learners get them."""


def gather(layout: Layout, fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    """A fragment's pieces from named tensors, as one flat fp32 vector."""
    pieces = []
    for piece in fragment.pieces:
        flat = tensors[layout.tensors[piece.tensor].name].detach().reshape(-1)
        pieces.append(flat[piece.start : piece.stop].to(device="cpu", dtype=torch.float32))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float32)


def create_run(folder: Path, tensors: Sequence[tuple[TensorSpec, Tensor]], sync: SyncConfig, job_json: str = "") -> RunIdentity:
    """Make a run folder from a model's initial tensors. The run exists once run.json does."""
    if recovery.is_run(folder):
        raise StoreError(f"{folder} already holds a run")
    specs = [spec for spec, _ in tensors]
    layout = split(specs, sync.fragments)
    named = {spec.name: tensor for spec, tensor in tensors}
    for name, tensor in named.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise StoreError(f"initial weights must be finite, tensor {name!r} is not")
    run_id = uuid.uuid4().hex
    try:
        _make_folder(folder)
        for name in db.TAPE_FILES:
            unlink(folder / name)
        fixed = {layout.tensors[p.tensor].name: named[layout.tensors[p.tensor].name] for p in layout.fixed.pieces}
        fixed_bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in fixed.items()})
        write_durably(folder / "fixed.safetensors", fixed_bytes)
        database = db.connect(folder, mode="rwc")
        with contextlib.closing(database), database:
            db.make_tables(database)
            for fragment in layout.fragments:
                state = FragmentState.fresh(gather(layout, fragment, named))
                file, found = file_name(fragment.index, 0), checksums_of(state)
                write_version(folder, file, state, Label(run_id, fragment.index, 0, 0), found.state)
                db.put_version(database, fragment.index, 0, 0, file, found.state, found.public)
            db.append(database, [TapeEntry(time.time(), "created", {"fragments": len(layout.fragments)})])
            db.count_rows(database)
        identity = {
            "format": FORMAT,
            "run_id": run_id,
            "fixed_checksum": checksum(fixed_bytes),
            "tensors": [[s.name, list(s.shape), s.dtype, s.rule] for s in specs],
            "sync": json.loads(to_json(sync)),
            "job": json.loads(job_json) if job_json else None,
        }
        text = identity_text(identity)
        write_durably(folder / "run.json", text.encode())
        # Last, for a copy of run.json says that there was one.
        with contextlib.closing(db.connect(folder)) as database, database:
            db.put_meta(database, "identity", text)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot create a run in {folder}: {error}") from error
    return parse_identity(text, folder)


class RunStore:
    """The run folder, open for writing by one process at a time. `write` may be called from several threads, the rest from
    one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._doubtful: dict[str, int] = {}
        """Files of commits that failed since the last one that succeeded, with their checksums: a crash may show that they did
        happen."""
        self._names = threading.Lock()
        """Held while the name of a doubtful file is taken again or given up."""
        self._copied_at = -COPY_EVERY_S
        self.said: list[str] = []
        """What was not as it should be when the folder was opened, with what it cost, one line each."""
        if not recovery.is_run(folder):
            read_identity(folder)  # says why it is none
        self._lock: int | None = _lock(folder)
        try:
            self.identity, repaired = recovery.recover_identity(folder)
            self._repair_fixed()
            _sync_tape(folder)
            findings = self._open_run()
            self._database = findings.database
            self.fallbacks: dict[int, Fallback] = findings.fallbacks
            """Fragments whose newest version is damaged, and what each can go on from. See `fall_back` and `take_bytes`."""
            self._say(*repaired, *findings.said)
            self._tidy(healthy=not (self.said or self.fallbacks))
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
            recovery.free_half_written(self.folder)
            return recovery.open_run(self.folder, self.identity)

    def _repair_fixed(self) -> None:
        """A model without such tensors has a file that can be made again; others may find theirs in a snapshot."""
        try:
            read_fixed(self.folder, self.identity)
            return
        except StoreError:
            pass
        candidates = [(save({}), "nothing"), *_fixed_of_snapshots(self.folder)]
        for data, source in candidates:
            if checksum(data) == self.identity.fixed_checksum:
                if (self.folder / "fixed.safetensors").exists():
                    recovery.Aside(self.folder, "repair").move(self.folder / "fixed.safetensors")
                write_durably(self.folder / "fixed.safetensors", data)
                self._say(f"fixed.safetensors was missing or damaged and is written again from {source}; nothing is lost")
                return

    def _say(self, *lines: str) -> None:
        for line in lines:
            self.said.append(line)
            log.warning("%s: %s", self.folder, line)

    def _tidy(self, healthy: bool) -> None:
        wanted = set(self._doubtful)
        for fragment in self.identity.layout.fragments:
            wanted |= {row["file"] for row in db.version_rows(self._database, fragment.index, KEPT_VERSIONS)}
        recovery.tidy(self.folder, wanted, healthy, lambda line: log.info("%s", line))

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
        self.fall_back(list(self.fallbacks))
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
            found = FragmentProgress(version=newest["version"], merged_step=newest["step"], floor=floor)
            for row in self._database.execute("SELECT * FROM counted WHERE fragment = ?", (fragment.index,)):
                db.checked("counted", row)
                session = standing.sessions.get(row["learner"])
                if session is not None and session[0] == row["session"]:
                    found.counted[row["learner"]] = Counted(row["version"], row["upto"], row["samples"])
            progress.append(found)
        if data is not None and "merges" not in data:  # of an earlier release
            standing = replace(standing, merges=sum(found.version for found in progress))
        return progress, standing

    def newest(self, fragments: Sequence[int]) -> list[tuple[int, int, str, int]]:
        """Of each fragment the version that counts, its file and checksum. What else lies there of it is removed: it is left
        of a process that wrote it and ended before it counted."""
        try:
            rows = [db.version_rows(self._database, fragment, KEPT_VERSIONS) for fragment in fragments]
            wanted = {row["file"] for kept in rows for row in kept} | self._doubtful.keys()
            beginnings = tuple(file_name(fragment, 0).split("-")[0] + "-" for fragment in fragments)
            for path in (self.folder / "fragments").iterdir():
                if path.name.lstrip(".").startswith(beginnings) and path.name not in wanted:
                    with contextlib.suppress(OSError):  # it takes space, but it is in nobody's way
                        unlink(path)
        except (sqlite3.Error, db.Torn, OSError) as error:
            raise StoreError(f"the newest versions cannot be found: {error}") from error
        return [(row["fragment"], row["version"], row["file"], row["checksum"]) for row, *_ in rows]

    # ------------------------------------------------------------ versions that were damaged

    def fall_back(self, fragments: Sequence[int]) -> dict[int, int]:
        """Go on from the newest older state of these fragments. Returns their new versions. Raises StoreError."""
        made: dict[int, int] = {}
        for fragment in fragments:
            fallback = self.fallbacks[fragment]
            try:
                with self._database:
                    made[fragment] = recovery.fall_back(self.folder, self.identity, self._database, fallback)
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"fragment {fragment} cannot go on from {fallback.source}: {error}") from error
            del self.fallbacks[fragment]
            self._say(f"fragment {fragment} goes on from {fallback.source}: what was merged since then is lost")
        return made

    def take_bytes(self, fragment: int, values: Tensor, source: str) -> None:
        """The lost version of this fragment again, from the values that an island holds, which the caller has found to be
        right. Its momentum is that of the older state. Raises StoreError."""
        fallback = self.fallbacks[fragment]
        older = fallback.read()
        state = FragmentState(values, older.momentum, values if older.shown is not None else None)
        found, file = checksums_of(state), file_name(fragment, fallback.version, "rescued")
        label = Label(self.identity.run_id, fragment, fallback.version, fallback.step)
        told = {"fragment": fragment, "lost": fallback.version, "version": fallback.version, "source": source}
        try:
            write_version(self.folder, file, state, label, found.state)
            with self._database:
                db.replace_version(self._database, db.newest_row(self._database, fragment), file, found.state)
                db.append(self._database, [TapeEntry(time.time(), "recovered", told)])
                db.count_rows(self._database, new_versions=0)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"version {fallback.version} of fragment {fragment} cannot be written: {error}") from error
        del self.fallbacks[fragment]
        self._say(f"version {fallback.version} of fragment {fragment} comes from {source}; its momentum from {fallback.source}")

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
        label = Label(self.identity.run_id, order.fragment, order.version, order.step)
        try:
            write_version(self.folder, file, state, label, found)
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
            with self._database:
                for merge in merges:
                    self._insert(merge)
                db.put_standing(self._database, standing.to_json())
                db.append(self._database, entries)
                db.count_rows(self._database, new_versions=len(merges))
                unwanted = {file for merge in merges for file in self._outdated(merge.order)}
        except sqlite3.IntegrityError as error:
            raise StoreError(f"the tape cannot be written: {error}") from error
        except sqlite3.Error as error:
            self._doubtful |= files
            raise StoreError(f"the tape cannot be written: {error}") from error
        if self._lock is not None:
            recovery.write_count(self._lock, db.last_entry(self._database))
        with self._names:
            # The log of this commit has taken the place of those that failed before it.
            for file in unwanted | self._doubtful.keys():
                with contextlib.suppress(OSError):  # what stays behind is removed when the folder is opened next
                    unlink(self.folder / "fragments" / file)
            self._doubtful.clear()
        if time.monotonic() - self._copied_at >= COPY_EVERY_S:
            with contextlib.suppress(OSError, sqlite3.Error):  # it is a spare, and there will be another
                self._copy_standing(standing)

    def _copy_standing(self, standing: Standing) -> None:
        self._copied_at = time.monotonic()
        recovery.write_standing_copy(self.folder, self.identity.run_id, db.last_entry(self._database), standing)

    def _insert(self, merge: Written) -> None:
        order = merge.order
        shares = [asdict(share) for share in order.shares]
        place = (order.fragment, order.version, order.step)
        db.put_version(self._database, *place, merge.file, merge.checksum, merge.public, shares)
        counted = [(order.fragment, s.name, s.session, order.version, s.upto, s.samples[1]) for s in order.shares]
        db.put_counted(self._database, counted)

    def cut(self, target: Path) -> None:
        """Everything that counts at this moment, as a run folder elsewhere on the same disk. Raises OSError or StoreError."""
        files = ["run.json", "fixed.safetensors"]
        try:
            files += [f"fragments/{db.newest_row(self._database, f.index)['file']}" for f in self.identity.layout.fragments]
        except (sqlite3.Error, db.Torn) as error:
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
        return list(db.entries_of(self._database))

    def _outdated(self, order: Merge) -> list[str]:
        """Files of this fragment that nobody needs once this merge counts."""
        rows = db.version_rows(self._database, order.fragment, KEPT_VERSIONS + 1)
        return [row["file"] for row in rows[KEPT_VERSIONS:]]


def _fixed_of_snapshots(folder: Path) -> list[tuple[bytes, str]]:
    found = []
    for path in sorted(folder.glob("snapshots/[0-9]*/fixed.safetensors"), reverse=True):
        with contextlib.suppress(OSError):
            found.append((path.read_bytes(), f"snapshot {path.parent.name}"))
    return found


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
