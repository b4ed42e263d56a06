"""The arithmetic of the benchmark: curves of loss over time, and the checkpoint interval."""

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
    """One kind of training, and its results."""

    name: str
    points: list[Point] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """The run's tokens at each point."""
    kills: list[tuple[float, int, float]] = field(default_factory=list)
    """(seconds since training began, worker, seconds down) of each actual kill."""
    start_up_s: float = 0.0
    """From the first process to the first step; not included in the times above."""
    checkpoint_every_s: float | None = None
    stopped_s: float | None = None
    """When the arm was stopped before its budget was spent, if it was. Losses not reached by then take longer than this."""

    @property
    def seconds(self) -> float:
        """Time of the whole budget, or until the arm was stopped."""
        return self.points[-1][0]

    @property
    def final_loss(self) -> float:
        return self.points[-1][1]


def time_to(loss: float, points: Sequence[Point]) -> float | None:
    """When a curve first reaches a loss, by linear interpolation; None if it does not."""
    if points and points[0][1] <= loss:
        return points[0][0]
    for (before_s, above), (after_s, below) in pairwise(points):
        if below <= loss:
            return before_s + (after_s - before_s) * (above - loss) / (above - below)
    return None


def time_to_keep(loss: float, points: Sequence[Point]) -> float | None:
    """When a curve reaches a loss and stays at or below it; None if it ends above."""
    above = [index for index, (_, value) in enumerate(points) if value > loss]
    return time_to(loss, points[above[-1] :] if above else points)


def common_loss(arms: dict[str, Arm]) -> float:
    """Final loss of the worst arm under failures, which all of them reach except those that were stopped."""
    counted = {key: arm for key, arm in arms.items() if key not in CALM or set(arms) <= CALM}
    ended = [arm.final_loss for arm in counted.values() if arm.stopped_s is None]
    return max(ended or [arm.final_loss for arm in counted.values()])


def ratio(arms: dict[str, Arm], above: str, below: str, loss: float, for_good: bool = False) -> float | None:
    """Ratio of the times to that loss. An upper bound if the arm `below` was stopped before it got there."""
    if above not in arms or below not in arms:
        return None
    when = time_to_keep if for_good else time_to
    mine, theirs = when(loss, arms[above].points), when(loss, arms[below].points) or arms[below].stopped_s
    return mine / theirs if mine is not None and theirs else None


def young_daly_s(cost_s: float, mtbf_s: float, floor_s: float) -> float:
    """Checkpoint interval that minimizes the cost of saving plus repeated work (Young 1974, Daly 2006)."""
    return max(floor_s, math.sqrt(2 * cost_s * mtbf_s))


def shares_of(rank: int, world: int, shares: int) -> list[int]:
    """The parts of a global batch that a rank computes; there may be fewer ranks than parts."""
    return list(range(rank, shares, world))


def weight_of(parts: int, world: int, shares: int) -> float:
    """Weight of a rank's mean loss over its parts, so that DDP's mean over ranks is the mean over the batch."""
    return parts * world / shares
