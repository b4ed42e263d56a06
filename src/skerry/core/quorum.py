"""The grace window: how long a merge waits for more contributions once it has its quorum."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MovingAverage:
    """Exponential moving average that starts at its first sample."""

    share: float = 0.2
    """Weight of a new sample."""
    value: float | None = None

    def add(self, sample: float) -> None:
        self.value = sample if self.value is None else (1 - self.share) * self.value + self.share * sample

    def get(self, default: float = 0.0) -> float:
        return default if self.value is None else self.value


LONGEST = 3.0
"""Cap on the measured duration of an exchange, as a multiple of H steps."""


@dataclass
class GraceWindow:
    """grace = γ · max(τ · step_time − taken, taken), with taken = quorum_time + sync_time.

    An exchange may take τ inner steps. The time left after gathering the quorum, merging, storing and announcing is spent
    waiting for slower learners. If steps are so short that no time is left, a merge waits as long as the exchange itself
    takes: it is late in any case, and being twice as late costs less than merging the first answer alone and losing the
    others. Fragments are then exchanged less often (see flow.py).
    """

    share: float
    """γ."""
    overlap: int
    """τ."""
    every: int
    """H."""
    quorum_time: MovingAverage = field(default_factory=MovingAverage)
    sync_time: MovingAverage = field(default_factory=MovingAverage)

    def taken(self, step_time_s: float) -> float:
        """Average duration of an exchange without the grace window."""
        return min(self.quorum_time.get() + self.sync_time.get(), self.longest(step_time_s))

    def longest(self, step_time_s: float) -> float:
        """Cap on the measured duration of an exchange."""
        return LONGEST * self.every * step_time_s

    def allowed(self, step_time_s: float) -> float:
        """How long an exchange may take: τ steps, at least one."""
        return max(self.overlap, 1) * step_time_s

    def seconds(self, step_time_s: float) -> float:
        """Length of the grace window."""
        taken = self.taken(step_time_s)
        return self.share * max(self.overlap * step_time_s - taken, taken)
