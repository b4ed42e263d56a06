"""A learner's bulk streams: contributions one way, merged fragments the other, spread over several connections.

One TCP connection cannot fill a long link, so what is large goes over all of them, a run of chunks at a time: the faster ones
carry more. A run is taken up when a lane is free, which bounds what is under way. When a lane breaks, the others go on, and
what is lost with it is sent or asked for again: only that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from skerry.errors import WireError
from skerry.wire import skerry_pb2 as pb
from skerry.wire.chunks import CHUNK_BYTES, Assembly, Run, chunk, count_chunks, in_runs
from skerry.wire.meter import Meter
from skerry.wire.service import SyncerStub
from skerry.wire.transfer import TryAgain, read, wire_errors

MOST_CHUNKS = 4
"""Of one run."""
ASKED_AHEAD = 4
"""Runs that are asked for on one lane before the first of them has come: a long link is full of bytes on their way."""
STUCK_S = (10.0, 60.0, 600.0)
"""A lane on which nothing moves for so long is dead: what many chunks take at the measured rate, between the first two of
these; but never less than three chunks take, up to the last."""
STUCK_CHUNKS = 20
QUEUE_NEWEST = 0.1

Key = tuple[int, int]
"""Fragment and round of a contribution."""


class NotAsWanted(WireError):
    """What was sent is not what was asked for, or it is not there: to go on asking for the rest is of no use."""


class Download:
    """A version on its way here. What has come stays when a connection breaks."""

    def __init__(self, wanted: pb.Fetch, check: Callable[[pb.Fetched], None]) -> None:
        self.wanted = wanted
        self._check = check
        self.header: pb.Fetched | None = None
        self.assembly: Assembly | None = None

    def begins(self, header: pb.Fetched) -> None:
        """Memory is set aside once what is declared has been looked at."""
        if (header.fragment, header.version) != (self.wanted.fragment, self.wanted.version):
            raise NotAsWanted(f"version {header.version} of fragment {header.fragment} was sent without being asked for")
        if header.reason:
            raise NotAsWanted(header.reason)
        if self.header is None:
            self._check(header)
            self.header, self.assembly = header, Assembly(header.size_bytes, header.checksum)
        elif _what(header) != _what(self.header):
            raise NotAsWanted(f"version {header.version} of fragment {header.fragment} is something else than before")

    @property
    def missing(self) -> list[Run]:
        return self.assembly.missing if self.assembly is not None else [(0, MOST_CHUNKS)]

    def finish(self) -> tuple[pb.Fetched, memoryview]:
        """Takes a while if it is large."""
        assert self.header is not None and self.assembly is not None
        return self.header, self.assembly.finish()


def _what(header: pb.Fetched) -> tuple[object, ...]:
    return header.codec, header.size_bytes, header.checksum, header.HasField("since"), header.since


@dataclass
class _Asked:
    """A run that was asked for. Without a download it is a part of an optimizer's state."""

    first: int
    count: int
    done: asyncio.Future[None]
    download: Download | None = None
    part: int = 0
    limit_bytes: int = 0
    state: pb.State | None = None
    assembly: Assembly | None = None
    following: int = 0
    """The number of the chunk that comes next."""
    paid: bool = False
    """Its bytes count among those that the cap allows; before the first answer nobody knows how many they are."""

    def fail(self, error: WireError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _forget(future: asyncio.Future[Any]) -> None:
    """Nobody will ask what became of it."""
    if not future.cancel() and not future.cancelled():
        future.exception()


class Lane:
    """One stream. It is opened when first used, and again when it broke; what was under way then fails."""

    def __init__(self, stub: SyncerStub, hello: pb.BulkHello, lanes: Lanes) -> None:
        self._stub, self._hello, self._lanes = stub, hello, lanes
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._sending = asyncio.Lock()
        self.queued_bytes = 0
        self._asked: deque[_Asked] = deque()
        self._state: _Asked | None = None
        self._arriving: _Asked | None = None
        self._carried: set[Key] = set()
        """Contributions that are on their way here, in part or whole, and were not answered."""
        self._moved_at = 0.0
        self._write_began: float | None = None
        self.broken = False
        """Its last stream broke, and nothing has come on another."""

    # ------------------------------------------------------------ sending

    async def send_run(self, header: pb.Upload, data: memoryview, run: Run, answered: Callable[[], bool]) -> None:
        """One run of a contribution. The syncer may answer before it has everything, if it does not want it."""
        key = (header.fragment, header.step)
        message = pb.BulkToSyncer(upload=header)
        message.upload.first_chunk = run[0]
        self.queued_bytes += run[1] * CHUNK_BYTES
        since = asyncio.get_running_loop().time()
        try:
            async with self._sending:
                call = await self._open()
                self._carried.add(key)
                for number in range(run[0], run[0] + run[1]):
                    message.chunk = chunk(data, number)
                    await self._lanes.sent.allow(len(message.chunk), self._lanes.is_closed)
                    if answered():
                        return
                    if number == run[0]:
                        self._lanes.queued(asyncio.get_running_loop().time() - since)
                    await self._write(call, message)
                    self._lanes.sent.moved(len(message.chunk), "contributions")
                    message = pb.BulkToSyncer()
        finally:
            self.queued_bytes -= run[1] * CHUNK_BYTES

    async def ask_missing(self, header: pb.Upload) -> None:
        message = pb.BulkToSyncer(upload=header)
        message.upload.resume = True
        async with self._sending:
            call = await self._open()
            self._carried.add((header.fragment, header.step))
            await self._write(call, message)

    async def send_state(self, header: pb.State, data: memoryview) -> None:
        message = pb.BulkToSyncer(state=header)
        async with self._sending:
            call = await self._open()
            for number in range(count_chunks(len(data))):
                message.chunk = chunk(data, number)
                await self._lanes.sent.allow(len(message.chunk), self._lanes.is_closed)
                await self._write(call, message)
                self._lanes.sent.moved(len(message.chunk), "state")
                message = pb.BulkToSyncer()

    async def _write(self, call: Any, message: pb.BulkToSyncer, asked: _Asked | None = None) -> None:
        """On that stream and no other. Requests may go between the chunks of a contribution."""
        async with self._writing:
            if self._call is not call:
                raise WireError("the stream broke")
            if asked is not None:
                self._asked.append(asked)
            self._moved()
            self._write_began = self._moved_at
            try:
                with wire_errors():
                    await call.write(message)
            finally:
                self._write_began = None
            self._moved()

    # ------------------------------------------------------------ receiving

    async def ask(self, download: Download, run: Run) -> asyncio.Future[None]:
        """Ask for a run. What is given is done when the last of it has come."""
        asked = _Asked(*run, asyncio.get_running_loop().create_future(), download)
        fetch = pb.Fetch()
        fetch.CopyFrom(download.wanted)
        fetch.first_chunk, fetch.chunks = run
        try:
            if download.assembly is not None:
                await self._lanes.received.allow(run[1] * CHUNK_BYTES, self._lanes.is_closed)
            asked.paid = download.assembly is not None
            await self._write(await self._open(), pb.BulkToSyncer(fetch=fetch), asked)
        except BaseException:
            _forget(asked.done)
            raise
        return asked.done

    async def fetch_state(self, part: int, limit_bytes: int) -> tuple[pb.State, memoryview]:
        """One part of a peer's optimizer state and what is said about it. One at a time."""
        assert self._state is None, "optimizer state is fetched one part after the other"
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asked = self._state = _Asked(0, 0, done, part=part, limit_bytes=limit_bytes)
        try:
            await self._write(await self._open(), pb.BulkToSyncer(fetch_state=pb.FetchState(part=part)))
            await done
        finally:
            self._state = None
            _forget(done)
        assert asked.state is not None and asked.assembly is not None
        return asked.state, asked.assembly.finish()

    def drop_if_stuck(self, send_s: float, receive_s: float) -> None:
        """Something is under way here and nothing has moved for so long: a stream can be dead without either end hearing of it.
        To wait for an answer alone is no reason for long: others may be carrying the rest, or it is being decoded."""
        if self._call is None:
            return
        now = asyncio.get_running_loop().time()
        sending = self._write_began is not None and now - self._write_began > send_s
        receiving = bool(self._asked or self._arriving) and now - self._moved_at > receive_s
        forgotten = bool(self._carried) and now - self._moved_at > 2 * STUCK_S[1]
        if sending or receiving or forgotten:
            self._call.cancel()

    def answered(self, key: Key) -> None:
        self._carried.discard(key)

    @property
    def idle(self) -> bool:
        return not (self._asked or self._arriving or self._carried)

    def _moved(self) -> None:
        self._moved_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _open(self) -> Any:
        async with self._writing:
            if self._lanes.closed:
                raise WireError("the connection was closed")
            if self._call is None:
                with wire_errors():
                    call = self._call = self._stub.bulk()
                    self._reader = asyncio.get_running_loop().create_task(self._read(call))
                    await call.write(pb.BulkToSyncer(hello=self._hello))
                if self._call is not call:
                    raise WireError("the stream broke")
            return self._call

    async def _read(self, call: Any) -> None:
        ended = WireError("the syncer ended the bulk stream")
        try:
            while (message := await read(call)) is not grpc.aio.EOF:
                self._received(message)
        except WireError as error:
            ended = error
        finally:
            call.cancel()
            self._call = None
            self.broken = True
            waiting = [*self._asked, *([self._arriving] if self._arriving else []), *([self._state] if self._state else [])]
            carried = set(self._carried)
            self._asked.clear()
            self._carried.clear()
            self._arriving = None
            for asked in waiting:
                asked.fail(ended)
            for key in carried:
                self._lanes.lost(key, ended)

    def _received(self, message: pb.BulkToLearner) -> None:
        self._moved()
        self.broken = False
        kind = message.WhichOneof("message")
        if kind == "reply":
            self._lanes.replied(message.reply)
            return
        if kind == "fetched":
            self._run_begins(message.fetched)
        elif kind == "state":
            self._state_begins(message.state)
        asked = self._arriving
        self._lanes.received.moved(len(message.chunk), "state" if asked is not None and asked.download is None else "versions")
        if asked is None or not asked.paid:
            self._lanes.received.charge(len(message.chunk))
        if asked is None:
            return  # the rest of something that was found to be wrong
        assembly = asked.assembly
        assert assembly is not None
        if not message.chunk and assembly.size_bytes:
            return  # a header alone
        try:
            assembly.add(asked.following, message.chunk)
        except WireError as error:
            self._arriving = None
            asked.fail(error)
            return
        asked.following += 1
        if asked.following >= min(asked.first + asked.count, assembly.chunks):
            self._arriving = None
            if not asked.done.done():
                asked.done.set_result(None)

    def _run_begins(self, header: pb.Fetched) -> None:
        self._cut_short()
        asked = self._asked.popleft() if self._asked else None
        if asked is None or asked.download is None:
            raise WireError(f"version {header.version} of fragment {header.fragment} was sent without being asked for")
        try:
            if header.first_chunk != asked.first:
                raise WireError(f"chunk {header.first_chunk} was sent, {asked.first} was asked for")
            asked.download.begins(header)
        except WireError as error:
            asked.fail(error)
            return
        asked.assembly, asked.following = asked.download.assembly, asked.first
        self._arriving = asked

    def _state_begins(self, header: pb.State) -> None:
        self._cut_short()
        asked = self._state
        if asked is None or asked.part != header.part:
            return  # the answer to a question that was given up
        if header.reason:
            asked.fail(TryAgain(header.reason) if header.again else WireError(header.reason))
        elif header.size_bytes > asked.limit_bytes:
            asked.fail(WireError(f"a part of optimizer state has at most {asked.limit_bytes} bytes"))
        else:
            asked.state, asked.assembly = header, Assembly(header.size_bytes, header.checksum)
            asked.count, asked.following = asked.assembly.chunks, 0
            self._arriving = asked

    def _cut_short(self) -> None:
        if self._arriving is not None:
            self._arriving.fail(WireError("what was arriving was cut short by something else"))
            self._arriving = None


class Lanes:
    def __init__(self, stubs: Sequence[SyncerStub], name: str, session: str, sent: Meter, received: Meter) -> None:
        self.sent, self.received = sent, received
        self._lanes = [Lane(stub, pb.BulkHello(name=name, session=session), self) for stub in stubs]
        self._replies: dict[Key, asyncio.Future[pb.UploadReply]] = {}
        self._asking: set[Key] = set()
        """Contributions of which it is being asked what is missing."""
        self.closed = False
        self.queue_s = 0.0
        """How long a run waited for its turn, of late."""

    def is_closed(self) -> bool:
        return self.closed

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
            _forget(reply)

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
                        _forget(future)

            await self._on_each(carry, len(waiting))

    async def _on_each(self, carry: Callable[[Lane], Any], runs: int) -> None:
        """On as many lanes as there are runs for. All come to an end; then the first error, if there was one."""
        found = await asyncio.gather(*(carry(lane) for lane in self._free_lanes(runs)), return_exceptions=True)
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
        self.closed = True
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
