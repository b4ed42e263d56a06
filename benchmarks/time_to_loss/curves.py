"""The arithmetic of the benchmark, without processes: curves of loss against time, and how often to save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Point = tuple[float, float]
"""(seconds since training began, validation loss)"""
CALM = {"dp-calm", "decoupled-calm"}
"""Arms without failures."""


@dataclass
class Arm:
    """What one way of training did."""

    name: str
    points: list[Point] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The run's tokens at each point."""
    kills: list[tuple[float, int, float]] = field(default_factory=list)
    """(seconds since training began, worker, seconds away), as they were done."""
    start_up_s: float = 0.0
    """From starting the first process to the first step, which the times above do not hold."""
    checkpoint_every_s: float | None = None
    stopped_s: float | None = None
    """When it was stopped before its budget was spent; whatever it had not reached then takes it longer than that."""

    @property
    def seconds(self) -> float:
        """Of the whole budget, or of what it came to."""
        return self.points[-1][0]

    @property
    def final_loss(self) -> float:
        return self.points[-1][1]


def time_to(loss: float, points: Sequence[Point]) -> float | None:
    """When a curve first comes down to a loss, on a straight line between two points; None if it does not."""
    if points and points[0][1] <= loss:
        return points[0][0]
    for (before_s, above), (after_s, below) in pairwise(points):
        if below <= loss:
            return before_s + (after_s - before_s) * (above - loss) / (above - below)
    return None


def time_to_keep(loss: float, points: Sequence[Point]) -> float | None:
    """When a curve comes down to a loss and stays there; None if it ends above. A lucky copy does not count."""
    above = [place for place, (_, value) in enumerate(points) if value > loss]
    return time_to(loss, points[above[-1] :] if above else points)


def common_loss(arms: dict[str, Arm]) -> float:
    """What the worst of the arms under failures has at its end, so that all of these reach it but those that were stopped."""
    counted = {key: arm for key, arm in arms.items() if key not in CALM or set(arms) <= CALM}
    ended = [arm.final_loss for arm in counted.values() if arm.stopped_s is None]
    return max(ended or [arm.final_loss for arm in counted.values()])


def ratio(arms: dict[str, Arm], above: str, below: str, loss: float, for_good: bool = False) -> float | None:
    """Of the times to that loss; no less than it really is, where the arm below was stopped before it was there."""
    if above not in arms or below not in arms:
        return None
    when = time_to_keep if for_good else time_to
    mine, theirs = when(loss, arms[above].points), when(loss, arms[below].points) or arms[below].stopped_s
    return mine / theirs if mine is not None and theirs else None


def young_daly_s(cost_s: float, mtbf_s: float, floor_s: float) -> float:
    """The interval between checkpoints at which saving and work done again cost least together (Young 1974, Daly 2006)."""
    return max(floor_s, math.sqrt(2 * cost_s * mtbf_s))


def shares_of(rank: int, world: int, shares: int) -> list[int]:
    """Which parts of a global batch a rank computes, when there may be fewer ranks than parts."""
    return list(range(rank, shares, world))


def weight_of(parts: int, world: int, shares: int) -> float:
    """What a rank's mean loss over its parts counts, so that the mean over ranks, which DDP takes, is that of the batch."""
    return parts * world / shares
