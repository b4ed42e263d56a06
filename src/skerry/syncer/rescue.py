"""Fragments whose newest version is damaged on disk: islands that have adopted it are asked for its values.

They are known by the checksum on the tape, so nobody has to be trusted. Islands that knew the syncer before are waited for as
long as it takes them to come back; then the fragment goes on from an older state. Until then it has no rounds, and training
goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import torch

from skerry.checksum import checksum
from skerry.clock import Clock
from skerry.core import messages as m
from skerry.core.syncer import RETURN_S, SyncerCore
from skerry.errors import StoreError
from skerry.syncer.rpc.state_relay import Relay
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.tape import Tape
from skerry.tensors.codecs.codec import byte_tensor

ANSWER_S = 60.0
"""How long an island may take to send a fragment."""
RETRY_S = 1.0


class Host(Protocol):
    core: SyncerCore
    clock: Clock

    def dispatch(self, event: m.Event) -> None: ...


class Rescue:
    def __init__(self, store: RunStore, tape: Tape, relay: Relay, host: Host, serve: Callable[[int], None]) -> None:
        """`serve` is called with each fragment once its file is whole again."""
        self._store, self._tape, self._relay, self._host, self._serve = store, tape, relay, host, serve
        self._held: dict[str, tuple[int, ...]] = {}
        self._asked: set[tuple[str, int]] = set()
        self._news = asyncio.Event()
        self.over = asyncio.Event()
        """Every fragment has a whole file."""
        if not store.fallbacks:
            self.over.set()

    def joined(self, name: str, held: tuple[int, ...]) -> None:
        """A learner connected, with these versions."""
        if not self.over.is_set():
            self._held[name] = held
            self._news.set()

    async def run(self) -> None:
        """Until every fragment is served again."""
        deadline = self._host.clock.now() + RETURN_S
        while self._store.fallbacks:
            self._news.clear()
            for fragment in list(self._store.fallbacks):
                await self._ask_islands(fragment)
            left = deadline - self._host.clock.now()
            if self._store.fallbacks and left <= 0:
                await self._fall_back()
            elif self._store.fallbacks:
                await _wait(self._news, left)
        self.over.set()

    async def _ask_islands(self, fragment: int) -> None:
        lost = self._store.fallbacks[fragment]
        for name, held in list(self._held.items()):
            if (name, fragment) in self._asked or lost.public is None or held[fragment : fragment + 1] != (lost.version,):
                continue
            self._asked.add((name, fragment))
            header, data = await self._relay.ask_held(name, fragment, lost.version, ANSWER_S)
            if header.reason or checksum(data) != lost.public:
                continue
            values = byte_tensor(data).view(torch.float32)
            try:
                await self._tape.between_commits(lambda v=values, n=name: self._store.take_bytes(fragment, v, n))  # type: ignore[misc]
            except StoreError:
                await asyncio.sleep(RETRY_S)  # a disk that is full now may not be later
                self._asked.discard((name, fragment))
                continue
            self._serve(fragment)
            return

    async def _fall_back(self) -> None:
        made: dict[int, int] = {}
        try:
            await self._tape.between_commits(lambda: made.update(self._store.fall_back(list(self._store.fallbacks))))
        except StoreError:
            await asyncio.sleep(RETRY_S)
        for fragment, version in made.items():
            self._host.dispatch(m.Recovered(fragment, version))
            self._serve(fragment)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return
