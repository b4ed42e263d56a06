"""The side process: carries bulk data between shared memory and the syncer. See sidecar.py for why it exists."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from skerry.errors import SkerryError, WireError
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.sidecar import ERRORS, UNNUMBERED, Endpoint, Reply, frame, next_frame
from skerry.learner.transport.stream import Download
from skerry.learner.transport.striped import StripedStreams
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import TLS, open_channel
from skerry.wire.loop import CalmSelector
from skerry.wire.service import SyncerStub

ALIVE_S = 0.25
"""Interval of signs of life to the island."""


class Carrier:
    """Executes the island's orders, one task each."""

    def __init__(self, setup: list[Any], send: Callable[[Reply, bytes], None]) -> None:
        outgoing, incoming, self._name, self._session, self._connections, tls, self._island = setup
        self._tls = TLS(**tls) if tls is not None else None
        self._send = send
        self._outgoing, self._incoming = _mapped(*outgoing), _mapped(*incoming)
        self._sent, self._received = Meter(), Meter()
        self._opened: dict[Endpoint, tuple[StripedStreams, list[Any]]] = {}
        self._downloads: dict[int, Download] = {}
        """Downloads in progress, by their offset in shared memory."""
        self._last_ended = -1
        """The newest connection to the syncer that has ended. Connections are numbered in order, so older ones have too."""
        self._tasks: set[asyncio.Task[None]] = set()

    def execute(self, order: list[Any], message: bytes) -> None:
        """Start an order: its number, its name and its arguments."""
        number, name, *arguments = order
        orders: dict[str, Callable[..., Coroutine[Any, Any, bytes]]]
        orders = {"upload": self._upload, "fetch": self._fetch, "forget": self._forget, "disconnect": self._disconnect}
        task = asyncio.get_running_loop().create_task(self._do(number, orders[name], message, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, number: int, act: Callable[..., Coroutine[Any, Any, bytes]], *arguments: Any) -> None:
        message, error, text = b"", "", ""
        try:
            message = await act(*arguments)
        except (Exception, asyncio.CancelledError) as raised:  # the island must get a reply in any case
            error, text = type(raised).__name__, str(raised) or repr(raised)
            if error not in ERRORS and isinstance(raised, (SkerryError, asyncio.CancelledError)):
                error = WireError.__name__
        self._reply(number, message, error, text)

    def _reply(self, number: int, message: bytes = b"", error: str = "", text: str = "") -> None:
        queue_s = max((streams.queue_s for streams, _ in self._opened.values()), default=0.0)
        self._send(Reply(number, error, text, self._sent.total_bytes, self._received.total_bytes, queue_s), message)

    async def _upload(self, header: bytes, connection: int, address: str, start: int, size: int, resume: bool) -> bytes:
        streams = self._streams(Endpoint(connection, address))
        reply = await streams.upload(pb.Upload.FromString(header), self._outgoing[start : start + size], resume)
        return reply.SerializeToString()

    async def _fetch(self, wanted: bytes, connection: int, address: str, start: int, size: int) -> bytes:
        download, request = self._downloads.get(start), pb.Fetch.FromString(wanted)
        if download is None or download.wanted != request:
            if download is not None:
                download.give_up()
            download = self._downloads[start] = Download(request, lambda _: None, self._incoming[start : start + size])
        await self._streams(Endpoint(connection, address)).fetch(download)
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
            self._last_ended = max(self._last_ended, connection)
        for endpoint in [e for e in self._opened if e.connection == connection and address in ("", e.address)]:
            streams, channels = self._opened.pop(endpoint)
            await streams.close()
            for channel in channels:
                await channel.close()
        return b""

    def _streams(self, endpoint: Endpoint) -> StripedStreams:
        if endpoint.connection <= self._last_ended:
            raise WireError("the connection was closed")
        if endpoint not in self._opened:
            channels = [open_channel(endpoint.address, self._tls) for _ in range(self._connections)]
            stubs = [SyncerStub(channel) for channel in channels]
            streams = StripedStreams(stubs, self._name, self._session, self._sent, self._received)
            self._opened[endpoint] = streams, channels
        return self._opened[endpoint][0]

    async def watch(self) -> None:
        """Until the island is gone: drop stuck streams, and send signs of life with the bytes carried so far."""
        while os.getppid() == self._island:
            await asyncio.sleep(ALIVE_S)
            for streams, _ in list(self._opened.values()):
                streams.drop_if_stuck()
            self._reply(UNNUMBERED)


def _mapped(descriptor: int, size_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, size_bytes))


async def _serve(end: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=end)
    setup, _ = await next_frame(reader)
    carrier = Carrier(setup, lambda reply, message: writer.write(frame(reply, message)))
    writer.write(frame(["ready"]))

    async def listen() -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while (received := await next_frame(reader))[0][1] != "end":
                carrier.execute(*received)

    tasks = [asyncio.ensure_future(work) for work in (listen(), carrier.watch())]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def main() -> None:
    code = 1
    try:
        asyncio.SelectorEventLoop(CalmSelector()).run_until_complete(_serve(socket.socket(fileno=int(sys.argv[1]))))
        code = 0
    except Exception:
        traceback.print_exc()
    os._exit(code)  # without waiting for transfers in flight: nobody needs them now
