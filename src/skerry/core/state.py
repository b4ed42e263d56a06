"""The syncer's state: learners, fragments with their open rounds, and the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from skerry.config import SyncConfig
from skerry.core.guard import Guard
from skerry.core.messages import Contributed
from skerry.core.quorum import MovingAverage
from skerry.core.schedule import Schedule

LearnerPhase = Literal["waiting", "training", "leaving", "away", "gone"]
RunPhase = Literal["gathering", "running", "closing", "ended"]


@dataclass
class LearnerState:
    name: str
    session: str
    slot: int
    phase: LearnerPhase
    region: str = field(default="", kw_only=True)
    step: int = 0
    tokens: int = 0
    heard_at: float = 0.0
    gone_at: float = 0.0
    moved_at: float = 0.0
    """When fragment bytes last moved between this learner and the syncer."""
    step_time: MovingAverage = field(default_factory=MovingAverage)
    merges: int = 0
    last_share: float = 0.0
    ready: bool = False
    began: bool = False
    strikes: int = 0
    """Consecutive unhealthy contributions. In quarantine: healthy contributions still required."""
    quarantined: bool = False
    owes: set[int] | None = None
    """Fragments this learner has not been able to contribute since it asked to leave; None if it is not leaving."""
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """Earlier sessions under this name."""

    @property
    def leaving(self) -> bool:
        return self.owes is not None

    def judged(self, healthy: bool, strikes: int) -> Literal["quarantined", "readmitted"] | None:
        """Count a contribution towards or out of quarantine. Returns the change of state, if any."""
        if self.quarantined:
            self.strikes = self.strikes - 1 if healthy else strikes
            self.quarantined = self.strikes > 0
            return None if self.quarantined else "readmitted"
        self.strikes = 0 if healthy else self.strikes + 1
        if healthy or strikes == 0 or self.strikes < strikes:
            return None
        self.quarantined, self.strikes = True, strikes
        return "quarantined"


@dataclass
class Round:
    number: int
    """Unique per fragment, normally the run step at which it was due. A learner answers each number once."""
    opened_at: float
    asked: set[str]
    needed: set[str] = field(default_factory=set)
    """Learners that the round waits for even after the quorum, because it is their last chance to contribute."""
    final: frozenset[str] = frozenset()
    """The needed learners that were asked after they stopped training, so that their answer is complete."""
    due: int = 0
    """The last due step that this round covers."""
    declined: set[str] = field(default_factory=set)
    """Learners that had nothing to give."""
    arrived: dict[str, Contributed] = field(default_factory=dict)
    quorum_at: float | None = None
    deadline: float | None = None
    merging_since: float | None = None
    not_before: float = 0.0
    """A failed merge is not retried before this time."""
    restores: bool = False
    """This is a rollback to the good copy, not a merge."""
    void: bool = False
    """The contributions are lost, so a failed merge cannot be retried."""

    @property
    def missing(self) -> set[str]:
        return self.asked - set(self.arrived)

    def exchange_s(self, now: float) -> float:
        """Seconds the exchange took, without the grace window: gathering the quorum, plus merging and storing."""
        assert self.merging_since is not None
        gathered_at = self.merging_since if self.quorum_at is None else self.quorum_at
        return gathered_at - self.opened_at + now - self.merging_since


@dataclass
class Counted:
    """A learner's last merged contribution: the version it is part of, and how many of the learner's steps it covers."""

    version: int
    at_step: int
    samples: int = 0
    """The contribution covers the session's leased samples up to this position."""


@dataclass
class FragmentProgress:
    version: int = 0
    merged_round: int = 0
    """The round of the newest version."""
    counted: dict[str, Counted] = field(default_factory=dict)
    round: Round | None = None
    restoring: int = 0
    """Attempts left to restore the good copy; 0 if no restore is in progress."""
    floor: int = 0
    """Progress since an older version is refused, because the fragment was rolled back or recovered."""
    last_round: int = 0
    """The highest round number used so far, merged or not."""
    declined: set[str] = field(default_factory=set)
    """Learners that had nothing to give in the last cancelled round."""
    dropped_round: int = -1
    """The highest round whose contributions were lost. If this or an earlier round is opened again, learners must answer it
    again."""
    away_since: float | None = None
    """Since when no process has served this fragment; None if it is served. No rounds are opened meanwhile."""

    def next_round(self, step: int) -> int:
        """An unused number for a round outside the schedule."""
        return max(step, self.merged_round + 1, self.last_round + 1)

    def counted_step(self, learner: str) -> int:
        """How many of this learner's own steps are part of the current version."""
        counted = self.counted.get(learner)
        return counted.at_step if counted else 0


@dataclass
class RunState:
    """Shared by the parts of the state machine. Nothing else changes it."""

    sync: SyncConfig
    schedule: Schedule
    fragments: list[FragmentProgress]
    learners: dict[str, LearnerState]
    guards: list[Guard]
    """One for each fragment."""
    step: int = 0
    phase: RunPhase = "gathering"
    banked_tokens: int = 0
    """Tokens of sessions that are over."""
    merges: int = 0
    recoveries: int = 0

    @property
    def tokens(self) -> int:
        """Tokens trained on by all sessions together."""
        return self.banked_tokens + sum(learner.tokens for learner in self.learners.values())

    def live(self) -> list[LearnerState]:
        return [learner for learner in self.learners.values() if learner.phase != "gone"]

    def in_phase(self, *phases: LearnerPhase) -> list[LearnerState]:
        return [learner for learner in self.learners.values() if learner.phase in phases]

    def is_askable(self, learner: LearnerState) -> bool:
        """Whether rounds ask this learner. In lock-step and while the run closes that includes learners that are away."""
        if learner.phase == "away":
            return learner.began and (self.sync.wait or self.phase == "closing")
        return learner.phase == "training" or (learner.phase == "leaving" and self.phase == "closing")

    def askable(self) -> set[str]:
        return {learner.name for learner in self.learners.values() if self.is_askable(learner)}

    def open_rounds(self) -> Iterable[Round]:
        return (fragment.round for fragment in self.fragments if fragment.round)

    def step_time_s(self) -> float:
        """Mean step time of the learners that train; 0 if none has reported one."""
        training = self.in_phase("training")
        times = [learner.step_time.get() for learner in training if learner.step_time.value is not None]
        return sum(times) / len(times) if times else 0.0
