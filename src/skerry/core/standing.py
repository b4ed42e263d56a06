"""What the syncer remembers: of each learner, of each fragment's open round, and what a restart needs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from skerry.core.guard import SizeHistory
from skerry.core.messages import Contributed
from skerry.core.quorum import MovingAverage

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
    """When bytes of a fragment last moved between it and us."""
    step_time: MovingAverage = field(default_factory=MovingAverage)
    merges: int = 0
    last_share: float = 0.0
    ready: bool = False
    began: bool = False
    strikes: int = 0
    """Unhealthy contributions in a row; for one in quarantine, healthy ones it still has to show."""
    quarantined: bool = False
    owes: set[int] | None = None
    """For one that leaves: fragments it has not had the chance to give since it said so."""
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """Sessions of earlier processes of this name."""

    @property
    def leaving(self) -> bool:
        return self.owes is not None

    def judged(self, healthy: bool, strikes: int) -> Literal["quarantined", "readmitted"] | None:
        """Count its unhealthy contributions, or the healthy ones while it is in quarantine. Says if that changed its state."""
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
    step: int
    opened_at: float
    asked: set[str]
    needed: set[str] = field(default_factory=set)
    """Those whose last chance this is: they are waited for as long as silence is tolerated, whatever the quorum."""
    final: frozenset[str] = frozenset()
    """Those of them who were asked only after they had stopped: what they give is all they have."""
    due: int = 0
    """The last turn that falls into this round."""
    declined: set[str] = field(default_factory=set)
    """Those who had nothing to give."""
    arrived: dict[str, Contributed] = field(default_factory=dict)
    quorum_at: float | None = None
    deadline: float | None = None
    merging_since: float | None = None
    not_before: float = 0.0
    """A merge that could not be stored is tried again from here on."""
    restores: bool = False
    """Not a merge: the fragment is put back to the good copy."""
    void: bool = False
    """What was gathered for it is lost. If the merge that is under way fails, there is nothing to try again."""

    @property
    def missing(self) -> set[str]:
        return self.asked - set(self.arrived)

    def taken_s(self, now: float) -> float:
        """To gather the quorum, and from the order to merge until now; what more contributions were waited for in between is
        not part of it."""
        assert self.merging_since is not None
        gathered_at = self.merging_since if self.quorum_at is None else self.quorum_at
        return gathered_at - self.opened_at + now - self.merging_since


@dataclass
class Counted:
    """The last contribution of a learner that was merged: into which version, and how many of its own steps it covers."""

    version: int
    upto: int
    samples: int = 0
    """Leased samples up to this position of what its process was given."""


@dataclass
class FragmentProgress:
    version: int = 0
    merged_step: int = 0
    """The round of the newest version."""
    counted: dict[str, Counted] = field(default_factory=dict)
    round: Round | None = None
    sizes: SizeHistory = field(default_factory=SizeHistory)
    restoring: int = 0
    """How often it may still be tried to put it back to the good copy; 0 if it is not to be."""
    floor: int = 0
    """Progress counted from an older version than this is not wanted: the model was put back."""
    last_round: int = 0
    """The highest number a round of this fragment had, whether or not it was merged."""
    declined: set[str] = field(default_factory=set)
    """Those who had nothing to give in the last round that was cancelled."""
    dropped_round: int = -1
    """The highest round whose answers were lost: who is asked in it again, or in one before it, has to answer again."""
    away_since: float | None = None
    """Nobody serves it, so no round is opened."""

    def next_round(self, step: int) -> int:
        """A number for a round that is nobody's turn: one that no other had, for a learner answers each number once."""
        return max(step, self.merged_step + 1, self.last_round + 1)

    def counted_upto(self, name: str) -> int:
        found = self.counted.get(name)
        return found.upto if found else 0


@dataclass(frozen=True)
class Standing:
    """What a restarted syncer needs besides the stored versions: small, written with every merge."""

    step: int = 0
    banked_tokens: int = 0
    phase: RunPhase = "gathering"
    sessions: dict[str, tuple[str, int, int, int]] = field(default_factory=dict)
    """name → (session, slot, step, tokens)."""
    gone: tuple[str, ...] = ()
    """Those of them that were given up or have left."""
    retired: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Sessions of earlier processes of these names; also of those that have taken a place and not begun."""
    quarantined: tuple[str, ...] = ()
    sizes: tuple[tuple[float, int] | None, ...] = ()
    """How large contributions to each fragment were lately."""
    good_step: int | None = None
    """Of the newest copy of the model that can be gone back to."""
    best_loss: float | None = None
    floors: tuple[int, ...] = ()
    restoring: tuple[int, ...] = ()
    """Fragments that are still to be put back."""
    rollbacks: int = 0
    leases: dict[str, Any] = field(default_factory=dict)
    """As core/leases.py writes it."""
    merges: int = 0
    """Over the whole run."""
    recoveries: int = 0
    """How often the tape lost something: what learners remember may then be newer than what is known here."""

    @property
    def tokens(self) -> int:
        return self.banked_tokens + sum(tokens for _, _, _, tokens in self.sessions.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "banked_tokens": self.banked_tokens,
            "phase": self.phase,
            "sessions": {name: list(value) for name, value in self.sessions.items()},
            "gone": list(self.gone),
            "retired": {name: list(sessions) for name, sessions in self.retired.items()},
            "quarantined": list(self.quarantined),
            "sizes": [list(size) if size else None for size in self.sizes],
            "good_step": self.good_step,
            "best_loss": self.best_loss,
            "floors": list(self.floors),
            "restoring": list(self.restoring),
            "rollbacks": self.rollbacks,
            "leases": self.leases,
            "merges": self.merges,
            "recoveries": self.recoveries,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Standing:
        sessions = {
            name: (str(s), int(slot), int(step), int(tokens)) for name, (s, slot, step, tokens) in data["sessions"].items()
        }
        retired = {name: tuple(map(str, old)) for name, old in data["retired"].items()}
        return Standing(
            int(data["step"]),
            int(data["banked_tokens"]),
            data["phase"],
            sessions,
            tuple(data["gone"]),
            retired,
            tuple(data.get("quarantined", ())),
            tuple((float(size[0]), int(size[1])) if size else None for size in data.get("sizes", ())),
            data.get("good_step"),
            data.get("best_loss"),
            tuple(map(int, data.get("floors", ()))),
            tuple(map(int, data.get("restoring", ()))),
            int(data.get("rollbacks", 0)),
            data.get("leases", {}),
            int(data.get("merges", 0)),
            int(data.get("recoveries", 0)),
        )
