"""The learner's end of the control stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import grpc

from skerry.errors import WireError
from skerry.learner.transport.meter import Meter
from skerry.wire import skerry_pb2 as pb
from skerry.wire.calls import read, wire_errors
from skerry.wire.framing import SEAL_SIZE
from skerry.wire.service import SyncerStub


class ControlStream:
    """Sends messages to the syncer and yields those from it. Sending never blocks; a newer report replaces a queued one."""

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
            replaced = self._outbox.pop().report
            if replaced.HasField("link") and not message.report.HasField("link"):
                message.report.link.CopyFrom(replaced.link)
        self._outbox.append(message)
        self._filled.set()

    async def _write(self) -> None:
        with contextlib.suppress(WireError):  # the reader raises it
            while True:
                await self._filled.wait()
                while self._outbox:
                    message = self._outbox.popleft()
                    self._sent.by_kind["control"] += message.ByteSize() + SEAL_SIZE
                    with wire_errors():
                        await self._call.write(message)
                self._filled.clear()

    async def messages(self) -> AsyncIterator[pb.ToLearner]:
        """Messages until the syncer ends the stream. Raises WireError if the stream breaks."""
        while True:
            try:
                message = await read(self._call)
            except WireError:
                if self._silent_s:
                    raise WireError(f"the syncer was silent for {self._silent_s:.0f} s") from None
                raise
            if message is grpc.aio.EOF:
                return
            self._received.by_kind["control"] += message.ByteSize() + SEAL_SIZE
            self._heard_at = asyncio.get_running_loop().time()
            yield message

    def drop_if_silent(self, limit_s: float) -> None:
        """Break a stream on which the syncer, which sends something every second or two, has been silent for this long. A
        stream can be dead without either end being told."""
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        if silent_s > limit_s:
            self._silent_s = silent_s
            self._call.cancel()

    async def close(self) -> None:
        self._writer.cancel()
        self._call.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
