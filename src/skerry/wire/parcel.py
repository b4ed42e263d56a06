"""A bulk message and the chunk that travels with it.

On the wire a chunk is a field of its message. Here it stays beside it, so that a megabyte is not copied into a message, out
of one, and in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from skerry.wire import skerry_pb2 as pb

M = TypeVar("M", pb.BulkToSyncer, pb.BulkToLearner)

_LENGTH_DELIMITED = 2
"""The wire type of messages and bytes, which is all there is at this level."""
_USUAL_FIELDS = 4
"""A message that has more of them is nothing we would send, and is left to protobuf, which is quick with any number."""


@dataclass(frozen=True)
class Parcel(Generic[M]):
    message: M
    chunk: bytes | memoryview = b""


def pack(parcel: Parcel[M]) -> bytes:
    head = parcel.message.SerializeToString()
    if not len(parcel.chunk):
        return head
    key = _chunk_field(type(parcel.message)) << 3 | _LENGTH_DELIMITED
    return b"".join((head, _varint(key), _varint(len(parcel.chunk)), parcel.chunk))


def unpack(kind: type[M]) -> Callable[[bytes], Parcel[M]]:
    """What takes bytes apart. It raises DecodeError if they are not a message of that kind."""
    field = _chunk_field(kind)

    def unusual(data: bytes) -> Parcel[M]:
        message = kind.FromString(data)
        chunk = message.chunk
        message.ClearField("chunk")
        return Parcel(message, chunk)

    def take_apart(data: bytes) -> Parcel[M]:
        view = memoryview(data)
        head: list[memoryview] = []
        chunk: bytes | memoryview = b""
        at = fields = 0
        while at < len(data):
            start = at
            key, at = _read_varint(data, at)
            fields += 1
            if key & 7 != _LENGTH_DELIMITED or fields > _USUAL_FIELDS:
                return unusual(data)
            size, at = _read_varint(data, at)
            if at + size > len(data):
                raise DecodeError("a field that is cut off")
            if key >> 3 == field:
                chunk = view[at : at + size]
            else:
                head.append(view[start : at + size])
            at += size
        return Parcel(kind.FromString(b"".join(head)), chunk)

    return take_apart


def _chunk_field(kind: type[M]) -> int:
    return kind.DESCRIPTOR.fields_by_name["chunk"].number


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
