"""The run's metrics, `metrics.jsonl`: one JSON object per line, appended by every process of a run and read while it grows.

This module knows how records are written and read, not what they mean. Any layer may write metrics, so it imports nothing
from skerry except the errors. Every record has "at" (unix seconds) and "kind".
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
    """Appends records to a file that several processes share.

    Each record is one `os.write` to an O_APPEND descriptor, so lines of different processes never interleave and a killed
    process loses no buffered records. This holds on local file systems, not on NFS.
    """

    def __init__(self, path: Path | str, wall: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._wall = wall
        self._fd = -1
        self._torn = False
        self.dropped = 0
        """Records lost since the last successful write. The next record that is written reports the number."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
            self._torn = self._ends_torn()
        except OSError as error:
            self.close()
            raise StoreError(f"{self.path} cannot be written: {error.strerror}") from error

    def _ends_torn(self) -> bool:
        """Whether the file ends in half a line, left by a crash or a full disk, which would swallow the next record.

        The half line may also be another process's write in progress. Then the extra newline leaves an empty line, which
        readers skip.
        """
        size = os.fstat(self._fd).st_size
        if size == 0:
            return False
        os.lseek(self._fd, size - 1, os.SEEK_SET)
        return os.read(self._fd, 1) != b"\n"

    def write(self, kind: str, **fields: object) -> None:
        """Append one record. NaN and infinities become null; a field `at` overrides the time.

        A record that cannot be written is dropped: training must not stop for metrics.
        """
        if self._fd < 0:
            raise StoreError(f"{self.path} cannot be written: the writer is closed")
        gap = {"dropped_before": self.dropped} if self.dropped else {}
        record = _plain({"at": self._wall(), "kind": kind, **fields, **gap})
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
        if self._torn:  # end the half-written line first, or this record is lost with it
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
            self._torn = written < len(line)
            while written < len(line):  # a nearly full disk or a signal cut the write short
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
    """Reads the records appended since the last read.

    The file may not exist yet. An incomplete last line is left for the next read. Lines that are not JSON objects are
    skipped. A file that became shorter was replaced and is read from its start.
    """

    def __init__(self, path: Path | str, from_end: bool = False) -> None:
        self.path = Path(path)
        self._offset = self.path.stat().st_size if from_end and self.path.exists() else 0

    def read(self, most_bytes: int = -1) -> list[dict[str, Any]]:
        """Records completed since the last call, in file order. Reads at most `most_bytes` of the file; -1 means all."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(most_bytes)
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
    """The value as JSON types. Recognizes numpy and torch scalars by their `item()` method, without importing either."""
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
