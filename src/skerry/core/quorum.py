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


@dataclass
class GraceWindow:
    """grace = γ · max(τ · step_time − (quorum_time + sync_time), 0).

    An exchange may take τ inner steps. What is left of that time after gathering the quorum and after merging, storing
    and announcing is free to be spent on waiting for slower learners.
    """

    share: float
    overlap: int
    quorum_time: MovingAverage = field(default_factory=MovingAverage)
    sync_time: MovingAverage = field(default_factory=MovingAverage)

    def seconds(self, step_time_s: float) -> float:
        slack = self.overlap * step_time_s - (self.quorum_time.get() + self.sync_time.get())
        return self.share * max(slack, 0.0)
