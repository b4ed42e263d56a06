"""Makes versions: computes merges, writes their files, commits them, publishes the result. The core decides when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from skerry.core import messages as m
from skerry.core.merge import FragmentState, merge
from skerry.errors import SkerryError
from skerry.syncer.bulk import Bulk, Gathered
from skerry.syncer.good_copy import GoodCopies
from skerry.syncer.published import Published
from skerry.syncer.store import RunStore, Written
from skerry.syncer.tape import Tape

MERGERS = 4
"""Merges computed and written at a time: writing waits for the disk more than it computes."""

T = TypeVar("T")


class Merger:
    def __init__(self, store: RunStore, states: list[FragmentState], bulk: Bulk, tape: Tape) -> None:
        self._store = store
        self._layout = store.identity.layout
        self._radial = store.identity.sync.merge == "radial"
        self._states = states
        self._bulk = bulk
        self._tape = tape
        self._good = GoodCopies(store.folder)
        self._pool = ThreadPoolExecutor(MERGERS, thread_name_prefix="skerry-merge")

    async def merge(self, order: m.Merge) -> m.Event:
        names = [share.name for share in order.shares]
        gathered = self._bulk.gathered(order.fragment, names)
        try:
            state, published, written = await self._in_pool(self._compute, order, gathered)
            await self._tape.commit(written)
        except SkerryError as error:
            return m.StoreFailed(order.fragment, str(error))
        self._states[order.fragment] = state
        self._bulk.publish(order.fragment, published)
        self._bulk.merged(order.fragment, names)
        return m.Stored(order.fragment, order.version)

    def _compute(self, order: m.Merge, gathered: list[Gathered]) -> tuple[FragmentState, Published, Written]:
        """A fragment has one merge at a time, so its state stands still meanwhile."""
        before = self._states[order.fragment]
        after = merge(
            self._layout,
            self._layout.fragments[order.fragment],
            before,
            [one.delta for one in gathered],
            [share.weight for share in order.shares],
            radial=self._radial,
            lr=order.outer_lr,
            momentum=order.outer_momentum,
            presence=order.presence,
            norms=[one.norms for one in gathered],
        )
        state, published = self._bulk.encode(order.fragment, order.version, before, after)
        return state, published, self._store.write(order, state)

    async def keep_good(self, step: int) -> m.Event:
        try:
            await self._in_pool(self._good.keep, step, [state.values for state in self._states])
        except SkerryError as error:
            return m.GoodKept(step, str(error))
        return m.GoodKept(step)

    async def restore(self, order: m.Restore) -> m.Event:
        """A version made of the good copy, stored and announced as any other; its momentum starts anew."""
        blank = m.Merge(order.fragment, order.version, order.step, (), 0.0, 0.0, 0.0)
        try:
            values = await self._in_pool(self._good.read, order.good_step, order.fragment)
            # Whole: a difference that could not express all of it would leave learners with some of what went wrong.
            state = FragmentState.fresh(values)
            written = await self._in_pool(self._store.write, blank, state)
            await self._tape.commit(written)
        except SkerryError as error:
            return m.StoreFailed(order.fragment, str(error))
        self._states[order.fragment] = state
        self._bulk.publish_whole(order.fragment, order.version, state)
        self._bulk.forget(order.fragment)
        return m.Stored(order.fragment, order.version)

    async def _in_pool(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        self._pool.shutdown()
