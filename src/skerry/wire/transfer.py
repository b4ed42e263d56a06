"""Bulk transfers and the control stream from a learner's side. gRPC's errors become WireError here."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc

from skerry.errors import WireError
from skerry.wire import skerry_pb2 as pb
from skerry.wire.chunks import Assembly, cut
from skerry.wire.service import SyncerStub


@contextlib.contextmanager
def wire_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise WireError(f"{error.code().name.lower()}: {error.details()}") from None
    except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
        raise WireError(str(error)) from None
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls; then it is the connection that ended, not the caller. Before Python
        # 3.11 a task cannot tell, and callers that cancel keep a flag.
        cancelling = getattr(asyncio.current_task(), "cancelling", lambda: 0)
        if cancelling():
            raise
        raise WireError("the connection was closed") from None


async def describe(stub: SyncerStub, protocol: int, timeout_s: float = 10.0) -> pb.RunDescription:
    with wire_errors():
        return await stub.describe(pb.DescribeRequest(protocol=protocol), timeout=timeout_s)


async def upload(stub: SyncerStub, header: pb.UploadHeader, data: memoryview, sent: Callable[[int], None]) -> pb.UploadReply:
    """Send one contribution. The syncer may answer before it has everything, if it does not want it."""
    with wire_errors():
        call = stub.upload()
        with contextlib.suppress(asyncio.InvalidStateError):  # it has answered already
            for number, chunk in enumerate(cut(data)):
                await call.write(pb.UploadPart(header=header if number == 0 else None, chunk=chunk))
                sent(len(chunk))
            await call.done_writing()
        reply: pb.UploadReply = await call
        return reply


async def download(
    stub: SyncerStub,
    request: pb.DownloadRequest,
    check: Callable[[pb.DownloadHeader], None],
    received: Callable[[int], None],
) -> tuple[str, memoryview]:
    """Fetch one version. `check` is called with what is declared, before memory is set aside for it."""
    header: pb.DownloadHeader | None = None
    assembly: Assembly | None = None
    with wire_errors():
        async for message in stub.download(request):
            if message.HasField("header"):
                if header is not None:
                    raise WireError("a second header in one download")
                header = message.header
                check(header)
                assembly = Assembly(header.size_bytes, header.checksum)
            if assembly is None:
                raise WireError("a download must start with its header")
            received(len(message.chunk))
            assembly.add(message.chunk)
    if assembly is None or header is None:
        raise WireError("an empty download")
    return header.codec, assembly.finish()


class ControlStream:
    """A learner's control stream. Sending never blocks; of reports that cannot be sent yet only the newest is kept."""

    def __init__(self, stub: SyncerStub) -> None:
        self._call: Any = stub.control()
        self._outbox: deque[pb.ToSyncer] = deque()
        self._filled = asyncio.Event()
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def send(self, message: pb.ToSyncer) -> None:
        if self._outbox and message.HasField("report") and self._outbox[-1].HasField("report"):
            self._outbox.pop()
        self._outbox.append(message)
        self._filled.set()

    async def _write(self) -> None:
        with contextlib.suppress(WireError, asyncio.InvalidStateError):  # the reading side finds out why
            while True:
                await self._filled.wait()
                while self._outbox:
                    with wire_errors():
                        await self._call.write(self._outbox.popleft())
                self._filled.clear()

    async def messages(self) -> AsyncIterator[pb.ToLearner]:
        while True:
            with wire_errors():
                message = await self._call.read()
            if message is grpc.aio.EOF:
                return
            yield message

    async def close(self) -> None:
        self._writer.cancel()
        self._call.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
