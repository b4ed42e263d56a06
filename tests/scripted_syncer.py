"""The syncer's decisions on a clock that tests move by hand: what happens is scripted, what it decides is collected."""

from __future__ import annotations

import copy
import json
from typing import Any, TypeVar

from skerry.config import SyncConfig
from skerry.core.messages import (
    Action,
    Announce,
    Ask,
    Contributed,
    Event,
    Hello,
    NothingToGive,
    Ready,
    Reported,
    Stored,
    Tick,
    Welcome,
)
from skerry.core.schema import TapeRecord
from skerry.core.standing import Standing
from skerry.core.state import FragmentProgress
from skerry.core.syncer import SyncerCore

A = TypeVar("A")
SILENCE_S = 10.0


def of(kind: type[A], actions: list[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def asked(actions: list[Action]) -> set[tuple[str, int, int]]:
    return {(ask.learner, ask.fragment, ask.round) for ask in of(Ask, actions)}


def welcomed(actions: list[Action]) -> tuple[str, int, int, bool, tuple[int, ...]]:
    [welcome] = of(Welcome, actions)
    return welcome.learner, welcome.slot, welcome.step, welcome.resumed, welcome.versions


def counted(announce: Announce) -> dict[str, int]:
    """For each learner: up to which of its own steps its progress is part of what was announced."""
    return dict(zip(announce.learners, announce.counted, strict=True))


def recorded(actions: list[Action]) -> list[str]:
    return [record.kind for record in of(TapeRecord, actions)]


class Run:
    """A core with its clock, and short words for what learners do."""

    def __init__(self, *, fragments: int = 1, now: float = 0.0, places: Any = (), **settings: Any) -> None:
        settings.setdefault("silence_s", SILENCE_S)
        settings.setdefault("every", 4)
        self.sync = SyncConfig(fragments=fragments, **settings)
        self.count = fragments
        self.now = now
        self.core = SyncerCore(self.sync, fragments, now=now, places=places)

    def send(self, event: Event) -> list[Action]:
        return self.core.handle(event, self.now).actions

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.send(Tick())

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(fragment.version for fragment in self.core.fragments)

    def join(self, name: str, session: str = "first", *, step: int = 0, tokens: int = 0, held: Any = ()) -> list[Action]:
        return self.send(Hello(name, session, step, tokens, tuple(held)))

    def enter(self, *names: str) -> list[Action]:
        """Join and be ready, one after the other."""
        actions: list[Action] = []
        for name in names:
            actions += self.join(name) + self.send(Ready(name))
        return actions

    def report(self, name: str, step: int, tokens: int | None = None, step_time_s: float = 0.0) -> list[Action]:
        return self.send(Reported(name, step, 10 * step if tokens is None else tokens, step_time_s))

    def offer(self, name: str, fragment: int = 0, **changed: Any) -> Contributed:
        gathering = self.core.fragments[fragment].round
        step = gathering.number if gathering else 0
        known = self.core.learners.get(name)
        values = {
            "round": step,
            "base": self.core.fragments[fragment].version,
            "steps": 2,
            "tokens": 20,
            "at_step": known.step if known else 0,
            **changed,
        }
        return Contributed(name, fragment, **values)

    def give(self, name: str, fragment: int = 0, **changed: Any) -> list[Action]:
        actions = self.send(self.offer(name, fragment, **changed))
        assert "refused" not in recorded(actions), of(TapeRecord, actions)
        return actions

    def nothing(self, name: str, fragment: int = 0) -> list[Action]:
        gathering = self.core.fragments[fragment].round
        assert gathering is not None
        return self.send(NothingToGive(name, fragment, gathering.number))

    def store(self, fragment: int = 0) -> list[Action]:
        return self.send(Stored(fragment, self.core.fragments[fragment].version + 1))

    def restored(self, *, after_seconds: float = 1.0) -> Run:
        """A new process that found what the last one wrote; the clock of another process starts anywhere."""
        standing = Standing.from_json(json.loads(json.dumps(self.core.standing().to_json())))
        stored = [FragmentProgress(f.version, f.merged_round, dict(f.counted)) for f in self.core.fragments]
        other = copy.copy(self)
        other.now = self.now + after_seconds
        other.core = SyncerCore(self.sync, self.count, now=other.now, progress=stored, standing=standing)
        return other

    def whole_state(self) -> Any:
        core = self.core
        return copy.deepcopy((core.fragments, core.learners, core.step, core.phase, core.tokens, core.run.banked_tokens))


def running(*names: str, **settings: Any) -> Run:
    run = Run(**settings)
    run.enter(*names)
    assert run.core.phase == "running"
    return run


def back(run: Run, name: str, step: int) -> list[Action]:
    held = tuple(fragment.version for fragment in run.core.fragments)
    return run.send(Hello(name, run.core.learners[name].session, step=step, tokens=10 * step, held=held))
