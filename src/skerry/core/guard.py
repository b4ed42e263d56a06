"""The guard against bad contributions: compares a contribution with recent ones to the same fragment."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

HISTORY = 64
ENOUGH = 8
"""Contributions needed before anything counts as an outlier."""


@dataclass
class SizeHistory:
    """Norms and step counts of recent contributions to one fragment."""

    norms: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def limit(self, factor: float, steps: int) -> float:
        """The largest acceptable norm. It grows in proportion for contributions of more steps than usual."""
        if len(self.norms) < ENOUGH or factor == 0:
            return math.inf
        usual = statistics.median(self.norms)
        if usual == 0:
            return math.inf
        return factor * usual * max(1.0, steps / max(1.0, statistics.median(self.steps)))

    def add(self, norm: float, steps: int, limit: float) -> None:
        """Add a contribution. An outlier is clamped to the limit: a single one barely moves the median, but if most
        contributions become larger, the limit follows."""
        self.norms.append(min(norm, limit))
        self.steps.append(steps)

    def summary(self) -> tuple[float, int] | None:
        """Median norm and steps, enough to continue after a restart; None if the history is too short."""
        if len(self.norms) < ENOUGH:
            return None
        return statistics.median(self.norms), int(statistics.median(self.steps))

    @staticmethod
    def restored(summary: tuple[float, int] | None) -> SizeHistory:
        history = SizeHistory()
        if summary is not None:
            history.norms.extend([summary[0]] * ENOUGH)
            history.steps.extend([summary[1]] * ENOUGH)
        return history


def why_unhealthy(history: SizeHistory, norm: float, steps: int, factor: float, repeated: bool = False) -> str | None:
    """Why a contribution of this norm is unhealthy, or None."""
    if not math.isfinite(norm):
        return "not finite, or beyond any plausible size"
    if repeated and norm > 0:
        return "bit for bit identical to its previous contribution"
    limit = history.limit(factor, steps)
    if norm > limit:
        return f"an outlier: its norm is {norm:.3g}, recent contributions allow at most {limit:.3g}"
    return None
