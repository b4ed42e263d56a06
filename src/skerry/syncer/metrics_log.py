"""What the syncer writes to `metrics.jsonl`, for people to look at: the run and every learner once a second, merges, events."""

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
"""Records that are shown as events."""


@dataclass
class Vitals:
    """What a learner last said of itself, for display."""

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
        self._said: dict[str, Vitals] = {}
        self._last: dict[str, tuple[object, ...]] = {}
        """What was last written of each learner that was gone by then."""

    def close(self) -> None:
        self._closed = True
        self._writer.close()

    def _note(self, kind: str, **fields: object) -> None:
        if not self._closed:  # what happens while the process ends need not be shown
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
        """The run and every learner, as they are now."""
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
            del self._counts[name], self._said[name]
            self._last.pop(name, None)
        for learner in core.learners.values():
            counted = sum(fragment.counted_step(learner.name) for fragment in core.fragments) // len(core.fragments)
            if learner.phase == "gone":
                # Those who came and went are many in a long run.
                last = (learner.session, learner.tokens, learner.merges, counted)
                if self._last.get(learner.name) == last:
                    continue
                self._last[learner.name] = last
            else:
                self._last.pop(learner.name, None)
            then, tokens = self._counts.get(learner.name, (self._started, 0))
            rate = max(0, learner.tokens - tokens) / (now - then) if now > then else 0.0
            self._counts[learner.name] = (now, learner.tokens)
            connected = learner.name in vitals
            said = vitals.get(learner.name) or self._said.get(learner.name) or Vitals()
            self._said[learner.name] = said
            self._note(
                "island",
                island=learner.name,
                state={"leaving": "training", "gone": "left"}.get(learner.phase, learner.phase),
                step=learner.step,
                tokens=learner.tokens,
                tokens_per_s=round(rate, 1),
                loss=said.loss if connected else None,
                weight=round(learner.last_share, 4),
                merges=learner.merges,
                sent_bytes=said.sent_bytes if connected else None,
                received_bytes=said.received_bytes if connected else None,
                session=learner.session[:12],
                steps=said.steps,
                counted=counted,
                step_time_s=round(learner.step_time.get(), 6),
                stall_s=round(said.stall_s, 6),
                stalled_s=round(said.stalled_s, 6),
                link=said.link if connected else None,
            )
            said.stall_s = 0.0
