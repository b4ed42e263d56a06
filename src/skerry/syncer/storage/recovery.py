"""What opening a run folder does when something in it is missing or damaged. Nothing is removed: it is moved to `aside/`.

Rules:
 1. What is found is looked at as a whole before anything is changed. If there is no whole state to go on from, nothing is.
 2. run.json is written again from the tape's copy, or from a snapshot's.
 3. Of a tape that is not whole, every row that is goes into a new one. A tape that is shorter than the lock file or
    standing.json say has lost its end. One of a generation that was replaced is an old copy. The tape of another run has no row
    of this one.
 4. A fragment goes on from its newest version, or from another file with the same bytes. If there is none, from the newest
    state that can be proven: the version before, one in a snapshot or in `aside/`, and last a good copy (sources.py). Live
    islands are asked first for the version that was lost (syncer/rescue.py).
 5. Without a whole tape nobody knows which files counted, so each fragment goes on from its newest whole file.
 6. A state that is not the newest version gets a number that no version had, so nothing that islands still hold or send can be
    mistaken for progress since then.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from skerry.core import records
from skerry.core.standing import Standing
from skerry.durable import DISK
from skerry.errors import StoreError
from skerry.syncer.storage import database as db
from skerry.syncer.storage.aside import Aside
from skerry.syncer.storage.run_folder import RunIdentity, find_identity, read_identity, snapshot_folders
from skerry.syncer.storage.sources import (
    KEPT_VERSIONS,
    Source,
    highest_number,
    highest_seen,
    newest_source,
    same_bytes,
    version_paths,
    versions_in,
)
from skerry.syncer.storage.standing_copy import noted_generations, read_count, read_standing_copy
from skerry.syncer.storage.version_file import (
    Label,
    Proven,
    checksums_of,
    file_name,
    newest_proven,
    read_version,
    state_checksum,
    write_version,
)
from skerry.tensors.fragments import Fragment

VERSION_STRIDE = 1_000_000
"""After a recovery versions go on at the next multiple of this: a number that nobody has seen."""
NEW_TAPE = "tape.new.sqlite"
"""A tape that is whole and has not taken the place of the damaged one yet."""


@dataclass(frozen=True)
class Fallback:
    """What a fragment goes on from when its newest version is lost."""

    fragment: int
    version: int
    """The version that is lost, as far as the tape knows."""
    public: int | None
    """Checksum of its values, by which the bytes of an island can be known; None if they cannot."""
    source: Source
    seen: int
    """The highest number any version of this fragment is known to have had."""

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
    healthy: bool = True
    """Everything the tape names was found whole."""


def recover_identity(folder: Path) -> tuple[RunIdentity, list[str]]:
    """The run's identity, and what was said if run.json had to be written again. Raises StoreError."""
    identity, text, source = find_identity(folder)
    if not source:
        return identity, []
    try:
        if (folder / "run.json").exists():
            Aside(folder, "repair").move(folder / "run.json")
        DISK.write_durably(folder / "run.json", text.encode())
    except OSError as error:
        raise StoreError(f"{folder / 'run.json'} cannot be written again: {error}") from None
    return identity, [f"run.json was missing or damaged and is written again from {source}; nothing is lost"]


def open_run(folder: Path, identity: RunIdentity) -> Findings:
    """Open the tape for writing, repaired if need be. Raises StoreError, sqlite3.Error and OSError; then nothing was changed,
    or a repair was interrupted that the next opening finishes."""
    _finish_swap(folder)
    problem = _problem_of_tape(folder, identity)
    if problem:
        return _rebuild(folder, identity, problem)
    findings = Findings(db.connect(folder))
    try:
        _find_fallbacks(folder, identity, findings)
        if db.meta(findings.database, "identity") is None:  # creation was cut short after run.json was written
            with findings.database:
                db.put_meta(findings.database, "identity", (folder / "run.json").read_text())
    except BaseException:
        findings.database.close()
        raise
    return findings


# ---------------------------------------------------------------- a tape that is whole


def _problem_of_tape(folder: Path, identity: RunIdentity) -> str:
    """In words; empty if it is whole. Raises sqlite3.Error for what is no damage, such as a full disk."""
    if not (folder / "tape.sqlite").exists():
        return "tape.sqlite is missing"
    try:
        db.finish_journal(folder)
        with contextlib.closing(db.connect(folder, mode="ro")) as database:
            if problem := db.problem_of(database):
                return f"tape.sqlite is damaged: {problem}"
            if not all(db.version_rows(database, fragment.index, 1) for fragment in identity.layout.fragments):
                return "tape.sqlite does not know every fragment"
            data = db.standing_data(database)
            Standing.from_json(data) if data is not None else Standing()
            if _is_of_another_run(database, identity):
                return "tape.sqlite belongs to another run"
            entries, generation = db.last_entry(database), db.meta(database, "generation") or ""
            if noted_generations(folder, identity.run_id) - _generations(database):
                return "tape.sqlite is a copy from before it was repaired"
            noted = read_count(folder, generation)
            ahead = max(_files_ahead(folder, identity, fragment, database, noted) for fragment in identity.layout.fragments)
    except (sqlite3.Error, db.Torn) as error:
        if not db.is_damage(error):
            raise
        return f"tape.sqlite is damaged: {db.one_line(error)}"
    except (ValueError, KeyError, TypeError) as error:
        return f"tape.sqlite is damaged: {db.one_line(error)}"
    copy = read_standing_copy(folder, identity.run_id, generation)
    known = max(noted, copy.entries if copy is not None else 0)
    if known > entries:
        return f"tape.sqlite has lost its last {known - entries} entries or more (is tape.sqlite-wal missing?)"
    if ahead > 1 or (ahead and not noted):
        return "tape.sqlite is older than the files it names (is tape.sqlite-wal missing?)"
    return ""


def _is_of_another_run(database: sqlite3.Connection, identity: RunIdentity) -> bool:
    text = db.meta(database, "identity")  # None if creation was cut short
    return text is not None and json.loads(text)["run_id"] != identity.run_id


def _generations(database: sqlite3.Connection) -> set[str]:
    """This tape's, and those of the tapes it took the place of."""
    return {db.meta(database, "generation") or "", *(db.meta(database, "replaces") or "").split()} - {""}


def _files_ahead(folder: Path, identity: RunIdentity, fragment: Fragment, database: sqlite3.Connection, noted: int) -> int:
    """How many versions whole files are ahead of the tape. One version ahead may never have counted, so that is 0 as long as
    the newest version that counts has its file. The first version of a stride is left by a recovery that was interrupted, if
    the tape is known to be as long as it was."""
    head = db.newest_row(database, fragment.index)
    newer = highest_number(version_paths(folder), fragment.index)
    if newer <= head["version"] or (newer == head["version"] + 1 and (folder / "fragments" / head["file"]).exists()):
        return 0
    proven = newest_proven(versions_in(folder / "fragments"), identity.run_id, fragment)
    if proven is not None and noted and proven.label.version % VERSION_STRIDE == 0:
        proven = newest_proven(versions_in(folder / "fragments"), identity.run_id, fragment, below=proven.label.version)
    return max(0, proven.label.version - head["version"]) if proven is not None else 0


def _find_fallbacks(folder: Path, identity: RunIdentity, findings: Findings) -> None:
    copies: list[tuple[str, Proven]] = []
    for fragment in identity.layout.fragments:
        head, *before = db.version_rows(findings.database, fragment.index, KEPT_VERSIONS)
        for row in before:
            with contextlib.suppress(StoreError):
                if (folder / "fragments" / row["file"]).exists():
                    read_version(folder, fragment, row)
                continue
            findings.healthy = False
        try:
            read_version(folder, fragment, head)
            continue
        except StoreError as error:
            damage = error
        findings.healthy = False
        if (copy := same_bytes(folder, identity, fragment, head)) is not None:
            copies.append((head["file"], copy))
            where = copy.path.parent.relative_to(folder).as_posix()
            findings.said.append(f"{damage}; it is written again from {where}, nothing is lost")
            continue
        source = newest_source(folder, identity, fragment, findings.database, below=head["version"])
        if source is None:
            raise StoreError(f"{damage}, and no older state of fragment {fragment.index} is whole")
        seen = highest_seen(folder, fragment.index, findings.database)
        findings.fallbacks[fragment.index] = Fallback(fragment.index, head["version"], head["public"], source, seen)
        findings.said.append(str(damage))
    for file, copy in copies:
        if (folder / "fragments" / file).exists():
            Aside(folder, "repair").move(folder / "fragments" / file)
        write_version(folder, file, copy.state, copy.label, state_checksum(copy.state))


def fall_back(folder: Path, identity: RunIdentity, database: sqlite3.Connection, fallback: Fallback) -> int:
    """Make what a fragment goes on from its newest version, inside a transaction of the caller's. Returns its number. Raises
    OSError, StoreError and sqlite3.Error."""
    fragment, version, source = fallback.fragment, fallback.next_version, fallback.source
    state = source.read()
    found, file = checksums_of(state), source.file
    if not file:  # from elsewhere, or of no version
        file = file_name(fragment, version)
        label = Label(identity.run_id, fragment, version, source.round, source.tokens)
        write_version(folder, file, state, label, found.state)
    db.put_version(database, fragment, version, source.round, file, found.state, found.public)
    database.execute("DELETE FROM counted WHERE fragment = ?", (fragment,))  # nothing of before is progress since then
    record = records.Recovered(fragment, fallback.version, version, source.words)
    db.append(database, [db.TapeEntry(time.time(), record)])
    db.count_rows(database, new_versions=1)
    return version


# ---------------------------------------------------------------- a tape that is not whole


def _rebuild(folder: Path, identity: RunIdentity, problem: str) -> Findings:
    """A new tape from what is whole of the old one, and every fragment from its newest whole file."""
    half = folder / f".{NEW_TAPE}.partial"
    half.unlink(missing_ok=True)
    try:
        with contextlib.closing(db.open_database(half.resolve().as_uri() + "?mode=rwc")) as target:
            db.make_tables(target)
            saved, origin = db.save_what_is_whole(folder, target), "what is whole of it"
            if _is_of_another_run(target, identity):
                db.forget_all(target)
                saved = db.Saved()
            if not saved.readable and (snapshot := _newest_snapshot_tape(folder, identity)) is not None:
                db.save_what_is_whole(snapshot, target)
                origin = f"that of snapshot {snapshot.name}"
            said = [f"{problem}; the tape goes on from {origin}: {_cost(saved)}"]
            standing, known = _newest_standing(folder, identity, target)
            newest = partial(_newest_of_files, folder, identity, target=target, standing=standing)
            fallbacks = [newest(fragment) for fragment in identity.layout.fragments]
            said += [line for fallback in fallbacks if (line := _what_it_cost(fallback))]
            if not known:
                tokens = max(fallback.source.tokens for fallback in fallbacks)
                standing = Standing(step=max(f.source.round for f in fallbacks), banked_tokens=tokens, phase="running")
                said.append(f"where the run stood is lost; it goes on at {tokens:,} tokens, and data is leased from the start")
            db.append(target, [db.TapeEntry(time.time(), records.TapeRecovered(problem, _cost(saved)))])
            for fallback in fallbacks:
                fall_back(folder, identity, target, fallback)
            db.put_meta(target, "identity", (folder / "run.json").read_text())
            replaced = _generations(target) | noted_generations(folder, identity.run_id)
            db.put_meta(target, "replaces", " ".join(sorted(replaced)))
            db.put_meta(target, "generation", uuid.uuid4().hex)
            floors = tuple(fallback.next_version for fallback in fallbacks)
            stands = replace(standing, restoring=(), recoveries=standing.recoveries + 1, floors=floors)
            db.put_standing(target, stands.to_json())
            db.count_rows(target)
            target.commit()
        DISK.sync_path(half)
        os.replace(half, folder / NEW_TAPE)
        DISK.sync_path(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise
    if not _finish_swap(folder):
        raise StoreError(
            f"{folder / NEW_TAPE} cannot be read back; it was moved to aside/, and the damaged tape is still there"
        )
    return Findings(db.connect(folder), said=said, healthy=False)


def _newest_snapshot_tape(folder: Path, identity: RunIdentity) -> Path | None:
    for snapshot in reversed(snapshot_folders(folder)):
        with contextlib.suppress(StoreError):
            if read_identity(snapshot).run_id == identity.run_id and (snapshot / "tape.sqlite").exists():
                return snapshot
    return None


def _newest_standing(folder: Path, identity: RunIdentity, target: sqlite3.Connection) -> tuple[Standing, bool]:
    """The latest there is, and whether there is one."""
    found: list[Standing] = []
    with contextlib.suppress(db.Torn, ValueError, KeyError, TypeError):
        if (data := db.standing_data(target)) is not None:
            found.append(Standing.from_json(data))
    if (copy := read_standing_copy(folder, identity.run_id)) is not None:
        found.append(copy.standing)
    latest = max(found, key=lambda standing: (standing.recoveries, standing.tokens, standing.step), default=Standing())
    return latest, bool(found)


def _newest_of_files(
    folder: Path, identity: RunIdentity, fragment: Fragment, target: sqlite3.Connection, standing: Standing
) -> Fallback:
    source = newest_source(folder, identity, fragment, target)
    if source is None:
        raise StoreError(f"{folder} has no whole tape, and no whole file of fragment {fragment.index}")
    seen = highest_seen(folder, fragment.index, target, standing)
    return Fallback(fragment.index, seen, None, source, seen)


def _what_it_cost(fallback: Fallback) -> str:
    if fallback.source.version == fallback.version:
        return ""
    return f"fragment {fallback.fragment} goes on from {fallback.source.words}: what was merged since then is lost"


def _cost(saved: db.Saved) -> str:
    parts = []
    if not saved.readable:
        parts.append("its history is lost")
    elif missing := saved.missing("tape", "entries"):
        parts.append(f"at least {missing} entries of its history are lost")
    parts.append("each fragment loses what islands did since it was last merged, and samples leased last may be used twice")
    return ", ".join(parts)


def _finish_swap(folder: Path) -> bool:
    """A new tape takes the place of the damaged one, which is moved aside. Done again if it was interrupted. False if there is
    no new tape, or it is not whole."""
    new = folder / NEW_TAPE
    if not new.exists():
        return False
    aside = Aside(folder, "repair")
    try:
        with contextlib.closing(db.open_database(f"{new.resolve().as_uri()}?mode=ro&immutable=1")) as database:
            whole = not db.problem_of(database)
    except sqlite3.Error:
        whole = False
    if not whole:
        aside.move(new)
        return False
    for name in reversed(db.TAPE_FILES):  # the file itself last: a log without its file is nothing
        if (folder / name).exists():
            aside.move(folder / name)
    os.replace(new, folder / "tape.sqlite")
    DISK.sync_path(folder)
    return True
