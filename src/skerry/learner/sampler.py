"""Iterators over leased data for a training loop: batches of sample numbers, or of items for a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skerry.clock import Clock
from skerry.core.leases.ranges import Pool, Range
from skerry.data.shuffle import Shuffle
from skerry.errors import ConfigError, WireError
from skerry.learner.connection import Connection
from skerry.learner.session import Session

WAIT_S = 0.2
ALONE_S = 120.0
"""How long a learner without any data waits for a disconnected syncer, which may be gone for good."""


class LeasedRanges:
    """Yields the ranges of sample numbers of one batch at a time, until the run closes.

    Waits only before the first batch, and in lock-step. Every step must use exactly `batches_per_step` batches, in order.
    """

    def __init__(
        self,
        connection: Connection,
        session: Session,
        pools: tuple[Pool, ...],
        batch: int,
        batches_per_step: int = 1,
        *,
        clock: Clock,
    ) -> None:
        if batch < 1 or batches_per_step < 1:
            raise ValueError(f"batch and batches_per_step must be >= 1, got {batch} and {batches_per_step}")
        self._connection, self._session, self._clock = connection, session, clock
        connection.want_leases(pools, batch, batches_per_step)

    def __iter__(self) -> Iterator[list[Range]]:
        return self

    def __next__(self) -> list[Range]:
        session, now = self._session, self._clock.now
        since = alone_since = now()
        waited = False
        with session.lock:
            while session.exchange.phase != "stopped":
                if session.no_lease is not None:
                    raise ConfigError(session.no_lease)
                if found := session.leases.take(may_repeat=not session.sync.wait):
                    session.pace.waited_s += now() - since if waited else 0.0
                    return found
                if session.connected or session.sync.wait:
                    alone_since = now()
                elif now() - alone_since >= ALONE_S:
                    raise WireError(f"{session.name} has no data to train on, and no syncer for {ALONE_S:.0f} s")
                self._connection.want_report()
                waited = True
                session.lock.wait(WAIT_S)
        raise StopIteration


class LeasedSampler:
    """A batch sampler for DataLoader: yields lists of item indices, or of (data set, index) pairs if there are several."""

    def __init__(
        self,
        connection: Connection,
        session: Session,
        size: int | Mapping[str, int],
        batch: int,
        seed: int,
        batches_per_step: int,
        clock: Clock,
    ) -> None:
        sizes = dict(size) if isinstance(size, Mapping) else {"": size}
        if not sizes or any(not isinstance(count, int) or count < 1 for count in sizes.values()):
            raise ValueError(f"a data set must have at least one sample, got {size!r}")
        self._session = session
        self._several = isinstance(size, Mapping)
        self._shuffles = {name: Shuffle(count, seed) for name, count in sizes.items()}
        pools = tuple(Pool(name, count, seed % (1 << 64)) for name, count in sizes.items())
        self._ranges = LeasedRanges(connection, session, pools, batch, batches_per_step, clock=clock)

    def __iter__(self) -> Iterator[list[Any]]:
        with self._session.lock:
            self._session.leases.skip_all()  # batches that an earlier loader prefetched
        for ranges in self._ranges:
            yield [item for samples in ranges for item in self._items(samples)]

    def _items(self, samples: Range) -> list[Any]:
        indices = self._shuffles[samples.pool].indices(samples.start, samples.count)
        return [(samples.pool, index) for index in indices] if self._several else indices
