"""Where a learner's bulk data goes: to the syncer itself, or, fragment by fragment, to its shards; in this process, or by the
sidecar if there is one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from skerry.errors import WireError
from skerry.learner.transport.sidecar import Endpoint, Gone, Sidecar
from skerry.learner.transport.stream import Download, NotAsWanted, TooLarge
from skerry.learner.transport.striped import StripedStreams
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import TLS, open_channel
from skerry.wire.service import SyncerStub

_connections = itertools.count()

DOUBT_S = 5.0
"""After the sidecar has failed for this long, something is tried without it."""
ENOUGH = 2
"""After this many transfers that only got through without the sidecar, it is given up."""


class Transport(Protocol):
    """What carries one fragment's bytes."""

    async def upload(self, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        """Send a contribution and wait for the reply; with `resume`, only what is missing of one sent before."""
        ...

    async def fetch(self, download: Download) -> None:
        """Get what is missing of a version."""
        ...


class Routes:
    """The routes of one connection to the syncer. Connections to shards come and go while it lasts."""

    def __init__(
        self,
        main: StripedStreams,
        address: str,
        connections: int,
        tls: TLS | None,
        open_streams: Callable[[Sequence[SyncerStub]], StripedStreams],
        sidecar: Callable[[], Sidecar | None] = lambda: None,
    ) -> None:
        """`sidecar` returns the side process, if there is one at that moment."""
        self.main = main
        self._address = address
        self._sidecar = sidecar
        self._doubt = _Doubt()
        self._connection = next(_connections)
        self._closed = False
        self._connections = connections
        self._tls = tls
        self._open_streams = open_streams
        self._of_fragment: tuple[int, ...] = ()
        self._shards: list[tuple[str, StripedStreams | None, list[Any]]] = []
        """Address, streams and channels of each."""
        self._closing: set[asyncio.Task[None]] = set()

    def to_send(self, fragment: int, data: memoryview) -> Transport:
        """What carries these bytes to wherever the fragment is served. Raises WireError."""
        streams, sidecar = self._serving(fragment), self._sidecar()
        if sidecar is None or not sidecar.can_send(data):
            return streams
        return _BySidecar(sidecar, streams, self._endpoint(fragment), self._doubt)

    def to_fetch(self, fragment: int, room: memoryview | None) -> Transport:
        """What brings a version of the fragment, into that room if there is one. Raises WireError."""
        streams, sidecar = self._serving(fragment), self._sidecar()
        if sidecar is None or room is None or not sidecar.can_receive(room):
            return streams
        return _BySidecar(sidecar, streams, self._endpoint(fragment), self._doubt)

    def _serving(self, fragment: int) -> StripedStreams:
        if self._closed:
            raise WireError("the connection was closed")
        if not self._shards or fragment >= len(self._of_fragment):
            return self.main
        streams = self._shards[self._of_fragment[fragment]][1]
        if streams is None:
            raise WireError(f"nobody serves fragment {fragment} just now")
        return streams

    def _endpoint(self, fragment: int) -> Endpoint:
        return Endpoint(self._connection, self.shard_of(fragment) or self._address)

    def shard_of(self, fragment: int) -> str:
        """The address of its shard; empty for the syncer itself, and while nobody serves it."""
        if not self._shards or fragment >= len(self._of_fragment):
            return ""
        return self._shards[self._of_fragment[fragment]][0]

    def place(self, addresses: Sequence[str], of_fragment: Sequence[int]) -> None:
        """The syncer says where fragments are. Transfers to an address that has changed fail, and are tried again."""
        before, self._shards = self._shards, []
        for number, address in enumerate(addresses):
            old = before[number] if number < len(before) else ("", None, [])
            if old[0] == address:
                self._shards.append(old)
                continue
            self._close(old)
            channels = [open_channel(address, self._tls) for _ in range(self._connections)] if address else []
            streams = self._open_streams([SyncerStub(channel) for channel in channels]) if address else None
            self._shards.append((address, streams, channels))
        for old in before[len(addresses) :]:
            self._close(old)
        self._of_fragment = tuple(of_fragment)

    @property
    def _all(self) -> list[StripedStreams]:
        return [self.main, *(streams for _, streams, _ in self._shards if streams is not None)]

    def drop_if_stuck(self) -> None:
        for streams in self._all:
            streams.drop_if_stuck()

    @property
    def queue_s(self) -> float:
        """How long outgoing data waited for its turn lately, where that was longest."""
        sidecar = self._sidecar()
        return max(*(streams.queue_s for streams in self._all), sidecar.queue_s if sidecar is not None else 0.0)

    def _close(self, shard: tuple[str, StripedStreams | None, list[Any]]) -> None:
        address, streams, channels = shard
        sidecar = self._sidecar()
        if sidecar is not None and address:
            sidecar.disconnect(self._connection, address)

        async def close() -> None:
            if streams is not None:
                await streams.close()
            for channel in channels:
                await channel.close()

        task = asyncio.get_running_loop().create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self._closed = True
        for shard in self._shards:
            self._close(shard)
        self._shards = []
        sidecar = self._sidecar()
        if sidecar is not None:
            sidecar.disconnect(self._connection)
        await self.main.close()
        await asyncio.gather(*self._closing, return_exceptions=True)


class _Doubt:
    """The sidecar may be the only one for whom the link does not work. When it has failed for a while, a transfer goes without
    it; if that succeeds again and again, it is given up."""

    def __init__(self) -> None:
        self._failing_since: float | None = None
        self._without = 0
        """Transfers that got through without it since it last carried anything."""

    def carried(self) -> None:
        self._failing_since, self._without = None, 0

    def failed(self) -> None:
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()

    def skips_one(self) -> bool:
        """Whether to do without it this time; next time it may try again."""
        since = self._failing_since
        if since is None or asyncio.get_running_loop().time() - since < DOUBT_S:
            return False
        self._failing_since = None
        return True

    def went_without(self, sidecar: Sidecar) -> None:
        self._without += 1
        if self._without >= ENOUGH:
            sidecar.give_up("what it could not carry got through without it")


class _BySidecar:
    def __init__(self, sidecar: Sidecar, streams: StripedStreams, endpoint: Endpoint, doubt: _Doubt) -> None:
        self._sidecar, self._streams, self._endpoint, self._doubt = sidecar, streams, endpoint, doubt

    async def upload(self, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        if self._doubt.skips_one():
            reply = await self._streams.upload(header, data, True)
            self._doubt.went_without(self._sidecar)
            return reply
        try:
            with self._doubting():
                return await self._sidecar.upload(self._endpoint, header, data, resume)
        except Gone:
            return await self._streams.upload(header, data, True)  # all of it may have arrived

    async def fetch(self, download: Download) -> None:
        assert download.room is not None
        without = self._doubt.skips_one()
        if not without:
            try:
                with self._doubting():
                    await self._sidecar.fetch(self._endpoint, download, download.room)
                    return
            except (TooLarge, Gone):
                pass
        self._sidecar.forget(download.room)
        download.room = None
        await self._streams.fetch(download)
        if without:
            self._doubt.went_without(self._sidecar)

    @contextlib.contextmanager
    def _doubting(self) -> Iterator[None]:
        try:
            yield
        except (NotAsWanted, Gone):
            raise
        except WireError:
            self._doubt.failed()
            raise
        self._doubt.carried()
