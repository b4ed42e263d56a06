"""A bulk message and the chunk that travels with it.

On the wire a chunk is the first field of its message. Here it stays beside it, so that a megabyte is not copied into a message,
out of one, and in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from skerry.wire import seal
from skerry.wire import skerry_pb2 as pb

M = TypeVar("M", pb.BulkToSyncer, pb.BulkToLearner)

_CHUNK = pb.BulkToSyncer.CHUNK_FIELD_NUMBER << 3 | 2
"""The key of the field on the wire; 2 stands for bytes, after their number. It is the same in both kinds of messages."""


@dataclass(frozen=True)
class Parcel(Generic[M]):
    message: M
    chunk: bytes | memoryview = b""


def pack(parcel: Parcel[M]) -> bytes:
    sealed = seal.serialize(parcel.message)
    if not len(parcel.chunk):
        return sealed
    return b"".join((bytes([_CHUNK]), _varint(len(parcel.chunk)), parcel.chunk, sealed))


def unpack(kind: type[M]) -> Callable[[bytes], Parcel[M]]:
    """What takes bytes apart. It raises DecodeError if they are not a message of that kind, as it was sent."""
    parse = seal.parser(kind)

    def take_apart(data: bytes) -> Parcel[M]:
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
