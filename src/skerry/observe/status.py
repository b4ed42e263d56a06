"""The state of a run, computed from its metrics records. No files, clock or terminal.

The writers may be newer versions, or processes that were killed and restarted. Therefore unknown kinds and keys are ignored, a
value of the wrong type keeps the old one, and a byte counter that restarts at zero continues from its last total.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

_Default = TypeVar("_Default", int, "int | None")

RATE_WINDOW_S = 15.0
"""Window of the run's tokens per second."""
PAUSE_S = 60.0
"""A longer gap between records means that nothing was running; it does not count as run time."""


@dataclass
class ByteCount:
    """A monotonic total of a counter that restarts at zero with its process."""

    total: int = 0
    reported: int = 0
    """The last value from the process."""

    def report(self, value: int) -> None:
        self.total += value - self.reported if value >= self.reported else value
        self.reported = value


@dataclass
class IslandStatus:
    """The latest values of one island."""

    name: str
    state: str = "waiting"
    """`waiting`, `training`, `away` or `left`; newer writers may use others."""
    step: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None
    loss: float | None = None
    weight: float | None = None
    """The island's share of the last merge it contributed to."""
    merges: int = 0
    sent: ByteCount = field(default_factory=ByteCount)
    received: ByteCount = field(default_factory=ByteCount)
    link: LinkStatus = field(default_factory=lambda: LinkStatus())
    restarts: int = 0

    @property
    def working(self) -> bool:
        return self.state not in ("away", "left")


LINK_KINDS = ("contributions", "versions", "state_sent", "state_received", "control_sent", "control_received")


@dataclass
class LinkStatus:
    """Traffic and waiting time of an island's link, over all of its processes."""

    round_trip_s: float | None = None
    send_bytes_per_s: float | None = None
    receive_bytes_per_s: float | None = None
    queue_s: float | None = None
    _session: str = ""
    _before: Counter[str] = field(default_factory=Counter)
    _now: dict[str, float] = field(default_factory=dict)

    def report(self, said: Mapping[str, Any], session: str, step_time_s: float | None, steps: int) -> None:
        if session != self._session:
            self._before.update(self._now)
            self._session, self._now = session, {}
        for kind in LINK_KINDS:
            self._now[kind] = number(said, f"{kind}_bytes") or 0.0
        self._now["waited_s"] = number(said, "waited_s") or 0.0
        self._now["stepped_s"] = (step_time_s or 0.0) * steps
        self.round_trip_s = number(said, "round_trip_s")
        self.send_bytes_per_s = number(said, "send_bytes_per_s")
        self.receive_bytes_per_s = number(said, "receive_bytes_per_s")
        self.queue_s = number(said, "queue_s")

    @property
    def known(self) -> bool:
        return bool(self._session)

    def total(self, what: str) -> float:
        return self._before[what] + self._now.get(what, 0.0)

    @property
    def waited_share(self) -> float | None:
        """Share of the step time that was spent waiting for the exchange."""
        stepped = self.total("stepped_s") + self.total("waited_s")
        return self.total("waited_s") / stepped if stepped else None


@dataclass(frozen=True)
class Event:
    """An event of the run."""

    elapsed_s: float
    what: str
    island: str
    """Empty if the event concerns the run or the syncer."""
    detail: str

    @property
    def of_syncer(self) -> bool:
        return self.what.startswith("syncer") or self.island == "syncer"


@dataclass(frozen=True)
class ValidationPoint:
    """One validation of the global model."""

    elapsed_s: float
    tokens: int
    step: int
    loss: float | None
    """None if it was not finite."""


@dataclass(frozen=True)
class Result:
    """The result of a finished run."""

    validation_loss: float | None
    standard_error: float | None
    tokens: int
    seconds: float
    sample: str


class RunStatus:
    """The state of a run, updated record by record with `apply`."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.phase = ""
        self.algorithm = ""
        self.step = 0
        self.tokens = 0
        self.budget_tokens = 0
        self.live: int | None = None
        self.expected: int | None = None
        self.recent_participation: float | None = None
        self.elapsed_s = 0.0
        self.islands: dict[str, IslandStatus] = {}
        self.events: list[Event] = []
        self.validations: list[ValidationPoint] = []
        self.result: Result | None = None
        self._merges_reported: int | None = None
        self._merges_seen = 0
        self._shares_seen = 0
        self._share_sum = 0.0
        self._last_at: float | None = None
        self._track: deque[tuple[float, int]] = deque()

    def apply(self, record: Mapping[str, Any]) -> None:
        """Update the state with one record."""
        at = number(record, "at")
        take = {
            "run": self._take_run,
            "island": self._take_island,
            "merge": self._take_merge,
            "validation": self._take_validation,
            "event": self._take_event,
            "result": self._take_result,
        }.get(text(record, "kind") or "")
        if at is None or take is None:
            return
        if self._last_at is None:
            self._last_at = at
        gap_s = at - self._last_at
        if gap_s > 0:  # several processes write, so times may go back a little
            self.elapsed_s += gap_s if gap_s <= PAUSE_S else 0.0
            self._last_at = at
        take(record, at)

    @property
    def merges(self) -> int:
        return self._merges_seen if self._merges_reported is None else self._merges_reported

    @property
    def participation(self) -> float | None:
        """Share of the asked learners that contributed, averaged over all merges on record."""
        return self._share_sum / self._shares_seen if self._shares_seen else self.recent_participation

    @property
    def tokens_per_s(self) -> float | None:
        """Rate over the last RATE_WINDOW_S; None until two token counts are known."""
        if len(self._track) < 2:
            return None
        (first_at, first), (last_at, last) = self._track[0], self._track[-1]
        return (last - first) / (last_at - first_at)

    @property
    def progress(self) -> float | None:
        """Share of the budget that is spent; None without a budget."""
        return min(1.0, self.tokens / self.budget_tokens) if self.budget_tokens > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the budget is spent at the current rate; None if unknown."""
        rate = self.tokens_per_s
        if self.budget_tokens <= 0 or not rate or self.phase in ("closing", "ended"):
            return None
        return max(0, self.budget_tokens - self.tokens) / rate

    @property
    def latest_validation(self) -> ValidationPoint | None:
        return self.validations[-1] if self.validations else None

    @property
    def best_validation(self) -> float | None:
        return min((point.loss for point in self.validations if point.loss is not None), default=None)

    @property
    def sent_bytes(self) -> int:
        return sum(island.sent.total for island in self.islands.values())

    @property
    def received_bytes(self) -> int:
        return sum(island.received.total for island in self.islands.values())

    @property
    def island_restarts(self) -> int:
        return sum(event.what.endswith("restarted") and not event.of_syncer for event in self.events)

    @property
    def syncer_restarts(self) -> int:
        return sum(event.what.endswith("restarted") and event.of_syncer for event in self.events)

    def sorted_islands(self) -> list[IslandStatus]:
        """Islands in natural order: island-2 comes before island-10."""
        return [self.islands[name] for name in sorted(self.islands, key=natural_key)]

    def _take_run(self, record: Mapping[str, Any], at: float) -> None:
        phase = text(record, "phase") or self.phase
        if self.phase == "ended" and phase in ("gathering", "running"):
            self.result = None  # the run was resumed
        self.phase = phase
        self.algorithm = text(record, "algorithm") or self.algorithm
        self.step = count(record, "step", self.step)
        self.tokens = count(record, "tokens", self.tokens)
        self.budget_tokens = count(record, "budget_tokens", self.budget_tokens)
        if "merges" in record:
            self._merges_reported = count(record, "merges", self._merges_reported or 0)
        self.live = count(record, "live", self.live)
        self.expected = count(record, "expected", self.expected)
        share = number(record, "participation")
        self.recent_participation = self.recent_participation if share is None else share
        self._follow_tokens(at)

    def _follow_tokens(self, at: float) -> None:
        if self._track and self.tokens < self._track[-1][1]:
            self._track.clear()  # a restarted syncer went back to its stored state
        if self._track and at <= self._track[-1][0]:
            return
        self._track.append((at, self.tokens))
        while at - self._track[0][0] > RATE_WINDOW_S:
            self._track.popleft()

    def _take_island(self, record: Mapping[str, Any], at: float) -> None:
        name = text(record, "island")
        if not name:
            return
        island = self._island(name)
        island.state = text(record, "state") or island.state
        island.step = count(record, "step", island.step)
        island.tokens = count(record, "tokens", island.tokens)
        island.merges = count(record, "merges", island.merges)
        island.tokens_per_s = number(record, "tokens_per_s")
        island.loss = number(record, "loss")
        weight = number(record, "weight")
        island.weight = island.weight if weight is None else weight
        island.sent.report(count(record, "sent_bytes", island.sent.reported))
        island.received.report(count(record, "received_bytes", island.received.reported))
        link = record.get("link")
        if isinstance(link, Mapping):
            island.link.report(link, text(record, "session") or "", number(record, "step_time_s"), count(record, "steps", 0))

    def _take_merge(self, record: Mapping[str, Any], at: float) -> None:
        self._merges_seen += 1
        contributors, asked = record.get("contributors"), count(record, "asked", 0)
        if isinstance(contributors, Mapping) and asked > 0:
            self._shares_seen += 1
            self._share_sum += min(1.0, len(contributors) / asked)

    def _take_validation(self, record: Mapping[str, Any], at: float) -> None:
        tokens, step = count(record, "tokens", self.tokens), count(record, "step", self.step)
        self.validations.append(ValidationPoint(self.elapsed_s, tokens, step, number(record, "loss")))

    def _take_event(self, record: Mapping[str, Any], at: float) -> None:
        what = text(record, "what")
        if not what:
            return
        event = Event(self.elapsed_s, what, text(record, "island") or "", text(record, "detail") or "")
        self.events.append(event)
        if not event.island or event.of_syncer:
            return
        # The syncer notices a killed island only after seconds of silence.
        if what in ("killed", "lost"):
            self._island(event.island).state = "away"
        elif what == "left":
            self._island(event.island).state = "left"
        elif what == "restarted":
            self._island(event.island).restarts += 1

    def _take_result(self, record: Mapping[str, Any], at: float) -> None:
        self.result = Result(
            number(record, "validation_loss"),
            number(record, "standard_error"),
            count(record, "tokens", self.tokens),
            seconds if (seconds := number(record, "seconds")) is not None else self.elapsed_s,
            text(record, "sample") or "",
        )

    def _island(self, name: str) -> IslandStatus:
        return self.islands.setdefault(name, IslandStatus(name))


def number(record: Mapping[str, Any], key: str) -> float | None:
    """The finite number under this key, or None."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def count(record: Mapping[str, Any], key: str, default: _Default) -> int | _Default:
    """The non-negative integer under this key, or the default."""
    value = number(record, key)
    return default if value is None or value < 0 else int(record[key])


def text(record: Mapping[str, Any], key: str) -> str | None:
    """The string under this key, or None."""
    value = record.get(key)
    return value if isinstance(value, str) else None


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key under which island-2 comes before island-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]
