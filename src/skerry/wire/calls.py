"""Calls to a syncer, with gRPC's errors mapped to Skerry's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import grpc

from skerry.errors import JoinRefused, WireError
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL
from skerry.wire.service import SyncerStub

T = TypeVar("T")


@contextlib.contextmanager
def wire_errors() -> Iterator[None]:
    """Raise WireError in place of gRPC's exceptions."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise WireError(f"{error.code().name.lower()}: {error.details()}") from None
    except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
        raise WireError(str(error) or "the stream has ended") from None
    except asyncio.CancelledError:
        # Closing a channel cancels its calls; then the connection ended, and nobody cancelled this task. Python before 3.11
        # cannot tell the two apart, so callers that cancel keep a flag.
        cancelling = getattr(asyncio.current_task(), "cancelling", lambda: 0)
        if cancelling():
            raise
        raise WireError("the connection was closed") from None


async def read(call: Any) -> Any:
    """The next message of a stream, or EOF. Raises WireError."""
    with wire_errors():
        return _whole(await call.read())


async def describe(stub: SyncerStub, timeout_s: float = 10.0) -> pb.RunDescription:
    """Ask the syncer which run it serves. Raises WireError, or JoinRefused if it speaks another protocol version."""
    with wire_errors():
        description: pb.RunDescription = _whole(await stub.describe(pb.DescribeRequest(protocol=PROTOCOL), timeout=timeout_s))
    if description.protocol != PROTOCOL:
        raise JoinRefused(f"protocol mismatch: the syncer speaks version {description.protocol}, Skerry here {PROTOCOL}")
    return description


def _whole(message: T | None) -> T:
    if message is None:  # the parser failed
        raise WireError("the message received is damaged")
    return message


class TryAgain(WireError):
    """A refusal that may be temporary."""
