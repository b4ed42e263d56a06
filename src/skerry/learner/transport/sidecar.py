"""A side process that carries contributions to the syncer and versions back, from and into memory that both processes share.

Sending and receiving much data keeps the GIL busy, and beside a GPU the training loop needs it to keep the GPU
fed. The side process does what it is told and decides nothing: what to send, what to ask for, and what to do when that fails
stays with the island. It exits when the island's end of the socket between them is closed.

This is the island's end; carrier.py is the process. A message on the socket is a JSON list and some bytes, after the sizes of
both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from skerry.errors import WireError
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.stream import Download, NotAsWanted, TooLarge
from skerry.wire import skerry_pb2 as pb
from skerry.wire.calls import TryAgain
from skerry.wire.channel import TLS

log = logging.getLogger("skerry.learner")

_SIZES = struct.Struct("<II")
SILENT_LOOKS = 10
"""Consecutive looks at the process that found no sign of life."""
LOOKS_APART_S = 2.0
"""After a longer time between two looks it was the island that stood still, and the process perhaps as well."""
EXIT_S = 5.0
POLL_S = 0.01
_PROGRAM = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    # Signals sent to all processes of a job are meant for the island, which then closes its end.
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from skerry.learner.transport.carrier import main
main()
"""
"""Imports are resolved as in the island."""
NOBODY = -1
"""The number of a message that nobody waits for."""


class SharedMemory(Protocol):
    """Memory of the island that the side process may read and write."""

    @property
    def descriptor(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def offset_of(self, data: memoryview) -> int | None:
        """Where in it that is; None if it is elsewhere."""
        ...


class Gone(WireError):
    """There is no such process, or no longer."""


class Endpoint(NamedTuple):
    """Where bulk data goes: an address, for as long as one connection to the syncer lasts."""

    connection: int
    address: str


class Reply(NamedTuple):
    number: int
    error: str
    """The exception's class, if it did not go well."""
    words: str
    sent_bytes: int
    """Since the process started, like the next."""
    received_bytes: int
    queue_s: float


ERRORS = {kind.__name__: kind for kind in (WireError, NotAsWanted, TooLarge, TryAgain)}


def frame(message: Sequence[Any], data: bytes = b"") -> bytes:
    words = json.dumps(message).encode()
    return b"".join((_SIZES.pack(len(words), len(data)), words, data))


async def next_frame(reader: asyncio.StreamReader) -> tuple[list[Any], bytes]:
    words, data = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    return json.loads(await reader.readexactly(words)), await reader.readexactly(data)


class Sidecar:
    """The side process, as the island sees it. All of it on one event loop."""

    def __init__(self, outgoing: SharedMemory, incoming: SharedMemory, sent: Meter, received: Meter) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._sent, self._received = sent, received
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[bytes], object]] = {}
        """With the shared memory in use: it must not change until the process is done with it, even if the caller gave up."""
        self._alive = True
        """It has said something since the last look."""
        self._looked_at, self._silent_looks = 0.0, 0
        self._closing = False
        self._counted = (0, 0)
        self.queue_s = 0.0
        """How long outgoing data waited for its turn, lately."""
        self.running = False

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
        self._writer.write(frame([outgoing, incoming, name, session, connections, certificates, os.getpid()]))
        try:
            await next_frame(reader)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Gone(f"the process that was to carry bulk data did not start: {error}") from None
        self.running = True
        self._listener = asyncio.get_running_loop().create_task(self._listen(reader))

    # ------------------------------------------------------------ orders

    def can_send(self, data: memoryview) -> bool:
        return self.running and self._outgoing.offset_of(data) is not None

    def can_receive(self, room: memoryview) -> bool:
        return self.running and self._incoming.offset_of(room) is not None

    async def upload(self, endpoint: Endpoint, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        """As StripedStreams.upload, for data in shared memory."""
        with self._sent.busy():
            start = self._outgoing.offset_of(data)
            reply = await self._ask(data, header.SerializeToString(), "upload", *endpoint, start, len(data), resume)
        return pb.UploadReply.FromString(reply)

    async def fetch(self, endpoint: Endpoint, download: Download, room: memoryview) -> None:
        """As StripedStreams.fetch, into shared memory. If it fails, what has arrived stays there until it is forgotten."""
        with self._received.busy():
            start = self._incoming.offset_of(room)
            reply = await self._ask(room, download.wanted.SerializeToString(), "fetch", *endpoint, start, len(room))
        header = pb.Fetched.FromString(reply)
        download.arrived(header, room[: header.size_bytes])

    def forget(self, room: memoryview) -> None:
        """What has arrived in it is no longer of use."""
        if self.running:
            self._tell(room, b"", "forget", self._incoming.offset_of(room))

    def disconnect(self, connection: int, address: str = "") -> None:
        """Transfers of this connection fail, at one address or at all of them, and it is not used any more."""
        if self.running:
            self._tell(None, b"", "disconnect", connection, address)

    async def _ask(self, held: object, message: bytes, *words: Any) -> bytes:
        if not self.running:
            raise Gone("the process that carries bulk data has exited")
        return await self._tell(held, message, *words)

    def _tell(self, held: object, message: bytes, *words: Any) -> asyncio.Future[bytes]:
        assert self._writer is not None
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply, held
        self._writer.write(frame((number, *words), message))
        return reply

    # ------------------------------------------------------------ replies

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self._hear(*await next_frame(reader))
        self._exited()

    def _hear(self, words: list[Any], message: bytes) -> None:
        reply = Reply(*words)
        self._alive = True
        self._count(reply)
        if reply.number == NOBODY:
            return
        if reply.error and reply.error not in ERRORS:
            # Not a fault of the link, which would be there without the process as well. Whoever waits hears of it once the
            # process has exited: until then it may write to the shared memory.
            self.give_up(f"{reply.error}: {reply.words}")
            return
        future, _ = self._waiting.pop(reply.number, (None, None))
        if future is None or future.done():
            return
        if reply.error:
            future.set_exception(ERRORS[reply.error](reply.words))
            future.exception()  # nobody may be waiting
        else:
            future.set_result(message)

    def _count(self, reply: Reply) -> None:
        self.queue_s = reply.queue_s
        before, self._counted = self._counted, (reply.sent_bytes, reply.received_bytes)
        for meter, kind, was, now in zip(
            (self._sent, self._received), ("contributions", "versions"), before, self._counted, strict=True
        ):
            if now > was:
                meter.moved(now - was, kind)

    # ------------------------------------------------------------ its life

    def check_alive(self) -> None:
        """Call once a second or so. The process says something more often than that; if it does not, its orders will not be
        carried out."""
        if not self.running or self._process is None:
            return
        now = asyncio.get_running_loop().time()
        stood_still, self._looked_at = now - self._looked_at > LOOKS_APART_S, now
        if self._alive:
            self._silent_looks = 0
        elif not stood_still:
            self._silent_looks += 1
        self._alive = False
        if self._process.poll() is not None:
            # Its end of the socket may still be open, in a process that was forked here just when it was started.
            self._exited()
        elif self._silent_looks >= SILENT_LOOKS:
            self.give_up("it has gone silent")

    def give_up(self, why: str) -> None:
        """The island is better off without it."""
        if self.running and self._process is not None:
            log.warning("the process that carries bulk data is ended: %s", why)
            self._process.kill()

    def _exited(self) -> None:
        if self.running and not self._closing:
            log.warning("the process that carries bulk data has exited; the training process does that now")
        self.running = False
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(Gone("the process that carries bulk data has exited"))
                future.exception()  # nobody may be waiting

    async def close(self) -> None:
        self._closing = True
        if self._writer is not None:
            # Closing may not be enough: a process that was forked here has the socket as well.
            self._writer.write(frame((NOBODY, "end")))
            self._writer.close()
        if self._listener is not None:
            self._listener.cancel()
        self._exited()
        process, loop = self._process, asyncio.get_running_loop()
        if process is not None:
            # Polled, not awaited in a thread: while the interpreter exits there are no more threads to be had.
            deadline = loop.time() + EXIT_S
            while process.poll() is None and loop.time() < deadline:
                await asyncio.sleep(POLL_S)
            process.kill()
            while process.poll() is None:
                await asyncio.sleep(POLL_S)
