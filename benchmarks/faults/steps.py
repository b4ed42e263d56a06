"""Step logs: replicas of every system write one JSON line per inner step. All measurements come from these logs.

A line is {"at": unix seconds, "step": n, "loss": x} or {"at": ..., "event": what, ...}. A restarted replica appends to the same
file. `step` is the replica's progress: it goes back when a system throws work away.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.metrics import MetricsTail, MetricsWriter


@dataclass(frozen=True)
class Step:
    at: float
    step: int
    loss: float
    """NaN if it was not finite."""


class StepLog:
    def __init__(self, path: Path) -> None:
        self._writer = MetricsWriter(path)

    def step(self, step: int, loss: float) -> None:
        self._writer.write("step", step=step, loss=loss)

    def event(self, what: str, **fields: object) -> None:
        self._writer.write("event", event=what, **fields)


class StepReader:
    def __init__(self, path: Path) -> None:
        self._tail = MetricsTail(path)
        self._steps: list[Step] = []
        self._events: list[dict[str, Any]] = []

    def _read(self) -> None:
        for record in self._tail.read():
            if record["kind"] == "step":
                loss = record["loss"]
                self._steps.append(Step(record["at"], record["step"], math.nan if loss is None else loss))
            else:
                self._events.append(record)

    def steps(self, since: float = 0.0, until: float = math.inf) -> list[Step]:
        self._read()
        return [step for step in self._steps if since <= step.at <= until]

    def events(self, what: str, since: float = 0.0) -> list[dict[str, Any]]:
        self._read()
        return [event for event in self._events if event["event"] == what and event["at"] >= since]


def gaps(steps: Sequence[Step]) -> list[float]:
    return [after.at - before.at for before, after in itertools.pairwise(steps)]


def median_gap(steps: Sequence[Step]) -> float:
    return statistics.median(gaps(steps)) if len(steps) > 1 else math.inf


def times_without_step(steps: Sequence[Step], since: float, until: float) -> list[float]:
    """Gaps between steps that end in the interval, and the open gap from the last step to `until`."""
    ended = [gap for step, gap in zip(steps[1:], gaps(steps), strict=True) if since < step.at <= until]
    before = [step.at for step in steps if step.at <= until]
    return [*ended, until - max(before, default=since)]


def taken_back(steps: Sequence[Step]) -> int:
    """Steps whose work was thrown away: logged, and later the replica was at or before that step again."""
    return sum(max(0, before.step + 1 - after.step) for before, after in itertools.pairwise(steps))
