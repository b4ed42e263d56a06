"""The run's diary, `metrics.jsonl`: one JSON object per line, appended by every process of a run, read while it grows.

This file owns how records are written and read back, not what they mean: any layer may write, so it imports nothing of
skerry but its errors. Every record has "at" (unix seconds) and "kind".
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from skerry.errors import StoreError


class MetricsWriter:
    """Appends records to a file that other processes append to as well.

    Each record goes out as one `os.write` to an O_APPEND descriptor, so lines of different processes never interleave
    and nothing is lost in a buffer when a process is killed. This holds on local file systems, not on NFS.
    """

    def __init__(self, path: Path | str, wall: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._wall = wall
        self._fd = -1
        self._torn = False
        self.dropped = 0
        """Records that could not be written since one was; the next one says so."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
            self._torn = self._ends_torn()
        except OSError as error:
            self.close()
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error

    def _ends_torn(self) -> bool:
        """A machine that went down, or a full disk, can leave half a line, which would swallow the first record written now.
        If it is merely being written by someone else, that record begins a line too far, and readers skip empty ones."""
        size = os.fstat(self._fd).st_size
        if size == 0:
            return False
        os.lseek(self._fd, size - 1, os.SEEK_SET)
        return os.read(self._fd, 1) != b"\n"

    def write(self, kind: str, **fields: object) -> None:
        """Append one record. Numbers that JSON lacks (NaN, infinities) become null; a field `at` replaces the time.

        What the disk does not take is dropped: nothing depends on it, and nothing must stop for it.
        """
        if self._fd < 0:
            raise StoreError(f"{self.path} cannot be written: the writer is closed")
        gap = {"dropped_before": self.dropped} if self.dropped else {}
        record = _plain({"at": self._wall(), "kind": kind, **fields, **gap})
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        if self._torn:  # half of the line before is in the file: end it, or it takes this one with it
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
            self._torn = written < len(line)
            while written < len(line):  # only a full disk or a signal gets here; finishing the line is the best left
                written += os.write(self._fd, line[written:])
            self._torn = False
            self.dropped = 0
        except OSError:
            self.dropped += 1

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class MetricsTail:
    """Reads a growing file of records from where the last read ended.

    The file may not exist yet. A last line without its newline is held back until it is complete; lines that are no
    JSON object are passed over; a file that became shorter was replaced and is read from its start.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The records completed since the last call, in the order of the file."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._offset = 0
            return []
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}") from error
        end = data.rfind(b"\n") + 1
        self._offset += end
        parsed = (_parse(line) for line in data[:end].split(b"\n"))
        return [record for record in parsed if record is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _plain(value: object) -> object:
    """The value as JSON can carry it. Scalars of numpy and torch are known by their `item()`; neither is imported."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    item = getattr(value, "item", None)
    return _plain(item()) if callable(item) else str(value)
