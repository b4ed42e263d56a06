"""A process of its own that carries contributions to the syncer and versions back, from and into memory that both share.

To send and receive takes the interpreter for a good part of the time when there is much to carry, and beside a GPU the training
loop needs it to keep the GPU busy. The process does what it is told and decides nothing: what to send and what to ask for, and
what to do when that fails, stays with the island. It ends when the island's end of the socket between them is closed.

Both ends of that socket are here. Messages are tuples, pickled, each after its size; nobody else can write to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from skerry.errors import WireError
from skerry.wire import skerry_pb2 as pb
from skerry.wire.connection import TLS, open_channel
from skerry.wire.lane import Download
from skerry.wire.lanes import Lanes
from skerry.wire.meter import Meter
from skerry.wire.service import SyncerStub

_SIZE = struct.Struct("<I")
HEARTBEAT_S = 1.0
END_S = 5.0


class SharedMemory(Protocol):
    """Memory of the island that the process may read and write."""

    @property
    def descriptor(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def place_of(self, data: memoryview) -> int | None:
        """Where in it that is; None if it is elsewhere."""
        ...


class Gone(WireError):
    """There is no such process, or no more."""


class Place(NamedTuple):
    """Where bulk data goes: an address, for as long as one connection to the syncer lasts."""

    connection: int
    address: str


@dataclass(frozen=True)
class _Setup:
    outgoing: tuple[int, int]
    """Descriptor and size."""
    incoming: tuple[int, int]
    name: str
    session: str
    connections: int
    tls: TLS | None


class _Reply(NamedTuple):
    number: int
    message: bytes
    """What the syncer said, if it went well."""
    error: type[WireError] | None
    words: str
    sent_bytes: int
    """Since the process began, as the next."""
    received_bytes: int
    queue_s: float


def _frame(message: Any) -> bytes:
    data = pickle.dumps(message)
    return _SIZE.pack(len(data)) + data


async def _next(reader: asyncio.StreamReader) -> Any:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return pickle.loads(await reader.readexactly(size))


# ---------------------------------------------------------------- the island's end


class Ferry:
    """The process, as the island sees it. All of it on one event loop."""

    def __init__(self, outgoing: SharedMemory, incoming: SharedMemory, sent: Meter, received: Meter) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._sent, self._received = sent, received
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[_Reply], object]] = {}
        """With what is shared: it stays as it is until the process is done with it, whoever gives up waiting."""
        self._counted = (0, 0)
        self.queue_s = 0.0
        """How long what is to be sent waited for its turn, of late."""
        self.running = False
        """It has begun and has not ended."""

    async def start(self, name: str, session: str, connections: int, tls: TLS | None) -> None:
        """Raises OSError or WireError."""
        here, there = socket.socketpair()
        with there:
            outgoing, incoming = ((memory.descriptor, memory.size_bytes) for memory in (self._outgoing, self._incoming))
            command = [sys.executable, "-c", "from skerry.wire.ferry import main; main()", str(there.fileno())]
            shared = (there.fileno(), outgoing[0], incoming[0])
            self._process = subprocess.Popen(command, pass_fds=shared, stdin=subprocess.DEVNULL)
        reader, self._writer = await asyncio.open_connection(sock=here)
        self._writer.write(_frame(_Setup(outgoing, incoming, name, session, connections, tls)))
        try:
            await _next(reader)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Gone(f"the process that was to carry bulk data did not start: {error}") from None
        self.running = True
        self._listener = asyncio.get_running_loop().create_task(self._listen(reader))

    def carries(self, data: memoryview) -> bool:
        return self.running and self._outgoing.place_of(data) is not None

    async def upload(self, place: Place, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        """As Lanes.upload, of data that is in shared memory."""
        with self._sent.under_way():
            told = (header.SerializeToString(), self._outgoing.place_of(data), len(data), resume)
            reply = await self._ask(data, "upload", place, *told)
        return pb.UploadReply.FromString(_good(reply))

    async def fetch(self, place: Place, download: Download, room: memoryview) -> None:
        """As Lanes.fetch, into shared memory. What has come stays there when this fails, until it is forgotten."""
        with self._received.under_way():
            told = (download.wanted.SerializeToString(), self._incoming.place_of(room), len(room))
            reply = await self._ask(room, "fetch", place, *told)
        header = pb.Fetched.FromString(_good(reply))
        download.arrived(header, room[: header.size_bytes])

    def takes(self, room: memoryview) -> bool:
        return self.running and self._incoming.place_of(room) is not None

    def forget(self, room: memoryview) -> None:
        """What has come into it is of no use any more."""
        if self.running:
            self._tell(asyncio.get_running_loop().create_future(), room, "forget", self._incoming.place_of(room))

    def disconnect(self, connection: int) -> None:
        """What is under way for it fails."""
        if self.running:
            self._tell(asyncio.get_running_loop().create_future(), None, "disconnect", connection)

    async def _ask(self, held: object, *words: Any) -> _Reply:
        if not self.running:
            raise Gone("the process that carries bulk data has ended")
        reply: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._tell(reply, held, *words)
        return await reply

    def _tell(self, reply: asyncio.Future[_Reply], held: object, *words: Any) -> None:
        assert self._writer is not None
        number = next(self._numbers)
        self._waiting[number] = reply, held
        self._writer.write(_frame((number, *words)))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                reply: _Reply = await _next(reader)
                self._count(reply)
                future, _ = self._waiting.pop(reply.number)
                if not future.done():
                    future.set_result(reply)
        self._ended()

    def _count(self, reply: _Reply) -> None:
        self.queue_s = reply.queue_s
        before, self._counted = self._counted, (reply.sent_bytes, reply.received_bytes)
        for meter, kind, was, now in zip(
            (self._sent, self._received), ("contributions", "versions"), before, self._counted, strict=True
        ):
            if now > was:
                meter.moved(now - was, kind)

    def _ended(self) -> None:
        self.running = False
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(Gone("the process that carries bulk data has ended"))
                future.exception()  # nobody may be waiting

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._listener is not None:
            self._listener.cancel()
        self._ended()
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.get_running_loop().run_in_executor(None, process.wait, END_S)
            process.kill()
            await asyncio.get_running_loop().run_in_executor(None, process.wait)


def _good(reply: _Reply) -> bytes:
    if reply.error is not None:
        raise reply.error(reply.words)
    return reply.message


# ---------------------------------------------------------------- the process


class _Carrier:
    def __init__(self, setup: _Setup, say: Callable[[_Reply], None]) -> None:
        self._setup, self._say = setup, say
        self._outgoing, self._incoming = _mapped(*setup.outgoing), _mapped(*setup.incoming)
        self._sent, self._received = Meter(), Meter()
        self._opened: dict[Place, tuple[Lanes, list[Any]]] = {}
        self._downloads: dict[int, Download] = {}
        """By where in shared memory they arrive."""
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, number: int, what: str, *told: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._do(number, getattr(self, f"_{what}"), *told))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, number: int, act: Callable[..., Awaitable[bytes]], *told: Any) -> None:
        message, error, words = b"", None, ""
        try:
            message = await act(*told)
        except WireError as found:
            error, words = type(found), str(found)
        queue_s = max((lanes.queue_s for lanes, _ in self._opened.values()), default=0.0)
        self._say(_Reply(number, message, error, words, self._sent.total_bytes, self._received.total_bytes, queue_s))

    async def _upload(self, place: Place, header: bytes, start: int, size: int, resume: bool) -> bytes:
        data = self._outgoing[start : start + size]
        reply = await self._lanes(place).upload(pb.Upload.FromString(header), data, resume)
        return reply.SerializeToString()

    async def _fetch(self, place: Place, wanted: bytes, start: int, size: int) -> bytes:
        download = self._downloads.get(start)
        if download is None:
            room = self._incoming[start : start + size]
            download = self._downloads[start] = Download(pb.Fetch.FromString(wanted), lambda _: None, room)
        await self._lanes(place).fetch(download)
        self._downloads.pop(start, None)
        header, _ = await asyncio.get_running_loop().run_in_executor(None, download.finish)
        return header.SerializeToString()

    async def _forget(self, start: int) -> bytes:
        download = self._downloads.pop(start, None)
        if download is not None:
            download.give_up()
        return b""

    async def _disconnect(self, connection: int) -> bytes:
        for place in [place for place in self._opened if place.connection == connection]:
            lanes, channels = self._opened.pop(place)
            await lanes.close()
            for channel in channels:
                await channel.close()
        return b""

    def _lanes(self, place: Place) -> Lanes:
        if place not in self._opened:
            setup = self._setup
            channels = [open_channel(place.address, setup.tls) for _ in range(setup.connections)]
            stubs = [SyncerStub(channel) for channel in channels]
            self._opened[place] = Lanes(stubs, setup.name, setup.session, self._sent, self._received), channels
        return self._opened[place][0]

    async def look_after(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for lanes, _ in self._opened.values():
                lanes.drop_if_stuck()


def _mapped(descriptor: int, size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size_bytes))


async def _serve(end: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=end)
    carrier = _Carrier(await _next(reader), lambda reply: writer.write(_frame(reply)))
    writer.write(_frame("ready"))
    looking = asyncio.get_running_loop().create_task(carrier.look_after())
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            carrier.heard(*await _next(reader))
    looking.cancel()


def main() -> None:
    # Whoever stops an island means the island, which then closes its end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # what was under way is of no use to anybody
