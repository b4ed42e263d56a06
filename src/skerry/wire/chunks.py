"""A vector's bytes as a stream of bounded chunks, with declared size and checksum, and back. Nothing is trusted on arrival."""

from __future__ import annotations

from collections.abc import Iterator

from skerry.core.codec import checksum
from skerry.core.fragment import Layout
from skerry.errors import WireError

CHUNK_BYTES = 1 << 20
STATE_PART_BYTES = 16 << 20
"""Optimizer state travels in parts; parameters are put into one until it has about this many bytes."""


def state_limit_bytes(layout: Layout) -> int:
    """No part can be larger: the parameter put in last may be the largest there is, with several tensors of state."""
    return 4 * STATE_PART_BYTES + 16 * max((spec.numel for spec in layout.tensors), default=0)


def cut(data: memoryview) -> Iterator[bytes]:
    """At least one chunk, even of nothing: the header travels with the first."""
    for start in range(0, max(len(data), 1), CHUNK_BYTES):
        yield bytes(data[start : start + CHUNK_BYTES])


class Assembly:
    """Puts chunks together. Memory is bounded by the declared size, which the caller has checked against what it expects."""

    def __init__(self, size_bytes: int, expected_checksum: int) -> None:
        self._buffer = bytearray(size_bytes)
        self._filled = 0
        self._checksum = expected_checksum

    def add(self, chunk: bytes) -> None:
        if len(chunk) > CHUNK_BYTES:
            raise WireError(f"a chunk of {len(chunk)} bytes is larger than the limit of {CHUNK_BYTES}")
        end = self._filled + len(chunk)
        if end > len(self._buffer):
            raise WireError(f"oversized: {end} bytes or more arrived, {len(self._buffer)} were declared")
        self._buffer[self._filled : end] = chunk
        self._filled = end

    @property
    def complete(self) -> bool:
        return self._filled == len(self._buffer)

    def finish(self) -> memoryview:
        if self._filled != len(self._buffer):
            raise WireError(f"truncated: {self._filled} bytes arrived, {len(self._buffer)} were declared")
        actual = checksum(self._buffer)
        if actual != self._checksum:
            raise WireError(f"checksum mismatch: declared {self._checksum:08x}, received {actual:08x}")
        return memoryview(self._buffer)
