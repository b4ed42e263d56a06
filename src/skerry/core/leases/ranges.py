"""The syncer's side of data leases: which session holds which samples. Plain state without time, threads or files.

A pool is a data set as an endless sequence of numbered samples: one seeded shuffle per epoch. A session is leased ranges of
sample numbers and reads them in order. Its position counts all samples ever leased to it, from 0.

Rules:
 1. A sample is held by one session at a time. It is leased again only after it was returned.
 2. A merged sample is never leased again. When a session ends, the samples after its last merged position are returned.
 3. Returned samples are leased first, then new ones from the pool with the least progress.
 4. Ranges become small towards the end of an epoch, so that all learners finish it together.
 5. A pinned pool is leased only to learners of its region. All readers of a pool must have the same data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOST_RANGES = 32
"""Ranges leased per request. Matters only when many small ranges were returned; the rest follows with the next request."""
MOST_POOLS = 1000
MOST_AHEAD = 1 << 32
"""Samples that one learner may hold."""
REFILL_BELOW = 0.75
"""A learner gets more only when it holds less than this share of its target, so that ranges do not become tiny."""


@dataclass(frozen=True)
class Pool:
    """A data set as declared by one of its readers."""

    name: str
    size: int
    fingerprint: int = 0
    """Differs for different data of the same size and for different shuffles."""


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
    """A learner's demand, as positions in its lease sequence."""

    given: int
    """Leases it knows of end here."""
    taken: int
    """Samples read so far end here."""
    wanted: int
    """Leases should reach this position."""
    least: int
    """Leases should reach this position even at the end of an epoch."""
    settled: int = 0
    """No future contribution contains samples before this position."""


@dataclass
class Holding:
    """The leases of one session, and how far they are used. Fields are positions in its lease sequence."""

    session: str
    first: int = 0
    """Start of `ranges`."""
    ranges: list[Range] = field(default_factory=list)
    """Leases that may still have to be taken back."""
    given: int = 0
    """End of everything ever leased to it."""
    merged: int = 0
    """Samples before this position are in the model, or will never be."""
    told: int | None = None
    """End of the ranges sent on its current connection; None if none were sent."""
    floor: int = 0
    """Unmerged samples before this position were taken back. The session starts over when it learns of that."""

    def add(self, leased: Range) -> None:
        """Append a range, joined to the previous one if it continues it."""
        last = self.ranges[-1] if self.ranges else None
        if last is not None and (last.pool, last.stop) == (leased.pool, leased.start):
            self.ranges[-1] = Range(last.pool, last.start, last.count + leased.count)
        else:
            self.ranges.append(leased)
        self.given += leased.count

    def behind(self, position: int) -> list[Range]:
        """The leased ranges after this position."""
        rest = []
        at = self.first
        for held in self.ranges:
            skipped = min(held.count, max(0, position - at))
            if skipped < held.count:
                rest.append(Range(held.pool, held.start + skipped, held.count - skipped))
            at += held.count
        return rest

    def forget_before(self, position: int) -> None:
        """Drop ranges before this position: they are merged, or will never be."""
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
    """Every sample number below this was leased at least once."""
    returned: list[tuple[int, int]] = field(default_factory=list)
    """Returned samples to lease again, as sorted (from, to) spans that do not touch."""

    @property
    def waiting(self) -> int:
        return sum(stop - start for start, stop in self.returned)

    @property
    def left_of_epoch(self) -> int:
        return self.size - self.given % self.size + self.waiting

    def take(self, count: int) -> tuple[int, int]:
        """The next (start, count) to lease, at most `count` samples."""
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
            assert not joined or a >= joined[-1][1], f"samples {a} to {joined[-1][1]} were given back twice"
            if joined and joined[-1][1] == a:
                joined[-1] = (joined[-1][0], b)
            else:
                joined.append((a, b))
        self.returned = joined


class Leases:
    def __init__(self, pins: dict[str, str] | None = None) -> None:
        self._pins = pins or {}
        """Pool → the only region that may read it."""
        self.pools: dict[str, PoolState] = {}
        self.holdings: dict[str, Holding] = {}
        """Learner → the leases of its session, as long as that session may still contribute."""
        self._readable: dict[str, tuple[str, ...]] = {}
        """Learner → the pools it has declared on its current connection."""

    # ------------------------------------------------------------ pools and readers

    def declare(self, name: str, session: str, region: str, pools: tuple[Pool, ...]) -> str | None:
        """Register the pools a learner can read. Returns why that is refused, or None."""
        if len({pool.name for pool in pools}) < len(pools):
            return f"{name} declares a pool twice"
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
                what = "data of different content or order" if known.size == pool.size else f"{pool.size} samples"
                return f"pool {pool.name!r} has {known.size} samples in this run, {name} reads {what}"
        for pool in pools:
            if pool.name not in self.pools or not self._is_read(pool.name, name):
                self.pools[pool.name] = PoolState(pool.size, pool.fingerprint)
        self._readable[name] = tuple(sorted({pool.name for pool in pools}))
        self.holdings.setdefault(name, Holding(session))
        return None

    def _is_read(self, pool: str, name: str) -> bool:
        """Whether the pool's definition is fixed: samples were leased, or another learner reads it. Until then a learner that
        declared it wrongly may correct itself."""
        return self.pools[pool].given > 0 or any(pool in read for other, read in self._readable.items() if other != name)

    def disconnected(self, name: str) -> None:
        self._readable.pop(name, None)

    # ------------------------------------------------------------ leasing

    def give(self, name: str, need: Need, live: int) -> tuple[list[tuple[int, Range]], list[tuple[int, Range]]]:
        """Lease samples to a learner. Returns the ranges to send to it, and those among them that are new, as (position,
        range). `live` is the number of learners that hold leases."""
        holding, readable = self.holdings.get(name), self._readable.get(name)
        if holding is None or not readable:
            return [], []
        if holding.told is None:
            # Ranges sent on the previous connection may not have arrived.
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

    # ------------------------------------------------------------ merging, returning

    def connected(self, name: str) -> None:
        """Reset the connection's state: ranges are sent again, and the learner has to declare its pools again."""
        self.disconnected(name)
        if name in self.holdings:
            self.holdings[name].told = None

    def merged(self, name: str, session: str, position: int) -> None:
        """Record that a contribution with samples up to this position was merged."""
        holding = self.holdings.get(name)
        if holding is not None and holding.session == session and position > holding.merged:
            holding.merged = position
            holding.forget_before(position)

    def of(self, name: str, session: str) -> Holding:
        """The session's holding, or an unregistered empty one."""
        holding = self.holdings.get(name)
        return holding if holding is not None and holding.session == session else Holding(session)

    def why_refused(self, name: str, session: str, samples: tuple[int, int]) -> str | None:
        """Why a contribution that covers these samples is refused, or None."""
        start, stop = samples
        holding = self.of(name, session)
        if start == stop == 0 or (start <= stop <= holding.given and (start == stop or start >= holding.floor)):
            return None
        return f"samples {start} to {stop} are not leased to {name}: it was given {holding.floor} to {holding.given}"

    def take_back(self, name: str, kept: int = 0) -> tuple[str, int, list[Range]]:
        """Return the learner's samples after its last merged position, or after `kept`, to their pools. Returns the session,
        that position and the ranges."""
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
        """Start an empty holding at this position, for a session that remembers more leases than the syncer does."""
        known = self.holdings.get(name)
        assert known is None or not known.ranges, "leases forgotten"
        self.holdings[name] = Holding(session, position, [], position, position, floor=position)

    def forget(self, name: str) -> None:
        """Forget a session that will not return. Its leases must have been taken back."""
        assert not self.holdings[name].ranges, "leases forgotten"
        del self.holdings[name]
        self.disconnected(name)

    # ------------------------------------------------------------ saving and restoring

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
            held = [Range(*fields) for fields in ranges]
            self.holdings[name] = Holding(session, first, held, given, merged, floor=floor)


def _with_positions(ranges: list[Range], end: int) -> list[tuple[int, Range]]:
    """Each range with its position, where the last range ends at `end`."""
    pairs = []
    at = end - sum(held.count for held in ranges)
    for held in ranges:
        pairs.append((at, held))
        at += held.count
    return pairs
