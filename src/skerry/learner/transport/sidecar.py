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
import logging
import mmap
import os
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from skerry.errors import SkerryError, WireError
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.stream import Download, NotAsWanted, TooLarge
from skerry.learner.transport.striped import Lanes
from skerry.wire import skerry_pb2 as pb
from skerry.wire.calls import TryAgain
from skerry.wire.channel import TLS, open_channel
from skerry.wire.loop import CalmSelector
from skerry.wire.service import SyncerStub

log = logging.getLogger("skerry.learner")

_SIZES = struct.Struct("<II")
LOOK_S = 0.25
SILENT_LOOKS = 10
"""So many times in a row nothing has come of it when it was looked for."""
LOOKS_APART_S = 2.0
"""After a longer time between two looks it was the island that stood still, and the other one perhaps as well."""
END_S = 5.0
LOOK_AGAIN_S = 0.01
_PROGRAM = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    # Whoever stops an island, or tells all processes of a job something, means the island, which then closes its end.
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from skerry.learner.transport.sidecar import main
main()
"""
"""What is imported is what the island would import."""
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


_ERRORS = {kind.__name__: kind for kind in (WireError, NotAsWanted, TooLarge, TryAgain)}


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
        self._heard = True
        """Something has come of it since it was looked for last."""
        self._looked_at, self._silent_looks = 0.0, 0
        self._closing = False
        self._counted = (0, 0)
        self.queue_s = 0.0
        """How long what is to be sent waited for its turn, of late."""
        self.running = False
        """It has begun and has not ended."""

    async def start(self, name: str, session: str, connections: int, tls: TLS | None) -> None:
        """Raises OSError or WireError."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise Gone("there is no interpreter to start it with")
        here, there = socket.socketpair()
        with there, contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(here.close)
            outgoing, incoming = ((memory.descriptor, memory.size_bytes) for memory in (self._outgoing, self._incoming))
            command = [sys.executable, "-c", _PROGRAM, str(there.fileno()), *sys.path]
            shared = (there.fileno(), outgoing[0], incoming[0])
            self._process = subprocess.Popen(command, pass_fds=shared, stdin=subprocess.DEVNULL)
            if_it_fails.pop_all()
        reader, self._writer = await asyncio.open_connection(sock=here)
        certificates = dataclasses.asdict(tls) if tls is not None else None
        self._writer.write(_frame([outgoing, incoming, name, session, connections, certificates, os.getpid()]))
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

    def disconnect(self, connection: int, address: str = "") -> None:
        """What is under way for it fails, at one address or at all of them, and it is not used any more."""
        if self.running:
            self._tell(None, b"", "disconnect", connection, address)

    def look_after(self) -> None:
        """Once a second or so. It says something more often than that; if it does not, what it was told to do will not be
        done."""
        if not self.running or self._process is None:
            return
        now = asyncio.get_running_loop().time()
        stood_still, self._looked_at = now - self._looked_at > LOOKS_APART_S, now
        if self._heard:
            self._silent_looks = 0
        elif not stood_still:
            self._silent_looks += 1
        self._heard = False
        if self._process.poll() is not None:
            # Its end of the socket may be open all the same, in a process that was forked here just when it was started.
            self._ended()
        elif self._silent_looks >= SILENT_LOOKS:
            self.give_up("it says nothing any more")

    def give_up(self, why: str) -> None:
        """The island is better off without it."""
        if self.running and self._process is not None:
            log.warning("the process that carries bulk data is ended: %s", why)
            self._process.kill()

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
                self._hear(*await _next(reader))
        self._ended()

    def _hear(self, words: list[Any], message: bytes) -> None:
        reply = _Reply(*words)
        self._heard = True
        self._count(reply)
        if reply.number == NOBODY:
            return
        if reply.error and reply.error not in _ERRORS:
            # No trouble of the link, which would be there without it as well. Whoever waits hears of it when it has ended, as
            # until then it may write to what is shared.
            self.give_up(f"{reply.error}: {reply.words}")
            return
        future, _ = self._waiting.pop(reply.number, (None, None))
        if future is None or future.done():
            return
        if reply.error:
            future.set_exception(_ERRORS[reply.error](reply.words))
            future.exception()  # nobody may be waiting
        else:
            future.set_result(message)

    def _count(self, reply: _Reply) -> None:
        self.queue_s = reply.queue_s
        before, self._counted = self._counted, (reply.sent_bytes, reply.received_bytes)
        for meter, kind, was, now in zip(
            (self._sent, self._received), ("contributions", "versions"), before, self._counted, strict=True
        ):
            if now > was:
                meter.moved(now - was, kind)

    def _ended(self) -> None:
        if self.running and not self._closing:
            log.warning("the process that carries bulk data has ended; the training process does that now")
        self.running = False
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(Gone("the process that carries bulk data has ended"))
                future.exception()  # nobody may be waiting

    async def close(self) -> None:
        self._closing = True
        if self._writer is not None:
            # To close it may not be enough: a process that was forked here has it as well.
            self._writer.write(_frame((NOBODY, "end")))
            self._writer.close()
        if self._listener is not None:
            self._listener.cancel()
        self._ended()
        process, loop = self._process, asyncio.get_running_loop()
        if process is not None:
            # Not in a thread that waits: at the end of the interpreter there are no more threads to be had.
            deadline = loop.time() + END_S
            while process.poll() is None and loop.time() < deadline:
                await asyncio.sleep(LOOK_AGAIN_S)
            process.kill()
            while process.poll() is None:
                await asyncio.sleep(LOOK_AGAIN_S)


# ---------------------------------------------------------------- the process


class _Carrier:
    def __init__(self, setup: list[Any], say: Callable[[_Reply, bytes], None]) -> None:
        outgoing, incoming, self._name, self._session, self._connections, tls, self._island = setup
        self._tls = TLS(**tls) if tls is not None else None
        self._say = say
        self._outgoing, self._incoming = _mapped(*outgoing), _mapped(*incoming)
        self._sent, self._received = Meter(), Meter()
        self._opened: dict[Place, tuple[Lanes, list[Any]]] = {}
        self._downloads: dict[int, Download] = {}
        """By where in shared memory they arrive."""
        self._over = -1
        """The newest connection to the syncer that has ended. Others follow, so those before it have ended, too."""
        self._tasks: set[asyncio.Task[None]] = set()

    def heard(self, words: list[Any], message: bytes) -> None:
        number, what, *told = words
        task = asyncio.get_running_loop().create_task(self._do(number, getattr(self, f"_{what}"), message, *told))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, number: int, act: Callable[..., Coroutine[Any, Any, bytes]], *told: Any) -> None:
        message, error, words = b"", "", ""
        try:
            message = await act(*told)
        except (Exception, asyncio.CancelledError) as found:  # whoever waits must hear of it, whatever it is
            error, words = type(found).__name__, str(found) or repr(found)
            if error not in _ERRORS and isinstance(found, (SkerryError, asyncio.CancelledError)):
                error = WireError.__name__
        self._reply(number, message, error, words)

    def _reply(self, number: int, message: bytes = b"", error: str = "", words: str = "") -> None:
        queue_s = max((lanes.queue_s for lanes, _ in self._opened.values()), default=0.0)
        self._say(_Reply(number, error, words, self._sent.total_bytes, self._received.total_bytes, queue_s), message)

    async def _upload(self, header: bytes, connection: int, address: str, start: int, size: int, resume: bool) -> bytes:
        lanes = self._lanes(Place(connection, address))
        reply = await lanes.upload(pb.Upload.FromString(header), self._outgoing[start : start + size], resume)
        return reply.SerializeToString()

    async def _fetch(self, wanted: bytes, connection: int, address: str, start: int, size: int) -> bytes:
        download, what = self._downloads.get(start), pb.Fetch.FromString(wanted)
        if download is None or download.wanted != what:
            if download is not None:
                download.give_up()
            download = self._downloads[start] = Download(what, lambda _: None, self._incoming[start : start + size])
        await self._lanes(Place(connection, address)).fetch(download)
        if self._downloads.get(start) is download:
            del self._downloads[start]
        header, _ = await asyncio.get_running_loop().run_in_executor(None, download.finish)
        return header.SerializeToString()

    async def _forget(self, _: bytes, start: int) -> bytes:
        download = self._downloads.pop(start, None)
        if download is not None:
            download.give_up()
        return b""

    async def _disconnect(self, _: bytes, connection: int, address: str) -> bytes:
        if not address:
            self._over = max(self._over, connection)
        for place in [place for place in self._opened if place.connection == connection and address in ("", place.address)]:
            lanes, channels = self._opened.pop(place)
            await lanes.close()
            for channel in channels:
                await channel.close()
        return b""

    def _lanes(self, place: Place) -> Lanes:
        if place.connection <= self._over:
            raise WireError("the connection was closed")
        if place not in self._opened:
            channels = [open_channel(place.address, self._tls) for _ in range(self._connections)]
            stubs = [SyncerStub(channel) for channel in channels]
            self._opened[place] = Lanes(stubs, self._name, self._session, self._sent, self._received), channels
        return self._opened[place][0]

    async def look_after(self) -> None:
        while os.getppid() == self._island:
            await asyncio.sleep(LOOK_S)
            for lanes, _ in list(self._opened.values()):
                lanes.drop_if_stuck()
            self._reply(NOBODY)  # we are alive; and the bytes of what is large are counted before it is done


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
    done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
    for work in done:
        work.result()


def main() -> None:
    code = 1
    try:
        asyncio.SelectorEventLoop(CalmSelector()).run_until_complete(_serve(socket.socket(fileno=int(sys.argv[1]))))
        code = 0
    except Exception:
        traceback.print_exc()
    os._exit(code)  # what was under way is of no use to anybody
