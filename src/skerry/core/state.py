"""What the syncer knows: about each learner, each fragment and its open round, and the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from skerry.config import SyncConfig
from skerry.core.guard import SizeHistory
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
    """When bytes of a fragment last moved between it and the syncer."""
    step_time: MovingAverage = field(default_factory=MovingAverage)
    merges: int = 0
    last_share: float = 0.0
    ready: bool = False
    began: bool = False
    strikes: int = 0
    """Consecutive unhealthy contributions; in quarantine, healthy ones it still has to send."""
    quarantined: bool = False
    owes: set[int] | None = None
    """While it is leaving: fragments it has not had the chance to give since it asked to leave."""
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """Earlier sessions under this name."""

    @property
    def leaving(self) -> bool:
        return self.owes is not None

    def judged(self, healthy: bool, strikes: int) -> Literal["quarantined", "readmitted"] | None:
        """Count an unhealthy contribution, or in quarantine a healthy one. Returns the change of state, if there is one."""
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
    """The run step it belongs to. Unique per fragment: a learner answers each number once."""
    opened_at: float
    asked: set[str]
    needed: set[str] = field(default_factory=set)
    """Learners whose last chance this is. They are waited for as long as silence is tolerated, whatever the quorum."""
    final: frozenset[str] = frozenset()
    """Those of them that were asked after they had stopped: their answer is all they have."""
    due: int = 0
    """The last due step that this round covers."""
    declined: set[str] = field(default_factory=set)
    """Learners that had nothing to give."""
    arrived: dict[str, Contributed] = field(default_factory=dict)
    quorum_at: float | None = None
    deadline: float | None = None
    merging_since: float | None = None
    not_before: float = 0.0
    """A merge that could not be stored is retried from this time on."""
    restores: bool = False
    """Not a merge: the fragment is put back to the good copy."""
    void: bool = False
    """Its contributions are lost. If the merge in progress fails, there is nothing to retry."""

    @property
    def missing(self) -> set[str]:
        return self.asked - set(self.arrived)

    def exchange_s(self, now: float) -> float:
        """Seconds to gather the quorum plus seconds from the merge order until now. Waiting for more learners in between (the
        grace window) does not count."""
        assert self.merging_since is not None
        gathered_at = self.merging_since if self.quorum_at is None else self.quorum_at
        return gathered_at - self.opened_at + now - self.merging_since


@dataclass
class Counted:
    """A learner's last merged contribution: the version it is part of, and how many of the learner's steps it covers."""

    version: int
    at_step: int
    samples: int = 0
    """Leased samples up to this position of its session are covered as well."""


@dataclass
class FragmentProgress:
    version: int = 0
    merged_round: int = 0
    """The round of the newest version."""
    counted: dict[str, Counted] = field(default_factory=dict)
    round: Round | None = None
    sizes: SizeHistory = field(default_factory=SizeHistory)
    restoring: int = 0
    """Tries left to put it back to the good copy; 0 if it is not being put back."""
    floor: int = 0
    """Progress counted from an older version than this is refused, because the model was put back."""
    last_round: int = 0
    """The highest round number this fragment had, merged or not."""
    declined: set[str] = field(default_factory=set)
    """Learners that had nothing to give in the last cancelled round."""
    dropped_round: int = -1
    """The highest round whose answers were lost. Asked in it again, or in an earlier one, a learner must answer again."""
    away_since: float | None = None
    """Nobody serves it, so no round is opened."""

    def next_round(self, step: int) -> int:
        """An unused number for a round that is not due by the schedule."""
        return max(step, self.merged_round + 1, self.last_round + 1)

    def counted_step(self, learner: str) -> int:
        found = self.counted.get(learner)
        return found.at_step if found else 0


@dataclass
class RunState:
    """Shared by the parts of the state machine. Only they change it."""

    sync: SyncConfig
    schedule: Schedule
    fragments: list[FragmentProgress]
    learners: dict[str, LearnerState]
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
        """In lock-step and at the end a learner that is only briefly away is still asked."""
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
