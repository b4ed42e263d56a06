"""How long a merge waits for more contributions once it has its quorum."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field


@dataclass
class MovingAverage:
    """Exponential average that starts at its first sample."""

    share: float = 0.2
    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else (1 - self.share) * self.value + self.share * sample

    def get(self, default: float = 0.0) -> float:
        return default if self.value is None else self.value


@dataclass
class Typical:
    """The median of what was seen lately: what happens once, a stall or a jump of the clock, does not count."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=15))

    def add(self, sample: float) -> None:
        self.samples.append(sample)

    def get(self) -> float:
        return statistics.median_low(self.samples) if self.samples else 0.0


REST = 8.0
"""Times what an exchange takes: with overwriting, what islands do while one is under way is lost, so this keeps that rare."""
ENOUGH = 3
"""Exchanges that must have been seen before a fragment rests."""


@dataclass
class GraceWindow:
    """grace = γ · max(τ · step_time − taken, taken), with taken = quorum_time + sync_time.

    An exchange may take τ inner steps. What is left of that time after gathering the quorum and after merging, storing
    and announcing is free to be spent on waiting for slower learners. Where steps are so short that nothing is left, a merge
    waits as long as the exchange takes by itself: it is late in any case, and to be twice as late costs less than to
    merge the first answer alone and lose what the others were about to give. Fragments then come up less often: see `rest`.
    """

    share: float
    overlap: int
    quorum_time: Typical = field(default_factory=Typical)
    sync_time: Typical = field(default_factory=Typical)

    @property
    def taken(self) -> float:
        """What an exchange takes by itself."""
        return self.quorum_time.get() + self.sync_time.get()

    def seconds(self, step_time_s: float) -> float:
        return self.share * max(self.overlap * step_time_s - self.taken, self.taken)

    def rest(self, step_time_s: float) -> float:
        """How long a merged fragment is left alone, though it may be due again, if exchanges take longer than they may."""
        known = step_time_s > 0 and len(self.sync_time.samples) >= ENOUGH
        return REST * self.taken if known and self.taken > max(self.overlap, 1) * step_time_s else 0.0
