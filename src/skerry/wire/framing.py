"""The format of messages and tensor bytes on the wire.

- Every message ends with its seal, a checksum of the rest, so a flipped bit is always detected.
- A bulk message is a parcel: the message, and beside it a chunk of up to 1 MiB, which is never copied into the message.
- A large vector is a numbered sequence of chunks with a declared size and checksum. `Assembly` reassembles it.
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
"""Protobuf key of the seal. Wire type 5 is a little-endian 32-bit value."""
SEAL_SIZE = len(_KEY) + 4


def seal(data: bytes) -> bytes:
    """Append the seal to a serialized message."""
    return data + _KEY + checksum(data).to_bytes(4, "little")


def unseal(data: bytes) -> bytes:
    """Remove the seal. Raises DecodeError if it is missing or does not match."""
    sealed = data[:-SEAL_SIZE]
    if seal(sealed) != data:
        raise DecodeError("the message's seal is missing or wrong")
    return sealed


def serialize(message: Message) -> bytes:
    return seal(message.SerializeToString())


def parser(kind: type[M]) -> Callable[[bytes], M]:
    """A function that parses sealed messages of this kind and raises DecodeError if they are damaged."""
    return lambda data: kind.FromString(unseal(data))


# ---------------------------------------------------------------- a message and its chunk

_CHUNK = pb.BulkToSyncer.CHUNK_FIELD_NUMBER << 3 | 2
"""Protobuf key of the chunk, the same in both kinds of messages. Wire type 2 is a length followed by bytes."""


@dataclass(frozen=True)
class Parcel(Generic[B]):
    """A bulk message and the chunk that travels with it."""

    message: B
    chunk: bytes | memoryview = b""


def pack(parcel: Parcel[B]) -> bytes:
    """Serialize a parcel: the chunk first, then the sealed message."""
    sealed = serialize(parcel.message)
    if not len(parcel.chunk):
        return sealed
    return b"".join((bytes([_CHUNK]), _varint(len(parcel.chunk)), parcel.chunk, sealed))


def unpack(kind: type[B]) -> Callable[[bytes], Parcel[B]]:
    """A function that parses parcels with messages of this kind and raises DecodeError if they are damaged."""
    parse = parser(kind)

    def parse_parcel(data: bytes) -> Parcel[B]:
        if data[:1] != bytes([_CHUNK]):
            return Parcel(parse(data))
        size, start = _read_varint(data, 1)
        # A truncated chunk leaves no bytes for the seal, so parsing fails.
        return Parcel(parse(data[start + size :]), memoryview(data)[start : start + size])

    return parse_parcel


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at this position, and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise DecodeError("a varint does not end")


# ---------------------------------------------------------------- chunks

CHUNK_BYTES = 1 << 20
STATE_PART_BYTES = 16 << 20
"""Approximate size of one part of optimizer state."""

Run = tuple[int, int]
"""Consecutive chunks: the number of the first, and the count."""


def state_limit_bytes(layout: Layout) -> int:
    """Upper bound on one part of optimizer state. The last parameter of a part may be the largest, with several tensors of
    state."""
    return 4 * STATE_PART_BYTES + 16 * max((spec.numel for spec in layout.tensors), default=0)


def count_chunks(size_bytes: int) -> int:
    """Number of chunks, at least one: the header of an empty vector travels with an empty chunk."""
    return max(1, -(-size_bytes // CHUNK_BYTES))


def chunk(data: memoryview, number: int) -> memoryview:
    return data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def in_runs(runs: list[Run], most: int) -> list[Run]:
    """Cut runs into runs of at most `most` chunks."""
    return [(start, min(most, first + count - start)) for first, count in runs for start in range(first, first + count, most)]


class Assembly:
    """Reassembles a vector from chunks that arrive in any order. The caller checks the declared size, which bounds memory."""

    def __init__(self, size_bytes: int, expected_checksum: int, room: memoryview | None = None) -> None:
        self.size_bytes = size_bytes
        self._buffer = None if room is None else room[:size_bytes]
        """Without `room`, allocated when the first chunk arrives: a header alone costs no memory."""
        self._checksum = expected_checksum
        self.chunks = count_chunks(size_bytes)
        self._missing = set(range(self.chunks))

    def add(self, number: int, data: bytes | memoryview) -> None:
        """Store a chunk. A repeated one is ignored. Raises WireError if it does not fit the declared size."""
        if number >= self.chunks:
            raise WireError(f"oversized: chunk {number} arrived, {self.size_bytes} bytes were declared")
        start = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, self.size_bytes - start)
        if len(data) != size:
            raise WireError(f"chunk {number} has {len(data)} bytes, not {size}")
        if number not in self._missing:
            return  # somebody may already be reading the first copy
        if self._buffer is None:
            self._buffer = empty_bytes(self.size_bytes).data
        # numpy releases the GIL while it copies; a memoryview does not.
        np.copyto(np.frombuffer(self._buffer, np.uint8, size, start), np.frombuffer(data, np.uint8))
        self._missing.discard(number)

    @property
    def complete(self) -> bool:
        return not self._missing

    @property
    def missing(self) -> list[Run]:
        """The chunks that have not arrived, as runs."""
        runs: list[Run] = []
        for number in sorted(self._missing):
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        return runs

    def give_up(self) -> None:
        """Ignore all further chunks."""
        self._buffer = None
        self._missing.clear()

    def finish(self) -> memoryview:
        """Verify the checksum, which is slow for large vectors, and return the data. Raises WireError."""
        assert self.complete
        if self._buffer is None:
            raise WireError("the transfer was given up")
        actual = checksum(self._buffer)
        if actual != self._checksum:
            raise WireError(f"checksum mismatch: declared {self._checksum:08x}, received {actual:08x}")
        return self._buffer
