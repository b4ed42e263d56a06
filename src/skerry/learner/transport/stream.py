"""The learner's end of one bulk stream: sends and receives runs of chunks. When it breaks, transfers in flight on it fail."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from skerry.errors import WireError
from skerry.learner.transport.meter import Meter
from skerry.wire import skerry_pb2 as pb
from skerry.wire.calls import TryAgain, read, wire_errors
from skerry.wire.framing import CHUNK_BYTES, Assembly, Parcel, Run, chunk, count_chunks
from skerry.wire.service import SyncerStub

log = logging.getLogger("skerry.learner")

MOST_CHUNKS = 4
"""Most chunks in one run."""
ASKED_AHEAD = 4
"""Runs requested on one stream ahead of arrival, to fill a long link."""
FORGOTTEN_S = 120.0
"""Timeout of a stream that only waits for a reply."""

Key = tuple[int, int]
"""Fragment and round of a contribution."""


class StreamOwner(Protocol):
    """The callbacks of a stream."""

    sent: Meter
    received: Meter

    def is_closed(self) -> bool: ...

    def queued(self, seconds: float) -> None:
        """A run has waited this long for its turn."""

    def replied(self, reply: pb.UploadReply) -> None: ...

    def lost(self, key: Key, error: WireError) -> None:
        """A stream that carried part of this contribution broke."""


class NotAsWanted(WireError):
    """The peer sent something else than was requested, or does not have it. Requesting the rest is pointless."""


class TooLarge(NotAsWanted):
    """The version does not fit into the memory given for it."""


class Download:
    """A version being received. Chunks that have arrived survive a broken connection."""

    def __init__(self, wanted: pb.Fetch, check: Callable[[pb.Fetched], None], room: memoryview | None = None) -> None:
        self.wanted = wanted
        self.room = room
        """Memory to receive it in, or None to allocate some."""
        self._check = check
        self.header: pb.Fetched | None = None
        self.assembly: Assembly | None = None
        self._arrived: memoryview | None = None

    def begins(self, header: pb.Fetched) -> None:
        """Check the header of a run. The first one allocates memory, once its declared size has been checked."""
        self._check_wanted(header)
        if header.reason:
            raise NotAsWanted(header.reason)
        if self.header is None:
            self._check(header)
            if self.room is not None and header.size_bytes > len(self.room):
                raise TooLarge(f"{header.size_bytes} bytes do not fit into {len(self.room)}")
            self.header, self.assembly = header, Assembly(header.size_bytes, header.checksum, self.room)
        elif _content(header) != _content(self.header):
            raise NotAsWanted(f"version {header.version} of fragment {header.fragment} changed during the download")

    def _check_wanted(self, header: pb.Fetched) -> None:
        if (header.fragment, header.version) != (self.wanted.fragment, self.wanted.version):
            raise NotAsWanted(f"version {header.version} of fragment {header.fragment} was sent unasked")

    @property
    def missing(self) -> list[Run]:
        return self.assembly.missing if self.assembly is not None else [(0, MOST_CHUNKS)]

    def arrived(self, header: pb.Fetched, data: memoryview) -> None:
        """Accept the whole version from the sidecar, which has verified the checksum."""
        self._check_wanted(header)
        self._check(header)
        self.header, self._arrived = header, data

    def give_up(self) -> None:
        """Stop writing to the memory."""
        if self.assembly is not None:
            self.assembly.give_up()

    def finish(self) -> tuple[pb.Fetched, memoryview]:
        """Verify the checksum, which is slow for large versions, and return header and data. Raises WireError."""
        assert self.header is not None
        if self._arrived is not None:
            return self.header, self._arrived
        assert self.assembly is not None
        return self.header, self.assembly.finish()


def _content(header: pb.Fetched) -> tuple[object, ...]:
    return header.codec, header.size_bytes, header.checksum, header.HasField("since"), header.since


@dataclass
class _Asked:
    """A requested run of a download; without a download, a requested part of optimizer state."""

    first: int
    count: int
    done: asyncio.Future[None]
    download: Download | None = None
    part: int = 0
    limit_bytes: int = 0
    state: pb.State | None = None
    assembly: Assembly | None = None
    next_chunk: int = 0
    charged: bool = False
    """The cap has been charged for its bytes. Impossible for the first run, whose size is not known yet."""

    def fail(self, error: WireError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def forget(future: asyncio.Future[Any]) -> None:
    """Cancel a future nobody waits for, or mark its exception as retrieved."""
    if not future.cancel() and not future.cancelled():
        future.exception()


class ClientStream:
    """One bulk stream. Opened lazily, and reopened after it broke."""

    def __init__(self, stub: SyncerStub, hello: pb.BulkHello, owner: StreamOwner) -> None:
        self._stub, self._hello, self._owner = stub, hello, owner
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._sending = asyncio.Lock()
        self.queued_bytes = 0
        self._asked: deque[_Asked] = deque()
        self._state: _Asked | None = None
        self._arriving: _Asked | None = None
        self._carried: set[Key] = set()
        """Contributions sent on this stream, in part or whole, that wait for a reply."""
        self._moved_at = 0.0
        self._write_began: float | None = None
        self.broken = False
        """The last call broke, and nothing has arrived since."""

    # ------------------------------------------------------------ sending

    async def send_runs(
        self, header: pb.Upload, data: memoryview, waiting: deque[Run], answer: asyncio.Future[pb.UploadReply]
    ) -> None:
        """Send runs of a contribution until `waiting` is empty. Several streams share `waiting` and take the next run when they
        are free. Stops early if the syncer has already answered, because it does not want the contribution."""
        while waiting and not answer.done():
            first, count = waiting.popleft()
            message = pb.BulkToSyncer(upload=header)
            message.upload.first_chunk = first
            if first:
                message.upload.ClearField("journal_json")  # sent with the first chunk only
            self.queued_bytes += count * CHUNK_BYTES
            since = asyncio.get_running_loop().time()
            try:
                async with self._sending:
                    call = await self._open()
                    self._carried.add((header.fragment, header.round))
                    for number in range(first, first + count):
                        part = chunk(data, number)
                        await self._owner.sent.allow(len(part), self._owner.is_closed)
                        if answer.done():
                            return
                        if number == first:
                            self._owner.queued(asyncio.get_running_loop().time() - since)
                        await self._write(call, Parcel(message, part))
                        self._owner.sent.moved(len(part), "contributions")
                        message = pb.BulkToSyncer()
            finally:
                self.queued_bytes -= count * CHUNK_BYTES

    async def ask_missing(self, header: pb.Upload) -> None:
        """Ask which chunks of a contribution the peer does not have. The reply goes to the owner."""
        message = pb.BulkToSyncer(upload=header)
        message.upload.resume = True
        async with self._sending:
            call = await self._open()
            self._carried.add((header.fragment, header.round))
            await self._write(call, Parcel(message))

    async def send_state(self, header: pb.State, data: memoryview) -> None:
        message = pb.BulkToSyncer(state=header)
        self.queued_bytes += len(data)
        try:
            async with self._sending:
                call = await self._open()
                for number in range(count_chunks(len(data))):
                    part = chunk(data, number)
                    await self._owner.sent.allow(len(part), self._owner.is_closed)
                    await self._write(call, Parcel(message, part))
                    self._owner.sent.moved(len(part), "state")
                    message = pb.BulkToSyncer()
        finally:
            self.queued_bytes -= len(data)

    async def _write(self, call: Any, parcel: Parcel[pb.BulkToSyncer], asked: _Asked | None = None) -> None:
        """Write to this call, or fail if it has been replaced. Requests may go out between the chunks of a contribution."""
        async with self._writing:
            if self._call is not call:
                raise WireError("the stream broke")
            if asked is not None:
                self._asked.append(asked)
            self._moved()
            self._write_began = self._moved_at
            try:
                with wire_errors():
                    await call.write(parcel)
            finally:
                self._write_began = None
            self._moved()

    # ------------------------------------------------------------ fetching

    async def ask(self, download: Download, run: Run) -> asyncio.Future[None]:
        """Request a run. The future is done when its last chunk has arrived."""
        asked = _Asked(*run, asyncio.get_running_loop().create_future(), download)
        fetch = pb.Fetch()
        fetch.CopyFrom(download.wanted)
        fetch.first_chunk, fetch.chunks = run
        try:
            if download.assembly is not None:
                await self._owner.received.allow(run[1] * CHUNK_BYTES, self._owner.is_closed)
            asked.charged = download.assembly is not None
            await self._write(await self._open(), Parcel(pb.BulkToSyncer(fetch=fetch)), asked)
        except BaseException:
            forget(asked.done)
            raise
        return asked.done

    async def fetch_runs(self, download: Download, waiting: deque[Run]) -> None:
        """Request runs of a version until `waiting` is empty, up to ASKED_AHEAD at a time. Several streams share `waiting`."""
        in_flight: deque[asyncio.Future[None]] = deque()
        try:
            while waiting or in_flight:
                while waiting and len(in_flight) < ASKED_AHEAD:
                    in_flight.append(await self.ask(download, waiting.popleft()))
                await in_flight.popleft()
        finally:
            for future in in_flight:
                forget(future)

    async def fetch_state(self, part: int, limit_bytes: int) -> tuple[pb.State, memoryview]:
        """Fetch one part of a peer's optimizer state. Returns its header and data."""
        assert self._state is None, "optimizer state is fetched one part at a time"
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asked = self._state = _Asked(0, 0, done, part=part, limit_bytes=limit_bytes)
        try:
            await self._write(await self._open(), Parcel(pb.BulkToSyncer(fetch_state=pb.FetchState(part=part))))
            await done
        finally:
            self._state = None
            forget(done)
        assert asked.state is not None and asked.assembly is not None
        return asked.state, asked.assembly.finish()

    # ------------------------------------------------------------ opening and closing

    def drop_if_stuck(self, send_s: float, receive_s: float) -> None:
        """Break the stream if a transfer is in flight and nothing has moved for this long. A stream can be dead without either
        end noticing. A pending reply alone has longer: other streams may carry the rest, or the syncer is decoding."""
        if self._call is None:
            return
        now = asyncio.get_running_loop().time()
        sending = self._write_began is not None and now - self._write_began > send_s
        receiving = bool(self._asked or self._arriving) and now - self._moved_at > receive_s
        forgotten = bool(self._carried) and now - self._moved_at > FORGOTTEN_S
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
            if self._owner.is_closed():
                raise WireError("the connection was closed")
            if self._call is None:
                with wire_errors():
                    call = self._call = self._stub.bulk()
                    self._reader = asyncio.get_running_loop().create_task(self._read(call))
                    self._reader.add_done_callback(lambda task: self._ended(call, task))
                    # Waits for the reader too: if the call is cancelled before it connects, the first write never returns.
                    hello = asyncio.ensure_future(call.write(Parcel(pb.BulkToSyncer(hello=self._hello))))
                    try:
                        await asyncio.wait((hello, self._reader), return_when=asyncio.FIRST_COMPLETED)
                        if hello.done():
                            await hello
                    finally:
                        hello.cancel()
                if self._call is not call:
                    raise WireError("the stream broke")
            return self._call

    # ------------------------------------------------------------ reading

    async def _read(self, call: Any) -> None:
        while (parcel := await read(call)) is not grpc.aio.EOF:
            message, data = parcel.message, parcel.chunk
            self._moved()
            self.broken = False
            kind = message.WhichOneof("message")
            if kind == "reply":
                self._owner.replied(message.reply)
                continue
            if kind == "fetched":
                self._run_begins(message.fetched)
            elif kind == "state":
                self._state_begins(message.state)
            asked = self._arriving
            self._owner.received.moved(len(data), "state" if asked is not None and asked.download is None else "versions")
            if asked is None or not asked.charged:
                self._owner.received.charge(len(data))
            if asked is None:
                continue  # a remaining chunk of a failed transfer
            assert asked.assembly is not None
            if not len(data) and asked.assembly.size_bytes:
                continue  # a header without a chunk
            try:
                asked.assembly.add(asked.next_chunk, data)
            except WireError as error:
                self._arriving = None
                asked.fail(error)
                continue
            asked.next_chunk += 1
            if asked.next_chunk >= min(asked.first + asked.count, asked.assembly.chunks):
                self._arriving = None
                if not asked.done.done():
                    asked.done.set_result(None)
        raise WireError("the syncer ended the bulk stream")

    def _ended(self, call: Any, reader: asyncio.Task[None]) -> None:
        """Fail every transfer in flight on a call that has ended."""
        error = None if reader.cancelled() else reader.exception()
        if error is not None and not isinstance(error, WireError):
            log.error("a bulk stream ended by a bug in Skerry", exc_info=error)
        ended = error if isinstance(error, WireError) else WireError(f"the bulk stream ended: {error or 'it was closed'}")
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
            self._owner.lost(key, ended)

    def _run_begins(self, header: pb.Fetched) -> None:
        self._cut_short()
        asked = self._asked.popleft() if self._asked else None
        if asked is None or asked.download is None:
            raise WireError(f"version {header.version} of fragment {header.fragment} was sent unasked")
        try:
            if header.first_chunk != asked.first:
                raise WireError(f"chunk {header.first_chunk} was sent instead of {asked.first}")
            asked.download.begins(header)
        except WireError as error:
            asked.fail(error)
            return
        asked.assembly, asked.next_chunk = asked.download.assembly, asked.first
        self._arriving = asked

    def _state_begins(self, header: pb.State) -> None:
        self._cut_short()
        asked = self._state
        if asked is None or asked.part != header.part:
            return  # the reply to a request that was given up
        if header.reason:
            asked.fail(TryAgain(header.reason) if header.again else WireError(header.reason))
        elif header.size_bytes > asked.limit_bytes:
            limit = asked.limit_bytes
            asked.fail(WireError(f"a part of optimizer state was declared as {header.size_bytes} bytes, the limit is {limit}"))
        else:
            asked.state, asked.assembly = header, Assembly(header.size_bytes, header.checksum)
            asked.count, asked.next_chunk = asked.assembly.chunks, 0
            self._arriving = asked

    def _cut_short(self) -> None:
        if self._arriving is not None:
            self._arriving.fail(WireError("the transfer was cut short by the next one"))
            self._arriving = None
