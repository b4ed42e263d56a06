"""Data leased from the run, as a training loop takes it: batches of sample numbers, or of items for a torch DataLoader."""

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
"""How long a learner without any data waits for a syncer that is away. It may be gone for good."""


class LeasedRanges:
    """Ranges of sample numbers, a batch of `batch` samples at a time, until the run closes.

    Waits only before the very first batch, and in lock-step. A step must use exactly `batches_per_step` of them, in order.
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
                    raise WireError(f"{session.name} has no data to train on, and the syncer was away for {ALONE_S:.0f} s")
                self._connection.want_report()
                waited = True
                session.lock.wait(WAIT_S)
        raise StopIteration


class LeasedSampler:
    """For `DataLoader(batch_sampler=...)`: lists of items of one data set, or of (pool, item) of several."""

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
            raise ValueError(f"a data set must hold at least one sample, got {size!r}")
        self._session = session
        self._several = isinstance(size, Mapping)
        self._shuffles = {name: Shuffle(count, seed) for name, count in sizes.items()}
        pools = tuple(Pool(name, count, seed % (1 << 64)) for name, count in sizes.items())
        self._ranges = LeasedRanges(connection, session, pools, batch, batches_per_step, clock=clock)

    def __iter__(self) -> Iterator[list[Any]]:
        with self._session.lock:
            self._session.leases.skip_all()  # what an earlier loader had read ahead
        for ranges in self._ranges:
            yield [item for found in ranges for item in self._items(found)]

    def _items(self, found: Range) -> list[Any]:
        indices = self._shuffles[found.pool].indices(found.start, found.count)
        return [(found.pool, index) for index in indices] if self._several else indices
