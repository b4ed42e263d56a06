"""A process of its own that carries contributions to the syncer and versions back, from and into memory that both share.

To send and receive takes the interpreter for a good part of the time when there is much to carry, and beside a GPU the training
loop needs it to keep the GPU busy. The process does what it is told and decides nothing: what to send and what to ask for, and
what to do when that fails, stays with the island. It ends when the island's end of the socket between them is closed.

Both ends of that socket are here. A message is a list in JSON and some bytes, after the sizes of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from skerry.errors import WireError
from skerry.wire import skerry_pb2 as pb
from skerry.wire.connection import TLS, open_channel
from skerry.wire.lane import Download, NotAsWanted, TooLarge
from skerry.wire.lanes import Lanes
from skerry.wire.loop import CalmSelector
from skerry.wire.meter import Meter
from skerry.wire.service import SyncerStub
from skerry.wire.transfer import TryAgain

_SIZES = struct.Struct("<II")
LOOK_S = 0.25
END_S = 5.0
NOBODY = -1
"""The number of a message that nobody waits for."""


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


class _Reply(NamedTuple):
    number: int
    error: str
    """Of which kind, if it did not go well."""
    words: str
    sent_bytes: int
    """Since the process began, as the next."""
    received_bytes: int
    queue_s: float


_ERRORS = {kind.__name__: kind for kind in (NotAsWanted, TooLarge, TryAgain)}


def _frame(message: Sequence[Any], data: bytes = b"") -> bytes:
    words = json.dumps(message).encode()
    return b"".join((_SIZES.pack(len(words), len(data)), words, data))


async def _next(reader: asyncio.StreamReader) -> tuple[list[Any], bytes]:
    words, data = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    return json.loads(await reader.readexactly(words)), await reader.readexactly(data)


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
        self._waiting: dict[int, tuple[asyncio.Future[bytes], object]] = {}
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
        setup = [outgoing, incoming, name, session, connections, dataclasses.asdict(tls) if tls is not None else None]
        self._writer.write(_frame(setup))
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
            start = self._outgoing.place_of(data)
            reply = await self._ask(data, header.SerializeToString(), "upload", *place, start, len(data), resume)
        return pb.UploadReply.FromString(reply)

    async def fetch(self, place: Place, download: Download, room: memoryview) -> None:
        """As Lanes.fetch, into shared memory. What has come stays there when this fails, until it is forgotten."""
        with self._received.under_way():
            start = self._incoming.place_of(room)
            reply = await self._ask(room, download.wanted.SerializeToString(), "fetch", *place, start, len(room))
        header = pb.Fetched.FromString(reply)
        download.arrived(header, room[: header.size_bytes])

    def takes(self, room: memoryview) -> bool:
        return self.running and self._incoming.place_of(room) is not None

    def forget(self, room: memoryview) -> None:
        """What has come into it is of no use any more."""
        if self.running:
            self._tell(room, b"", "forget", self._incoming.place_of(room))

    def disconnect(self, connection: int) -> None:
        """What is under way for it fails."""
        if self.running:
            self._tell(None, b"", "disconnect", connection)

    async def _ask(self, held: object, message: bytes, *words: Any) -> bytes:
        if not self.running:
            raise Gone("the process that carries bulk data has ended")
        return await self._tell(held, message, *words)

    def _tell(self, held: object, message: bytes, *words: Any) -> asyncio.Future[bytes]:
        assert self._writer is not None
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply, held
        self._writer.write(_frame((number, *words), message))
        return reply

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                words, message = await _next(reader)
                reply = _Reply(*words)
                self._count(reply)
                if reply.number == NOBODY:
                    continue
                future, _ = self._waiting.pop(reply.number)
                if future.done():
                    continue
                if reply.error:
                    future.set_exception(_ERRORS.get(reply.error, WireError)(reply.words))
                    future.exception()  # nobody may be waiting
                else:
                    future.set_result(message)
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
            # To close it may not be enough: a process that was forked here has it as well.
            self._writer.write(_frame((NOBODY, "end")))
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


# ---------------------------------------------------------------- the process


class _Carrier:
    def __init__(self, setup: list[Any], say: Callable[[_Reply, bytes], None]) -> None:
        outgoing, incoming, self._name, self._session, self._connections, tls = setup
        self._tls = TLS(**tls) if tls is not None else None
        self._say = say
        self._outgoing, self._incoming = _mapped(*outgoing), _mapped(*incoming)
        self._sent, self._received = Meter(), Meter()
        self._opened: dict[Place, tuple[Lanes, list[Any]]] = {}
        self._downloads: dict[int, Download] = {}
        """By where in shared memory they arrive."""
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, words: list[Any], message: bytes) -> None:
        number, what, *told = words
        does: dict[str, Callable[..., Coroutine[Any, Any, bytes]]] = {
            "upload": self._upload,
            "fetch": self._fetch,
            "forget": self._forget,
            "disconnect": self._disconnect,
        }
        task = asyncio.get_running_loop().create_task(self._do(number, does[what](message, *told)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, number: int, work: Coroutine[Any, Any, bytes]) -> None:
        message, error, words = b"", "", ""
        try:
            message = await work
        except WireError as found:
            error, words = type(found).__name__, str(found)
        self._reply(number, message, error, words)

    def _reply(self, number: int, message: bytes = b"", error: str = "", words: str = "") -> None:
        queue_s = max((lanes.queue_s for lanes, _ in self._opened.values()), default=0.0)
        self._say(_Reply(number, error, words, self._sent.total_bytes, self._received.total_bytes, queue_s), message)

    async def _upload(self, header: bytes, connection: int, address: str, start: int, size: int, resume: bool) -> bytes:
        lanes = self._lanes(Place(connection, address))
        reply = await lanes.upload(pb.Upload.FromString(header), self._outgoing[start : start + size], resume)
        return reply.SerializeToString()

    async def _fetch(self, wanted: bytes, connection: int, address: str, start: int, size: int) -> bytes:
        download = self._downloads.get(start)
        if download is None:
            room = self._incoming[start : start + size]
            download = self._downloads[start] = Download(pb.Fetch.FromString(wanted), lambda _: None, room)
        await self._lanes(Place(connection, address)).fetch(download)
        self._downloads.pop(start, None)
        header, _ = await asyncio.get_running_loop().run_in_executor(None, download.finish)
        return header.SerializeToString()

    async def _forget(self, _: bytes, start: int) -> bytes:
        download = self._downloads.pop(start, None)
        if download is not None:
            download.give_up()
        return b""

    async def _disconnect(self, _: bytes, connection: int) -> bytes:
        for place in [place for place in self._opened if place.connection == connection]:
            lanes, channels = self._opened.pop(place)
            await lanes.close()
            for channel in channels:
                await channel.close()
        return b""

    def _lanes(self, place: Place) -> Lanes:
        if place not in self._opened:
            channels = [open_channel(place.address, self._tls) for _ in range(self._connections)]
            stubs = [SyncerStub(channel) for channel in channels]
            self._opened[place] = Lanes(stubs, self._name, self._session, self._sent, self._received), channels
        return self._opened[place][0]

    async def look_after(self) -> None:
        island = os.getppid()
        while os.getppid() == island:
            before = self._sent.total_bytes, self._received.total_bytes
            await asyncio.sleep(LOOK_S)
            for lanes, _ in self._opened.values():
                lanes.drop_if_stuck()
            if (self._sent.total_bytes, self._received.total_bytes) != before:
                self._reply(NOBODY)  # what is large takes a while, and its bytes are counted meanwhile


def _mapped(descriptor: int, size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size_bytes))


async def _serve(end: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=end)
    setup, _ = await _next(reader)
    carrier = _Carrier(setup, lambda reply, message: writer.write(_frame(reply, message)))
    writer.write(_frame(["ready"]))

    async def listen() -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while (heard := await _next(reader))[0][1] != "end":
                carrier.heard(*heard)

    works = [asyncio.ensure_future(work) for work in (listen(), carrier.look_after())]
    await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)


def main() -> None:
    # Whoever stops an island means the island, which then closes its end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asyncio.SelectorEventLoop(CalmSelector()).run_until_complete(_serve(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # what was under way is of no use to anybody
