"""The four faults, for any driver, and what is measured for each."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

from faults.drivers import Driver
from faults.replica import REPLICAS, job_config, replica_name
from faults.steps import median_gap, taken_back, times_without_step

FAST, FAULTY = 0, 1
PERIOD = job_config().sync.every
AWAY_S = 3.0
"""How long a killed replica stays down."""
LIMIT_S = 90.0
"""A system that takes longer to recover counts as never recovering."""


@dataclass(frozen=True)
class Straggler:
    ratio: float
    """The fast replica's speed with a straggler over its speed with an equally fast peer: median over pairs of blocks."""
    lowest: float
    highest: float
    even: float
    """Steps per second with an equally fast peer."""


def straggler(driver: Driver, pairs: int, how: str) -> Straggler:
    """Alternate blocks with and without a straggler in one run: A B, B A, A B, ..., so that drift cancels out. The first period
    of a block is discarded. The rest is whole periods, so the timing of exchanges does not matter."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs):
        for slow in (False, True) if pair % 2 == 0 else (True, False):
            driver.slow(FAULTY, how if slow else None)
            driver.run_steps(FAST, PERIOD)
            steps = driver.run_steps(FAST, 2 * PERIOD + 1)
            speeds[slow].append((len(steps) - 1) / (steps[-1].at - steps[0].at) if len(steps) > 1 else 0.0)
    driver.slow(FAULTY, None)
    ratios = [slowed / even for slowed, even in zip(speeds[True], speeds[False], strict=True)]
    return Straggler(statistics.median(ratios), min(ratios), max(ratios), statistics.median(speeds[False]))


@dataclass(frozen=True)
class Outage:
    stall: float
    """`gap` minus `quiet_gap`, at least 0."""
    gap: float
    """Longest time between two inner steps of any surviving replica, from the coordinator's death until all exchange again, in
    units of the median step time. Median over the outages."""
    quiet_gap: float
    """The same for equally long intervals before, in which an unused coordinator is killed and restarted: on a small machine
    that alone slows the replicas down."""
    gap_s: float
    back_s: float
    """From the restart of the coordinator until every replica has taken part in an exchange."""
    kept: float
    """Share of the inner steps that reach the common model, from the coordinator's death until two periods after the recovery;
    minimum over replicas."""
    exits: str


def outage(driver: Driver, away_s: float, after_s: float, rounds: int) -> Outage:
    found = [_outage_once(driver, away_s, after_s) for _ in range(1 if driver.waits else rounds)]
    gap = statistics.median(one.gap for one in found)
    quiet_gap = statistics.median(one.quiet_gap for one in found)
    gap_s, back_s, kept = (statistics.median(getattr(one, name) for one in found) for name in ("gap_s", "back_s", "kept"))
    exits = sorted({one.exits for one in found if one.exits})
    return Outage(max(0.0, gap - quiet_gap), gap, quiet_gap, gap_s, back_s, kept, "; ".join(exits))


def _outage_once(driver: Driver, away_s: float, after_s: float) -> Outage:
    exits_before = len(driver.exits)
    survivors = [index for index in range(REPLICAS) if driver.coordinator != f"rank {index}"]
    driver.start_decoy()
    driver.run_for(after_s)
    quiet_since = time.time()
    driver.kill_decoy()
    driver.run_for(min(away_s, AWAY_S) if driver.waits else away_s)
    driver.start_decoy()
    driver.run_for(after_s)
    since = time.time()
    driver.kill_coordinator()
    driver.run_for(away_s)
    driver.start_coordinator()
    started = time.time()
    driver.run_for(after_s)
    driver.kill_decoy()
    driver.run_until(lambda: all(driver.took_part(index, started) < math.inf for index in survivors), LIMIT_S)
    until = time.time()
    gap, gap_s, quiet = 0.0, 0.0, 0.0
    for index in survivors:
        steps = driver.logs[index].steps()
        step_s = median_gap([step for step in steps if quiet_since <= step.at <= since])
        worst_s = max(times_without_step(steps, since, until))
        quiet = max(quiet, max(times_without_step(steps, quiet_since, since)) / step_s)
        if worst_s / step_s > gap:
            gap, gap_s = worst_s / step_s, worst_s
    back_s = max(driver.took_part(index, started) for index in survivors) - started
    driver.run_steps(survivors[-1], 2 * PERIOD)  # until every fragment was exchanged
    kept = min(driver.kept(index, since, time.time()) for index in survivors)
    return Outage(gap - quiet, gap, quiet, gap_s, back_s, kept, ", ".join(driver.exits[exits_before:]))


@dataclass(frozen=True)
class Poison:
    finite: float
    """Share of the other replica's losses that are finite in the third period after the NaN."""
    faulty_finite: float
    """The same for the faulty replica."""
    accused: str
    exits: str


def poison(driver: Driver) -> Poison:
    exits_before = len(driver.exits)
    driver.poison(FAULTY)
    driver.run_until(lambda: bool(driver.logs[FAULTY].events("nan")), LIMIT_S)
    driver.run_steps(FAST, 3 * PERIOD)
    shares = []
    for index in range(REPLICAS):
        losses = [step.loss for step in driver.logs[index].steps()[-PERIOD:]]
        shares.append(sum(map(math.isfinite, losses)) / len(losses))
    return Poison(shares[FAST], shares[FAULTY], driver.accused(), ", ".join(driver.exits[exits_before:]))


@dataclass(frozen=True)
class Kill:
    lost_steps: float
    """What the other replica loses until the killed one is back: excess time without a step, compared with the interval before,
    in steps; plus steps that were thrown away."""
    stall: float
    """The other replica's longest time without a step, in steps."""
    quiet_stall: float
    rejoin_s: float
    """From the start of the new process to its first contribution to the common model, less its start-up."""
    start_up_s: float
    exits: str
    """Other processes that ended."""


def kill(driver: Driver) -> Kill:
    exits_before = len(driver.exits)
    began = time.time()
    driver.run_steps(FAST, 3 * PERIOD)
    killed = time.time()
    driver.kill_replica(FAULTY)
    driver.run_for(AWAY_S)
    restarted = time.time()
    driver.start_replica(FAULTY)
    driver.run_until(lambda: driver.took_part(FAULTY, restarted) < math.inf, LIMIT_S)
    driver.run_for(1.0)
    until = time.time()
    built = [event["at"] for event in driver.logs[FAULTY].events("built", restarted)]
    start_up_s = (built[0] if built else until) - restarted
    steps = driver.logs[FAST].steps(began, until)
    step_s = median_gap([step for step in steps if step.at <= killed])
    usual_s = max(times_without_step(steps, began, killed))
    without_s = times_without_step(steps, killed, until)
    lost_steps = sum(gap - step_s for gap in without_s if gap > usual_s) / step_s + taken_back(steps)
    return Kill(
        lost_steps,
        max(without_s) / step_s,
        usual_s / step_s,
        driver.took_part(FAULTY, restarted) - restarted - start_up_s,
        start_up_s,
        ", ".join(name for name in driver.exits[exits_before:] if name != replica_name(FAULTY)),
    )
