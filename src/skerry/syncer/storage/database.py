"""The tape's file: a SQLite database in which every row is sealed, so that damage is found and whatever is whole can be saved.

    tape        every decision, in order
    versions    the versions that count, by fragment
    counted     the last progress of each learner that is part of a fragment
    standing    where the run stands
    meta        a copy of run.json, and how many rows the first two tables must have

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
from skerry.errors import StoreError

TAPE_FILES = ("tape.sqlite", "tape.sqlite-wal", "tape.sqlite-shm")
BUSY_S = 30.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tape (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL, seal INTEGER
);
CREATE TABLE IF NOT EXISTS versions (
    fragment INTEGER NOT NULL, version INTEGER NOT NULL, step INTEGER NOT NULL, file TEXT NOT NULL,
    checksum INTEGER NOT NULL, shares TEXT NOT NULL, public INTEGER, seal INTEGER, PRIMARY KEY (fragment, version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counted (
    fragment INTEGER NOT NULL, learner TEXT NOT NULL, session TEXT NOT NULL, version INTEGER NOT NULL,
    upto INTEGER NOT NULL, samples INTEGER NOT NULL, seal INTEGER, PRIMARY KEY (fragment, learner)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS standing (id INTEGER PRIMARY KEY CHECK (id = 1), data TEXT NOT NULL, seal INTEGER);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, seal INTEGER) WITHOUT ROWID;
"""
_ADDED = {"tape": ("seal",), "versions": ("public", "seal"), "counted": ("seal",), "standing": ("seal",)}
"""Columns that folders of earlier releases do not have. Their rows are taken as they are."""
_COLUMNS = {
    "tape": ("at", "kind", "data"),
    "versions": ("fragment", "version", "step", "file", "checksum", "shares", "public"),
    "counted": ("fragment", "learner", "session", "version", "upto", "samples"),
    "standing": ("id", "data"),
    "meta": ("key", "value"),
}
_ORDER = {"tape": "seq", "versions": "fragment, version", "counted": "fragment, learner", "standing": "id", "meta": "key"}

T = TypeVar("T")


@dataclass(frozen=True)
class TapeEntry:
    at: float
    kind: str
    data: dict[str, Any]


# ---------------------------------------------------------------- opening


def connect(folder: Path, mode: str = "rw") -> sqlite3.Connection:
    """With the log that lies beside it."""
    uri = f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode={mode}"
    # Calls come from the syncer's store thread and its main thread, never at once.
    database = _open(uri)
    if mode != "ro":
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error:
            database.close()
            raise
    return database


def connect_without_log(folder: Path) -> sqlite3.Connection:
    """As of the last time the log was moved into the file. Needs no right to write, and nobody may be writing."""
    return _open(f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode=ro&immutable=1")


def _open(uri: str) -> sqlite3.Connection:
    database = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.text_factory = _as_text
    return database


def _as_text(data: bytes) -> str:
    """Damaged text is text as well; its seal says that it is damaged."""
    return data.decode("utf-8", "surrogateescape")


def make_tables(database: sqlite3.Connection) -> None:
    """Those that are missing, and columns that an earlier release did not have."""
    database.executescript(_SCHEMA)
    for table, columns in _ADDED.items():
        known = {row["name"] for row in database.execute(f"PRAGMA table_info({table})")}
        for column in columns:
            if column not in known:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER")


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
    """What a reader wants to know of a tape: beside a running syncer, on read-only media, or of a copy made while the run went
    on. Rows that are not whole are left out. Raises StoreError. If a damaged row is met half way, `question` is asked once
    more of those that are whole; with `look_first` every row is looked at before, and it is asked once."""
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
        with contextlib.closing(_open(":memory:")) as saved:
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
    names = set(row.keys())
    if not names >= set(_COLUMNS[table]) - set(_ADDED.get(table, ())):
        return False  # the table's own description is damaged
    if "seal" not in names or row["seal"] is None:
        return True  # written by an earlier release
    try:
        return bool(row["seal"] == seal_of([row[name] for name in _COLUMNS[table]]))
    except TypeError:  # bytes, where there should be text
        return False


def _put(database: sqlite3.Connection, table: str, rows: Sequence[Sequence[object]]) -> None:
    names = [*_COLUMNS[table], "seal"]
    command = "INSERT" if table in ("tape", "versions") else "INSERT OR REPLACE"
    marks = ", ".join("?" * len(names))
    sealed = [(*row, seal_of(row)) for row in rows]
    database.executemany(f"{command} INTO {table} ({', '.join(names)}) VALUES ({marks})", sealed)


def append(database: sqlite3.Connection, entries: Sequence[TapeEntry]) -> None:
    _put(database, "tape", [(float(entry.at), entry.kind, json.dumps(entry.data)) for entry in entries])


def put_version(
    database: sqlite3.Connection,
    fragment: int,
    version: int,
    step: int,
    file: str,
    checksum: int,
    public: int | None,
    shares: Sequence[dict[str, Any]] = (),
) -> None:
    _put(database, "versions", [(fragment, version, step, file, checksum, json.dumps(list(shares)), public)])


def replace_version(database: sqlite3.Connection, row: sqlite3.Row, file: str, checksum: int) -> None:
    """The same version in another file."""
    values = (row["fragment"], row["version"], row["step"], file, checksum, row["shares"], row["public"])
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


def entries_of(database: sqlite3.Connection, kinds: Sequence[str] = ()) -> Iterator[TapeEntry]:
    """In the order in which things were decided."""
    which = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
    for row in database.execute(f"SELECT * FROM tape {which} ORDER BY seq", tuple(kinds)):
        checked("tape", row)
        yield TapeEntry(row["at"], row["kind"], json.loads(row["data"]))


def count_rows(database: sqlite3.Connection, new_versions: int | None = None) -> None:
    """Write down how many there are, as part of the transaction that changed it. Entries are numbered without gaps. Versions
    are counted if it is not said how many are new."""
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
    """As opposed to a disk that is full or a file that is busy: those pass, and nothing is to be repaired."""
    if isinstance(error, sqlite3.OperationalError):
        return "no such table" in str(error) or "no such column" in str(error) or "malformed" in str(error)
    return isinstance(error, (Torn, sqlite3.DatabaseError))


def one_line(error: object) -> str:
    """SQLite quotes what it cannot read, which may be anything."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(str(error).split()))[:200]


def problem_of(database: sqlite3.Connection, thorough: bool = True) -> str:
    """What is wrong with a tape, in words; empty if it is whole. Looks at every row only if that is asked for."""
    try:
        if thorough:
            found = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                return one_line(found)
        counted = database.execute("SELECT count(*), coalesce(max(seq), 0) FROM tape").fetchone()
        if counted[0] != counted[1]:
            return f"{counted[1] - counted[0]} entries are missing"
        if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            versions = database.execute("SELECT count(*) FROM versions").fetchone()[0]
            for table, rows in (("entries", counted[0]), ("versions", versions)):
                expected = meta(database, table)
                if expected is not None and int(expected) != rows:
                    return f"it should have {expected} {table}, it has {rows}"
        for table in _COLUMNS if thorough else ():
            if table == "meta" and not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                continue
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
        for connect_to in (_with_log, _without_log):
            with contextlib.suppress(sqlite3.Error, OSError):
                database = opened.enter_context(connect_to(folder))
                found = _survey(database)
                if found.readable and found.rows.get("tape", 0) > best.rows.get("tape", -1):
                    best, source = found, database
        if source is not None:
            _copy(source, target)
    return best


@contextlib.contextmanager
def _with_log(folder: Path) -> Iterator[sqlite3.Connection]:
    with _private(folder) as database:
        yield database


@contextlib.contextmanager
def _without_log(folder: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(connect_without_log(folder)) as database:
        yield database


def _survey(database: sqlite3.Connection) -> Saved:
    found = Saved()
    for table in _COLUMNS:
        for row in _readable_rows(database, table):
            found.readable = True
            whole = _is_whole(table, row)
            counts = found.rows if whole else found.lost
            counts[table] = counts.get(table, 0) + 1
            if table == "meta" and whole and row["key"] in ("entries", "versions"):
                found.expected[row["key"]] = int(row["value"])
    return found


def _copy(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    for table, columns in _COLUMNS.items():
        whole = [row for row in _readable_rows(source, table) if _is_whole(table, row)]
        known = set(whole[0].keys()) if whole else set()
        _put(target, table, [[row[name] if name in known else None for name in columns] for row in whole])
    count_rows(target)


def _readable_rows(database: sqlite3.Connection, table: str) -> Iterator[sqlite3.Row]:
    """From the front as far as it can be read, then from the back: what is torn is somewhere in between."""
    order = _ORDER[table]
    last: object = None
    try:
        for row in database.execute(f"SELECT * FROM {table} ORDER BY {order}"):
            last = _key(table, row)
            yield row
        return
    except (sqlite3.DatabaseError, IndexError):
        pass
    rest: list[sqlite3.Row] = []
    with contextlib.suppress(sqlite3.DatabaseError, IndexError):
        backwards = ", ".join(f"{name} DESC" for name in order.split(", "))
        for row in database.execute(f"SELECT * FROM {table} ORDER BY {backwards}"):
            if last is not None and _key(table, row) == last:
                break
            rest.append(row)
    yield from reversed(rest)


def _key(table: str, row: sqlite3.Row) -> tuple[object, ...]:
    return tuple(row[name] for name in _ORDER[table].split(", "))
