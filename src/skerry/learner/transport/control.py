"""A learner's end of the control stream."""

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
