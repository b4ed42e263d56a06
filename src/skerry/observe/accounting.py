"""Account for the islands' time: goodput, uptime, lost work, stalls and recoveries, computed from a run's metrics.

docs/operate.md defines the terms. The input is the records of `metrics.jsonl` in file order; unknown records are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

INJURIES = ("freeze", "cut", "drop")
"""Faults that start a recovery, as a death does: it ends at the island's next merge."""
THAW_S = 3.0
"""Seconds after a thaw in which long steps do not count as stalls."""


@dataclass
class IslandAccount:
    name: str
    allocated_s: float = 0.0
    """From first joining until the end of the run, or until the island left for good."""
    alive_s: float = 0.0
    """Part of the allocated time in which a process of the island was in the run and not frozen."""
    useful_s: float = 0.0
    """Part of the alive time that was neither stalled nor lost."""
    stalled_s: float = 0.0
    """Part of the alive time that steps took beyond three times their usual duration."""
    lost_s: float = 0.0
    """Time spent on inner steps that were in no merge when their process died."""
    steps: int = 0
    longest_stall_s: float = 0.0
    """Longest time between two inner steps of one process, except while frozen."""
    step_time_s: float = 0.0
    deaths: int = 0
    merges: int = 0


@dataclass
class Recovery:
    """An island's way from an injury to its next merge."""

    island: str
    what: str
    at: float
    seconds: float | None = None
    joined_after_s: float | None = None
    """For a killed island: seconds until its new process joined."""


@dataclass
class _Life:
    """One process of an island, as of its last record."""

    session: str
    since: float
    seen_at: float
    steps: int = 0
    counted: int = 0
    stalled_s: float = 0.0


@dataclass
class RunAccount:
    islands: dict[str, IslandAccount] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    merges: int = 0
    merges_alone: int = 0
    """Merges with one contributor although several islands were asked."""
    merged_share: float = 0.0
    """Mean share of the asked islands that contributed to a merge."""
    longest_pause_s: float = 0.0
    """Longest time in which no island took a step."""

    @property
    def goodput(self) -> float | None:
        return _ratio(self.useful_s, self.allocated_s)

    @property
    def goodput_alive(self) -> float | None:
        return _ratio(self.useful_s, self.alive_s)

    @property
    def uptime(self) -> float | None:
        return _ratio(self.alive_s, self.allocated_s)

    @property
    def allocated_s(self) -> float:
        return sum(island.allocated_s for island in self.islands.values())

    @property
    def alive_s(self) -> float:
        return sum(island.alive_s for island in self.islands.values())

    @property
    def useful_s(self) -> float:
        return sum(island.useful_s for island in self.islands.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "goodput": self.goodput,
            "goodput_alive": self.goodput_alive,
            "uptime": self.uptime,
            "merges": self.merges,
            "merges_alone": self.merges_alone,
            "merged_share": self.merged_share,
            "longest_pause_s": self.longest_pause_s,
            "islands": {name: asdict(island) for name, island in self.islands.items()},
            "recoveries": [asdict(recovery) for recovery in self.recoveries],
        }


class Accountant:
    """Takes records one by one; `account` returns the account so far."""

    def __init__(self) -> None:
        self._account = RunAccount()
        self._lives: dict[str, _Life] = {}
        self._first_at: dict[str, float] = {}
        self._until: dict[str, float] = {}
        self._frozen: dict[str, float] = {}
        self._frozen_s: dict[str, float] = {}
        self._excused_s: dict[str, float] = {}
        self._thawed: dict[str, float] = {}
        self._recovering: list[Recovery] = []
        self._merged_share_sum = 0.0
        self._stepped_at: float | None = None
        self._last_at = 0.0
        self._ended_at: float | None = None

    def apply(self, record: Mapping[str, Any]) -> None:
        at, kind = record.get("at"), record.get("kind")
        if not isinstance(at, (int, float)) or isinstance(at, bool):
            return
        at = float(at)
        self._last_at = max(self._last_at, at)
        island = record.get("island")
        if kind == "island" and isinstance(island, str):
            self._island(island, at, record)
        elif kind == "event" and isinstance(record.get("what"), str):
            self._event(island if isinstance(island, str) else "", at, record)
        elif kind == "merge" and isinstance(record.get("contributors"), Mapping):
            self._merge(at, record)
        elif kind == "run" and record.get("phase") == "ended" and self._ended_at is None:
            self._ended_at = at

    def account(self) -> RunAccount:
        account = self._account
        end = self._ended_at if self._ended_at is not None else self._last_at
        for name, island in account.islands.items():
            island.allocated_s = max(0.0, self._until.get(name, end) - self._first_at[name])
            island.alive_s = min(island.alive_s, island.allocated_s)
            island.useful_s = min(island.useful_s, island.alive_s)
        if account.merges:
            account.merged_share = self._merged_share_sum / account.merges
        return account

    # ------------------------------------------------------------ records

    def _of(self, name: str, at: float) -> IslandAccount:
        self._first_at.setdefault(name, at)
        return self._account.islands.setdefault(name, IslandAccount(name))

    def _island(self, name: str, at: float, record: Mapping[str, Any]) -> None:
        session, steps = str(record.get("session") or ""), record.get("steps")
        state = record.get("state")
        if not session or not isinstance(steps, int) or state == "waiting":
            return
        account = self._of(name, at)
        life = self._lives.get(name)
        if life is None or life.session != session:
            if life is not None:
                self._end(name, life.seen_at)
            if state != "training":
                return
            life = self._lives[name] = _Life(session, at, at)
        if state == "left" and name not in self._until:
            self._until[name] = at
            self._advance(account, life, at, steps, record)
        elif state == "training":
            self._until.pop(name, None)
            self._advance(account, life, at, steps, record)

    def _advance(self, account: IslandAccount, life: _Life, at: float, steps: int, record: Mapping[str, Any]) -> None:
        name = account.name
        if name in self._frozen:
            return
        account.step_time_s = _number(record.get("step_time_s")) or account.step_time_s
        if at - self._thawed.get(name, -math.inf) > THAW_S:
            account.longest_stall_s = max(account.longest_stall_s, _number(record.get("stall_s")))
        passed = max(0.0, at - life.seen_at - self._frozen_s.pop(name, 0.0))
        stalled = max(0.0, _number(record.get("stalled_s")) - life.stalled_s)
        life.stalled_s += stalled
        excused = min(stalled, self._excused_s.get(name, 0.0))
        self._excused_s[name] = self._excused_s.get(name, 0.0) - excused
        stalled = min(passed, stalled - excused)
        account.alive_s += passed
        account.stalled_s += stalled
        account.useful_s += passed - stalled
        taken = max(0, steps - life.steps)
        account.steps += taken
        if taken:
            if self._stepped_at is not None:
                self._account.longest_pause_s = max(self._account.longest_pause_s, at - self._stepped_at)
            self._stepped_at = at
        life.seen_at, life.steps = at, max(life.steps, steps)
        counted = record.get("counted")
        if isinstance(counted, int):
            life.counted = max(life.counted, counted)

    def _end(self, name: str, at: float) -> None:
        """A process has ended. Its work since its last merged contribution is lost."""
        life = self._lives.pop(name, None)
        if life is None:
            return
        account = self._account.islands[name]
        account.deaths += 1
        after = max(0.0, at - life.seen_at - self._frozen_s.pop(name, 0.0))
        account.alive_s += after
        unmerged = min(max(0, life.steps - life.counted) * account.step_time_s, account.useful_s)
        account.useful_s -= unmerged
        account.lost_s += unmerged + after

    def _event(self, name: str, at: float, record: Mapping[str, Any]) -> None:
        what, fault = record["what"], record.get("fault")
        if what == "killed" and name not in self._until:
            self._end(name, at)
        elif what == "joined":
            self._joined(name, at)
        elif what == "fault" and fault == "freeze":
            self._frozen[name] = at
        elif what == "healed" and fault == "freeze" and name in self._frozen:
            frozen_s = at - self._frozen.pop(name)
            self._frozen_s[name] = self._frozen_s.get(name, 0.0) + frozen_s
            self._excused_s[name] = self._excused_s.get(name, 0.0) + frozen_s
            self._thawed[name] = at
        if name in self._account.islands and (what == "killed" or (what == "fault" and fault in INJURIES)):
            recovery = Recovery(name, "killed" if what == "killed" else str(fault), at)
            self._account.recoveries.append(recovery)
            self._recovering.append(recovery)

    def _joined(self, name: str, at: float) -> None:
        for recovery in self._recovering:
            if recovery.island == name and recovery.what == "killed":
                recovery.joined_after_s = at - recovery.at

    def _merge(self, at: float, record: Mapping[str, Any]) -> None:
        names = [str(name) for name in record["contributors"]]
        asked = record.get("asked")
        asked = max(asked, len(names)) if isinstance(asked, int) else len(names)
        self._account.merges += 1
        self._account.merges_alone += len(names) == 1 and asked > 1
        self._merged_share_sum += len(names) / max(1, asked)
        for name in names:
            if name in self._account.islands:
                self._account.islands[name].merges += 1
        for recovery in [recovery for recovery in self._recovering if recovery.island in names]:
            recovery.seconds = at - recovery.at
            self._recovering.remove(recovery)


def account_of(records: Iterable[Mapping[str, Any]]) -> RunAccount:
    accountant = Accountant()
    for record in records:
        accountant.apply(record)
    return accountant.account()


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
