"""Opens a run folder in which files are missing or damaged. Deletes nothing: damaged files move to `aside/`.

Rules:
 1. Everything is inspected before anything is changed. If a fragment has no intact state, nothing is changed.
 2. run.json is rewritten from the copy in the tape or in a snapshot.
 3. If the tape is damaged, its intact rows move to a new one. These count as damaged too: a tape shorter than the lock file or
    standing.json says (its end is lost), a tape of a replaced generation (an old copy), and the tape of another run (none of
    its rows is kept).
 4. A fragment continues from its newest version, or from another file with the same bytes. Otherwise live islands are asked for
    that version first (syncer/rescue.py). If none has it, the fragment continues from the newest state that verifies: an older
    version, here, in a snapshot or in `aside/`, or else a good copy (sources.py).
 5. Without an intact tape nobody knows which files were committed, so each fragment continues from its newest intact file.
 6. A fragment that continues from an older state gets a version number that was never used, so nothing that islands still hold
    or send can be mistaken for progress since then.
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
"""After a recovery, versions continue at the next multiple of this, a number never used before."""
NEW_TAPE = "tape.new.sqlite"
"""A complete new tape that has not replaced the damaged one yet."""


@dataclass(frozen=True)
class Fallback:
    """A fragment whose newest version is lost, and the state to continue from."""

    fragment: int
    version: int
    """The lost version, as far as the tape knows."""
    public: int | None
    """Checksum of the lost values, to verify an island's copy; None if unknown."""
    source: Source
    seen: int
    """The highest version number this fragment is known to have used."""

    @property
    def next_version(self) -> int:
        return (self.seen // VERSION_STRIDE + 1) * VERSION_STRIDE


@dataclass
class Findings:
    """The opened tape, and what was found damaged."""

    database: sqlite3.Connection
    fallbacks: dict[int, Fallback] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """One line per problem, with what was lost."""
    healthy: bool = True
    """Every file that the tape names is intact."""


def recover_identity(folder: Path) -> tuple[RunIdentity, list[str]]:
    """Read the run's identity, and rewrite run.json if necessary. Also returns the problems found. Raises StoreError."""
    identity, text, source = find_identity(folder)
    if not source:
        return identity, []
    try:
        if (folder / "run.json").exists():
            Aside(folder, "repair").move(folder / "run.json")
        DISK.write_durably(folder / "run.json", text.encode())
    except OSError as error:
        raise StoreError(f"{folder / 'run.json'} cannot be rewritten: {error}") from None
    return identity, [f"run.json was missing or damaged; rewrote it from {source}; nothing is lost"]


def open_run(folder: Path, identity: RunIdentity) -> Findings:
    """Open the tape for writing, and repair it if necessary. Raises StoreError, sqlite3.Error and OSError; then either nothing
    was changed, or the next opening finishes the interrupted repair."""
    _finish_swap(folder)
    problem = _problem_of_tape(folder, identity)
    if problem:
        return _rebuild(folder, identity, problem)
    findings = Findings(db.connect(folder))
    try:
        _find_fallbacks(folder, identity, findings)
        if db.meta(findings.database, "identity") is None:  # creation was interrupted right after writing run.json
            with findings.database:
                db.put_meta(findings.database, "identity", (folder / "run.json").read_text())
    except BaseException:
        findings.database.close()
        raise
    return findings


# ---------------------------------------------------------------- intact tape


def _problem_of_tape(folder: Path, identity: RunIdentity) -> str:
    """Describe the tape's damage. Returns "" if it is intact. Raises sqlite3.Error for other failures, such as a full disk."""
    if not (folder / "tape.sqlite").exists():
        return "tape.sqlite is missing"
    try:
        db.finish_journal(folder)
        with contextlib.closing(db.connect(folder, mode="ro")) as database:
            if problem := db.problem_of(database):
                return f"tape.sqlite is damaged: {problem}"
            if not all(db.version_rows(database, fragment.index, 1) for fragment in identity.layout.fragments):
                return "tape.sqlite lacks some fragments"
            data = db.standing_data(database)
            Standing.from_json(data) if data is not None else Standing()
            if _is_of_another_run(database, identity):
                return "tape.sqlite belongs to another run"
            entries, generation = db.last_entry(database), db.meta(database, "generation") or ""
            if noted_generations(folder, identity.run_id) - _generations(database):
                return "tape.sqlite is a copy from before it was repaired"
            counted = read_count(folder, generation)
            ahead = max(_files_ahead(folder, identity, fragment, database, counted) for fragment in identity.layout.fragments)
    except (sqlite3.Error, db.DamagedRow) as error:
        if not db.is_damage(error):
            raise
        return f"tape.sqlite is damaged: {db.one_line(error)}"
    except (ValueError, KeyError, TypeError) as error:
        return f"tape.sqlite is damaged: {db.one_line(error)}"
    copy = read_standing_copy(folder, identity.run_id, generation)
    expected = max(counted, copy.entries if copy is not None else 0)
    if expected > entries:
        return f"tape.sqlite has lost at least its last {expected - entries} entries (is tape.sqlite-wal missing?)"
    if ahead > 1 or (ahead and not counted):
        return "tape.sqlite is older than the files it names (is tape.sqlite-wal missing?)"
    return ""


def _is_of_another_run(database: sqlite3.Connection, identity: RunIdentity) -> bool:
    text = db.meta(database, "identity")  # None if creation was interrupted
    return text is not None and json.loads(text)["run_id"] != identity.run_id


def _generations(database: sqlite3.Connection) -> set[str]:
    """The generations of this tape and of those it replaced."""
    return {db.meta(database, "generation") or "", *(db.meta(database, "replaces") or "").split()} - {""}


def _files_ahead(folder: Path, identity: RunIdentity, fragment: Fragment, database: sqlite3.Connection, counted: int) -> int:
    """By how many versions intact files are ahead of the tape. A single version ahead may never have been committed, so it does
    not count while the newest committed version has its file. Nor does the first version of a stride if the tape's length is
    known: an interrupted recovery leaves such a file."""
    head = db.newest_row(database, fragment.index)
    newer = highest_number(version_paths(folder), fragment.index)
    if newer <= head["version"] or (newer == head["version"] + 1 and (folder / "fragments" / head["file"]).exists()):
        return 0
    proven = newest_proven(versions_in(folder / "fragments"), identity.run_id, fragment)
    if proven is not None and counted and proven.label.version % VERSION_STRIDE == 0:
        proven = newest_proven(versions_in(folder / "fragments"), identity.run_id, fragment, below=proven.label.version)
    return max(0, proven.label.version - head["version"]) if proven is not None else 0


def _find_fallbacks(folder: Path, identity: RunIdentity, findings: Findings) -> None:
    copies: list[tuple[str, Proven]] = []
    for fragment in identity.layout.fragments:
        head, *older = db.version_rows(findings.database, fragment.index, KEPT_VERSIONS)
        for row in older:
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
            findings.problems.append(f"{damage}; rewrote it from {where}; nothing is lost")
            continue
        source = newest_source(folder, identity, fragment, findings.database, below=head["version"])
        if source is None:
            raise StoreError(f"{damage}, and no older state of fragment {fragment.index} is intact")
        seen = highest_seen(folder, fragment.index, findings.database)
        findings.fallbacks[fragment.index] = Fallback(fragment.index, head["version"], head["public"], source, seen)
        findings.problems.append(str(damage))
    for file, copy in copies:
        if (folder / "fragments" / file).exists():
            Aside(folder, "repair").move(folder / "fragments" / file)
        write_version(folder, file, copy.state, copy.label, state_checksum(copy.state))


def fall_back(folder: Path, identity: RunIdentity, database: sqlite3.Connection, fallback: Fallback) -> int:
    """Commit the fallback's source as a new version, inside the caller's transaction. Returns its number. Raises OSError,
    StoreError and sqlite3.Error."""
    fragment, version, source = fallback.fragment, fallback.next_version, fallback.source
    state = source.read()
    sums, file = checksums_of(state), source.file
    if not file:  # in a snapshot or in aside/, or a good copy
        file = file_name(fragment, version)
        label = Label(identity.run_id, fragment, version, source.round, source.tokens)
        write_version(folder, file, state, label, sums.state)
    db.put_version(database, fragment, version, source.round, file, sums.state, sums.public)
    database.execute("DELETE FROM counted WHERE fragment = ?", (fragment,))  # earlier progress is not part of this state
    record = records.Recovered(fragment, fallback.version, version, source.description)
    db.append(database, [db.TapeEntry(time.time(), record)])
    db.count_rows(database, new_versions=1)
    return version


# ---------------------------------------------------------------- damaged tape


def _rebuild(folder: Path, identity: RunIdentity, problem: str) -> Findings:
    """Build a new tape from the intact rows of the old one, and continue every fragment from its newest intact file."""
    unfinished = folder / f".{NEW_TAPE}.partial"
    unfinished.unlink(missing_ok=True)
    try:
        with contextlib.closing(db.open_database(unfinished.resolve().as_uri() + "?mode=rwc")) as target:
            db.make_tables(target)
            salvaged, origin = db.salvage(folder, target), "its intact rows"
            if _is_of_another_run(target, identity):
                db.forget_all(target)
                salvaged = db.Salvaged()
            if not salvaged.readable and (snapshot := _newest_snapshot_tape(folder, identity)) is not None:
                db.salvage(snapshot, target)
                origin = f"the tape of snapshot {snapshot.name}"
            problems = [f"{problem}; rebuilt from {origin}: {_tape_loss(salvaged)}"]
            standing, known = _newest_standing(folder, identity, target)
            newest = partial(_newest_of_files, folder, identity, target=target, standing=standing)
            fallbacks = [newest(fragment) for fragment in identity.layout.fragments]
            problems += [continues_from(fallback) for fallback in fallbacks if fallback.source.version != fallback.version]
            if not known:
                tokens = max(fallback.source.tokens for fallback in fallbacks)
                standing = Standing(step=max(f.source.round for f in fallbacks), banked_tokens=tokens, phase="running")
                problems.append(f"the run's standing is lost; it continues at {tokens:,} tokens and leases data from the start")
            db.append(target, [db.TapeEntry(time.time(), records.TapeRecovered(problem, _tape_loss(salvaged)))])
            for fallback in fallbacks:
                fall_back(folder, identity, target, fallback)
            db.put_meta(target, "identity", (folder / "run.json").read_text())
            replaced = _generations(target) | noted_generations(folder, identity.run_id)
            db.put_meta(target, "replaces", " ".join(sorted(replaced)))
            db.put_meta(target, "generation", uuid.uuid4().hex)
            floors = tuple(fallback.next_version for fallback in fallbacks)
            recovered = replace(standing, restoring=(), recoveries=standing.recoveries + 1, floors=floors)
            db.put_standing(target, recovered.to_json())
            db.count_rows(target)
            target.commit()
        DISK.sync_path(unfinished)
        os.replace(unfinished, folder / NEW_TAPE)
        DISK.sync_path(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    if not _finish_swap(folder):
        raise StoreError(f"{folder / NEW_TAPE} cannot be read back; moved it to aside/ and left the damaged tape in place")
    return Findings(db.connect(folder), problems=problems, healthy=False)


def _newest_snapshot_tape(folder: Path, identity: RunIdentity) -> Path | None:
    for snapshot in reversed(snapshot_folders(folder)):
        with contextlib.suppress(StoreError):
            if read_identity(snapshot).run_id == identity.run_id and (snapshot / "tape.sqlite").exists():
                return snapshot
    return None


def _newest_standing(folder: Path, identity: RunIdentity, target: sqlite3.Connection) -> tuple[Standing, bool]:
    """The newest standing from the tape or standing.json, and whether one was found."""
    found: list[Standing] = []
    with contextlib.suppress(db.DamagedRow, ValueError, KeyError, TypeError):
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
        raise StoreError(f"{folder} has no intact tape, and no intact file of fragment {fragment.index}")
    seen = highest_seen(folder, fragment.index, target, standing)
    return Fallback(fragment.index, seen, None, source, seen)


def continues_from(fallback: Fallback) -> str:
    """The log line for a fragment that fell back."""
    return f"fragment {fallback.fragment} continues from {fallback.source.description}; later merges are lost"


def _tape_loss(salvaged: db.Salvaged) -> str:
    parts = []
    if not salvaged.readable:
        parts.append("its history is lost")
    elif missing := salvaged.missing("tape", "entries"):
        parts.append(f"at least {missing} entries of its history are lost")
    parts.append(
        "each fragment loses the islands' progress since its last merge, and the last leased samples may be used twice"
    )
    return ", ".join(parts)


def _finish_swap(folder: Path) -> bool:
    """Replace a damaged tape with the new one, if there is one, and move it aside. Resumes after an interruption. Returns False
    if there is no new tape, or it is damaged."""
    new = folder / NEW_TAPE
    if not new.exists():
        return False
    aside = Aside(folder, "repair")
    try:
        with contextlib.closing(db.open_database(f"{new.resolve().as_uri()}?mode=ro&immutable=1")) as database:
            intact = not db.problem_of(database)
    except sqlite3.Error:
        intact = False
    if not intact:
        aside.move(new)
        return False
    for name in reversed(db.TAPE_FILES):  # the database last: its log is useless without it
        if (folder / name).exists():
            aside.move(folder / name)
    os.replace(new, folder / "tape.sqlite")
    DISK.sync_path(folder)
    return True
