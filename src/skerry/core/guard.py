"""The guard against bad contributions: compares a contribution with recent ones to the same fragment.

A contribution that is not finite, or repeats its sender's previous one, is never merged. The run's guard (`sync.guard`) judges
all others.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from skerry.config import SyncConfig
from skerry.core.messages import Contributed
from skerry.registry import Registry

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


class Guard(Protocol):
    """Judges the contributions to one fragment. The syncer makes one for each fragment, from the run's settings.

    Pure: it decides by its arguments and what it saw before, without clocks, files or chance. Called on the syncer's event
    loop, so it must be quick. Its verdicts are on the tape, so a replay does not ask it again.
    """

    def judge(self, offer: Contributed) -> str | None:
        """Why this contribution must not be merged, or None. Called once for each that has arrived whole and is finite."""
        ...

    def summary(self) -> Any:
        """What a syncer that is started again needs to go on, as JSON can carry it; None for nothing. Called at every merge."""
        ...

    def restore(self, summary: Any) -> None:
        """Go on from an earlier guard's summary, which is not None."""
        ...


class NormGuard:
    """Refuses contributions whose norm is more than `sync.outlier` times the median of recent ones."""

    def __init__(self, sync: SyncConfig) -> None:
        self._factor = sync.outlier
        self._history = SizeHistory()

    def judge(self, offer: Contributed) -> str | None:
        limit = self._history.limit(self._factor, offer.steps)
        self._history.add(offer.norm, offer.steps, limit)
        if offer.norm > limit:
            return f"an outlier: its norm is {offer.norm:.3g}, recent contributions allow at most {limit:.3g}"
        return None

    def summary(self) -> tuple[float, int] | None:
        """Median norm and steps, enough to continue after a restart; None if the history is too short."""
        norms, steps = self._history.norms, self._history.steps
        return (statistics.median(norms), int(statistics.median(steps))) if len(norms) >= ENOUGH else None

    def restore(self, summary: Any) -> None:
        self._history.norms.extend([float(summary[0])] * ENOUGH)
        self._history.steps.extend([int(summary[1])] * ENOUGH)


GUARDS: Registry[Callable[[SyncConfig], Guard]] = Registry("guard")
GUARDS.add("norm", NormGuard)


def make_guards(sync: SyncConfig, fragments: int) -> list[Guard]:
    make = GUARDS.get(sync.guard, "sync.guard")
    return [make(sync) for _ in range(fragments)]


def why_unhealthy(guard: Guard, offer: Contributed) -> str | None:
    """Why a contribution is unhealthy, or None."""
    if not math.isfinite(offer.norm):
        return "not finite, or beyond any plausible size"
    reason = guard.judge(offer)  # first, so that the guard also remembers repeated contributions
    if offer.repeated and offer.norm > 0:
        return "bit for bit identical to its previous contribution"
    return reason
