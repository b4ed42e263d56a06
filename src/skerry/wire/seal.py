"""Messages that show whether they arrived as they were sent. A flipped bit in a number would be believed otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from skerry.core.checksum import checksum
from skerry.wire import skerry_pb2 as pb

M = TypeVar("M", bound=Message)

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
