"""The tape's file: a SQLite database in which every row is sealed, so damage is found and whatever is whole can be saved.

    tape        every record, in order
    versions    the versions that count, by fragment
    counted     each learner's last progress that is part of a fragment
    standing    where the run stands
    meta        a copy of run.json, the tape's generation, those it replaces, and how many rows the first two tables must have

SQLite notices damage to its own structure, but not to the content of a row. A log (`-wal`) that is missing, or belongs to
another copy of the file, can make it return rows of different ages without an error. Seals and row counts notice both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from skerry.checksum import checksum
from skerry.core.schema import MalformedRecord, TapeRecord, read_record
from skerry.errors import StoreError

TAPE_FILES = ("tape.sqlite", "tape.sqlite-wal", "tape.sqlite-shm", "tape.sqlite-journal")
BUSY_S = 30.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tape (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL, seal INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS versions (
    fragment INTEGER NOT NULL, version INTEGER NOT NULL, round INTEGER NOT NULL, file TEXT NOT NULL,
    checksum INTEGER NOT NULL, public INTEGER, seal INTEGER NOT NULL, PRIMARY KEY (fragment, version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counted (
    fragment INTEGER NOT NULL, learner TEXT NOT NULL, session TEXT NOT NULL, version INTEGER NOT NULL,
    at_step INTEGER NOT NULL, samples INTEGER NOT NULL, seal INTEGER NOT NULL, PRIMARY KEY (fragment, learner)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS standing (id INTEGER PRIMARY KEY CHECK (id = 1), data TEXT NOT NULL, seal INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, seal INTEGER NOT NULL) WITHOUT ROWID;
"""
_COLUMNS = {
    "tape": ("at", "kind", "data"),
    "versions": ("fragment", "version", "round", "file", "checksum", "public"),
    "counted": ("fragment", "learner", "session", "version", "at_step", "samples"),
    "standing": ("id", "data"),
    "meta": ("key", "value"),
}
_ORDER = {"tape": "seq", "versions": "fragment, version", "counted": "fragment, learner", "standing": "id", "meta": "key"}

T = TypeVar("T")


@dataclass(frozen=True)
class TapeEntry:
    at: float
    record: TapeRecord


# ---------------------------------------------------------------- opening


def connect(folder: Path, mode: str = "rw") -> sqlite3.Connection:
    """With the log that lies beside it."""
    database = open_database(f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode={mode}")
    if mode != "ro":
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error:
            database.close()
            raise
    return database


def finish_journal(folder: Path) -> None:
    """Let SQLite undo a change that was cut short. It does so when it opens the file with the right to write, and without that
    it refuses to read. Only the change of a new tape to its log has such a journal."""
    if (folder / TAPE_FILES[3]).exists():
        with contextlib.closing(open_database(f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode=rw")) as database:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()


def connect_without_log(folder: Path) -> sqlite3.Connection:
    """As of the last checkpoint. Needs no right to write, and nobody may be writing."""
    return open_database(f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode=ro&immutable=1")


def open_database(uri: str) -> sqlite3.Connection:
    # Calls come from the syncer's tape thread and its main thread, never at once.
    database = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.text_factory = _as_text
    return database


def _as_text(data: bytes) -> str:
    """Damaged text is still text; its seal says that it is damaged."""
    return data.decode("utf-8", "surrogateescape")


def make_tables(database: sqlite3.Connection) -> None:
    database.executescript(_SCHEMA)


def forget_all(database: sqlite3.Connection) -> None:
    for table in _COLUMNS:
        database.execute(f"DELETE FROM {table}")


def is_served(folder: Path) -> bool:
    """Whether a syncer has this folder open for writing."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def ask(folder: Path, question: Callable[[sqlite3.Connection], T], *, look_first: bool = False) -> T:
    """Answer a reader's question about a tape: beside a running syncer, on read-only media, or of a copy made while the run
    went on. Damaged rows are left out. Raises StoreError. If a damaged row is met half way, `question` is asked once more of
    the rows that are whole; with `look_first` every row is checked before, and it is asked once."""
    path = folder / "tape.sqlite"
    if not path.exists():
        raise StoreError(f"{path} cannot be read: the file is missing")
    try:
        if is_served(folder):
            with contextlib.closing(connect(folder, mode="ro")) as database:
                return question(database)
        with _private(folder) as database:
            if not (problem := problem_of(database, thorough=look_first)):
                return question(database)
    except (Torn, sqlite3.Error) as error:
        problem = one_line(error)
        if is_served(folder) or not is_damage(error):
            raise StoreError(f"{path} cannot be read: {problem}") from None
    try:
        with contextlib.closing(open_database(":memory:")) as saved:
            make_tables(saved)
            if not save_what_is_whole(folder, saved).readable:
                raise StoreError(f"{path} cannot be read: {problem}")
            saved.commit()
            return question(saved)
    except (Torn, sqlite3.Error) as error:
        raise StoreError(f"{path} cannot be read: {one_line(error)}") from None


@contextlib.contextmanager
def _private(folder: Path) -> Iterator[sqlite3.Connection]:
    """A tape that nobody writes. To read its log SQLite has to write beside it, so that is done in a copy."""
    log = folder / "tape.sqlite-wal"
    if not log.exists() or not log.stat().st_size:
        with contextlib.closing(connect_without_log(folder)) as database:
            yield database
        return
    with tempfile.TemporaryDirectory(prefix="skerry-") as copy:
        for name in TAPE_FILES[:2]:
            shutil.copyfile(folder / name, Path(copy) / name)
        with contextlib.closing(connect(Path(copy), mode="ro")) as database:
            yield database


# ---------------------------------------------------------------- rows


class Torn(Exception):
    """A row is not what was written."""


def seal_of(values: Sequence[object]) -> int:
    return checksum(json.dumps(list(values)).encode())


def checked(table: str, row: sqlite3.Row) -> sqlite3.Row:
    """The row, if it is what was written. Raises Torn."""
    if not _is_whole(table, row):
        raise Torn(f"a row of table {table} is damaged")
    return row


def _is_whole(table: str, row: sqlite3.Row) -> bool:
    try:
        return bool(row["seal"] == seal_of([row[name] for name in _COLUMNS[table]]))
    except (TypeError, IndexError):  # bytes where there should be text, or a damaged description of the table
        return False


def _put(database: sqlite3.Connection, table: str, rows: Iterator[Sequence[object]] | Sequence[Sequence[object]]) -> None:
    names = [*_COLUMNS[table], "seal"]
    command = "INSERT" if table in ("tape", "versions") else "INSERT OR REPLACE"
    sealed = ((*row, seal_of(row)) for row in rows)
    database.executemany(f"{command} INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})", sealed)


def append(database: sqlite3.Connection, entries: Sequence[TapeEntry]) -> None:
    rows = [(float(entry.at), entry.record.kind, json.dumps(entry.record.to_json())) for entry in entries]
    _put(database, "tape", rows)


def put_version(
    database: sqlite3.Connection, fragment: int, version: int, round: int, file: str, checksum: int, public: int | None
) -> None:
    _put(database, "versions", [(fragment, version, round, file, checksum, public)])


def replace_version(database: sqlite3.Connection, row: sqlite3.Row, file: str, checksum: int) -> None:
    """The same version in another file."""
    values = (row["fragment"], row["version"], row["round"], file, checksum, row["public"])
    change = "UPDATE versions SET file = ?, checksum = ?, seal = ? WHERE fragment = ? AND version = ?"
    database.execute(change, (file, checksum, seal_of(values), row["fragment"], row["version"]))


def put_counted(database: sqlite3.Connection, rows: Sequence[tuple[int, str, str, int, int, int]]) -> None:
    _put(database, "counted", rows)


def put_standing(database: sqlite3.Connection, data: dict[str, Any]) -> None:
    _put(database, "standing", [(1, json.dumps(data))])


def put_meta(database: sqlite3.Connection, key: str, value: str) -> None:
    _put(database, "meta", [(key, value)])


def meta(database: sqlite3.Connection, key: str) -> str | None:
    row = database.execute("SELECT * FROM meta WHERE key = ?", (key,)).fetchone()
    return str(checked("meta", row)["value"]) if row is not None else None


def standing_data(database: sqlite3.Connection) -> dict[str, Any] | None:
    row = database.execute("SELECT * FROM standing").fetchone()
    return json.loads(checked("standing", row)["data"]) if row is not None else None


def version_rows(database: sqlite3.Connection, fragment: int, count: int) -> list[sqlite3.Row]:
    """The newest versions of a fragment that count, newest first."""
    query = "SELECT * FROM versions WHERE fragment = ? ORDER BY version DESC LIMIT ?"
    return [checked("versions", row) for row in database.execute(query, (fragment, count))]


def newest_row(database: sqlite3.Connection, fragment: int) -> sqlite3.Row:
    rows = version_rows(database, fragment, 1)
    if not rows:
        raise StoreError(f"the tape knows no version of fragment {fragment}; the run folder is incomplete")
    return rows[0]


def entries_of(database: sqlite3.Connection, kinds: Sequence[type[TapeRecord]] = ()) -> Iterator[TapeEntry]:
    """In the order in which they were written. Raises Torn."""
    which = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
    for row in database.execute(f"SELECT * FROM tape {which} ORDER BY seq", tuple(kind.kind for kind in kinds)):
        checked("tape", row)
        try:
            yield TapeEntry(row["at"], read_record(row["kind"], json.loads(row["data"])))
        except MalformedRecord as error:
            raise Torn(str(error)) from None


def count_rows(database: sqlite3.Connection, new_versions: int | None = None) -> None:
    """Write down how many rows there are, in the transaction that changed it. Entries are numbered without gaps. Versions are
    counted unless the caller says how many are new."""
    known = meta(database, "versions")
    if known is None or new_versions is None:
        versions = int(database.execute("SELECT count(*) FROM versions").fetchone()[0])
    else:
        versions = int(known) + new_versions
    put_meta(database, "entries", str(last_entry(database)))
    put_meta(database, "versions", str(versions))


def last_entry(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT max(seq) FROM tape").fetchone()[0] or 0)


# ---------------------------------------------------------------- damage


def is_damage(error: Exception) -> bool:
    """As opposed to a full disk or a busy file: those pass, and nothing is to be repaired."""
    if isinstance(error, sqlite3.OperationalError):
        words = ("no such table", "no such column", "malformed", "unsupported file format")
        return any(word in str(error) for word in words)
    return isinstance(error, (Torn, sqlite3.DatabaseError))


def one_line(error: object) -> str:
    """SQLite quotes what it cannot read, which may be anything."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(str(error).split()))[:200]


def problem_of(database: sqlite3.Connection, thorough: bool = True) -> str:
    """What is wrong with a tape, in words; empty if it is whole. Checks every row only if `thorough`."""
    try:
        if thorough:
            found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                return one_line(found)
        entries, last = database.execute("SELECT count(*), coalesce(max(seq), 0) FROM tape").fetchone()
        if entries != last:
            return f"{last - entries} entries are missing"
        versions = database.execute("SELECT count(*) FROM versions").fetchone()[0]
        for name, rows in (("entries", entries), ("versions", versions)):
            expected = meta(database, name)
            if expected is None or int(expected) != rows:
                return f"it should have {expected} {name}, it has {rows}"
        for table in _COLUMNS if thorough else ():
            for row in database.execute(f"SELECT * FROM {table}"):
                checked(table, row)
    except (Torn, sqlite3.Error, ValueError, TypeError, IndexError) as error:
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise
        return one_line(error)
    return ""


@dataclass
class Saved:
    """What could be saved of a tape, table by table."""

    rows: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    """Rows that were found damaged. How many were not found at all is not known."""
    expected: dict[str, int] = field(default_factory=dict)
    """How many rows there should be, where that could be read."""
    readable: bool = False

    def missing(self, table: str, name: str) -> int:
        """At least this many rows are gone. `name` is what the count is called."""
        return max(self.lost.get(table, 0), self.expected.get(name, 0) - self.rows.get(table, 0))


def save_what_is_whole(folder: Path, target: sqlite3.Connection) -> Saved:
    """Copy every row that can be read and is as it was written, with the log or without it, whichever has more."""
    best, source = Saved(), None
    with contextlib.ExitStack() as opened:
        for connect_to in (_private, _without_log):
            with contextlib.suppress(sqlite3.Error, OSError):
                database = opened.enter_context(connect_to(folder))
                found = _survey(database)
                if found.readable and found.rows.get("tape", 0) > best.rows.get("tape", -1):
                    best, source = found, database
        if source is not None:
            for table, columns in _COLUMNS.items():
                whole = (row for row in _readable_rows(source, table) if _is_whole(table, row))
                _put(target, table, ([row[name] for name in columns] for row in whole))
            count_rows(target)
    return best


@contextlib.contextmanager
def _without_log(folder: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(connect_without_log(folder)) as database:
        yield database


def _survey(database: sqlite3.Connection) -> Saved:
    found = Saved()
    for table in _COLUMNS:
        for row in _readable_rows(database, table):
            whole = _is_whole(table, row)
            found.readable = found.readable or whole
            counts = found.rows if whole else found.lost
            counts[table] = counts.get(table, 0) + 1
            if table == "meta" and whole and row["key"] in ("entries", "versions"):
                found.expected[row["key"]] = int(row["value"])
    return found


def _readable_rows(database: sqlite3.Connection, table: str) -> Iterator[sqlite3.Row]:
    """From the front as far as it can be read, then from the back: what is torn is somewhere in between. Each row once: a
    damaged page may lead to others twice."""
    names = _ORDER[table].split(", ")
    seen: set[tuple[object, ...]] = set()

    def unseen(order: str) -> Iterator[sqlite3.Row]:
        for row in database.execute(f"SELECT * FROM {table} ORDER BY {order}"):
            key = tuple(row[name] for name in names)
            if key not in seen:
                seen.add(key)
                yield row

    try:
        yield from unseen(", ".join(names))
        return
    except (sqlite3.DatabaseError, IndexError):
        pass
    rest: list[sqlite3.Row] = []
    with contextlib.suppress(sqlite3.DatabaseError, IndexError):
        for row in unseen(", ".join(f"{name} DESC" for name in names)):
            rest.append(row)
    yield from reversed(rest)
