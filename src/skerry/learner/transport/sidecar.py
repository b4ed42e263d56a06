"""A side process that carries contributions to the syncer and versions back, through memory shared with the island.

Bulk transfers hold the GIL, which the training loop needs to keep a GPU busy. The side process only executes orders: the island
decides what to send, what to fetch, and what to do when a transfer fails. The process exits when the island closes its end of
the socket between them.

This is the island's end; carrier.py is the process. A frame on the socket has the sizes of two parts, then a JSON list, then
bytes.
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
"""Consecutive checks without a sign of life after which the process is killed."""
LOOKS_APART_S = 2.0
"""A check this late does not count: the island was suspended, and perhaps the process too."""
EXIT_S = 5.0
"""How long the process may take to exit before it is killed."""
POLL_S = 0.01
_PROGRAM = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    # Signals to the whole process group are meant for the island, which then closes its end of the socket.
    signal.signal(getattr(signal, name), signal.SIG_IGN)
sys.path[:] = sys.argv[2:]
from skerry.learner.transport.carrier import main
main()
"""
"""The process's program. It uses the island's import path."""
UNNUMBERED = -1
"""The number of a message that needs no reply."""


class SharedMemory(Protocol):
    """Memory that the island shares with the side process."""

    @property
    def descriptor(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def offset_of(self, data: memoryview) -> int | None:
        """Offset of `data` in this memory; None if it is elsewhere."""
        ...


class Gone(WireError):
    """The side process does not run."""


class Endpoint(NamedTuple):
    """An address, for the life of one connection to the syncer."""

    connection: int
    address: str


class Reply(NamedTuple):
    """The JSON part of a frame from the side process."""

    number: int
    """Number of the order, or UNNUMBERED for a sign of life."""
    error: str
    """Class name of the exception if the order failed, else empty."""
    text: str
    """Message of the exception."""
    sent_bytes: int
    """Bytes sent since the process started."""
    received_bytes: int
    """Bytes received since the process started."""
    queue_s: float


ERRORS = {kind.__name__: kind for kind in (WireError, NotAsWanted, TooLarge, TryAgain)}


def frame(message: Sequence[Any], data: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return b"".join((_SIZES.pack(len(text), len(data)), text, data))


async def next_frame(reader: asyncio.StreamReader) -> tuple[list[Any], bytes]:
    text_size, data_size = _SIZES.unpack(await reader.readexactly(_SIZES.size))
    return json.loads(await reader.readexactly(text_size)), await reader.readexactly(data_size)


class Sidecar:
    """The island's handle to the side process. Use it on one event loop only."""

    def __init__(self, outgoing: SharedMemory, incoming: SharedMemory, sent: Meter, received: Meter) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._sent, self._received = sent, received
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[bytes], object]] = {}
        """Orders without a reply, each with the shared memory it uses: kept until the process is done with it, even if the
        caller has given up."""
        self._alive = True
        """The process has sent something since the last check."""
        self._looked_at, self._silent_looks = 0.0, 0
        self._closing = False
        self._counted = (0, 0)
        self.queue_s = 0.0
        """Recent waiting time of outgoing data in the process."""
        self.running = False

    async def start(self, name: str, session: str, connections: int, tls: TLS | None) -> None:
        """Start the process. Raises OSError or WireError."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise Gone("no Python interpreter to run the bulk transfer process")
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
            raise Gone(f"the bulk transfer process did not start: {error}") from None
        self.running = True
        self._listener = asyncio.get_running_loop().create_task(self._listen(reader))

    # ------------------------------------------------------------ orders

    def can_send(self, data: memoryview) -> bool:
        return self.running and self._outgoing.offset_of(data) is not None

    def can_receive(self, room: memoryview) -> bool:
        return self.running and self._incoming.offset_of(room) is not None

    async def upload(self, endpoint: Endpoint, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        """Like StripedStreams.upload, for data in shared memory."""
        with self._sent.busy():
            start = self._outgoing.offset_of(data)
            reply = await self._ask(data, header.SerializeToString(), "upload", *endpoint, start, len(data), resume)
        return pb.UploadReply.FromString(reply)

    async def fetch(self, endpoint: Endpoint, download: Download, room: memoryview) -> None:
        """Like StripedStreams.fetch, into shared memory. After a failure the next attempt continues where it stopped, unless
        `forget` was called."""
        with self._received.busy():
            start = self._incoming.offset_of(room)
            reply = await self._ask(room, download.wanted.SerializeToString(), "fetch", *endpoint, start, len(room))
        header = pb.Fetched.FromString(reply)
        download.arrived(header, room[: header.size_bytes])

    def forget(self, room: memoryview) -> None:
        """Drop the download in progress in this memory."""
        if self.running:
            self._tell(room, b"", "forget", self._incoming.offset_of(room))

    def disconnect(self, connection: int, address: str = "") -> None:
        """Close the streams of a connection, to one address or to all. Their transfers fail."""
        if self.running:
            self._tell(None, b"", "disconnect", connection, address)

    async def _ask(self, held: object, message: bytes, *order: Any) -> bytes:
        if not self.running:
            raise Gone("the bulk transfer process has exited")
        return await self._tell(held, message, *order)

    def _tell(self, held: object, message: bytes, *order: Any) -> asyncio.Future[bytes]:
        assert self._writer is not None
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply, held
        self._writer.write(frame((number, *order), message))
        return reply

    # ------------------------------------------------------------ replies

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                self._hear(*await next_frame(reader))
        self._exited()

    def _hear(self, fields: list[Any], message: bytes) -> None:
        reply = Reply(*fields)
        self._alive = True
        self._count(reply)
        if reply.number == UNNUMBERED:
            return
        if reply.error and reply.error not in ERRORS:
            # A bug in the process, not a fault of the link. The order fails when the process has exited; until then it may
            # write to the shared memory.
            self.give_up(f"{reply.error}: {reply.text}")
            return
        future, _ = self._waiting.pop(reply.number, (None, None))
        if future is None or future.done():
            return
        if reply.error:
            future.set_exception(ERRORS[reply.error](reply.text))
            future.exception()  # marks it retrieved, in case nobody waits
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

    # ------------------------------------------------------------ the process

    def check_alive(self) -> None:
        """Kill the process if it has been silent for SILENT_LOOKS checks. Call it about once a second; a healthy process sends
        something more often."""
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
            # The socket alone does not tell: a process forked from the island may still hold the other end open.
            self._exited()
        elif self._silent_looks >= SILENT_LOOKS:
            self.give_up("it has gone silent")

    def give_up(self, why: str) -> None:
        """Kill the process. Transfers fall back to the training process."""
        if self.running and self._process is not None:
            log.warning("killing the bulk transfer process: %s", why)
            self._process.kill()

    def _exited(self) -> None:
        if self.running and not self._closing:
            log.warning("the bulk transfer process has exited; the training process takes over")
        self.running = False
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(Gone("the bulk transfer process has exited"))
                future.exception()  # marks it retrieved, in case nobody waits

    async def close(self) -> None:
        self._closing = True
        if self._writer is not None:
            # Closing may not be enough: a process forked from the island has the socket as well.
            self._writer.write(frame((UNNUMBERED, "end")))
            self._writer.close()
        if self._listener is not None:
            self._listener.cancel()
        self._exited()
        process, loop = self._process, asyncio.get_running_loop()
        if process is not None:
            # Polled, because no thread can be started to wait for it while the interpreter exits.
            deadline = loop.time() + EXIT_S
            while process.poll() is None and loop.time() < deadline:
                await asyncio.sleep(POLL_S)
            process.kill()
            while process.poll() is None:
                await asyncio.sleep(POLL_S)
