"""The checksum of everything that is sent or stored. Does not import torch, so that a sidecar process starts quickly."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import xxhash

READ_BYTES = 1 << 20
_32_BITS = 0xFFFFFFFF


def checksum(data: memoryview | bytes | bytearray, before: int = 0) -> int:
    """The low 32 bits of XXH3-64, which runs at memory speed. `before` is the seed: pass the checksum of earlier data to
    chain them."""
    return xxhash.xxh3_64_intdigest(data, before) & _32_BITS


def checksum_in_parts(parts: Iterable[bytes]) -> int:
    """The `checksum` of the concatenated parts."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest() & _32_BITS


def file_checksum(path: Path) -> int:
    """The `checksum` of a file's content, read in pieces. Raises OSError."""
    with path.open("rb") as file:
        return checksum_in_parts(iter(lambda: file.read(READ_BYTES), b""))
