"""Files that are there whole or not at all, whatever dies in between."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


class Disk:
    """What stands between Skerry and the file system. Chaos puts one in its place that fails."""

    def sync(self, descriptor: int) -> None:
        """Wait until what was written is durable. Raises OSError."""
        os.fsync(descriptor)

    def before_commit(self) -> None:
        """Called before a transaction of the tape. Raises OSError if the disk takes nothing."""

    def write_durably(self, path: Path, *parts: bytes | memoryview) -> None:
        """The file is there with these bytes or as it was before, and stays so when the power fails. Raises OSError."""
        self._replace(path, parts, sync=True)

    def write_whole(self, path: Path, *parts: bytes | memoryview) -> None:
        """The same without waiting for the disk: a process that dies leaves one or the other, a power cut may leave neither."""
        self._replace(path, parts, sync=False)

    def _replace(self, path: Path, parts: Sequence[bytes | memoryview], sync: bool) -> None:
        beside = path.with_name(f".{path.name}.partial")
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                for part in parts:
                    rest = memoryview(part)
                    while len(rest):
                        rest = rest[os.write(descriptor, rest) :]
                if sync:
                    self.sync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                unlink(beside)  # a disk that is full needs the space
            raise
        if sync:
            self.sync_path(path.parent)

    def sync_path(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)


DISK = Disk()
"""The disk as it is."""


def unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
