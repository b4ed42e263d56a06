"""The small part of the syncer's state that survives a restart. Written with every merge."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from skerry.core.state import LearnerState, RunPhase, RunState


@dataclass(frozen=True)
class Standing:
    step: int = 0
    banked_tokens: int = 0
    phase: RunPhase = "gathering"
    sessions: dict[str, tuple[str, int, int, int]] = field(default_factory=dict)
    """Learner → (session, slot, step, tokens)."""
    gone: tuple[str, ...] = ()
    """Learners in `sessions` that were lost or have left."""
    retired: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Learner → earlier sessions, including learners that have replaced a session but not begun training."""
    quarantined: tuple[str, ...] = ()
    sizes: tuple[Any, ...] = ()
    """Per fragment: the summary of its guard, or None."""
    good_step: int | None = None
    """The run step of the newest good copy of the model."""
    best_loss: float | None = None
    floors: tuple[int, ...] = ()
    restoring: tuple[int, ...] = ()
    """Fragments whose rollback is not finished."""
    rollbacks: int = 0
    leases: dict[str, Any] = field(default_factory=dict)
    """`Leases.to_json`."""
    merges: int = 0
    recoveries: int = 0
    """How often the tape lost records. After that, learners may remember more than the syncer knows."""

    @property
    def tokens(self) -> int:
        return self.banked_tokens + sum(tokens for _, _, _, tokens in self.sessions.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Standing:
        """Raises KeyError, TypeError or ValueError if the data is malformed."""
        plain = {"step", "banked_tokens", "phase", "good_step", "best_loss", "rollbacks", "leases", "merges", "recoveries"}
        return Standing(
            **{name: data[name] for name in plain},
            sessions={name: (str(s), int(slot), int(step), int(n)) for name, (s, slot, step, n) in data["sessions"].items()},
            gone=tuple(data["gone"]),
            retired={name: tuple(map(str, sessions)) for name, sessions in data["retired"].items()},
            quarantined=tuple(data["quarantined"]),
            sizes=tuple(tuple(size) if isinstance(size, list) else size for size in data["sizes"]),
            floors=tuple(map(int, data["floors"])),
            restoring=tuple(map(int, data["restoring"])),
        )


def known_learners(standing: Standing, strikes: int, now: float) -> dict[str, LearnerState]:
    """The learners an earlier syncer process knew. They start as "away", so that the syncer waits for their return."""
    learners = {
        name: LearnerState(name, session, slot, "away", step, tokens, heard_at=now, gone_at=now, ready=True, began=True)
        for name, (session, slot, step, tokens) in standing.sessions.items()
    }
    for name in standing.gone:
        learners[name].phase = "gone"
    for name, sessions in standing.retired.items():
        # A learner that had not begun training is not in `sessions`.
        learners.setdefault(name, LearnerState(name, "", 0, "gone")).retired.extend(sessions)
    for name in standing.quarantined:
        learners[name].quarantined, learners[name].strikes = True, strikes
    return learners


def restore_fragments(standing: Standing, run: RunState, tries: int) -> None:
    """Restore guard history, floors and unfinished rollbacks into the run's fragments."""
    for guard, summary in zip(run.guards, standing.sizes, strict=False):
        if summary is not None:
            guard.restore(summary)
    for fragment, floor in zip(run.fragments, standing.floors, strict=False):
        fragment.floor = max(fragment.floor, floor)
    for index in standing.restoring:
        run.fragments[index].restoring = tries


def standing_of(
    run: RunState, *, good_step: int | None, best_loss: float | None, rollbacks: int, leases: dict[str, Any]
) -> Standing:
    """The persistent part of the run's state."""
    began = [learner for learner in run.learners.values() if learner.began or learner.tokens]
    return Standing(
        step=run.step,
        banked_tokens=run.banked_tokens,
        phase=run.phase,
        sessions={learner.name: (learner.session, learner.slot, learner.step, learner.tokens) for learner in began},
        gone=tuple(learner.name for learner in began if learner.phase == "gone"),
        retired={learner.name: tuple(learner.retired) for learner in run.learners.values() if learner.retired},
        quarantined=tuple(learner.name for learner in began if learner.quarantined),
        sizes=copy.deepcopy(tuple(guard.summary() for guard in run.guards)),  # a plugin may go on changing its own
        good_step=good_step,
        best_loss=best_loss,
        floors=tuple(fragment.floor for fragment in run.fragments),
        restoring=tuple(index for index, fragment in enumerate(run.fragments) if fragment.restoring),
        rollbacks=rollbacks,
        leases=leases,
        merges=run.merges,
        recoveries=run.recoveries,
    )
