"""Atomic file writes: after a crash a file is either complete or unchanged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


class Disk:
    """The writes that must be atomic or durable. Chaos injects a Disk that fails."""

    def sync(self, descriptor: int) -> None:
        """Block until the written data is durable. Raises OSError."""
        os.fsync(descriptor)

    def before_commit(self) -> None:
        """Called before each tape transaction. Raises OSError if the disk is not writable."""

    def write_durably(self, path: Path, *parts: bytes | memoryview) -> None:
        """Replace the file atomically and durably: a power cut leaves the old content or the new. Raises OSError."""
        self._replace(path, parts, sync=True)

    def write_whole(self, path: Path, *parts: bytes | memoryview) -> None:
        """Replace the file atomically but without fsync: safe if the process dies, not if the power fails. Raises OSError."""
        self._replace(path, parts, sync=False)

    def _replace(self, path: Path, parts: Sequence[bytes | memoryview], sync: bool) -> None:
        partial = path.with_name(f".{path.name}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                for part in parts:
                    rest = memoryview(part)
                    while len(rest):
                        rest = rest[os.write(descriptor, rest) :]
                if sync:
                    self.sync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                unlink(partial)  # the disk may be full
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
"""The real file system."""


def unlink(path: Path) -> None:
    """Delete the file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
