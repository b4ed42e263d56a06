"""The tape's file: a SQLite database with a checksum (seal) in every row, so that damage is detected and intact rows can be
salvaged.

    tape        every record, in order
    versions    committed versions of each fragment
    counted     per fragment and learner: the learner's last merged progress
    standing    the run's standing
    meta        a copy of run.json, the tape's generation, those it replaces, and the row counts of the first two tables

SQLite detects damage to its own structure, but not to a row's content. With a missing or foreign log (`-wal`) it can silently
return rows of different ages. Seals and row counts detect both.
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
"""How long a connection waits for a lock of another one."""

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
    """Open the tape with its log."""
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
    """Let SQLite roll back an interrupted change, which it does when it opens the file for writing. Until then it refuses to
    read. Such a journal exists only while a new tape switches to its log."""
    if (folder / TAPE_FILES[3]).exists():
        with contextlib.closing(open_database(f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode=rw")) as database:
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()


def connect_without_log(folder: Path) -> sqlite3.Connection:
    """Open the tape as of its last checkpoint. Works on read-only media. No process may be writing."""
    return open_database(f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode=ro&immutable=1")


def open_database(uri: str) -> sqlite3.Connection:
    # The tape thread and the main thread share the connection, but never use it at the same time.
    database = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False)
    database.row_factory = sqlite3.Row
    database.text_factory = _as_text
    return database


def _as_text(data: bytes) -> str:
    """Decode damaged text too: the row's seal detects the damage."""
    return data.decode("utf-8", "surrogateescape")


def make_tables(database: sqlite3.Connection) -> None:
    database.executescript(_SCHEMA)


def forget_all(database: sqlite3.Connection) -> None:
    """Delete every row."""
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


def ask(folder: Path, question: Callable[[sqlite3.Connection], T], *, check_first: bool = False) -> T:
    """Run a read-only query. Works beside a running syncer, on read-only media, and on a copy made during the run. If the tape
    is damaged, `question` runs again on the intact rows alone; with `check_first` damage is found before `question` runs, so it
    runs once. Raises StoreError."""
    path = folder / "tape.sqlite"
    if not path.exists():
        raise StoreError(f"{path} cannot be read: the file is missing")
    try:
        if is_served(folder):
            with contextlib.closing(connect(folder, mode="ro")) as database:
                return question(database)
        with _unserved(folder) as database:
            if not (problem := problem_of(database, thorough=check_first)):
                return question(database)
    except (DamagedRow, sqlite3.Error, UnicodeDecodeError) as error:
        problem = one_line(error)
        if is_served(folder) or not is_damage(error):
            raise StoreError(f"{path} cannot be read: {problem}") from None
    try:
        with contextlib.closing(open_database(":memory:")) as target:
            make_tables(target)
            if not salvage(folder, target).readable:
                raise StoreError(f"{path} cannot be read: {problem}")
            target.commit()
            return question(target)
    except (DamagedRow, sqlite3.Error) as error:
        raise StoreError(f"{path} cannot be read: {one_line(error)}") from None


@contextlib.contextmanager
def _unserved(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open a tape that no process is writing. To read a log SQLite must create files beside it, so it gets a copy."""
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


class DamagedRow(Exception):
    """A row does not match its seal, or cannot be parsed."""


def seal_of(values: Sequence[object]) -> int:
    return checksum(json.dumps(list(values)).encode())


def checked(table: str, row: sqlite3.Row) -> sqlite3.Row:
    """Return the row if it matches its seal. Raises DamagedRow."""
    if not _is_intact(table, row):
        raise DamagedRow(f"a row of table {table} is damaged")
    return row


def _is_intact(table: str, row: sqlite3.Row) -> bool:
    try:
        return bool(row["seal"] == seal_of([row[name] for name in _COLUMNS[table]]))
    except (TypeError, IndexError):  # bytes instead of text, or a damaged table schema
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
    """Point a version's row to another file."""
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
    """Up to `count` committed versions of a fragment, newest first. Raises DamagedRow."""
    query = "SELECT * FROM versions WHERE fragment = ? ORDER BY version DESC LIMIT ?"
    return [checked("versions", row) for row in database.execute(query, (fragment, count))]


def newest_row(database: sqlite3.Connection, fragment: int) -> sqlite3.Row:
    rows = version_rows(database, fragment, 1)
    if not rows:
        raise StoreError(f"the tape has no version of fragment {fragment}; the run folder is incomplete")
    return rows[0]


def entries_of(database: sqlite3.Connection, kinds: Sequence[type[TapeRecord]] = ()) -> Iterator[TapeEntry]:
    """Entries in the order they were written. Raises DamagedRow."""
    which = f"WHERE kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
    for row in database.execute(f"SELECT * FROM tape {which} ORDER BY seq", tuple(kind.kind for kind in kinds)):
        checked("tape", row)
        try:
            yield TapeEntry(row["at"], read_record(row["kind"], json.loads(row["data"])))
        except MalformedRecord as error:
            raise DamagedRow(str(error)) from None


def count_rows(database: sqlite3.Connection, new_versions: int | None = None) -> None:
    """Store the row counts, in the transaction that changed them. Entries are numbered without gaps, so the last number
    is their count. Versions are counted with a scan unless the caller passes how many are new."""
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
    """Whether an error means damage. A full disk or a busy file passes, and needs no repair."""
    if isinstance(error, sqlite3.OperationalError):
        phrases = ("no such table", "no such column", "malformed", "unsupported file format")
        return any(phrase in str(error) for phrase in phrases)
    # The sqlite3 module fails to decode SQLite's message if it quotes a damaged schema.
    return isinstance(error, (DamagedRow, sqlite3.DatabaseError, UnicodeDecodeError))


def one_line(error: object) -> str:
    """An error as one printable line. SQLite quotes damaged content in its messages."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(str(error).split()))[:200]


def problem_of(database: sqlite3.Connection, thorough: bool = True) -> str:
    """Describe what is wrong with a tape. Returns "" if it is intact. Checks every row only if `thorough`."""
    try:
        if thorough:
            result = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if result != "ok":
                return one_line(result)
        entries, last = database.execute("SELECT count(*), coalesce(max(seq), 0) FROM tape").fetchone()
        if entries != last:
            return f"{last - entries} entries are missing"
        versions = database.execute("SELECT count(*) FROM versions").fetchone()[0]
        for name, rows in (("entries", entries), ("versions", versions)):
            expected = meta(database, name)
            if expected is None or int(expected) != rows:
                return f"expected {expected} {name}, found {rows}"
        for table in _COLUMNS if thorough else ():
            for row in database.execute(f"SELECT * FROM {table}"):
                checked(table, row)
    except (DamagedRow, sqlite3.Error, ValueError, TypeError, IndexError) as error:
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise
        return one_line(error)
    return ""


@dataclass
class Salvaged:
    """Result of a salvage, by table."""

    rows: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    """Damaged rows that were found. Rows that vanished altogether are not included."""
    expected: dict[str, int] = field(default_factory=dict)
    """Row counts according to the meta table, as far as it is readable."""
    readable: bool = False

    def missing(self, table: str, name: str) -> int:
        """Lower bound on the rows lost. `name` is the count's key in the meta table."""
        return max(self.lost.get(table, 0), self.expected.get(name, 0) - self.rows.get(table, 0))


def salvage(folder: Path, target: sqlite3.Connection) -> Salvaged:
    """Copy every intact row to `target`, from the tape with its log or without, whichever has more records."""
    best, source = Salvaged(), None
    with contextlib.ExitStack() as opened:
        for connect_to in (_unserved, _without_log):
            with contextlib.suppress(sqlite3.Error, OSError):
                database = opened.enter_context(connect_to(folder))
                found = _survey(database)
                if found.readable and found.rows.get("tape", 0) > best.rows.get("tape", -1):
                    best, source = found, database
        if source is not None:
            for table, columns in _COLUMNS.items():
                intact = (row for row in _readable_rows(source, table) if _is_intact(table, row))
                _put(target, table, ([row[name] for name in columns] for row in intact))
            count_rows(target)
    return best


@contextlib.contextmanager
def _without_log(folder: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(connect_without_log(folder)) as database:
        yield database


def _survey(database: sqlite3.Connection) -> Salvaged:
    found = Salvaged()
    for table in _COLUMNS:
        for row in _readable_rows(database, table):
            intact = _is_intact(table, row)
            found.readable = found.readable or intact
            counts = found.rows if intact else found.lost
            counts[table] = counts.get(table, 0) + 1
            if table == "meta" and intact and row["key"] in ("entries", "versions"):
                found.expected[row["key"]] = int(row["value"])
    return found


def _readable_rows(database: sqlite3.Connection, table: str) -> Iterator[sqlite3.Row]:
    """Rows from the front up to the first unreadable page, then rows from the back down to the last unreadable one. Each row
    once: a damaged page may point to others twice."""
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
    except (sqlite3.DatabaseError, IndexError, UnicodeDecodeError):
        pass
    rest: list[sqlite3.Row] = []
    with contextlib.suppress(sqlite3.DatabaseError, IndexError, UnicodeDecodeError):
        for row in unseen(", ".join(f"{name} DESC" for name in names)):
            rest.append(row)
    yield from reversed(rest)
