"""Files that are there whole or not at all, whatever dies in between."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path


def write_durably(path: Path, *parts: bytes | memoryview) -> None:
    """The file is there with these bytes or as it was before, and stays so when the power fails. Raises OSError."""
    _replace(path, parts, sync=True)


def write_whole(path: Path, *parts: bytes | memoryview) -> None:
    """The same without waiting for the disk: a process that dies leaves one or the other, a power cut may leave neither."""
    _replace(path, parts, sync=False)


def _replace(path: Path, parts: Sequence[bytes | memoryview], sync: bool) -> None:
    beside = path.with_name(f".{path.name}.partial")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for part in parts:
                rest = memoryview(part)
                while len(rest):
                    rest = rest[os.write(descriptor, rest) :]
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            unlink(beside)  # a disk that is full needs the space
        raise
    if sync:
        sync_path(path.parent)


def unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
