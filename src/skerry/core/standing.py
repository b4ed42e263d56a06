"""What the syncer remembers: of each learner, of each fragment's open round, and what a restart needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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
    step: int = 0
    tokens: int = 0
    heard_at: float = 0.0
    step_time: MovingAverage = field(default_factory=MovingAverage)
    merges: int = 0
    last_share: float = 0.0
    ready: bool = False
    began: bool = False
    leaving: bool = False


@dataclass
class Round:
    step: int
    opened_at: float
    asked: set[str]
    everyone: bool = False
    """Wait for all who were asked, for as long as silence is tolerated: the last chance of a learner to give."""
    arrived: dict[str, Contributed] = field(default_factory=dict)
    quorum_at: float | None = None
    deadline: float | None = None
    merging_since: float | None = None
    not_before: float = 0.0
    """A merge that could not be stored is tried again from here on."""


@dataclass
class FragmentProgress:
    version: int = 0
    merged_step: int = 0
    """The round of the newest version."""
    merged_base: dict[str, int] = field(default_factory=dict)
    """For each learner the newest base whose progress has been merged."""
    round: Round | None = None

    def counted(self, name: str) -> int:
        """This learner's progress from versions below the one returned has been merged."""
        return self.merged_base.get(name, -1) + 1


@dataclass(frozen=True)
class Standing:
    """What a restarted syncer needs besides the stored versions: small, written with every merge."""

    step: int = 0
    banked_tokens: int = 0
    phase: RunPhase = "gathering"
    sessions: dict[str, tuple[str, int, int, int]] = field(default_factory=dict)
    """name → (session, slot, step, tokens)."""

    @property
    def tokens(self) -> int:
        return self.banked_tokens + sum(tokens for _, _, _, tokens in self.sessions.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "banked_tokens": self.banked_tokens,
            "phase": self.phase,
            "sessions": {name: list(value) for name, value in self.sessions.items()},
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Standing:
        sessions = {
            name: (str(s), int(slot), int(step), int(tokens)) for name, (s, slot, step, tokens) in data["sessions"].items()
        }
        return Standing(int(data["step"]), int(data["banked_tokens"]), data["phase"], sessions)
