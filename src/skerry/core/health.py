"""Divergence detection: compares the training loss that learners report with its best level."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

CHECKS_BAD = 3
"""Consecutive checks that must find the loss too high. A single bad batch is not divergence."""

HealthStatus = Literal["unknown", "healthy", "doubtful", "diverged"]


@dataclass
class Health:
    """Compares the median loss of the training learners with the best level so far."""

    factor: float
    """The loss may rise to this many times its best level; 0 disables the check."""
    best: float | None = None
    level: float | None = None
    """The current loss: the median over learners, smoothed over the last checks."""
    bad: int = 0
    """Consecutive checks that found the loss too high."""
    losses: dict[str, float] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    def report(self, name: str, loss: float | None) -> None:
        if loss is not None:
            self.losses[name] = loss if math.isfinite(loss) else math.inf

    def check(self, names: list[str]) -> HealthStatus:
        """Assess the latest losses of the learners that train now. Called once per H steps."""
        self.losses = {name: loss for name, loss in self.losses.items() if name in names}
        if self.factor == 0 or not self.losses:
            return "unknown"
        self.recent.append(statistics.median_low(self.losses.values()))
        self.level = statistics.median(self.recent)
        if self.best is not None and self.level > self.best + (self.factor - 1) * abs(self.best):
            self.bad += 1
            return "diverged" if self.bad >= CHECKS_BAD else "doubtful"
        self.bad = 0
        if math.isfinite(self.level):
            self.best = self.level if self.best is None else min(self.best, self.level)
            return "healthy"
        return "doubtful"

    def start_again(self) -> None:
        """Forget all reported losses, after a rollback."""
        self.bad = 0
        self.level = None
        self.losses.clear()
        self.recent.clear()
