"""Is a contribution healthy? It is judged by what came for the same fragment lately, not by what its sender says of it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

HISTORY = 64
ENOUGH = 8
"""With fewer contributions seen than this, nothing is called an outlier."""


@dataclass
class SizeHistory:
    """How large recent contributions to one fragment were."""

    norms: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def limit(self, factor: float, steps: int) -> float:
        """The largest norm that passes. More steps than usual may have gone further, at most in proportion."""
        if len(self.norms) < ENOUGH or factor == 0:
            return math.inf
        usual = statistics.median(self.norms)
        if usual == 0:
            return math.inf
        return factor * usual * max(1.0, steps / max(1.0, statistics.median(self.steps)))

    def add(self, norm: float, steps: int, limit: float) -> None:
        """One more. An outlier counts as the largest that would have passed, so that it cannot make way for the next, but if
        most contributions have become that large, that is the new measure."""
        self.norms.append(min(norm, limit))
        self.steps.append(steps)

    def summary(self) -> tuple[float, int] | None:
        """Enough to go on after a restart."""
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
    """What is wrong with a contribution of this norm, or None."""
    if not math.isfinite(norm):
        return "not finite, or beyond any plausible size"
    if repeated and norm > 0:
        return "the same, bit for bit, as its last one: progress does not repeat itself"
    limit = history.limit(factor, steps)
    if norm > limit:
        return f"an outlier: its norm is {norm:.3g}, and what came lately allows at most {limit:.3g}"
    return None
