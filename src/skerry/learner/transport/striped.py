"""A learner's bulk streams: contributions one way, merged fragments the other, spread over several connections.

One TCP connection cannot fill a long link, so what is large goes over all of them, a run of chunks at a time: the faster ones
carry more. A run is taken up when a lane is free, which bounds what is under way. When a lane breaks, the others go on, and
what is lost with it is sent or asked for again: only that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from skerry.errors import WireError
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.stream import MOST_CHUNKS, Download, Key, Lane, forget
from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import CHUNK_BYTES, Run, count_chunks, in_runs
from skerry.wire.service import SyncerStub

ASKED_AHEAD = 4
"""Runs that are asked for on one lane before the first of them has come: a long link is full of bytes on their way."""
STUCK_S = (10.0, 60.0, 600.0)
"""A lane on which nothing moves for so long is dead: what many chunks take at the measured rate, between the first two of
these; but never less than three chunks take, up to the last."""
STUCK_CHUNKS = 20
QUEUE_NEWEST = 0.1


class Lanes:
    def __init__(self, stubs: Sequence[SyncerStub], name: str, session: str, sent: Meter, received: Meter) -> None:
        self.sent, self.received = sent, received
        self._lanes = [Lane(stub, pb.BulkHello(name=name, session=session), self) for stub in stubs]
        self._replies: dict[Key, asyncio.Future[pb.UploadReply]] = {}
        self._asking: set[Key] = set()
        """Contributions of which it is being asked what is missing."""
        self._closed = False
        self.queue_s = 0.0
        """How long a run waited for its turn, of late."""

    def is_closed(self) -> bool:
        return self._closed

    def queued(self, seconds: float) -> None:
        self.queue_s += QUEUE_NEWEST * (seconds - self.queue_s)

    async def upload(self, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        """Send one contribution and wait for what is said to it; or what is missing of one that was begun before."""
        chunks = count_chunks(len(data))
        with self.sent.under_way():
            runs: list[Run] = [(0, chunks)]
            if resume:
                reply = await self._ask_missing(header)
                if not reply.missing:
                    return reply
                runs = _checked(list(reply.missing), chunks)
            return await self._reply_to(header, lambda answered: self._send(header, data, runs, answered))

    async def _ask_missing(self, header: pb.Upload) -> pb.UploadReply:
        key = (header.fragment, header.step)
        self._asking.add(key)
        try:
            return await self._reply_to(header, lambda _: self._free_lanes(1)[0].ask_missing(header))
        finally:
            self._asking.discard(key)

    async def _reply_to(self, header: pb.Upload, send: Callable[[Callable[[], bool]], Any]) -> pb.UploadReply:
        key = (header.fragment, header.step)
        if key in self._replies:
            raise WireError(f"fragment {header.fragment} is being sent already")
        reply: asyncio.Future[pb.UploadReply] = asyncio.get_running_loop().create_future()
        self._replies[key] = reply
        try:
            await send(reply.done)
            return await reply
        finally:
            del self._replies[key]
            for lane in self._lanes:
                lane.answered(key)
            forget(reply)

    async def _send(self, header: pb.Upload, data: memoryview, runs: list[Run], answered: Callable[[], bool]) -> None:
        waiting = deque(self._cut(runs))
        plain = pb.Upload()
        plain.CopyFrom(header)
        plain.ClearField("journal_json")  # once is enough

        async def carry(lane: Lane) -> None:
            while waiting and not answered():
                run = waiting.popleft()
                await lane.send_run(header if run[0] == 0 else plain, data, run, answered)

        # What a lane that breaks had taken on is lost, and the reply fails: some of it may have arrived.
        await self._on_each(carry, len(waiting))

    async def fetch(self, download: Download) -> None:
        """Get what is missing of a version."""
        with self.received.under_way():
            if download.assembly is None:
                await (await self._free_lanes(1)[0].ask(download, (0, MOST_CHUNKS)))
            waiting = deque(self._cut(download.missing))

            async def carry(lane: Lane) -> None:
                under_way: deque[asyncio.Future[None]] = deque()
                try:
                    while waiting or under_way:
                        while waiting and len(under_way) < ASKED_AHEAD:
                            under_way.append(await lane.ask(download, waiting.popleft()))
                        await under_way.popleft()
                finally:
                    for future in under_way:
                        forget(future)

            await self._on_each(carry, len(waiting))

    async def _on_each(self, carry: Callable[[Lane], Any], runs: int) -> None:
        """On as many lanes as there are runs for. All come to an end; then the first error, if there was one."""
        lanes = self._free_lanes(runs)
        if len(lanes) <= 1:  # what is small is not worth a task
            for lane in lanes:
                await carry(lane)
            return
        found = await asyncio.gather(*map(carry, lanes), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error

    def _free_lanes(self, count: int) -> list[Lane]:
        """Those with the least to do, the first ones first: what is small needs no more than one connection."""
        return sorted(self._lanes, key=lambda lane: (lane.broken, lane.queued_bytes // CHUNK_BYTES))[:count]

    def _cut(self, runs: list[Run]) -> list[Run]:
        """Small enough that every lane gets some."""
        total = sum(count for _, count in runs)
        return in_runs(runs, max(1, min(MOST_CHUNKS, total // (2 * len(self._lanes)))))

    async def fetch_state(self, part: int, limit_bytes: int) -> tuple[pb.State, memoryview]:
        with self.received.under_way():
            return await self._lanes[0].fetch_state(part, limit_bytes)

    async def send_state(self, header: pb.State, data: memoryview) -> None:
        with self.sent.under_way():
            await self._lanes[0].send_state(header, data)

    def replied(self, reply: pb.UploadReply) -> None:
        key = (reply.fragment, reply.step)
        if reply.missing and key not in self._asking:
            return  # the answer to a question that was given up
        waiting = self._replies.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def lost(self, key: Key, error: WireError) -> None:
        """A lane broke that carried some of this contribution."""
        waiting = self._replies.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    @property
    def idle(self) -> bool:
        return all(lane.idle for lane in self._lanes)

    def drop_if_stuck(self) -> None:
        limits = [_longest_s(meter.bytes_per_s / len(self._lanes)) for meter in (self.sent, self.received)]
        for lane in self._lanes:
            lane.drop_if_stuck(*limits)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(lane.close() for lane in self._lanes))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(WireError("the connection was closed"))


def _longest_s(bytes_per_s: float) -> float:
    """How long nothing may move on one lane that usually moves so many bytes."""
    if not bytes_per_s:
        return STUCK_S[1]
    chunk_s = CHUNK_BYTES / bytes_per_s
    return min(max(STUCK_S[0], min(STUCK_CHUNKS * chunk_s, STUCK_S[1]), 3 * chunk_s), STUCK_S[2])


def _checked(missing: list[int], chunks: int) -> list[Run]:
    runs = list(zip(missing[::2], missing[1::2], strict=False))
    if len(missing) % 2 or len(runs) > chunks or any(count < 1 or first + count > chunks for first, count in runs):
        raise WireError(f"chunks that there are not are said to be missing of {chunks}")
    return runs
