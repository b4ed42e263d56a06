"""Writes the syncer's `metrics.jsonl`: the run and every learner once a second, merges, and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skerry.clock import Clock
from skerry.core import messages as m
from skerry.core import records
from skerry.core.schema import TapeRecord
from skerry.core.syncer import SyncerCore
from skerry.metrics import MetricsWriter

EVENTS = (
    records.Joined,
    records.Disconnected,
    records.Lost,
    records.Left,
    records.Began,
    records.Closing,
    records.SyncerStarted,
    records.MergeFailed,
    records.Unhealthy,
    records.Quarantined,
    records.Readmitted,
    records.Diverged,
    records.NotRestored,
    records.ShardJoined,
    records.ShardLost,
    records.LeftOut,
    records.Recovered,
    records.TapeRecovered,
)
"""Tape records that are also written as events."""


@dataclass
class Vitals:
    """A learner's last report, for display."""

    loss: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    steps: int = 0
    stall_s: float = 0.0
    stalled_s: float = 0.0
    link: dict[str, float] | None = None


class MetricsLog:
    def __init__(self, folder: Path, clock: Clock) -> None:
        self._writer = MetricsWriter(folder / "metrics.jsonl")
        self._closed = False
        self._clock = clock
        self._started = clock.now()
        self._counts: dict[str, tuple[float, int]] = {}
        self._vitals: dict[str, Vitals] = {}
        self._last_gone: dict[str, tuple[object, ...]] = {}
        """The last line of each learner that has left, to skip repeats."""

    def close(self) -> None:
        self._closed = True
        self._writer.close()

    def _note(self, kind: str, **fields: object) -> None:
        if not self._closed:  # events during shutdown are not written
            self._writer.write(kind, **fields)

    def event(self, record: TapeRecord) -> None:
        if isinstance(record, EVENTS):
            data = record.to_json()
            detail = ", ".join(f"{key} {value}" for key, value in data.items() if key not in ("learner", "session"))
            self._note("event", what=record.kind.replace("_", " "), island=data.get("learner"), detail=detail)

    def merged(self, order: m.Merge, seconds: float) -> None:
        total = sum(share.weight for share in order.shares)
        self._note(
            "merge",
            fragment=order.fragment,
            version=order.version,
            step=order.round,
            contributors={share.learner: round(share.weight / total, 4) for share in order.shares},
            asked=order.asked,
            seconds=round(seconds, 6),
        )

    def summary(self, core: SyncerCore, vitals: Mapping[str, Vitals]) -> None:
        """Write the current state of the run and of every learner."""
        now, participation = self._clock.now(), core.rounds.participation
        live = core.run.in_phase("training", "leaving")
        self._note(
            "run",
            phase=core.phase,
            step=core.step,
            tokens=core.tokens,
            budget_tokens=core.sync.budget_tokens,
            merges=core.run.merges,
            participation=sum(participation) / len(participation) if participation else None,
            live=len(live),
            expected=core.sync.start_with,
        )
        for name in set(self._counts) - set(core.learners):
            del self._counts[name], self._vitals[name]
            self._last_gone.pop(name, None)
        for learner in core.learners.values():
            counted = sum(fragment.counted_step(learner.name) for fragment in core.fragments) // len(core.fragments)
            if learner.phase == "gone":
                # A long run may have many departed learners. Write each only when it changes.
                last = (learner.session, learner.tokens, learner.merges, counted)
                if self._last_gone.get(learner.name) == last:
                    continue
                self._last_gone[learner.name] = last
            else:
                self._last_gone.pop(learner.name, None)
            then, tokens = self._counts.get(learner.name, (self._started, 0))
            rate = max(0, learner.tokens - tokens) / (now - then) if now > then else 0.0
            self._counts[learner.name] = (now, learner.tokens)
            connected = learner.name in vitals
            report = vitals.get(learner.name) or self._vitals.get(learner.name) or Vitals()
            self._vitals[learner.name] = report
            self._note(
                "island",
                island=learner.name,
                state={"leaving": "training", "gone": "left"}.get(learner.phase, learner.phase),
                step=learner.step,
                tokens=learner.tokens,
                tokens_per_s=round(rate, 1),
                loss=report.loss if connected else None,
                weight=round(learner.last_share, 4),
                merges=learner.merges,
                sent_bytes=report.sent_bytes if connected else None,
                received_bytes=report.received_bytes if connected else None,
                session=learner.session[:12],
                steps=report.steps,
                counted=counted,
                step_time_s=round(learner.step_time.get(), 6),
                stall_s=round(report.stall_s, 6),
                stalled_s=round(report.stalled_s, 6),
                link=report.link if connected else None,
            )
            report.stall_s = 0.0
