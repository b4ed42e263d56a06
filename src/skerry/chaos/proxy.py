"""A proxy between islands and syncer on one machine that can degrade each island's link: one forwarded port per island.

Bytes are forwarded unread, so TLS works. Each direction of a connection buffers at most BUFFER_BYTES; a full buffer puts
back-pressure on the sender. All connections of an island share its link's rate.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skerry.chaos.bucket import TokenBucket
from skerry.errors import WireError

PIECE_BYTES = 16 << 10
BUFFER_BYTES = 4 << 20
LISTEN_AGAIN_S = 0.1
CALL_S = 10.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with a zero timeout: closing sends a reset and drops unsent data."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Condition:
    """Impairments of one direction of a link."""

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    corrupt_every_bytes: float | None = None


@dataclass(frozen=True)
class LinkState:
    cut: bool = False
    """Connections are reset and new ones refused."""
    drop: bool = False
    """Bytes are discarded. When this ends, the connections are reset."""
    up: Condition = Condition()
    down: Condition = Condition()


class Link:
    """One island's link to the syncer. All methods run on the proxy's event loop."""

    def __init__(self, name: str, target: tuple[str, int], seed: int) -> None:
        self.name = name
        self.port = 0
        self.state = LinkState()
        self.changed = asyncio.Event()
        """Set, and replaced by a new event, at every change of the state, so that waiters recompute."""
        self._target = target
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._buckets = {"up": TokenBucket(), "down": TokenBucket()}
        self._damage = {way: _Damage(random.Random(f"{seed}/{name}/{way}")) for way in ("up", "down")}

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def become(self, state: LinkState) -> None:
        before, self.state = self.state, state
        old, self.changed = self.changed, asyncio.Event()
        old.set()
        if state.cut and self._server is not None:
            self._server.close()
            self._server = None
        if (state.cut and not before.cut) or (before.drop and not state.drop):
            self.reset()
        while not self.state.cut and self._server is None:
            try:
                await self.listen()
            except OSError:  # another process took the port; retry
                await asyncio.sleep(LISTEN_AGAIN_S)

    def reset(self) -> None:
        for writer in list(self._open):
            _reset(writer)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._open.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            if self.state.drop:
                await self._swallow(reader)
                return
            answers, onward = await asyncio.open_connection(*self._target)
            self._open.add(onward)
            if self.state.cut:
                return
            await asyncio.gather(self._carry("up", reader, onward), self._carry("down", answers, writer))
            writer.close()
            onward.close()
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone or the proxy is closing; the reset below tells the other side
        finally:
            self._serving.discard(task)
            for one in (writer, onward):
                if one is not None:
                    self._open.discard(one)
                    if not one.is_closing():
                        _reset(one)

    async def _swallow(self, reader: asyncio.StreamReader) -> None:
        while await reader.read(PIECE_BYTES):
            pass

    async def _carry(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction of a connection until its sender is done. Raises if either side breaks."""
        pipe = _Pipe()
        sending = asyncio.ensure_future(self._send(way, pipe, writer))
        try:
            while data := await reader.read(PIECE_BYTES):
                if self.state.drop:
                    continue
                await pipe.put(asyncio.get_running_loop().time(), self._damage[way].apply(data, self._condition(way)))
                if sending.done():
                    break
            await pipe.put(asyncio.get_running_loop().time(), b"")
            await sending
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(self, way: str, pipe: _Pipe, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                since, data = await pipe.get()
                await self._wait_for_turn(way, since, len(data))
                if not data:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                if not self.state.drop:
                    writer.write(data)
                    await writer.drain()
        finally:
            pipe.give_up()

    async def _wait_for_turn(self, way: str, since: float, size_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            condition, changed = self._condition(way), self.changed
            wait_s = since + condition.delay_s - loop.time()
            if wait_s <= 0:
                if condition.bytes_per_s is None:
                    return
                wait_s = self._buckets[way].wait_s(size_bytes, condition.bytes_per_s, loop.time())
                if wait_s <= 0:
                    return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), wait_s)

    def _condition(self, way: str) -> Condition:
        return self.state.up if way == "up" else self.state.down


class _Pipe:
    """FIFO between reader and writer of one direction; each piece carries its arrival time."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0
        self._moved = asyncio.Event()
        self._abandoned = False

    async def put(self, since: float, data: bytes) -> None:
        while self._held_bytes >= BUFFER_BYTES and not self._abandoned:
            self._moved.clear()
            await self._moved.wait()
        self._pieces.append((since, data))
        self._held_bytes += len(data)
        self._moved.set()

    async def get(self) -> tuple[float, bytes]:
        while not self._pieces:
            self._moved.clear()
            await self._moved.wait()
        since, data = self._pieces.popleft()
        self._held_bytes -= len(data)
        self._moved.set()
        return since, data

    def give_up(self) -> None:
        """The writer is gone: unblock the reader."""
        self._abandoned = True
        self._moved.set()


class _Damage:
    """Flips one random bit per `corrupt_every_bytes` on average."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._left: int | None = None

    def apply(self, data: bytes, condition: Condition) -> bytes:
        every = condition.corrupt_every_bytes
        if every is None:
            self._left = None
            return data
        damaged = bytearray(data)
        at = self._next(every) if self._left is None else self._left
        while at < len(damaged):
            damaged[at] ^= 1 << self._chance.randrange(8)
            at += 1 + self._next(every)
        self._left = at - len(damaged)
        return bytes(damaged)

    def _next(self, every: float) -> int:
        return int(self._chance.expovariate(1 / every))


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


class LinkProxy:
    """The links of all islands, served by an event loop in its own thread."""

    def __init__(self, names: Sequence[str], target: tuple[str, int], seed: int = 0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="skerry-proxy", daemon=True)
        self._thread.start()
        try:
            self._links = self._do(_listen(names, target, seed))
        except OSError as error:
            raise WireError(f"the proxy cannot listen on 127.0.0.1: {error.strerror}") from error

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self._links[name].port}"

    def set(self, name: str, state: LinkState) -> None:
        """Apply the state. A healed link may start listening again shortly after this returns."""
        link = self._links[name]

        async def become() -> None:
            task = asyncio.ensure_future(link.become(state))
            await asyncio.wait([task], timeout=CALL_S / 2)

        self._do(become())

    def close(self) -> None:
        async def close_all() -> None:
            for link in self._links.values():
                await link.close()

        with contextlib.suppress(concurrent.futures.TimeoutError):  # the daemon thread ends with the process
            self._do(close_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)


async def _listen(names: Sequence[str], target: tuple[str, int], seed: int) -> dict[str, Link]:
    links = {name: Link(name, target, seed) for name in names}
    for link in links.values():
        await link.listen()
    return links
