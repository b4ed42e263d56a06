"""A simulated network of streams between islands, shards and the syncer, in virtual time. Messages are delayed but keep their
order. Streams break, and either end may notice late. Messages can be damaged. A frozen island neither sends nor receives."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from islands import flipped

from skerry.errors import WireError
from skerry.wire import framing as seal
from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import Parcel, pack, unpack
from skerry.wire.service import or_none, parse_description

NOTICED_S = (0.0, 0.0, 0.05, 1.0, 12.0)
"""Delays after which one end of a broken stream may notice."""
KINDS: dict[str, tuple[Any, Any]] = {
    "control": (pb.ToSyncer, pb.ToLearner),
    "bulk": (pb.BulkToSyncer, pb.BulkToLearner),
    "shard": (pb.FromShard, pb.ToShard),
}


class Network:
    def __init__(self, loop: asyncio.AbstractEventLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self.server: Any = None
        """The listening syncer, or None."""
        self.shards: dict[str, Any] = {}
        """Address → the shard that listens there."""
        self.hosts: dict[str, str] = {}
        """Address of the syncer → the island or shard that uses it. Everyone has a different one."""
        self.calls: list[Call] = []
        self.held_until: dict[str, float] = {}
        """Island → when its freeze ends."""
        self.delay_s: dict[str, float] = {}
        """Island → factor by which its link is slower."""
        self.damage = 0.0
        """Probability that a message has a flipped bit."""
        self.on_down: Callable[[str, Message], None] = lambda session, message: None
        """Called with a session and a message to it, when the syncer sends it."""
        self.on_up: Callable[[str, Message], None] = lambda session, message: None
        """Called with a session and a message from it, when it arrives."""
        self.on_shard: Callable[[str, str], None] = lambda shard, kind: None
        """Called with a shard and the kind of a message that it sends or is sent."""

    def delay(self, island: str) -> float:
        return self.chance.choice([0.001, 0.003, 0.003, 0.01, 0.05]) * self.delay_s.get(island, 1.0)

    def perhaps_damaged(self, data: bytes) -> bytes:
        if not self.damage or self.chance.random() >= self.damage:
            return data
        # Half of the time in the last 64 bytes, so that headers are hit as often as chunks.
        bits = 8 * min(len(data), self.chance.choice([len(data), 64]))
        return flipped(data, 8 * len(data) - 1 - self.chance.randrange(bits))

    # ------------------------------------------------------------ in place of gRPC

    def open_channel(self, address: str, tls: object) -> Channel:
        """Open a channel to the syncer or a shard. For a shard, the caller is only known from its hello."""
        return Channel(self, self.hosts.get(address, ""), address)

    def at(self, address: str) -> Any:
        return self.server if address in self.hosts else self.shards.get(address)

    def listen(self, server: Any) -> None:
        self.server = server

    def stop_listening(self, server: Any) -> None:
        if self.server is server:
            self.server = None

    # ------------------------------------------------------------ faults

    def of(self, island: str, method: str | None = None) -> list[Call]:
        return [call for call in self.calls if call.island == island and method in (None, call.method)]

    def gone(self, server: Any) -> None:
        """Break all streams of a syncer or shard that died."""
        self.stop_listening(server)
        self.shards = {address: shard for address, shard in self.shards.items() if shard is not server}
        for call in [call for call in self.calls if call.server is server]:
            call.end_handler()
            call.break_off(self.chance.choice(NOTICED_S), 0.0)


class Channel:
    def __init__(self, net: Network, island: str, address: str) -> None:
        self.net, self.island, self.address = net, island, address
        self._calls: list[Call] = []

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()

    def open(self, method: str) -> Call:
        call = Call(self.net, self.island, method, self.net.at(self.address))
        self._calls.append(call)
        return call


class Stub:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def describe(self, request: pb.DescribeRequest, timeout: float) -> pb.RunDescription | None:
        net = self._channel.net
        await asyncio.sleep(net.delay(self._channel.island))
        if net.server is None:
            raise WireError("unavailable: nobody listens")
        data = net.perhaps_damaged(seal.serialize(await net.server.describe(request, None)))
        return or_none(parse_description)(data)

    def control(self) -> Call:
        return self._channel.open("control")

    def bulk(self) -> Call:
        return self._channel.open("bulk")

    def shard(self) -> Call:
        return self._channel.open("shard")


class _Context:
    def __init__(self, call: Call) -> None:
        self._call = call

    async def write(self, message: Message) -> None:
        await asyncio.sleep(0)
        self._call.pass_on("down", message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise WireError(f"{code.name.lower()}: {details}")


class Call:
    """One stream. The client's end has the interface of a gRPC call."""

    def __init__(self, net: Network, island: str, method: str, server: Any) -> None:
        self.net, self.island, self.method = net, island, method
        self.server = server
        self._up: asyncio.Queue[Any] = asyncio.Queue()
        self._down: asyncio.Queue[Any] = asyncio.Queue()
        self._arrival = {"up": 0.0, "down": 0.0}
        self._session = ""
        self._broken = False
        self._over = False
        """The client's end has noticed that the stream is over."""
        self._handler: asyncio.Task[None] | None = None
        if self.server is None:
            self._over = True
            self._down.put_nowait(WireError("unavailable: nobody listens"))
            return
        net.calls.append(self)
        self._handler = net.loop.create_task(self._serve())

    # ------------------------------------------------------------ the client's end

    async def write(self, message: Message | Parcel[Any]) -> None:
        if self._over:
            raise WireError("unavailable: the stream is over")
        await asyncio.sleep(0)
        if _plain(message).HasField("hello") and self.method != "shard":
            hello = _plain(message).hello
            self.island, self._session = hello.name, hello.session
        self.pass_on("up", message)

    async def read(self) -> Any:
        found = await self._down.get()
        if isinstance(found, WireError):
            self._over = True
            raise found
        return found

    def cancel(self) -> None:
        if not self._over:
            self._down.put_nowait(WireError("cancelled: here"))
            self.break_off(0.0, self.net.chance.choice(NOTICED_S[:4]))

    # ------------------------------------------------------------ the syncer's end

    async def _serve(self) -> None:
        end: Any = grpc.aio.EOF
        try:
            if self.method != "bulk":
                serve = self.server.control if self.method == "control" else self.server.shard
                async with contextlib.aclosing(serve(self._incoming(), None)) as answers:
                    async for message in answers:
                        self.pass_on("down", message)
            else:
                await self.server.bulk(self._incoming(), _Context(self))
        except WireError as error:
            end = error
        finally:
            self._at("down", lambda: None if self._broken else self._down.put_nowait(end))

    async def _incoming(self) -> AsyncIterator[Any]:
        while (message := await self._up.get()) is not grpc.aio.EOF:
            yield message

    def end_handler(self) -> None:
        """End the handler as gRPC does: first the messages end, then the handler is cancelled."""
        self._up.put_nowait(grpc.aio.EOF)
        if self._handler is not None:
            self.net.loop.call_later(self.net.chance.choice([0.0, 0.001]), self._handler.cancel)

    # ------------------------------------------------------------ delivery

    def _at(self, way: str, act: Callable[[], object]) -> None:
        """Run `act` when a message sent now would arrive."""
        now = self.net.loop.time()
        held = self.net.held_until.get(self.island, 0.0)
        # The loop does not keep the order of equal times.
        at = max(now + self.net.delay(self.island), self._arrival[way] + 1e-6, held)
        self._arrival[way] = at
        self.net.loop.call_at(at, act)

    def pass_on(self, way: str, message: Message | Parcel[Any]) -> None:
        if way == "down":
            self.net.on_down(self._session, _plain(message))
        if self.method == "shard":
            self.net.on_shard(self.island, message.WhichOneof("message") or "")
        kind = KINDS[self.method][way == "down"]
        data = self.net.perhaps_damaged(pack(message) if isinstance(message, Parcel) else seal.serialize(message))

        def arrive() -> None:
            if self._broken:
                return
            arrived = or_none(unpack(kind) if self.method == "bulk" else seal.parser(kind))(data)
            if way == "up" and arrived is not None:
                self.net.on_up(self._session, _plain(arrived))
            (self._down if way == "down" else self._up).put_nowait(arrived)

        self._at(way, arrive)

    def break_off(self, island_notices_s: float, syncer_notices_s: float) -> None:
        """Break the stream. Each end notices after its own delay."""
        if self._broken:
            return
        self._broken = True
        if self in self.net.calls:
            self.net.calls.remove(self)
        self.net.loop.call_later(syncer_notices_s, self.end_handler)
        self.net.loop.call_later(island_notices_s, lambda: self._down.put_nowait(WireError("unavailable: it broke")))


def _plain(message: Any) -> Any:
    return message.message if isinstance(message, Parcel) else message
