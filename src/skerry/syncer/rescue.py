"""Recovers fragments whose newest version is damaged on disk, by asking islands that hold it for the values.

The tape has the checksum of the values, so islands need not be trusted. If no island delivers within `RETURN_S`, the time known
islands have to reconnect, the fragment falls back to an older state. Meanwhile it has no rounds, and training continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch

from skerry.checksum import checksum
from skerry.core import messages as m
from skerry.core.syncer import RETURN_S
from skerry.errors import StoreError
from skerry.syncer.decisions import Decisions
from skerry.syncer.rpc.state_relay import StateRelay
from skerry.syncer.storage.recovery import Fallback
from skerry.syncer.storage.store import RunStore
from skerry.tensors.codecs.codec import byte_tensor

ANSWER_S = 15.0
"""How long an island may take to send a fragment."""
RETRY_S = 1.0
"""Pause between tries."""


class Rescue:
    def __init__(
        self, store: RunStore, decisions: Decisions, relay: StateRelay, serve: Callable[[int], Awaitable[None]]
    ) -> None:
        """`serve` is called with each fragment once it is recovered."""
        self._store, self._decisions, self._relay, self._serve = store, decisions, relay, serve
        self._held: dict[str, tuple[int, ...]] = {}
        self._asked: set[tuple[str, int]] = set()
        self._wake = asyncio.Event()
        self._closing = False
        self._deadline = 0.0
        self.over = asyncio.Event()
        """Set once every fragment is recovered, or the syncer stops."""
        if not store.fallbacks:
            self.over.set()

    def joined(self, learner: str, held: tuple[int, ...]) -> None:
        """A learner connected that holds these versions."""
        if not self.over.is_set():
            self._held[learner] = held
            self._asked -= {(learner, fragment) for fragment in self._store.fallbacks}
            self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self.over.set()

    async def run(self) -> None:
        """Return once every fragment is recovered."""
        self._deadline = self._decisions.clock.now() + RETURN_S
        while self._store.fallbacks and not self._closing:
            self._wake.clear()
            await asyncio.gather(*(self._ask_island(name, turn) for turn, name in enumerate(list(self._held))))
            left = self._deadline - self._decisions.clock.now()
            if self._store.fallbacks and not self._wake.is_set() and left <= 0:
                await self._fall_back()
            elif self._store.fallbacks:
                await _wait(self._wake, max(left, 0.0))
        self.over.set()

    async def _ask_island(self, learner: str, turn: int) -> None:
        """Ask one island for every lost version it holds, one at a time: the relay carries only a few transfers at once. Each
        island starts with another fragment. After one unanswered question the island is not asked again until it rejoins."""
        lost = list(self._store.fallbacks.values())
        for fallback in lost[turn % len(lost) :] + lost[: turn % len(lost)] if lost else []:
            fragment, held = fallback.fragment, self._held.get(learner, ())
            wanted = fallback.public is not None and held[fragment : fragment + 1] == (fallback.version,)
            if wanted and (learner, fragment) not in self._asked and fragment in self._store.fallbacks:
                self._asked.add((learner, fragment))
                asked_at = self._decisions.clock.now()
                await self._ask(learner, fallback)
                if fragment in self._store.fallbacks and self._decisions.clock.now() - asked_at >= ANSWER_S:
                    return

    async def _ask(self, learner: str, lost: Fallback) -> None:
        fragment = lost.fragment
        while fragment in self._store.fallbacks and not self._closing:
            header, data = await self._relay.ask_held(learner, fragment, lost.version, ANSWER_S)
            if header.reason and (not header.again or self._decisions.clock.now() >= self._deadline):
                return  # an island that never delivers must not block the fallback
            if not header.reason and fragment in self._store.fallbacks:
                if checksum(data) != lost.public:
                    return
                values = byte_tensor(data).view(torch.float32)
                try:
                    await self._decisions.tape.between_commits(self._store.take_values, fragment, values, learner)
                except StoreError:
                    pass  # retry unless another island was quicker: the disk may be full only for now
                else:
                    await self._serve(fragment)
                    return
            if fragment in self._store.fallbacks:
                await asyncio.sleep(RETRY_S)

    async def _fall_back(self) -> None:
        for fragment in list(self._store.fallbacks):
            try:
                version = await self._decisions.tape.between_commits(self._store.fall_back, fragment)
            except StoreError:
                await _wait(self._wake, RETRY_S)  # `run` tries again
                return
            self._decisions.dispatch(m.FragmentRecovered(fragment, version))
            await self._serve(fragment)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return
