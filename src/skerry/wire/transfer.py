"""The control stream from a learner's side. gRPC's errors become WireError here."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import grpc

from skerry.errors import JoinRefused, WireError
from skerry.wire import skerry_pb2 as pb
from skerry.wire.connection import PROTOCOL
from skerry.wire.meter import Meter
from skerry.wire.seal import SEAL_SIZE
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


class ControlStream:
    """A learner's control stream. Sending never blocks; of reports that cannot be sent yet only the newest is kept."""

    def __init__(self, stub: SyncerStub, sent: Meter, received: Meter) -> None:
        self._sent, self._received = sent, received
        self._call: Any = stub.control()
        self._outbox: deque[pb.ToSyncer] = deque()
        self._filled = asyncio.Event()
        self._heard_at = asyncio.get_running_loop().time()
        self._silent_s = 0.0
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def send(self, message: pb.ToSyncer) -> None:
        if self._outbox and message.HasField("report") and self._outbox[-1].HasField("report"):
            passed_over = self._outbox.pop().report
            if passed_over.HasField("link") and not message.report.HasField("link"):
                message.report.link.CopyFrom(passed_over.link)
        self._outbox.append(message)
        self._filled.set()

    async def _write(self) -> None:
        with contextlib.suppress(WireError):  # the reading side finds out why
            while True:
                await self._filled.wait()
                while self._outbox:
                    message = self._outbox.popleft()
                    self._sent.by_kind["control"] += message.ByteSize() + SEAL_SIZE
                    with wire_errors():
                        await self._call.write(message)
                self._filled.clear()

    async def messages(self) -> AsyncIterator[pb.ToLearner]:
        while True:
            try:
                message = await read(self._call)
            except WireError:
                if self._silent_s:
                    raise WireError(f"nothing was heard of the syncer for {self._silent_s:.0f} s") from None
                raise
            if message is grpc.aio.EOF:
                return
            self._received.by_kind["control"] += message.ByteSize() + SEAL_SIZE
            self._heard_at = asyncio.get_running_loop().time()
            yield message

    def drop_if_silent(self, limit_s: float) -> None:
        """The syncer says something every second or two. A stream can be dead without either end hearing of it."""
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        if silent_s > limit_s:
            self._silent_s = silent_s
            self._call.cancel()

    async def close(self) -> None:
        self._writer.cancel()
        self._call.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
