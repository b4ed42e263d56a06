"""Makes versions. A plane computes a version and writes its file; then the version is committed, and the plane publishes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from skerry.config import SyncConfig
from skerry.core import messages as m
from skerry.errors import SkerryError
from skerry.syncer.rpc.fragments import ServedFragments
from skerry.syncer.rpc.published import Published
from skerry.syncer.rpc.uploads import Contributions, Gathered
from skerry.syncer.storage.good_copies import GoodCopies
from skerry.syncer.storage.run_folder import read_values
from skerry.syncer.storage.store import RunStore, Written
from skerry.syncer.storage.tape import Tape
from skerry.tensors.fragments import Layout
from skerry.tensors.merge import FragmentState, merge, merge_rule, outer_optimizer

MERGERS = 4
"""Threads that compute and write merges. They mostly wait for the disk."""

T = TypeVar("T")


class Plane(Protocol):
    """Where the tensors of fragments live: in this process, or in shards."""

    async def make(self, order: m.Merge) -> Written:
        """Compute a version and write its file, without committing it. May be retried. Raises SkerryError."""
        ...

    async def publish(self, written: Written) -> None:
        """Serve the version made last, which is now committed."""
        ...

    async def put_back(self, written: Written, state: FragmentState) -> None:
        """Serve a committed version that was made elsewhere, and drop the contributions gathered for the fragment."""
        ...


class LocalPlane:
    """Fragments whose tensors are in this process."""

    def __init__(
        self,
        layout: Layout,
        sync: SyncConfig,
        served: ServedFragments,
        contributions: Contributions,
        write: Callable[[m.Merge, FragmentState], Written],
    ) -> None:
        self._layout = layout
        self._rule, self._outer = merge_rule(sync), outer_optimizer(sync)
        self._served, self._contributions = served, contributions
        self._write = write
        self._states: dict[int, FragmentState] = {}
        self._made: dict[int, tuple[FragmentState, Published]] = {}
        self.pool = ThreadPoolExecutor(MERGERS, thread_name_prefix="skerry-merge")

    def serve(self, fragment: int, version: int, state: FragmentState) -> None:
        self._states[fragment] = state
        self._served.serve_whole(fragment, version, state)

    def withdraw(self, fragment: int) -> None:
        """Stop serving a fragment."""
        self._states.pop(fragment, None)
        self._made.pop(fragment, None)
        self._served.withdraw(fragment)
        self._contributions.forget(fragment)

    async def make(self, order: m.Merge) -> Written:
        gathered = self._contributions.gathered(order)
        state, published, written = await in_pool(self.pool, self._compute, order, gathered)
        self._made[order.fragment] = state, published
        return written

    def _compute(self, order: m.Merge, gathered: list[Gathered]) -> tuple[FragmentState, Published, Written]:
        """Runs in a thread. A fragment has one merge at a time, so its state does not change meanwhile."""
        before = self._states[order.fragment]
        after = merge(
            self._layout,
            self._layout.fragments[order.fragment],
            before,
            [contribution.delta for contribution in gathered],
            [share.weight for share in order.shares],
            lr=order.outer_lr,
            momentum=order.outer_momentum,
            rule=self._rule,
            outer=self._outer,
            presence=order.presence,
            norms=[contribution.norms for contribution in gathered],
            fresh=order.fresh,
        )
        state, published = self._served.encode(order.fragment, order.version, before, after)
        return state, published, self._write(order, state)

    async def publish(self, written: Written) -> None:
        fragment = written.order.fragment
        self._states[fragment], published = self._made.pop(fragment)
        self._served.serve(fragment, published)
        self._contributions.merged(written.order)

    async def put_back(self, written: Written, state: FragmentState) -> None:
        self._contributions.forget(written.order.fragment)
        self.serve(written.order.fragment, written.order.version, state)

    def close(self) -> None:
        self.pool.shutdown()


class Merger:
    """Carries out the core's orders. Returns the event that reports the outcome."""

    def __init__(self, store: RunStore, plane: Plane, tape: Tape) -> None:
        self._store = store
        self._plane = plane
        self._tape = tape
        self._good = GoodCopies(store.folder, store.disk)
        self._outer = outer_optimizer(store.identity.sync)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skerry-copies")

    async def merge(self, order: m.Merge) -> m.Stored | m.StoreFailed:
        try:
            written = await self._plane.make(order)
            await self._tape.commit(written)
        except SkerryError as error:
            return m.StoreFailed(order.fragment, str(error))
        await self._plane.publish(written)
        return m.Stored(order.fragment, order.version)

    async def keep_good(self, step: int) -> m.GoodCopyKept:
        def keep() -> None:
            self._good.keep(step, read_values(self._store.folder, self._store.identity))

        try:
            await in_pool(self._thread, keep)
        except SkerryError as error:
            return m.GoodCopyKept(step, str(error))
        return m.GoodCopyKept(step)

    async def restore(self, order: m.Restore) -> m.Stored | m.StoreFailed:
        """Make a version from a good copy, with a fresh optimizer state."""
        empty_merge = m.Merge(order.fragment, order.version, order.round, (), 0.0, 0.0, 0.0)
        try:
            values = await in_pool(self._thread, self._good.read, order.good_step, order.fragment)
            # Published in full: a lossy difference would leave learners with part of the divergence.
            state = FragmentState.fresh(values, self._outer)
            written = await in_pool(self._thread, self._store.write, empty_merge, state)
            await self._tape.commit(written)
        except SkerryError as error:
            return m.StoreFailed(order.fragment, str(error))
        await self._plane.put_back(written, state)
        return m.Stored(order.fragment, order.version)

    def close(self) -> None:
        self._thread.shutdown()


async def in_pool(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
