"""What opening a run folder does when something in it is missing or damaged. Nothing is removed: it is moved to `aside/`.

Rules:
 1. What is found is looked at as a whole before anything is changed. If there is no whole state to go on from, nothing is.
 2. run.json is written again from the tape's copy, or from a snapshot's.
 3. Of a tape that is not whole, every row that is goes into a new one. A tape that lags behind standing.json has lost its end.
 4. A fragment goes on from its newest version. If that is damaged, from the newest state that can be proven: the version
    before, one in a snapshot, or a good copy. Live islands are asked first for the version that was lost (syncer/rescue.py).
 5. Without a whole tape nobody knows which files counted, so each fragment goes on from its newest whole file.
 6. A state that is not the newest version gets a number that no version had, so nothing that islands still hold or send can be
    mistaken for progress since then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from skerry.checksum import checksum
from skerry.core.standing import Standing
from skerry.durable import sync_path, write_durably, write_whole
from skerry.errors import StoreError
from skerry.syncer.storage import database as db
from skerry.syncer.storage.good_copies import GoodCopies
from skerry.syncer.storage.run_folder import DamagedIdentity, RunIdentity, parse_identity, read_identity
from skerry.syncer.storage.version_file import (
    Label,
    checksums_of,
    file_name,
    newest_proven,
    numbers_of,
    prove,
    read_version,
    write_version,
)
from skerry.tensors.fragments import Fragment
from skerry.tensors.merge import FragmentState

log = logging.getLogger("skerry.storage")

KEPT_VERSIONS = 2
"""Files of each fragment that stay: the newest, and the one before for readers that are in the middle of it."""
VERSION_STRIDE = 1_000_000
"""After a recovery versions go on at the next multiple of this: a number that nobody has seen."""
NEW_TAPE = "tape.new.sqlite"
"""A tape that is whole and has not taken the place of the damaged one yet."""
KEPT_ASIDE = 2
"""Folders in `aside/` with leftovers of healthy openings. Those of repairs stay until somebody removes them."""


Source = tuple[Callable[[], FragmentState], int, str]
"""A state that was found whole: how to read it, the round it was merged in, and what it is in words."""


@dataclass(frozen=True)
class Fallback:
    """What a fragment goes on from when its newest version is lost."""

    fragment: int
    version: int
    """The version that is lost, as far as the tape knows."""
    public: int | None
    """Checksum of its values, by which the bytes of an island can be known; None if they cannot."""
    read: Callable[[], FragmentState]
    step: int
    """The round in which that was merged."""
    source: str
    """What it is, in words."""
    seen: int
    """The highest number that any version of this fragment has had, by the tape or by a file's name."""

    @property
    def next_version(self) -> int:
        return (self.seen // VERSION_STRIDE + 1) * VERSION_STRIDE


@dataclass
class Findings:
    """What an opening found and did."""

    database: sqlite3.Connection
    fallbacks: dict[int, Fallback] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    """One line for each thing that was not as it should be, with what it cost."""
    tape_was_lost: bool = False
    """In part or whole: leases, tokens and counts may be older than what islands remember."""


class Aside:
    """Where things go instead of being removed: one numbered folder for each opening that needs it."""

    def __init__(self, folder: Path, why: str) -> None:
        self._parent = folder / "aside"
        self._why = why
        self._folder: Path | None = None
        self.moved: list[str] = []

    def move(self, path: Path) -> None:
        """Raises OSError."""
        if self._folder is None:
            taken = [int(found.name.split("-")[0]) for found in _numbered(self._parent)]
            self._folder = self._parent / f"{max(taken, default=0) + 1:04d}-{self._why}"
            self._folder.mkdir(parents=True)
        os.replace(path, self._folder / path.name)
        self.moved.append(path.name)


def _numbered(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name[:4].isdigit()) if folder.is_dir() else []


# ---------------------------------------------------------------- run.json


def recover_identity(folder: Path) -> tuple[RunIdentity, list[str]]:
    """The run's identity, and what was said if run.json had to be written again. Raises StoreError."""
    try:
        return read_identity(folder), []
    except StoreError as error:
        damage = error
        if "run format" in str(error):
            raise
    for text, source in _copies_of_identity(folder):
        try:
            identity = parse_identity(text, folder)
        except (DamagedIdentity, StoreError):
            continue
        try:
            if (folder / "run.json").exists():
                Aside(folder, "repair").move(folder / "run.json")
            write_durably(folder / "run.json", text.encode())
        except OSError as error:
            raise StoreError(f"{damage}; it cannot be written again: {error}") from None
        return identity, [f"run.json was missing or damaged and is written again from {source}; nothing is lost"]
    raise damage


def _copies_of_identity(folder: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if (folder / "tape.sqlite").exists():
        with contextlib.suppress(StoreError):
            text = db.ask(folder, lambda database: db.meta(database, "identity"))
            found += [(text, "the tape")] if text is not None else []
    for snapshot in reversed(_numbered(folder / "snapshots")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append(((snapshot / "run.json").read_text(), f"snapshot {snapshot.name}"))
    return found


def is_run(folder: Path) -> bool:
    """Whether a run was ever made here, even if run.json is gone."""
    return (folder / "run.json").exists() or bool(_copies_of_identity(folder))


# ---------------------------------------------------------------- standing.json


@dataclass(frozen=True)
class StandingCopy:
    """Where the run stood after this many entries of the tape."""

    entries: int
    standing: Standing


def write_standing_copy(folder: Path, run_id: str, entries: int, standing: Standing) -> None:
    """Not synced: it is for a tape that is lost or damaged, not for a power cut, in which the tape is safe. Raises OSError."""
    text = json.dumps({"run_id": run_id, "entries": entries, "standing": standing.to_json()})
    write_whole(folder / "standing.json", json.dumps({"checksum": checksum(text.encode()), "text": text}).encode())


def read_standing_copy(folder: Path, run_id: str) -> StandingCopy | None:
    try:
        outside = json.loads((folder / "standing.json").read_text())
        if outside["checksum"] != checksum(outside["text"].encode()):
            return None
        data = json.loads(outside["text"])
        return StandingCopy(data["entries"], Standing.from_json(data["standing"])) if data["run_id"] == run_id else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_count(lock: int, entries: int) -> None:
    """Note in the lock file how long the tape is, without syncing it: whoever finds a shorter tape knows that its log is gone.
    After a power cut the note may be older than the tape, which says nothing."""
    text = f"{entries:020d}"
    with contextlib.suppress(OSError):
        os.pwrite(lock, f"{text} {checksum(text.encode()):08x}\n".encode(), 0)


def read_count(folder: Path) -> int:
    try:
        text, found = (folder / "lock").read_text().split()
        return int(text) if f"{checksum(text.encode()):08x}" == found else 0
    except (OSError, ValueError):
        return 0


# ---------------------------------------------------------------- the tape and the fragments


def open_run(folder: Path, identity: RunIdentity) -> Findings:
    """Open the tape for writing, repaired if need be. Raises StoreError, sqlite3.Error and OSError; then nothing was changed,
    or a repair was interrupted that the next opening finishes."""
    _finish_swap(folder)
    problem = _problem_of_tape(folder, identity)
    if not problem:
        findings = Findings(_connected(folder))
        try:
            _find_fallbacks(folder, identity, findings, findings.database)
            _write_meta(folder, findings.database)
        except BaseException:
            findings.database.close()
            raise
        return findings
    return _rebuild(folder, identity, problem)


def _connected(folder: Path) -> sqlite3.Connection:
    database = db.connect(folder)
    try:
        db.make_tables(database)
    except BaseException:
        database.close()
        raise
    return database


def _write_meta(folder: Path, database: sqlite3.Connection) -> None:
    """What a folder of an earlier release does not have."""
    with database:
        if db.meta(database, "identity") is None:
            db.put_meta(database, "identity", (folder / "run.json").read_text())
        if db.meta(database, "entries") is None:
            db.count_rows(database)


def _problem_of_tape(folder: Path, identity: RunIdentity) -> str:
    """In words; empty if it is whole. Raises sqlite3.Error for what is no damage, such as a full disk."""
    if not (folder / "tape.sqlite").exists():
        return "tape.sqlite is missing"
    try:
        with contextlib.closing(db.connect(folder, mode="ro")) as database:
            if problem := db.problem_of(database):
                return f"tape.sqlite is damaged: {problem}"
            if not all(db.version_rows(database, fragment.index, 1) for fragment in identity.layout.fragments):
                return "tape.sqlite does not know every fragment"
            data = db.standing_data(database)
            Standing.from_json(data) if data is not None else Standing()
            entries = db.last_entry(database)
            ahead = any(_has_files_ahead(folder, identity, fragment, database) for fragment in identity.layout.fragments)
    except (sqlite3.Error, db.Torn) as error:
        if not db.is_damage(error):
            raise
        return f"tape.sqlite is damaged: {db.one_line(error)}"
    except (ValueError, KeyError, TypeError) as error:
        return f"tape.sqlite is damaged: {db.one_line(error)}"
    copy = read_standing_copy(folder, identity.run_id)
    noted = read_count(folder)
    known = max(noted, copy.entries if copy is not None else 0)
    if known > entries:
        return f"tape.sqlite has lost its last {known - entries} entries or more (is tape.sqlite-wal missing?)"
    return "tape.sqlite is older than the files it names (is tape.sqlite-wal missing?)" if ahead and not noted else ""


def _has_files_ahead(folder: Path, identity: RunIdentity, fragment: Fragment, database: sqlite3.Connection) -> bool:
    """Whether there are files that only a later tape can name. One version ahead alone may never have counted."""
    head = db.newest_row(database, fragment.index)
    newer = _highest_number(folder, fragment.index)
    if newer <= head["version"] or (newer == head["version"] + 1 and (folder / "fragments" / head["file"]).exists()):
        return False
    proven = newest_proven(sorted((folder / "fragments").glob("*")), identity.run_id, fragment)
    return proven is not None and proven.label.version > head["version"]


def _find_fallbacks(folder: Path, identity: RunIdentity, findings: Findings, database: sqlite3.Connection) -> None:
    """For fragments whose newest version is damaged, with a tape that is whole."""
    for fragment in identity.layout.fragments:
        head = db.newest_row(database, fragment.index)
        try:
            read_version(folder, fragment, head)
            continue
        except StoreError as error:
            damage = error
        found = _older_state(folder, identity, fragment, database, head["version"])
        if found is None:
            raise StoreError(f"{damage}, and no older state of fragment {fragment.index} is whole")
        seen = max(head["version"], _highest_number(folder, fragment.index))
        findings.fallbacks[fragment.index] = Fallback(fragment.index, head["version"], head["public"], *found, seen)
        findings.said.append(f"{damage}")


def _older_state(
    folder: Path, identity: RunIdentity, fragment: Fragment, database: sqlite3.Connection, below: int
) -> Source | None:
    """The newest state before this version that can be proven, the round it was merged in, and where it is from."""
    older = [row for row in db.version_rows(database, fragment.index, KEPT_VERSIONS) if row["version"] < below]
    return _state_by_rows(folder, fragment, older) or _state_elsewhere(folder, identity, fragment, below)


def _state_by_rows(folder: Path, fragment: Fragment, rows: Sequence[sqlite3.Row]) -> Source | None:
    for row in rows:
        with contextlib.suppress(StoreError):
            read_version(folder, fragment, row)
            return partial(read_version, folder, fragment, dict(row)), row["step"], f"version {row['version']}"
    return None


def _state_elsewhere(folder: Path, identity: RunIdentity, fragment: Fragment, below: int | None) -> Source | None:
    paths = sorted((folder / "fragments").glob("*"))
    for snapshot in _numbered(folder / "snapshots"):
        paths += sorted((snapshot / "fragments").glob("*"))
    proven = newest_proven(paths, identity.run_id, fragment, below)
    if proven is not None:
        inside = "snapshots" in proven.path.relative_to(folder).parts
        where = f" in snapshot {proven.path.parent.parent.name}" if inside else ""
        read = partial(_read_again, proven.path, identity.run_id, fragment)
        return read, proven.label.step, f"version {proven.label.version}{where}"
    good = GoodCopies(folder)
    for step in good.steps():
        with contextlib.suppress(StoreError):
            good.read(step, fragment.index)
            return partial(_read_good, good, step, fragment), step, f"the good copy of step {step}"
    return None


def _read_good(good: GoodCopies, step: int, fragment: Fragment) -> FragmentState:
    return FragmentState.fresh(good.read(step, fragment.index))


def _read_again(path: Path, run_id: str, fragment: Fragment) -> FragmentState:
    proven = prove(path, run_id, fragment)
    if proven is None:
        raise StoreError(f"{path} has changed since it was looked at")
    return proven.state


def _highest_number(folder: Path, fragment: int) -> int:
    numbers = [numbers_of(path.name) for path in (folder / "fragments").glob("*")]
    return max((found[1] for found in numbers if found is not None and found[0] == fragment), default=0)


def fall_back(folder: Path, identity: RunIdentity, database: sqlite3.Connection, fallback: Fallback) -> int:
    """Make what a fragment goes on from its newest version, inside a transaction of the caller's. Returns its number. Raises
    OSError, StoreError and sqlite3.Error."""
    fragment, version, state = fallback.fragment, fallback.next_version, fallback.read()
    file, found = file_name(fragment, version), checksums_of(state)
    write_version(folder, file, state, Label(identity.run_id, fragment, version, fallback.step), found.state)
    db.put_version(database, fragment, version, fallback.step, file, found.state, found.public)
    database.execute("DELETE FROM counted WHERE fragment = ?", (fragment,))  # nothing of before is progress since then
    told = {"fragment": fragment, "lost": fallback.version, "version": version, "source": fallback.source}
    db.append(database, [db.TapeEntry(time.time(), "recovered", told)])
    db.count_rows(database, new_versions=1)
    return version


def _rebuild(folder: Path, identity: RunIdentity, problem: str) -> Findings:
    """A new tape from what is whole of the old one, and every fragment from its newest whole file."""
    half = folder / f".{NEW_TAPE}.partial"
    half.unlink(missing_ok=True)
    try:
        with contextlib.closing(sqlite3.connect(half)) as target:
            target.row_factory = sqlite3.Row
            db.make_tables(target)
            saved, source = db.save_what_is_whole(folder, target), "what is whole of it"
            if not saved.readable and (snapshot := _newest_snapshot_tape(folder, identity)) is not None:
                db.save_what_is_whole(snapshot, target)
                source = f"that of snapshot {snapshot.name}"
            standing = _newest_standing(folder, identity, target)
            fallbacks = [_newest_of_files(folder, identity, fragment, target) for fragment in identity.layout.fragments]
            newer = sum(max(0, fallback.seen - _newest_version(target, fallback.fragment)) for fallback in fallbacks)
            cost = _cost(saved, newer)
            db.append(target, [db.TapeEntry(time.time(), "tape_recovered", {"problem": problem, "cost": cost})])
            for fallback in fallbacks:
                fall_back(folder, identity, target, fallback)
            db.put_meta(target, "identity", (folder / "run.json").read_text())
            db.put_standing(target, replace(standing, restoring=(), recoveries=standing.recoveries + 1).to_json())
            db.count_rows(target)
            target.commit()
        sync_path(half)
        os.replace(half, folder / NEW_TAPE)
        sync_path(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise
    _finish_swap(folder)
    return Findings(_connected(folder), {}, [f"{problem}; the tape goes on from {source}: {cost}"], tape_was_lost=True)


def _newest_snapshot_tape(folder: Path, identity: RunIdentity) -> Path | None:
    for snapshot in reversed(_numbered(folder / "snapshots")):
        with contextlib.suppress(StoreError):
            if read_identity(snapshot).run_id == identity.run_id and (snapshot / "tape.sqlite").exists():
                return snapshot
    return None


def _newest_standing(folder: Path, identity: RunIdentity, target: sqlite3.Connection) -> Standing:
    found = [Standing()]
    with contextlib.suppress(db.Torn, ValueError, KeyError, TypeError):
        if (data := db.standing_data(target)) is not None:
            found.append(Standing.from_json(data))
    if (copy := read_standing_copy(folder, identity.run_id)) is not None:
        found.append(copy.standing)
    return max(found, key=lambda standing: (standing.tokens, standing.step))


def _newest_of_files(folder: Path, identity: RunIdentity, fragment: Fragment, target: sqlite3.Connection) -> Fallback:
    """Files of earlier releases do not say what they are, but rows that were saved do."""
    found = _state_elsewhere(folder, identity, fragment, None) or _state_by_rows(
        folder, fragment, db.version_rows(target, fragment.index, KEPT_VERSIONS)
    )
    if found is None:
        raise StoreError(f"{folder} has no whole tape, and no whole file of fragment {fragment.index}")
    seen = max(_newest_version(target, fragment.index), _highest_number(folder, fragment.index))
    return Fallback(fragment.index, seen, None, *found, seen)


def _newest_version(target: sqlite3.Connection, fragment: int) -> int:
    rows = db.version_rows(target, fragment, 1)
    return int(rows[0]["version"]) if rows else 0


def _cost(saved: db.Saved, newer: int) -> str:
    parts = []
    if not saved.readable:
        parts.append("its history is lost")
    elif missing := saved.missing("tape", "entries"):
        parts.append(f"at least {missing} entries of its history are lost")
    if newer:
        parts.append(f"{newer} merges that it does not know are in the model")
    parts.append("each fragment loses what islands did since it was last merged, and samples leased last may be used twice")
    return ", ".join(parts)


def _finish_swap(folder: Path) -> None:
    """A new tape takes the place of the damaged one, which is moved aside. Done again if it was interrupted."""
    new = folder / NEW_TAPE
    if not new.exists():
        return
    aside = Aside(folder, "repair")
    for name in reversed(db.TAPE_FILES):  # the file itself last: a log without its file is nothing
        if (folder / name).exists():
            aside.move(folder / name)
    os.replace(new, folder / "tape.sqlite")
    sync_path(folder)


# ---------------------------------------------------------------- leftovers


def tidy(folder: Path, wanted: set[str], healthy: bool, say: Callable[[str], None]) -> None:
    """Move files that no version needs out of the way. Only once everything the tape names was found whole are half-written
    files removed, and what earlier healthy openings moved aside."""
    aside = Aside(folder, "leftovers" if healthy else "repair")
    for path in sorted((folder / "fragments").iterdir()):
        if path.name.endswith(".partial"):
            if healthy:
                with contextlib.suppress(OSError):
                    path.unlink()
        elif path.name not in wanted:
            with contextlib.suppress(OSError):  # it takes space, but it is in nobody's way
                aside.move(path)
    if aside.moved:
        say(f"{len(aside.moved)} files that no version needs were moved to {folder / 'aside'}: {_few(aside.moved)}")
    if healthy:
        for old in [path for path in _numbered(folder / "aside") if path.name.endswith("-leftovers")][:-KEPT_ASIDE]:
            shutil.rmtree(old, ignore_errors=True)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def free_half_written(folder: Path) -> None:
    """On a full disk the tape may need the space of files that were never finished. They never counted."""
    for path in (folder / "fragments").glob(".*.partial"):
        with contextlib.suppress(OSError):
            path.unlink()
