"""A disk that fails, or whose process dies, at a chosen call, and the states that a power cut can leave behind.

`FaultyDisk` stands between a process and one folder. It counts every call that changes something there, of `os` and of SQLite,
whose file methods it replaces. It also tracks which bytes and names have been synced, so that `Folder.write_out` can write a
state that the disk may hold after a power cut.

It patches the whole process, so install it in a child process, unless only `full` is used, which merely refuses writes.
"""

from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

DIED = 77
"""Exit status of a process that died on purpose."""

Cut = Literal["all lost", "names kept, bytes lost", "bytes kept, names lost", "some"]
CUTS: tuple[Cut, ...] = ("all lost", "names kept, bytes lost", "bytes kept, names lost", "some")


# ---------------------------------------------------------------- contents of a disk, synced and not


@dataclass
class Content:
    """A file: its synced bytes, and the changes since. A change is a write (offset, bytes) or a truncation (size, None)."""

    synced: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def after(self, changes: list[tuple[int, bytes | None]]) -> bytes:
        data = bytearray(self.synced)
        for at, new in changes:
            if new is None:
                del data[at:]
            data.extend(bytes(max(0, at - len(data))))
            if new is not None:
                data[at : at + len(new)] = new
        return bytes(data)

    def sync(self) -> None:
        self.synced, self.changes = self.after(self.changes), []

    def some(self, chance: random.Random) -> bytes:
        """The bytes after a power cut: each unsynced change is kept, lost or torn at random."""
        kept: list[tuple[int, bytes | None]] = []
        for at, new in self.changes:
            luck = chance.random()
            if luck < 0.5:
                kept.append((at, new))
            elif luck < 0.75 and new is not None:
                kept.append((at, new[: chance.randrange(len(new) + 1)]))
        return self.after(kept)


@dataclass
class Folder:
    """A folder: its synced names, and the changes since. A change is (name, content), or (name, None) for a removal."""

    synced: dict[str, Content | Folder] = field(default_factory=dict)
    changes: list[tuple[str, Content | Folder | None]] = field(default_factory=list)

    def after(self, count: int) -> dict[str, Content | Folder]:
        """The names after the first `count` changes. Journaling file systems keep their order."""
        names = dict(self.synced)
        for name, what in self.changes[:count]:
            if what is None:
                names.pop(name, None)
            else:
                names[name] = what
        return names

    @property
    def now(self) -> dict[str, Content | Folder]:
        return self.after(len(self.changes))

    def sync(self) -> None:
        self.synced, self.changes = self.now, []

    def write_out(self, target: Path, how: Cut, chance: random.Random) -> None:
        """Write a state that a power cut can leave to another folder."""
        target.mkdir()
        count = len(self.changes) if how == "names kept, bytes lost" else chance.randrange(len(self.changes) + 1)
        names = self.after(count if how in ("names kept, bytes lost", "some") else 0)
        for name, what in names.items():
            if isinstance(what, Folder):
                what.write_out(target / name, how, chance)
            elif how == "some":
                (target / name).write_bytes(what.some(chance))
            else:
                (target / name).write_bytes(what.after(what.changes) if how == "bytes kept, names lost" else what.synced)


def scan(path: Path) -> Folder:
    """The folder's current contents, all synced."""
    folder = Folder()
    for entry in path.iterdir():
        if not entry.name.endswith("-shm"):  # SQLite's shared memory, meaningless once nobody has it open
            folder.synced[entry.name] = scan(entry) if entry.is_dir() else Content(entry.read_bytes())
    return folder


def to_json(what: Content | Folder, known: dict[int, int] | None = None) -> Any:
    known = {} if known is None else known
    if id(what) in known:
        return known[id(what)]
    known[id(what)] = number = len(known)
    if isinstance(what, Content):
        changes = [[at, None if new is None else new.decode("latin-1")] for at, new in what.changes]
        return {"number": number, "bytes": what.synced.decode("latin-1"), "changes": changes}
    names = {name: to_json(inside, known) for name, inside in what.synced.items()}
    later = [[name, None if inside is None else to_json(inside, known)] for name, inside in what.changes]
    return {"number": number, "names": names, "changes": later}


def from_json(data: Any, known: dict[int, Content | Folder] | None = None) -> Any:
    known = {} if known is None else known
    if isinstance(data, int):
        return known[data]
    if "bytes" in data:
        changes = [(at, None if new is None else new.encode("latin-1")) for at, new in data["changes"]]
        known[data["number"]] = content = Content(data["bytes"].encode("latin-1"), changes)
        return content
    known[data["number"]] = folder = Folder()
    folder.synced = {name: from_json(inside, known) for name, inside in data["names"].items()}
    folder.changes = [(name, None if inside is None else from_json(inside, known)) for name, inside in data["changes"]]
    return folder


# ---------------------------------------------------------------- SQLite's files


_FILE_METHODS = [
    "xClose", "xRead", "xWrite", "xTruncate", "xSync", "xFileSize", "xLock", "xUnlock", "xCheckReservedLock", "xFileControl",
    "xSectorSize", "xDeviceCharacteristics", "xShmMap", "xShmLock", "xShmBarrier", "xShmUnmap", "xFetch", "xUnfetch",
]  # fmt: skip


class _Methods(ctypes.Structure):
    _fields_ = [("iVersion", ctypes.c_int)] + [(name, ctypes.c_void_p) for name in _FILE_METHODS]


class _File(ctypes.Structure):
    _fields_ = [("pMethods", ctypes.POINTER(_Methods))]


class _Vfs(ctypes.Structure):
    _fields_ = [
        ("iVersion", ctypes.c_int), ("szOsFile", ctypes.c_int), ("mxPathname", ctypes.c_int), ("pNext", ctypes.c_void_p),
        ("zName", ctypes.c_char_p), ("pAppData", ctypes.c_void_p), ("xOpen", ctypes.c_void_p), ("xDelete", ctypes.c_void_p),
    ]  # fmt: skip


_OPEN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int)
)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
_WRITE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_TRUNCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
_SYNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)

OK, FULL, CANTOPEN, IOERR_FSYNC, IOERR_TRUNCATE, IOERR_DELETE = 0, 13, 14, 1034, 1546, 2570
_LOG = 0x80000 | 0x4000 | 0x800
"""Open flags of SQLite's logs. The first sync of a log that SQLite has created syncs its folder too (UNIXFILE_DIRSYNC)."""
_IN_USE: list[Any] = []
"""Keeps callbacks alive: SQLite may call them for the life of the process."""


class Sqlite:
    """Patches SQLite's file methods in this process to ask `host` before each call that changes a file."""

    def __init__(self, host: FaultyDisk) -> None:
        library = ctypes.CDLL(_sqlite3.__file__)
        library.sqlite3_vfs_find.restype = ctypes.POINTER(_Vfs)
        self._vfs = library.sqlite3_vfs_find(None).contents
        self._host = host
        self._open, self._delete = _OPEN(self._vfs.xOpen), _DELETE(self._vfs.xDelete)
        self._originals = (self._vfs.xOpen, self._vfs.xDelete)
        self._paths: dict[int, str] = {}
        self._new_logs: set[str] = set()
        self._methods: dict[int, tuple[_Methods, list[Any]]] = {}
        _IN_USE.append(self)
        self._mine = [_OPEN(self._on_open), _DELETE(self._on_delete)]
        self._vfs.xOpen, self._vfs.xDelete = (ctypes.cast(mine, ctypes.c_void_p).value for mine in self._mine)

    def restore(self) -> None:
        self._vfs.xOpen, self._vfs.xDelete = self._originals

    def _on_open(self, vfs: int, name: int | None, file: int, flags: int, out: Any) -> int:
        # SQLite keeps the pointer to the name, so the original must be passed on.
        path = os.fsdecode(ctypes.string_at(name)) if name else ""
        new = bool(path) and not os.path.exists(path)
        if new and self._host.refuses("sqlite open", path):
            return CANTOPEN
        code = self._open(vfs, name, file, flags, out)
        if code == OK and self._host.owns(path):
            self._paths[file] = path
            opened = ctypes.cast(file, ctypes.POINTER(_File)).contents
            opened.pMethods = ctypes.pointer(self._patched(opened.pMethods))
            if new:
                self._host.made(path)
                if flags & _LOG:
                    self._new_logs.add(path)
        return int(code)

    def _patched(self, methods: Any) -> _Methods:
        address = ctypes.addressof(methods.contents)
        if address not in self._methods:
            copy = _Methods.from_buffer_copy(methods.contents)
            write, truncate, sync = _WRITE(copy.xWrite), _TRUNCATE(copy.xTruncate), _SYNC(copy.xSync)

            def on_write(file: int, data: int, size: int, at: int) -> int:
                new = ctypes.string_at(data, size)

                def half() -> None:
                    write(file, data, size // 2, at)
                    self._host.changed(self._paths[file], at, new[: size // 2])

                if self._host.refuses("sqlite write", self._paths[file], half):
                    return FULL
                code = write(file, data, size, at)
                self._host.changed(self._paths[file], at, new)
                return int(code)

            def on_truncate(file: int, size: int) -> int:
                if self._host.refuses("sqlite truncate", self._paths[file]):
                    return IOERR_TRUNCATE
                code = truncate(file, size)
                self._host.changed(self._paths[file], size, None)
                return int(code)

            def on_sync(file: int, flags: int) -> int:
                path = self._paths[file]
                if self._host.refuses("sqlite sync", path):
                    return IOERR_FSYNC
                self._host.synced(path)
                if path in self._new_logs:
                    self._new_logs.discard(path)
                    self._host.synced(os.path.dirname(path))
                return OK

            mine = [_WRITE(on_write), _TRUNCATE(on_truncate), _SYNC(on_sync)]
            copy.xWrite, copy.xTruncate, copy.xSync = (ctypes.cast(each, ctypes.c_void_p).value for each in mine)
            self._methods[address] = (copy, [*mine, write, truncate, sync])
        return self._methods[address][0]

    def _on_delete(self, vfs: int, name: bytes, sync_folder: int) -> int:
        path = os.fsdecode(name)
        there = os.path.exists(path) and self._host.owns(path)
        if there and self._host.refuses("sqlite delete", path):
            return IOERR_DELETE
        code = self._delete(vfs, name, sync_folder)
        if there and code == OK:
            self._host.removed(path)
            if sync_folder:
                self._host.synced(os.path.dirname(path))
        return int(code)


# ---------------------------------------------------------------- the disk


class FaultyDisk:
    """Counts the calls that change one folder in `calls`, and lets chosen ones fail or kill the process."""

    def __init__(self, root: Path, state: Folder | None = None) -> None:
        self.root = str(root.resolve())
        self.state = state or scan(root)
        self.calls = 0
        self.at, self.until = 0, -1
        self.last_words: Callable[[], None] | None = None
        self.leave: Callable[[int], object] = os._exit
        """Ends the process. A simulation may replace it with a function that returns; the call is then refused."""
        self.full: Callable[[str, str], bool] = lambda what, path: False
        """Whether to refuse a call (its name and path), whatever its number."""
        self._files: dict[int, tuple[str, Content | Folder]] = {}
        self._lock = threading.RLock()
        self._real = {
            name: getattr(os, name) for name in ("open", "write", "pwrite", "fsync", "replace", "unlink", "mkdir", "close")
        }

    def die_at(self, call: int, last_words: Callable[[], None]) -> None:
        """End the process at this call, after calling `last_words`."""
        self.at, self.until, self.last_words = call, call, last_words

    def fail_at(self, call: int, until: int) -> None:
        """Refuse the calls from `call` to `until`."""
        self.at, self.until, self.last_words = call, until, None

    @contextlib.contextmanager
    def installed(self) -> Iterator[FaultyDisk]:
        for name in self._real:
            setattr(os, name, getattr(self, f"_{name}"))
        sqlite = Sqlite(self)
        try:
            yield self
        finally:
            sqlite.restore()
            for name, real in self._real.items():
                setattr(os, name, real)

    # ------------------------------------------------------------ faults and state

    def owns(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self.root + os.sep)

    def refuses(self, what: str, path: str, half: Callable[[], None] | None = None) -> bool:
        """Whether this call fails. Does not return if the process dies here. Odd-numbered calls do `half` of a write first."""
        if not self.owns(path) and os.path.abspath(path) != self.root:
            return False
        self.calls += 1
        if not self.at <= self.calls <= self.until and not self.full(what, path):
            return False
        if half is not None and self.calls % 2:
            half()
        if self.last_words is not None:
            self.last_words()
            self.leave(DIED)
        return True

    def _find(self, path: str) -> Content | Folder:
        found: Content | Folder = self.state
        for name in Path(os.path.relpath(os.path.abspath(path), self.root)).parts:
            assert isinstance(found, Folder)
            found = found.now[name]
        return found

    def _parent(self, path: str) -> Folder:
        parent = self._find(os.path.dirname(os.path.abspath(path)))
        assert isinstance(parent, Folder)
        return parent

    def made(self, path: str) -> None:
        with self._lock:
            self._parent(path).changes.append((os.path.basename(path), Content()))

    def removed(self, path: str) -> None:
        with self._lock:
            self._parent(path).changes.append((os.path.basename(path), None))

    def changed(self, path: str, at: int, new: bytes | None) -> None:
        with self._lock:
            content = self._find(path)
            assert isinstance(content, Content)
            content.changes.append((at, new))

    def synced(self, path: str) -> None:
        with self._lock:
            self._find(path).sync()

    # ------------------------------------------------------------ calls of os

    def _refuse(self, what: str, path: Any, half: Callable[[], None] | None = None) -> None:
        if self.refuses(what, os.fspath(path), half):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))

    def _open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        name = os.fspath(path)
        if not self.owns(name) and os.path.abspath(name) != self.root:
            return int(self._real["open"](path, flags, *rest, **more))
        there = os.path.exists(name)
        if flags & os.O_CREAT and not there:
            self._refuse("open", path)
        descriptor = int(self._real["open"](path, flags, *rest, **more))
        if not there:
            self.made(name)
        elif flags & os.O_TRUNC:
            self.changed(name, 0, None)
        self._files[descriptor] = (name, self._find(name))
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._files.pop(descriptor, None)
        self._real["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        if descriptor not in self._files:
            return int(self._real["write"](descriptor, data))
        path, content = self._files[descriptor]
        assert isinstance(content, Content)

        def put(part: Any) -> int:
            count = int(self._real["write"](descriptor, part))
            content.changes.append((os.lseek(descriptor, 0, os.SEEK_CUR) - count, bytes(part[:count])))
            return count

        self._refuse("write", path, lambda: put(data[: len(data) // 2]) and None)
        return put(data)

    def _pwrite(self, descriptor: int, data: Any, at: int) -> int:
        if descriptor in self._files:
            path, content = self._files[descriptor]
            assert isinstance(content, Content)
            self._refuse("write", path)
            content.changes.append((at, bytes(data)))
        return int(self._real["pwrite"](descriptor, data, at))

    def _fsync(self, descriptor: int) -> None:
        if descriptor not in self._files:
            self._real["fsync"](descriptor)
            return
        path, what = self._files[descriptor]
        self._refuse("fsync", path)
        with self._lock:
            what.sync()

    def _replace(self, old: Any, new: Any) -> None:
        before, after = os.path.abspath(old), os.path.abspath(new)
        if not self.owns(after) or before.endswith("-shm"):
            self._real["replace"](old, new)
            return
        self._refuse("replace", after)
        with self._lock:
            what = self._find(before)
            self._real["replace"](old, new)
            # After a rename between folders, a power cut may keep the new name, the removal of the old, both or neither.
            self._parent(after).changes.append((os.path.basename(after), what))
            self._parent(before).changes.append((os.path.basename(before), None))

    def _unlink(self, path: Any, **more: Any) -> None:
        if os.path.exists(path):
            self._refuse("unlink", path)
        self._real["unlink"](path, **more)
        if self.owns(os.fspath(path)):
            self.removed(os.fspath(path))

    def _mkdir(self, path: Any, *rest: Any, **more: Any) -> None:
        if not os.path.exists(path):
            self._refuse("mkdir", path)
        self._real["mkdir"](path, *rest, **more)
        if self.owns(os.fspath(path)):
            with self._lock:
                self._parent(os.fspath(path)).changes.append((os.path.basename(path), Folder()))
