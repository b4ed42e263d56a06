"""Of everything that is sent or stored. Knows nothing of tensors, so that a process that only carries bytes starts at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

_32_BITS = 0xFFFFFFFF
READ_BYTES = 1 << 20


def checksum(data: memoryview | bytes | bytearray, before: int = 0) -> int:
    """32 bits of XXH3: everything that is sent or stored passes through here, so it has to be as fast as memory."""
    return xxhash.xxh3_64_intdigest(data, before) & _32_BITS


def checksum_in_parts(parts: Iterable[bytes]) -> int:
    """The same as `checksum` of all of them together."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.intdigest() & _32_BITS


def file_checksum(path: Path) -> int:
    """The same of a file's content, a part at a time. Raises OSError."""
    with path.open("rb") as file:
        return checksum_in_parts(iter(lambda: file.read(READ_BYTES), b""))
