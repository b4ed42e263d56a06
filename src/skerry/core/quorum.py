"""How long a merge waits for more contributions once it has its quorum."""

from __future__ import annotations

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


LONGEST = 3.0
"""Times H steps: an exchange is not reckoned with as longer than this."""


@dataclass
class GraceWindow:
    """grace = γ · max(τ · step_time − taken, taken), with taken = quorum_time + sync_time.

    An exchange may take τ inner steps. What is left of that time after gathering the quorum and after merging, storing
    and announcing is free to be spent on waiting for slower learners. Where steps are so short that nothing is left, a merge
    waits as long as the exchange takes by itself: it is late in any case, and to be twice as late costs less than to
    merge the first answer alone and lose what the others were about to give. Fragments then come up less often: see flow.py.
    """

    share: float
    overlap: int
    every: int
    quorum_time: MovingAverage = field(default_factory=MovingAverage)
    sync_time: MovingAverage = field(default_factory=MovingAverage)

    def taken(self, step_time_s: float) -> float:
        """What an exchange takes by itself."""
        return min(self.quorum_time.get() + self.sync_time.get(), self.longest(step_time_s))

    def longest(self, step_time_s: float) -> float:
        return LONGEST * self.every * step_time_s

    def allowed(self, step_time_s: float) -> float:
        """What an exchange may take."""
        return max(self.overlap, 1) * step_time_s

    def seconds(self, step_time_s: float) -> float:
        taken = self.taken(step_time_s)
        return self.share * max(self.overlap * step_time_s - taken, taken)
