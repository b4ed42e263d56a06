"""The arithmetic of benchmarks/time_to_loss.py."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from time_to_loss.curves import Arm, common_loss, ratio, shares_of, time_to, time_to_keep, weight_of, young_daly_s

CURVE = [(0.0, 5.0), (10.0, 3.0), (20.0, 3.5), (30.0, 1.0)]


@pytest.mark.parametrize("loss, seconds", [(6.0, 0.0), (5.0, 0.0), (4.0, 5.0), (3.0, 10.0), (2.0, 26.0), (1.0, 30.0)])
def test_a_loss_is_reached_where_the_curve_first_crosses_it(loss: float, seconds: float) -> None:
    assert time_to(loss, CURVE) == pytest.approx(seconds)


@pytest.mark.parametrize("loss, seconds", [(6.0, 0.0), (4.0, 5.0), (3.25, 21.0), (3.0, 22.0), (1.0, 30.0), (0.9, None)])
def test_a_loss_is_kept_from_where_the_curve_last_crosses_it(loss: float, seconds: float | None) -> None:
    assert time_to_keep(loss, CURVE) == (None if seconds is None else pytest.approx(seconds))


def test_a_loss_below_the_curve_is_never_reached() -> None:
    assert time_to(0.9, CURVE) is None
    assert time_to(1.0, []) is None


def test_an_arm_that_was_stopped_makes_the_ratio_an_upper_bound() -> None:
    """Its own loss is no aim for the others, and it counts as if it had reached theirs when it was stopped."""
    decoupled = Arm("decoupled", [(0.0, 5.0), (10.0, 1.0)])
    ended = Arm("dp", [(0.0, 5.0), (40.0, 1.0)])
    stopped = Arm("dp", [(0.0, 5.0), (20.0, 3.0)], stopped_s=25.0)
    assert common_loss({"dp-restart": stopped, "decoupled": decoupled}) == 1.0
    assert ratio({"dp-restart": stopped, "decoupled": decoupled}, "decoupled", "dp-restart", 1.0) == 10.0 / 25.0
    assert ratio({"dp-restart": ended, "decoupled": decoupled}, "decoupled", "dp-restart", 1.0) == 10.0 / 40.0
    # What it did reach takes as long as it took.
    assert ratio({"dp-restart": stopped, "decoupled": decoupled}, "decoupled", "dp-restart", 3.0) == 5.0 / 20.0


@pytest.mark.parametrize("cost_s, mtbf_s", [(0.01, 60.0), (0.5, 60.0), (2.0, 600.0)])
def test_no_other_interval_between_checkpoints_wastes_less(cost_s: float, mtbf_s: float) -> None:
    def wasted(every_s: float) -> float:
        return cost_s / every_s + every_s / 2 / mtbf_s  # saving, and half an interval done again at each failure

    chosen = young_daly_s(cost_s, mtbf_s, floor_s=0.0)
    assert wasted(chosen) <= min(wasted(chosen * factor / 100) for factor in range(10, 500)) + 1e-12
    assert young_daly_s(cost_s, mtbf_s, floor_s=1000.0) == 1000.0


@pytest.mark.parametrize("shares", range(1, 9))
def test_fewer_ranks_take_the_same_step_as_all(shares: int) -> None:
    """Their gradient, as DDP takes it, is the mean over the whole global batch, however many ranks are left."""
    gradients = [random.Random(shares).gauss(0, 1) + part for part in range(shares)]
    for world in range(1, shares + 1):
        ranks = [shares_of(rank, world, shares) for rank in range(world)]
        assert sorted(part for mine in ranks for part in mine) == list(range(shares))
        means = [sum(gradients[part] for part in mine) / len(mine) * weight_of(len(mine), world, shares) for mine in ranks]
        assert sum(means) / world == pytest.approx(sum(gradients) / shares)
