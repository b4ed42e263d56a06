"""A vector's bytes as numbered chunks, with declared size and checksum, and back. Nothing is trusted on arrival."""

from __future__ import annotations

import numpy as np

from skerry.core.checksum import checksum
from skerry.core.fragment import Layout
from skerry.core.vectors import empty_bytes
from skerry.errors import WireError

CHUNK_BYTES = 1 << 20
STATE_PART_BYTES = 16 << 20
"""Optimizer state travels in parts; parameters are put into one until it has about this many bytes."""

Run = tuple[int, int]
"""Chunks that follow each other: the first one's number, and how many."""


def state_limit_bytes(layout: Layout) -> int:
    """No part can be larger: the parameter put in last may be the largest there is, with several tensors of state."""
    return 4 * STATE_PART_BYTES + 16 * max((spec.numel for spec in layout.tensors), default=0)


def count_chunks(size_bytes: int) -> int:
    """At least one chunk, even of nothing: the header travels with it."""
    return max(1, -(-size_bytes // CHUNK_BYTES))


def chunk(data: memoryview, number: int) -> memoryview:
    return data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def in_runs(runs: list[Run], most: int) -> list[Run]:
    """The same chunks in runs of at most so many."""
    return [(start, min(most, first + count - start)) for first, count in runs for start in range(first, first + count, most)]


class Assembly:
    """Puts chunks together, in whichever order they come. Memory is bounded by the declared size, which the caller has checked
    against what it expects."""

    def __init__(self, size_bytes: int, expected_checksum: int, room: memoryview | None = None) -> None:
        self.size_bytes = size_bytes
        self._buffer = None if room is None else room[:size_bytes]
        """If no room is given, made when the first chunk comes: a header alone costs nothing."""
        self._checksum = expected_checksum
        self.chunks = count_chunks(size_bytes)
        self._missing = set(range(self.chunks))

    def add(self, number: int, data: bytes | memoryview) -> None:
        if number >= self.chunks:
            raise WireError(f"oversized: chunk {number} arrived, {self.size_bytes} bytes were declared")
        start = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, self.size_bytes - start)
        if len(data) != size:
            raise WireError(f"chunk {number} has {len(data)} bytes, not {size}")
        if number not in self._missing:
            return  # what has come is not written again: somebody may be reading it
        if self._buffer is None:
            self._buffer = empty_bytes(self.size_bytes).data  # nothing is read of it before it was written
        # Not by the memoryview, which would hold the interpreter meanwhile.
        np.copyto(np.frombuffer(self._buffer, np.uint8, size, start), np.frombuffer(data, np.uint8))
        self._missing.discard(number)

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def missing(self) -> list[Run]:
        runs: list[Run] = []
        for number in sorted(self._missing):
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        return runs

    def give_up(self) -> None:
        """Nothing more is written, whatever comes."""
        self._buffer = None
        self._missing.clear()

    def finish(self) -> memoryview:
        """The whole. Takes a while if it is large."""
        assert self.complete
        if self._buffer is None:
            raise WireError("it was given up")
        actual = checksum(self._buffer)
        if actual != self._checksum:
            raise WireError(f"checksum mismatch: declared {self._checksum:08x}, received {actual:08x}")
        return self._buffer
