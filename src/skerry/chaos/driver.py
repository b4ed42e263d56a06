"""Inject planned and requested faults into a run, heal them, and record both.

The driver runs in the supervisor's loop and never blocks. The plan alone decides which faults it injects; their timing also
depends on the run's speed.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.chaos.kinds import Parts, kind_named
from skerry.chaos.mailbox import Mailbox
from skerry.chaos.parse import parse_faults
from skerry.chaos.plan import Fault, check_part, order
from skerry.chaos.proxy import Condition, LinkProxy, LinkState
from skerry.chaos.recorder import Recorder
from skerry.core import records
from skerry.errors import ConfigError
from skerry.metrics import MetricsTail, MetricsWriter

BYTES_PER_MBIT = 125_000
NO_PROXY = "{kind} needs a proxy in the links, which this run does not have; start it with: skerry train ... --proxy"


@dataclass
class Active:
    fault: Fault
    heal_at: float | None


class Driver:
    def __init__(
        self,
        faults: Sequence[Fault],
        islands: int,
        folder: Path,
        parts: Parts,
        metrics: MetricsWriter,
        recorder: Recorder,
        proxy: LinkProxy | None,
    ) -> None:
        self._islands = islands
        self._folder = folder / "chaos"
        self._parts = parts
        self._metrics = metrics
        self._recorder = recorder
        self._proxy = proxy
        self._began_at: float | None = None
        self._active: list[Active] = []
        self._mailbox = Mailbox(self._folder)
        for left_behind in self._folder.glob("*.json"):
            left_behind.unlink()
        (self._folder / "plan.txt").write_text("".join(f"{fault.words}\n" for fault in faults))
        done = Counter(record.get("words") for record in MetricsTail(metrics.path).read() if record.get("what") == "fault")
        left: list[Fault] = []
        for fault in faults:
            # A resumed run does not repeat faults that were already injected.
            if done[fault.words] > 0:
                done[fault.words] -= 1
            else:
                left.append(fault)
        self._step = 0
        self._timed: deque[Fault] = deque()
        self._stepped: deque[Fault] = deque()
        self._plan(left)

    def poll(self, now: float, running: bool, step: int) -> None:
        """Inject and heal what is due. `running` says whether training has begun; `step` is the run's step."""
        if running and self._began_at is None:
            self._began_at = now
        for active in [a for a in self._active if a.heal_at is not None and now >= a.heal_at]:
            self._heal(active)
        for identity, text in self._mailbox.requests():
            self._mailbox.answer(identity, *self._request(text, now))
        self._step = step
        for fault in self._due(now):
            if self._still_wanted(fault):
                self._inject(fault, now)

    def restarted(self, part: str, pid: int) -> None:
        self._recorder.write(records.PartRestarted(part, pid))

    def close(self) -> None:
        left = [fault for fault in [*self._stepped, *self._timed] if self._still_wanted(fault)]
        if left:
            detail = f"{len(left)} planned faults, the first: {left[0].words}"
            self._metrics.write("event", what="faults not reached", detail=detail)
        self._mailbox.close()
        self._recorder.close()
        if self._proxy is not None:
            self._proxy.close()

    # ------------------------------------------------------------ timing

    def _plan(self, more: Sequence[Fault]) -> None:
        """Sort faults into two queues, by time and by step. Plans may be long, so each poll looks only at the heads."""
        faults = sorted([*self._timed, *self._stepped, *more], key=order)
        self._timed = deque(fault for fault in faults if fault.at_step is None)
        self._stepped = deque(fault for fault in faults if fault.at_step is not None)

    def _due(self, now: float) -> Iterator[Fault]:
        if self._began_at is None:
            return
        while self._timed and now - self._began_at >= (self._timed[0].at_s or 0.0):
            yield self._timed.popleft()
        while self._stepped and self._step >= (self._stepped[0].at_step or 0):
            yield self._stepped.popleft()

    def _still_wanted(self, fault: Fault) -> bool:
        return fault.before_step is None or self._step < fault.before_step

    def _request(self, text: str, now: float) -> tuple[bool, str]:
        """Inject requested faults, or queue those that have a time. Returns whether they were accepted, and the reply."""
        try:
            faults = parse_faults(text)
            for fault in faults:
                check_part(fault, self._islands)
                if kind_named(fault.kind).link and self._proxy is None:
                    return False, NO_PROXY.format(kind=fault.kind)
        except ConfigError as error:
            return False, str(error)
        for fault in faults:
            if fault.at_s is None and fault.at_step is None:
                self._inject(fault, now)
            else:
                self._plan([fault])
        return True, ", ".join(fault.words for fault in faults)

    # ------------------------------------------------------------ injecting and healing

    def _inject(self, fault: Fault, now: float) -> None:
        kind = kind_named(fault.kind)
        lasts = f" for {fault.for_s:g} s" if fault.for_s else ""
        # Recorded first, so that the fault precedes its effects in the metrics.
        self._note(
            "fault", fault, fault.what + lasts + ("" if self._parts.runs(fault.part) else ", but the part was not running")
        )
        if fault.kind in ("kill", "kill_syncer"):
            self._parts.kill(fault.part, fault.for_s)
            return
        self._active.append(Active(fault, now + fault.for_s if fault.for_s else None))
        if kind.inject is not None:
            self._attempt(kind.inject, fault)
        elif kind.link:
            self._set_link(fault.part)
        elif kind.inside:
            self._set_inside(fault.part)
        else:
            self._parts.signal(fault.part, signal.SIGSTOP)

    def _attempt(self, act: Callable[[Parts, str, float], object], fault: Fault) -> None:
        try:
            act(self._parts, fault.part, fault.amount)
        except Exception as error:  # code from outside: no failure of it may end the run
            detail = f"{fault.words}: {type(error).__name__}: {error}"
            self._metrics.write("event", what="fault failed", island=fault.part, detail=detail)

    def _heal(self, active: Active) -> None:
        fault, kind = active.fault, kind_named(active.fault.kind)
        self._active.remove(active)
        if kind.inject is not None:
            if kind.heal is not None:
                self._attempt(kind.heal, fault)
        elif kind.link:
            self._set_link(fault.part)
        elif kind.inside:
            self._set_inside(fault.part)
        elif not any(other.fault.part == fault.part and other.fault.kind == "freeze" for other in self._active):
            self._parts.signal(fault.part, signal.SIGCONT)
        self._note("healed", fault, fault.what)

    def _note(self, what: str, fault: Fault, detail: str) -> None:
        self._metrics.write("event", what=what, island=fault.part, detail=detail, fault=fault.kind, words=fault.words)
        kind = records.FaultInjected if what == "fault" else records.FaultHealed
        self._recorder.write(kind(fault.part, fault.kind, detail, fault.words))

    def _faults_of(self, part: str) -> list[Fault]:
        return [active.fault for active in self._active if active.fault.part == part]

    def _set_inside(self, part: str) -> None:
        """Tell a process about its faults. If several have the same kind, the last one wins."""
        amounts = {fault.kind: fault.amount or 1.0 for fault in self._faults_of(part) if kind_named(fault.kind).inside}
        write_json(self._folder / f"{part}.json", amounts)

    def _set_link(self, part: str) -> None:
        assert self._proxy is not None, "link fault without a proxy"
        faults = self._faults_of(part)
        kinds = {fault.kind for fault in faults}
        up, down = (_condition([f for f in faults if f.direction in (way, "both")]) for way in ("up", "down"))
        self._proxy.set(part, LinkState("cut" in kinds, "drop" in kinds, up, down))


def _condition(faults: Sequence[Fault]) -> Condition:
    amount = {fault.kind: fault.amount for fault in faults}
    rate = amount["throttle"] * BYTES_PER_MBIT if "throttle" in amount else None
    return Condition(rate, amount.get("delay", 0.0) / 1000, amount.get("corrupt"))


def write_json(path: Path, value: Any) -> None:
    """Write atomically: readers poll the file at any time."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)
