"""Who holds which samples: the syncer's side of data leases, as plain state without time, threads or files.

A pool is a data set as an endless sequence of numbered samples: one seeded shuffle of it after the other. A learner is given
ranges of numbers and reads them in the order they were given; of that order only positions matter here, counted from 0 over all
its process was ever given.

Rules:
 1. A number is held by one process at a time. It can be given again only after its holder gave it back.
 2. What is part of a merge is never given again: when a process ends, what lies behind its last merged position is given back.
 3. Numbers that were given back go out first, then new ones, from the pool that has come the least far.
 4. Nobody holds so much that an epoch could not end together: towards its end ranges become small.
 5. A pool that is pinned to a region is given to learners of that region alone. All readers of a pool must read the same data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOST_RANGES = 32
"""Given at once. If so many small ones were given back, the rest comes with the next request."""
MOST_POOLS = 1000
MOST_AHEAD = 1 << 32
"""Samples that one learner may hold."""
REFILL_BELOW = 0.75
"""A learner that holds this share of what it should is not given more, so that ranges do not crumble."""


@dataclass(frozen=True)
class Pool:
    """A data set as one of its readers describes it."""

    name: str
    size: int
    fingerprint: int = 0
    """Tells data sets of equal size apart, and shuffles of the same data."""


@dataclass(frozen=True)
class Range:
    pool: str
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Need:
    """What a learner has and wants, as positions."""

    given: int
    """It knows of ranges up to here."""
    taken: int
    """It has read samples up to here."""
    wanted: int
    least: int
    """It would like to hold ranges up to `wanted`, and up to `least` even at the end of an epoch."""
    settled: int = 0
    """Up to here nothing will be part of anything it contributes from now on."""


@dataclass
class Holding:
    """What one process was given and what has become of it."""

    session: str
    first: int = 0
    """Position of the first range below."""
    ranges: list[Range] = field(default_factory=list)
    given: int = 0
    """Position behind the last range that it was ever given."""
    merged: int = 0
    """Samples up to here are part of the model, or their progress was replaced before it could be."""
    told: int | None = None
    """Ranges up to here were sent on its present connection."""
    floor: int = 0
    """What it was given up to here is not its own any more, unless it was merged. It starts over when it hears of that."""

    def add(self, found: Range) -> None:
        last = self.ranges[-1] if self.ranges else None
        if last is not None and (last.pool, last.stop) == (found.pool, found.start):
            self.ranges[-1] = Range(last.pool, last.start, last.count + found.count)
        else:
            self.ranges.append(found)
        self.given += found.count

    def behind(self, position: int) -> list[Range]:
        """What it was given behind this position."""
        found = []
        at = self.first
        for held in self.ranges:
            skipped = min(held.count, max(0, position - at))
            if skipped < held.count:
                found.append(Range(held.pool, held.start + skipped, held.count - skipped))
            at += held.count
        return found

    def forget_before(self, position: int) -> None:
        """What lies before it is merged, or will never be."""
        if position <= self.first:
            return
        kept = self.behind(position)
        self.first = self.given - sum(held.count for held in kept)
        self.ranges = kept


@dataclass
class PoolState:
    size: int
    fingerprint: int
    given: int = 0
    """Every number below this was given out at least once."""
    returned: list[tuple[int, int]] = field(default_factory=list)
    """Numbers that wait to be given again: from, to; in order, not touching."""

    @property
    def waiting(self) -> int:
        return sum(stop - start for start, stop in self.returned)

    @property
    def left_of_epoch(self) -> int:
        return self.size - self.given % self.size + self.waiting

    def take(self, count: int) -> tuple[int, int]:
        if self.returned:
            start, stop = self.returned[0]
            taken = min(count, stop - start)
            if taken == stop - start:
                del self.returned[0]
            else:
                self.returned[0] = (start + taken, stop)
            return start, taken
        self.given += count
        return self.given - count, count

    def give_back(self, spans: list[tuple[int, int]]) -> None:
        joined: list[tuple[int, int]] = []
        for a, b in sorted([*self.returned, *spans]):
            assert not joined or a >= joined[-1][1], f"numbers {a} to {joined[-1][1]} were given back twice"
            if joined and joined[-1][1] == a:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        self.returned = joined


class Leases:
    def __init__(self, pins: dict[str, str] | None = None) -> None:
        self._pins = pins or {}
        """Pool → the region that may read it."""
        self.pools: dict[str, PoolState] = {}
        self.holdings: dict[str, Holding] = {}
        """By the learner's name. A name that is here has one process that may still come and claim what it did."""
        self._readable: dict[str, tuple[str, ...]] = {}

    # ------------------------------------------------------------ who reads what

    def declare(self, name: str, session: str, region: str, pools: tuple[Pool, ...]) -> str | None:
        """A learner says what it can read. Returns why it must not, or None."""
        if len({pool.name for pool in pools}) < len(pools):
            return f"{name} names a pool twice"
        if len(self.pools.keys() | {pool.name for pool in pools}) > MOST_POOLS:
            return f"a run has at most {MOST_POOLS} pools"
        for pool in pools:
            wanted = self._pins.get(pool.name)
            if wanted is not None and wanted != region:
                where = f"region {region!r}" if region else "no region"
                return f"pool {pool.name!r} is pinned to region {wanted!r}, and {name} is in {where}"
            if pool.size < 1:
                return f"pool {pool.name!r} must hold at least one sample, got {pool.size}"
            known = self.pools.get(pool.name)
            if (
                known is not None
                and self._is_read(pool.name, name)
                and (known.size, known.fingerprint) != (pool.size, pool.fingerprint)
            ):
                what = "data of another content or order" if known.size == pool.size else f"{pool.size} samples"
                return f"pool {pool.name!r} has {known.size} samples in this run, {name} reads {what}"
        for pool in pools:
            if pool.name not in self.pools or not self._is_read(pool.name, name):
                self.pools[pool.name] = PoolState(pool.size, pool.fingerprint)
        self._readable[name] = tuple(sorted({pool.name for pool in pools}))
        self.holdings.setdefault(name, Holding(session))
        return None

    def _is_read(self, pool: str, name: str) -> bool:
        """By others, or it was. Before that a reader that is set up wrongly does not decide what it is."""
        return self.pools[pool].given > 0 or any(pool in read for other, read in self._readable.items() if other != name)

    def disconnected(self, name: str) -> None:
        self._readable.pop(name, None)

    # ------------------------------------------------------------ giving

    def give(self, name: str, need: Need, live: int) -> tuple[list[tuple[int, Range]], list[tuple[int, Range]]]:
        """Ranges to tell this learner of, each with its position; and those of them that are new."""
        holding, readable = self.holdings.get(name), self._readable.get(name)
        if holding is None or not readable:
            return [], []
        if holding.told is None:
            # A new connection: what was sent on the one before may not have arrived.
            holding.told = min(need.given, holding.given)
        told = _with_positions(holding.behind(holding.told), holding.given)
        taken = min(need.taken, holding.given)
        if need.settled > holding.merged:
            holding.forget_before(min(need.settled, taken))
        share = sum(self.pools[pool].left_of_epoch for pool in readable) // (2 * max(1, live))
        target = min(need.wanted, taken + MOST_AHEAD, max(need.least, taken + share))
        fresh: list[tuple[int, Range]] = []
        if holding.given - taken < REFILL_BELOW * (target - taken):
            fresh = self._give_new(holding, readable, target - holding.given)
        holding.told = holding.given
        return told + fresh, fresh

    def _give_new(self, holding: Holding, readable: tuple[str, ...], count: int) -> list[tuple[int, Range]]:
        most = count if len(readable) == 1 else -(-count // 8)
        fresh: list[tuple[int, Range]] = []
        while count > 0 and len(fresh) < MOST_RANGES:
            pool = min(readable, key=lambda pool: (not self.pools[pool].returned, self._progress(pool), pool))
            start, taken = self.pools[pool].take(min(count, most))
            fresh.append((holding.given, Range(pool, start, taken)))
            holding.add(Range(pool, start, taken))
            count -= taken
        return fresh

    def _progress(self, pool: str) -> float:
        return self.pools[pool].given / self.pools[pool].size

    # ------------------------------------------------------------ what becomes of it

    def connected(self, name: str) -> None:
        """On a new connection nothing has been told yet; what can be read is declared anew."""
        self.disconnected(name)
        if name in self.holdings:
            self.holdings[name].told = None

    def merged(self, name: str, session: str, position: int) -> None:
        """A contribution of this process with samples up to here counts from now on."""
        holding = self.holdings.get(name)
        if holding is not None and holding.session == session and position > holding.merged:
            holding.merged = position
            holding.forget_before(position)

    def of(self, name: str, session: str) -> Holding:
        """What this process holds; an empty holding, which is nowhere kept, if it holds nothing."""
        holding = self.holdings.get(name)
        return holding if holding is not None and holding.session == session else Holding(session)

    def why_refused(self, name: str, session: str, samples: tuple[int, int]) -> str | None:
        start, stop = samples
        holding = self.of(name, session)
        if start == stop == 0 or (start <= stop <= holding.given and (start == stop or start >= holding.floor)):
            return None
        return f"samples {start} to {stop} of {name} are not its own: it was given {holding.floor} to {holding.given}"

    def take_back(self, name: str, kept: int = 0) -> tuple[str, int, list[Range]]:
        """What this learner's process holds behind its last merged position, or behind `kept`, can be given to others from now
        on. Returns the process, the position and the ranges."""
        holding = self.holdings[name]
        position = max(holding.merged, holding.first, kept)
        ranges = holding.behind(position)
        for pool in {held.pool for held in ranges}:
            self.pools[pool].give_back([(held.start, held.stop) for held in ranges if held.pool == pool])
        if ranges:
            holding.floor = holding.given
        holding.ranges = []
        holding.first = holding.merged = holding.given
        return holding.session, position, ranges

    def disown(self, name: str, session: str, position: int) -> None:
        """This process remembers that it was given more than is known here. It starts again behind that."""
        known = self.holdings.get(name)
        assert known is None or not known.ranges, "leases forgotten"
        self.holdings[name] = Holding(session, position, [], position, position, floor=position)

    def forget(self, name: str) -> None:
        """This process will not come back. What it held must have been taken back."""
        assert not self.holdings[name].ranges, "leases forgotten"
        del self.holdings[name]
        self.disconnected(name)

    # ------------------------------------------------------------ what a restart needs

    def to_json(self) -> dict[str, Any]:
        return {
            "pools": {n: [p.size, p.fingerprint, p.given, [list(r) for r in p.returned]] for n, p in self.pools.items()},
            "holdings": {
                name: [
                    h.session,
                    h.first,
                    h.given,
                    h.merged,
                    h.floor,
                    [[r.pool, r.start, r.count] for r in h.ranges],
                ]
                for name, h in self.holdings.items()
            },
        }

    def restore(self, data: dict[str, Any]) -> None:
        for name, (size, fingerprint, given, returned) in data.get("pools", {}).items():
            self.pools[name] = PoolState(size, fingerprint, given, [(start, stop) for start, stop in returned])
        for name, (session, first, given, merged, floor, ranges) in data.get("holdings", {}).items():
            held = [Range(*found) for found in ranges]
            self.holdings[name] = Holding(session, first, held, given, merged, floor=floor)


def _with_positions(ranges: list[Range], end: int) -> list[tuple[int, Range]]:
    """The last ranges up to this position."""
    found = []
    at = end - sum(held.count for held in ranges)
    for held in ranges:
        found.append((at, held))
        at += held.count
    return found
