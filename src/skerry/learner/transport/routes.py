"""Chooses how bulk data travels: to the syncer or to the fragment's shard, in this process or through the sidecar."""

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
"""After the sidecar has failed for this long, one transfer bypasses it."""
MOST_BYPASSES = 2
"""Give the sidecar up after this many transfers succeeded only without it."""


class Transport(Protocol):
    """Carries one fragment's bytes."""

    async def upload(self, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        """Send a contribution and wait for the reply. `resume` sends only the chunks the peer did not get before."""
        ...

    async def fetch(self, download: Download) -> None:
        """Fetch the missing chunks of a version."""
        ...


class Routes:
    """The routes of one connection to the syncer. Connections to shards may change during its life."""

    def __init__(
        self,
        main: StripedStreams,
        address: str,
        connections: int,
        tls: TLS | None,
        open_streams: Callable[[Sequence[SyncerStub]], StripedStreams],
        sidecar: Callable[[], Sidecar | None] = lambda: None,
    ) -> None:
        """`sidecar` returns the side process, or None if there is none at the moment."""
        self.main = main
        self._address = address
        self._sidecar = sidecar
        self._health = _SidecarHealth()
        self._connection = next(_connections)
        self._closed = False
        self._connections = connections
        self._tls = tls
        self._open_streams = open_streams
        self._of_fragment: tuple[int, ...] = ()
        self._shards: list[tuple[str, StripedStreams | None, list[Any]]] = []
        """Address, streams and channels of each shard."""
        self._closing: set[asyncio.Task[None]] = set()

    def to_send(self, fragment: int, data: memoryview) -> Transport:
        """The transport for these bytes of a fragment. Raises WireError if nobody serves the fragment."""
        streams, sidecar = self._serving(fragment), self._sidecar()
        if sidecar is None or not sidecar.can_send(data):
            return streams
        return _BySidecar(sidecar, streams, self._endpoint(fragment), self._health)

    def to_fetch(self, fragment: int, room: memoryview | None) -> Transport:
        """The transport for a version that arrives in `room`. Raises WireError if nobody serves the fragment."""
        streams, sidecar = self._serving(fragment), self._sidecar()
        if sidecar is None or room is None or not sidecar.can_receive(room):
            return streams
        return _BySidecar(sidecar, streams, self._endpoint(fragment), self._health)

    def _serving(self, fragment: int) -> StripedStreams:
        if self._closed:
            raise WireError("the connection was closed")
        if not self._shards or fragment >= len(self._of_fragment):
            return self.main
        streams = self._shards[self._of_fragment[fragment]][1]
        if streams is None:
            raise WireError(f"nobody serves fragment {fragment} at the moment")
        return streams

    def _endpoint(self, fragment: int) -> Endpoint:
        return Endpoint(self._connection, self.shard_of(fragment) or self._address)

    def shard_of(self, fragment: int) -> str:
        """Address of the fragment's shard. Empty if the syncer serves it itself, or nobody does at the moment."""
        if not self._shards or fragment >= len(self._of_fragment):
            return ""
        return self._shards[self._of_fragment[fragment]][0]

    def place(self, addresses: Sequence[str], of_fragment: Sequence[int]) -> None:
        """Apply the syncer's placement of fragments. Transfers to an address that changed fail and are retried."""
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
        """Recent waiting time of outgoing data, on the slowest route."""
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


class _SidecarHealth:
    """Tells a broken sidecar from a broken link. When the sidecar has failed for a while, one transfer bypasses it; if such
    transfers succeed repeatedly, the sidecar is given up."""

    def __init__(self) -> None:
        self._failing_since: float | None = None
        self._bypasses = 0
        """Transfers that succeeded without the sidecar since it last carried one."""

    def succeeded(self) -> None:
        self._failing_since, self._bypasses = None, 0

    def failed(self) -> None:
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()

    def bypasses_next(self) -> bool:
        """Whether this transfer should bypass the sidecar. The next one may use it again."""
        since = self._failing_since
        if since is None or asyncio.get_running_loop().time() - since < DOUBT_S:
            return False
        self._failing_since = None
        return True

    def bypassed(self, sidecar: Sidecar) -> None:
        """Count a transfer that succeeded without the sidecar."""
        self._bypasses += 1
        if self._bypasses >= MOST_BYPASSES:
            sidecar.give_up("transfers succeed only without it")


class _BySidecar:
    """A transport through the sidecar that falls back to this process's own streams."""

    def __init__(self, sidecar: Sidecar, streams: StripedStreams, endpoint: Endpoint, health: _SidecarHealth) -> None:
        self._sidecar, self._streams, self._endpoint, self._health = sidecar, streams, endpoint, health

    async def upload(self, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        if self._health.bypasses_next():
            reply = await self._streams.upload(header, data, True)
            self._health.bypassed(self._sidecar)
            return reply
        try:
            with self._watching():
                return await self._sidecar.upload(self._endpoint, header, data, resume)
        except Gone:
            return await self._streams.upload(header, data, True)  # resume: the sidecar may have delivered it all

    async def fetch(self, download: Download) -> None:
        assert download.room is not None
        bypass = self._health.bypasses_next()
        if not bypass:
            try:
                with self._watching():
                    await self._sidecar.fetch(self._endpoint, download, download.room)
                    return
            except (TooLarge, Gone):
                pass
        self._sidecar.forget(download.room)
        download.room = None
        await self._streams.fetch(download)
        if bypass:
            self._health.bypassed(self._sidecar)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except (NotAsWanted, Gone):
            raise
        except WireError:
            self._health.failed()
            raise
        self._health.succeeded()
