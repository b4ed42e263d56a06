"""A learner's bulk streams to one process, which carry contributions out and merged fragments in over several connections.

One TCP connection rarely fills a long link, so large transfers are striped over all connections, one run of chunks at a time. A
stream takes the next run when it is free, so faster connections carry more and the bytes in flight are bounded. When a stream
breaks, the others go on, and only the lost chunks are sent or requested again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from skerry.errors import WireError
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.stream import MOST_CHUNKS, ClientStream, Download, Key, forget
from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import CHUNK_BYTES, Run, count_chunks, in_runs
from skerry.wire.service import SyncerStub

STUCK_S = (10.0, 60.0, 600.0)
"""Limits on how long a stream may stand still: the time of STUCK_CHUNKS chunks at the measured rate, clamped to the first two
limits. On very slow links at least the time of three chunks, up to the third limit."""
STUCK_CHUNKS = 20
QUEUE_NEWEST = 0.1
"""Weight of the newest sample in the moving average of the waiting time."""


class StripedStreams:
    """Several bulk streams used as one."""

    def __init__(self, stubs: Sequence[SyncerStub], name: str, session: str, sent: Meter, received: Meter) -> None:
        self.sent, self.received = sent, received
        self._streams = [ClientStream(stub, pb.BulkHello(name=name, session=session), self) for stub in stubs]
        self._replies: dict[Key, asyncio.Future[pb.UploadReply]] = {}
        self._asking: set[Key] = set()
        """Contributions whose missing chunks were asked for, until the reply."""
        self._closed = False
        self.queue_s = 0.0
        """Moving average of how long a run waits for its turn."""

    # ------------------------------------------------------------ sending

    async def upload(self, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        """Send a contribution and wait for the reply. `resume` sends only the chunks the peer did not get before."""
        with self.sent.busy():
            runs: list[Run] = [(0, count_chunks(len(data)))]
            if resume:
                reply = await self._ask_missing(header)
                if not reply.missing:
                    return reply
                runs = _checked(list(reply.missing), runs[0][1])
            answer = self._expect(header)
            try:
                waiting = deque(self._cut(runs))
                streams = self._least_busy(len(waiting))
                sending = [stream.send_runs(header, data, waiting, answer) for stream in streams]
                await (sending[0] if len(sending) == 1 else _all_done(sending))  # a small contribution needs no extra task
                return await answer
            finally:
                self._expect_no_more(header, answer)

    async def _ask_missing(self, header: pb.Upload) -> pb.UploadReply:
        key, answer = (header.fragment, header.round), self._expect(header)
        self._asking.add(key)
        try:
            await self._least_busy(1)[0].ask_missing(header)
            return await answer
        finally:
            self._asking.discard(key)
            self._expect_no_more(header, answer)

    def _expect(self, header: pb.Upload) -> asyncio.Future[pb.UploadReply]:
        key = (header.fragment, header.round)
        if key in self._replies:
            raise WireError(f"fragment {header.fragment} is being sent already")
        self._replies[key] = answer = asyncio.get_running_loop().create_future()
        return answer

    def _expect_no_more(self, header: pb.Upload, answer: asyncio.Future[pb.UploadReply]) -> None:
        key = (header.fragment, header.round)
        del self._replies[key]
        for stream in self._streams:
            stream.answered(key)
        forget(answer)

    # ------------------------------------------------------------ receiving

    async def fetch(self, download: Download) -> None:
        """Fetch the missing chunks of a version."""
        with self.received.busy():
            if download.assembly is None:
                await (await self._least_busy(1)[0].ask(download, (0, MOST_CHUNKS)))
            waiting = deque(self._cut(download.missing))
            await _all_done([stream.fetch_runs(download, waiting) for stream in self._least_busy(len(waiting))])

    # ------------------------------------------------------------ several streams

    def _least_busy(self, count: int) -> list[ClientStream]:
        """The streams with the shortest queues. Ties go to the first stream, so small transfers open only one connection."""
        return sorted(self._streams, key=lambda stream: (stream.broken, stream.queued_bytes // CHUNK_BYTES))[:count]

    def _cut(self, runs: list[Run]) -> list[Run]:
        """Cut runs small enough that every stream gets some."""
        total = sum(count for _, count in runs)
        return in_runs(runs, max(1, min(MOST_CHUNKS, total // (2 * len(self._streams)))))

    # ------------------------------------------------------------ optimizer state

    async def fetch_state(self, part: int, limit_bytes: int) -> tuple[pb.State, memoryview]:
        with self.received.busy():
            return await self._streams[0].fetch_state(part, limit_bytes)

    async def send_state(self, header: pb.State, data: memoryview) -> None:
        with self.sent.busy():
            await self._streams[0].send_state(header, data)

    # ------------------------------------------------------------ callbacks of the streams

    def is_closed(self) -> bool:
        return self._closed

    def queued(self, seconds: float) -> None:
        self.queue_s += QUEUE_NEWEST * (seconds - self.queue_s)

    def replied(self, reply: pb.UploadReply) -> None:
        key = (reply.fragment, reply.round)
        if reply.missing and key not in self._asking:
            return  # the reply to a request that was given up
        waiting = self._replies.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def lost(self, key: Key, error: WireError) -> None:
        """Fail a contribution when a stream that carried part of it broke. Part of it may have arrived."""
        waiting = self._replies.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    @property
    def idle(self) -> bool:
        return all(stream.idle for stream in self._streams)

    def drop_if_stuck(self) -> None:
        limits = [_longest_s(meter.bytes_per_s / len(self._streams)) for meter in (self.sent, self.received)]
        for stream in self._streams:
            stream.drop_if_stuck(*limits)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(stream.close() for stream in self._streams))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(WireError("the connection was closed"))


async def _all_done(transfers: list[Coroutine[Any, Any, None]]) -> None:
    """Wait for all of them, then raise the first error."""
    for result in await asyncio.gather(*transfers, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _longest_s(bytes_per_s: float) -> float:
    """How long a stream with this rate may stand still."""
    if not bytes_per_s:
        return STUCK_S[1]
    chunk_s = CHUNK_BYTES / bytes_per_s
    return min(max(STUCK_S[0], min(STUCK_CHUNKS * chunk_s, STUCK_S[1]), 3 * chunk_s), STUCK_S[2])


def _checked(missing: list[int], chunks: int) -> list[Run]:
    runs = list(zip(missing[::2], missing[1::2], strict=False))
    if len(missing) % 2 or len(runs) > chunks or any(count < 1 or first + count > chunks for first, count in runs):
        raise WireError(f"the peer reported chunks that do not exist as missing, of {chunks}")
    return runs
