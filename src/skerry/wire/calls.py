"""Calls to a syncer, with gRPC's errors mapped to ours."""

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
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise WireError(f"{error.code().name.lower()}: {error.details()}") from None
    except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
        raise WireError(str(error) or "the stream has ended") from None
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls; then it is the connection that ended, not the caller. Before Python
        # 3.11 a task cannot tell, and callers that cancel keep a flag.
        cancelling = getattr(asyncio.current_task(), "cancelling", lambda: 0)
        if cancelling():
            raise
        raise WireError("the connection was closed") from None


async def read(call: Any) -> Any:
    """The next message of a stream, or EOF."""
    with wire_errors():
        return _whole(await call.read())


async def describe(stub: SyncerStub, timeout_s: float = 10.0) -> pb.RunDescription:
    """Raises JoinRefused if the syncer speaks another version: nothing else that it says would be understood."""
    with wire_errors():
        found: pb.RunDescription = _whole(await stub.describe(pb.DescribeRequest(protocol=PROTOCOL), timeout=timeout_s))
    if found.protocol != PROTOCOL:
        raise JoinRefused(f"protocol mismatch: the syncer speaks version {found.protocol}, Skerry here {PROTOCOL}")
    return found


def _whole(message: T | None) -> T:
    if message is None:  # what gRPC makes of bytes that are no message
        raise WireError("the message received is damaged")
    return message


class TryAgain(WireError):
    """A refusal that may not last."""
