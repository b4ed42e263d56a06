"""How messages and tensors' bytes look on the wire, the same at both ends.

- A control message ends with a checksum of the rest (its seal), so a flipped bit is never believed.
- A bulk message travels as a frame: the message, and beside it a chunk of up to 1 MiB that is never copied into it.
- A large vector is a numbered sequence of chunks with a declared size and checksum; `Assembly` puts it together again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from skerry.checksum import checksum
from skerry.errors import WireError
from skerry.tensors.fragments import Layout
from skerry.tensors.memory import empty_bytes
from skerry.wire import skerry_pb2 as pb

M = TypeVar("M", bound=Message)
B = TypeVar("B", pb.BulkToSyncer, pb.BulkToLearner)

# ---------------------------------------------------------------- sealed messages

_KEY = bytes([pb.ToSyncer.SEAL_FIELD_NUMBER << 3 | 5])
"""Of the field on the wire; 5 stands for four bytes, the lowest first."""
SEAL_SIZE = len(_KEY) + 4


def seal(data: bytes) -> bytes:
    return data + _KEY + checksum(data).to_bytes(4, "little")


def unseal(data: bytes) -> bytes:
    """What was sealed. Raises DecodeError if it is not that any more."""
    sealed = data[:-SEAL_SIZE]
    if seal(sealed) != data:
        raise DecodeError("a message without its seal")
    return sealed


def serialize(message: Message) -> bytes:
    return seal(message.SerializeToString())


def parser(kind: type[M]) -> Callable[[bytes], M]:
    """What reads messages of this kind. It raises DecodeError if they are damaged."""
    return lambda data: kind.FromString(unseal(data))


# ---------------------------------------------------------------- a message and its chunk

_CHUNK = pb.BulkToSyncer.CHUNK_FIELD_NUMBER << 3 | 2
"""The key of the field on the wire; 2 stands for bytes, after their number. It is the same in both kinds of messages."""


@dataclass(frozen=True)
class Parcel(Generic[B]):
    message: B
    chunk: bytes | memoryview = b""


def pack(parcel: Parcel[B]) -> bytes:
    sealed = serialize(parcel.message)
    if not len(parcel.chunk):
        return sealed
    return b"".join((bytes([_CHUNK]), _varint(len(parcel.chunk)), parcel.chunk, sealed))


def unpack(kind: type[B]) -> Callable[[bytes], Parcel[B]]:
    """What takes bytes apart. It raises DecodeError if they are not a message of that kind, as it was sent."""
    parse = parser(kind)

    def take_apart(data: bytes) -> Parcel[B]:
        if data[:1] != bytes([_CHUNK]):
            return Parcel(parse(data))
        size, start = _read_varint(data, 1)
        # If less is there, then no seal is.
        return Parcel(parse(data[start + size :]), memoryview(data)[start : start + size])

    return take_apart


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number there, and where what follows it begins."""
    found = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, at
    raise DecodeError("a number that does not end")


# ---------------------------------------------------------------- chunks

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
