"""Where a learner's bulk data goes: to the syncer itself, or, fragment by fragment, to its shards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from skerry.errors import WireError
from skerry.learner.transport.sidecar import Ferry, Gone, Place
from skerry.learner.transport.stream import Download, NotAsWanted, TooLarge
from skerry.learner.transport.striped import Lanes
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import TLS, open_channel
from skerry.wire.service import SyncerStub

_numbers = itertools.count()

DOUBT_S = 5.0
OFTEN = 2


class _Doubt:
    """Of the process that carries bulk data: it may be the only one for whom the link does not work. When it has failed for a
    while, something goes without it; if that gets through again and again, it is given up."""

    def __init__(self) -> None:
        self._failing_since: float | None = None
        self._without = 0
        """So often something got through without it since it carried anything."""

    def carried(self) -> None:
        self._failing_since, self._without = None, 0

    def failed(self) -> None:
        if self._failing_since is None:
            self._failing_since = asyncio.get_running_loop().time()

    def takes_a_turn(self) -> bool:
        """Whether to do without it this time; next time it may try again."""
        since = self._failing_since
        if since is None or asyncio.get_running_loop().time() - since < DOUBT_S:
            return False
        self._failing_since = None
        return True

    def went_without(self, ferry: Ferry) -> None:
        self._without += 1
        if self._without >= OFTEN:
            ferry.give_up("what it could not carry got through without it")


class Routes:
    """Of one connection to the syncer. Connections to shards come and go while it lasts."""

    def __init__(
        self,
        main: Lanes,
        address: str,
        connections: int,
        tls: TLS | None,
        open_lanes: Callable[[Sequence[SyncerStub]], Lanes],
        ferry: Callable[[], Ferry | None] = lambda: None,
    ) -> None:
        """`ferry` gives the process that carries bulk data, if there is one at that moment."""
        self.main = main
        self._address = address
        self._ferry = ferry
        self._doubt = _Doubt()
        self._number = next(_numbers)
        self._closed = False
        self._connections = connections
        self._tls = tls
        self._open_lanes = open_lanes
        self._of_fragment: tuple[int, ...] = ()
        self._shards: list[tuple[str, Lanes | None, list[Any]]] = []
        """Address, lanes and channels of each."""
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, fragment: int) -> Lanes | None:
        """None while nobody serves it. What is no fragment is the syncer's own."""
        if not self._shards or fragment >= len(self._of_fragment):
            return self.main
        return self._shards[self._of_fragment[fragment]][1]

    def address_of(self, fragment: int) -> str:
        """Empty for the syncer itself, and while nobody serves it."""
        if not self._shards or fragment >= len(self._of_fragment):
            return ""
        return self._shards[self._of_fragment[fragment]][0]

    async def upload(self, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
        """As Lanes.upload, wherever the fragment is served."""
        lanes, ferry = self._served(header.fragment), self._ferry()
        if ferry is None or not ferry.carries(data):
            return await lanes.upload(header, data, resume)
        if self._doubt.takes_a_turn():
            reply = await lanes.upload(header, data, True)
            self._doubt.went_without(ferry)
            return reply
        try:
            with self._doubting():
                return await ferry.upload(self._where(header.fragment), header, data, resume)
        except Gone:
            return await lanes.upload(header, data, True)  # all of it may be there

    async def fetch(self, download: Download) -> None:
        """As Lanes.fetch."""
        lanes, ferry = self._served(download.wanted.fragment), self._ferry()
        if ferry is None or download.room is None or not ferry.takes(download.room):
            await lanes.fetch(download)
            return
        without = self._doubt.takes_a_turn()
        if not without:
            try:
                with self._doubting():
                    await ferry.fetch(self._where(download.wanted.fragment), download, download.room)
                    return
            except (TooLarge, Gone):
                pass
        ferry.forget(download.room)
        download.room = None
        await lanes.fetch(download)
        if without:
            self._doubt.went_without(ferry)

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

    def _served(self, fragment: int) -> Lanes:
        if self._closed:
            raise WireError("the connection was closed")
        lanes = self.of(fragment)
        if lanes is None:
            raise WireError(f"nobody serves fragment {fragment} just now")
        return lanes

    def _where(self, fragment: int) -> Place:
        return Place(self._number, self.address_of(fragment) or self._address)

    def place(self, addresses: Sequence[str], of_fragment: Sequence[int]) -> None:
        """The syncer says where fragments are. What was under way to a place that has changed fails, and is tried again."""
        before, self._shards = self._shards, []
        for number, address in enumerate(addresses):
            old = before[number] if number < len(before) else ("", None, [])
            if old[0] == address:
                self._shards.append(old)
                continue
            self._close(old)
            channels = [open_channel(address, self._tls) for _ in range(self._connections)] if address else []
            lanes = self._open_lanes([SyncerStub(channel) for channel in channels]) if address else None
            self._shards.append((address, lanes, channels))
        for old in before[len(addresses) :]:
            self._close(old)
        self._of_fragment = tuple(of_fragment)

    @property
    def _all(self) -> list[Lanes]:
        return [self.main, *(lanes for _, lanes, _ in self._shards if lanes is not None)]

    def drop_if_stuck(self) -> None:
        for lanes in self._all:
            lanes.drop_if_stuck()

    @property
    def queue_s(self) -> float:
        """How long what is to be sent waited for its turn, of late, where that was longest."""
        ferry = self._ferry()
        return max(*(lanes.queue_s for lanes in self._all), ferry.queue_s if ferry is not None else 0.0)

    def _close(self, shard: tuple[str, Lanes | None, list[Any]]) -> None:
        address, lanes, channels = shard
        ferry = self._ferry()
        if ferry is not None and address:
            ferry.disconnect(self._number, address)

        async def close() -> None:
            if lanes is not None:
                await lanes.close()
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
        ferry = self._ferry()
        if ferry is not None:
            ferry.disconnect(self._number)
        await self.main.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
