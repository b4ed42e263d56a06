"""The learner's side of the exchange as a state machine: what to fetch, what to give, what to adopt, when to wait.

It knows counters and versions, not tensors. Its caller owns threads, sockets and the model, and consults it after every event.

Rules:
 1. Progress counts from the version last adopted. A fragment's steps and tokens restart at every adoption, except that
    "carry" keeps what is not part of the adopted version.
 2. An answer needs a base the syncer still takes (min_base) and at least one step of progress; until then the question
    stays open. A learner that can make no progress (it has stopped, or waits) says so. A question is answered once. An
    answer that did not get through is sent again as it was, also after a reconnect: part of it may have arrived.
 3. Only the newest version of a fragment is fetched; one that is overtaken is dropped.
 4. Outside lock-step nothing ever waits. In lock-step a fragment due at step t is snapshot at t, adopted at t + τ (or
    just before it is due again, if that is earlier) and not before, and no further step starts without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from skerry.config import SyncConfig
from skerry.core.schedule import Schedule

KEPT_GIVES = 4
"""Answers per fragment whose fate is unknown that are remembered. More than one happens only when connections break."""


@dataclass(frozen=True)
class Question:
    """The syncer wants this fragment for this round."""

    fragment: int
    round: int
    min_base: int


@dataclass(frozen=True)
class Version:
    """A version the syncer has announced."""

    fragment: int
    version: int
    round: int
    """The round it was merged in."""
    counted: int
    """How many of the learner's own steps are part of it, by this merge or an earlier one."""


@dataclass(frozen=True)
class Mark:
    """The learner's totals at some moment."""

    steps: int = 0
    tokens: int = 0
    samples: int = 0
    """Leased samples, as a position in the sequence this session was given."""


@dataclass(frozen=True)
class Give:
    """Answer a question: progress of `steps` and `tokens` since version `base`. `staged` says that the snapshot is already
    taken."""

    question: Question
    base: int
    steps: int
    tokens: int
    at: Mark
    staged: bool
    samples: tuple[int, int] = (0, 0)
    """Leased samples in it: from, to."""
    again: bool = False
    """The same answer as before, which did not get through."""


@dataclass(frozen=True)
class GiveNothing:
    question: Question


@dataclass
class Held:
    """What the learner has of one fragment, and what is going on with it."""

    version: int = -1
    since: Mark = field(default_factory=Mark)
    """Progress from these totals on is not part of the version held."""
    question: Question | None = None
    answered: int | None = None
    """The round of the last answer, while it may be in flight."""
    undelivered: Give | None = None
    """The last answer, from when it is encoded until it is known to have arrived."""
    gives: list[Mark] = field(default_factory=list)
    """Totals at the snapshots of answers that are not known to be part of the version held."""
    staged: tuple[int, Mark, int] | None = None
    """In lock-step: (step, totals, version) of the snapshot taken when the fragment was due."""
    waits_for: int | None = None
    """In lock-step: the due round whose merge has not been adopted yet."""
    newest: Version | None = None
    fetching: Version | None = None
    fetched: Version | None = None


Phase = Literal["joining", "training", "stopped"]


class Exchange:
    def __init__(self, sync: SyncConfig, fragments: int) -> None:
        self.sync = sync
        self.schedule = Schedule(sync, fragments)
        self.held = [Held() for _ in range(fragments)]
        self.totals = Mark()
        self.step = 0
        """The learner's place in the run: it takes over the run's step when it begins."""
        self.phase: Phase = "joining"

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions held, for a reconnect; empty until every fragment has one."""
        held = tuple(h.version for h in self.held)
        return held if all(version >= 0 for version in held) else ()

    # ------------------------------------------------------------ from the syncer

    def welcomed(
        self, versions: tuple[int, ...], merged_rounds: tuple[int, ...], counted: tuple[int, ...], run_step: int
    ) -> None:
        """Connected. Earlier questions are void; versions that came out meanwhile are wanted."""
        for fragment, version in enumerate(versions):
            held = self.held[fragment]
            held.question = None
            held.answered = None
            held.fetching = None
            self.announced(Version(fragment, version, merged_rounds[fragment], counted[fragment]))
        if self.sync.wait and self.phase == "training":
            # The others may have gone on without this learner.
            self.step = max(self.step, run_step)

    def begin(self, step: int) -> None:
        if self.phase == "joining":
            self.phase = "training"
            self.step = max(self.step, step)

    def announced(self, version: Version) -> None:
        held = self.held[version.fragment]
        if version.version > held.version:
            held.answered = None  # that round is over
            if held.newest is None or version.version > held.newest.version:
                held.undelivered = None
            if held.newest is None or version.version >= held.newest.version:
                held.newest = version
            if held.fetched is not None and held.fetched.version == version.version:
                held.fetched = version  # a later round brought nothing new: the same version, at a later round
        elif held.waits_for is not None and version.round >= held.waits_for:
            held.waits_for = None  # the round waited for brought nothing new

    def asked(self, question: Question, anew: bool = False) -> None:
        """Each question is answered once, unless the answer was lost."""
        held = self.held[question.fragment]
        if held.answered != question.round or anew:
            held.question = question

    def stop(self) -> None:
        self.phase = "stopped"

    # ------------------------------------------------------------ transfers

    def to_fetch(self) -> list[Version]:
        """Versions whose download should start now."""
        wanted = []
        for held in self.held:
            newest = held.newest
            if newest is None or newest.version <= held.version or held.fetching is not None:
                continue  # nearly always: this is asked after every event
            if held.fetched is None or newest.version > held.fetched.version:
                held.fetching = newest
                wanted.append(newest)
        return wanted

    def fetched(self, version: Version) -> bool:
        """A download is complete. False if it is no longer of use."""
        self.fetch_failed(version)
        held = self.held[version.fragment]
        if version.version <= max(held.version, held.fetched.version if held.fetched else -1):
            return False
        held.fetched = held.newest if held.newest is not None and held.newest.version == version.version else version
        return True

    def fetch_failed(self, version: Version) -> None:
        held = self.held[version.fragment]
        if held.fetching is not None and held.fetching.version == version.version:
            held.fetching = None

    def void_samples(self, position: int) -> None:
        """Samples leased up to here are no longer this session's, so nothing it gives from now on contains them."""
        self.totals = dataclasses.replace(self.totals, samples=position)
        for held in self.held:
            held.since = dataclasses.replace(held.since, samples=position)

    @property
    def settled_samples(self) -> int:
        """Nothing given from now on contains leased samples up to here."""
        return min(held.since.samples for held in self.held)

    def start_over(self) -> None:
        """The syncer does not know the versions held here: every fragment is fetched again."""
        for fragment in range(len(self.held)):
            self.held[fragment] = Held(since=self.totals)

    def has_questions(self) -> bool:
        return any(held.question is not None for held in self.held)

    def can_answer(self) -> bool:
        return any(held.question is not None and self._answer(held) is not None for held in self.held)

    def answers(self, busy: Collection[int] = ()) -> list[Give | GiveNothing]:
        """Questions that can be answered now; each is handed out once. Those of busy fragments wait."""
        ready = []
        for index, held in enumerate(self.held):
            answer = self._answer(held)
            if answer is not None and index not in busy:
                held.question = None
                held.answered = answer.question.round
                ready.append(answer)
        return ready

    def _answer(self, held: Held) -> Give | GiveNothing | None:
        question = held.question
        if question is None or held.version < question.min_base:
            return None
        stopped = self.phase == "stopped"
        if self.sync.wait and not stopped and question.round > self.step:
            return None
        sent = held.undelivered
        if sent is not None and not stopped and (sent.question.round, sent.base) == (question.round, held.version):
            return dataclasses.replace(sent, question=question, again=True)
        at, staged = self.totals, False
        if not stopped and held.staged is not None and held.staged[::2] == (question.round, held.version):
            at, staged = held.staged[1], True
        steps, tokens = at.steps - held.since.steps, at.tokens - held.since.tokens
        if steps > 0 and tokens > 0:
            return Give(question, held.version, steps, tokens, at, staged, (held.since.samples, at.samples))
        return GiveNothing(question) if stopped or self.must_wait() else None

    def given(self, give: Give) -> None:
        """The snapshot for this answer has been taken."""
        held = self.held[give.question.fragment]
        held.gives = [*held.gives, give.at][-KEPT_GIVES:]

    def encoded(self, give: Give) -> None:
        """The bytes of this answer exist, and are kept until it is delivered or no longer wanted."""
        held = self.held[give.question.fragment]
        if held.version == give.base and held.gives and held.gives[-1] == give.at:
            held.undelivered = give

    def delivered(self, question: Question) -> None:
        """The syncer has said what became of the answer."""
        held = self.held[question.fragment]
        if held.undelivered is not None and held.undelivered.question.round == question.round:
            held.undelivered = None

    def still_wanted(self, question: Question) -> bool:
        """Whether an answer that did not get through should be sent again, as it was: the first may have arrived."""
        return self.held[question.fragment].answered == question.round

    # ------------------------------------------------------------ the training loop

    def stepped(self, tokens: int, samples: int = 0) -> list[int]:
        """One inner step is done. Returns the fragments to snapshot at this very step (lock-step only)."""
        self.step += 1
        self.totals = Mark(self.totals.steps + 1, self.totals.tokens + tokens, self.totals.samples + samples)
        if not self.sync.wait or self.phase != "training":
            return []
        due = self.schedule.due(self.step)
        for fragment in due:
            held = self.held[fragment]
            held.staged = (self.step, self.totals, held.version)
            held.waits_for = self.step
        return due

    def adoptable(self) -> list[Version]:
        """Fetched versions that may be put into the model at this step boundary."""
        return [held.fetched for held in self.held if held.fetched is not None and self._may_adopt(held, held.fetched)]

    def _may_adopt(self, held: Held, version: Version) -> bool:
        if not self.sync.wait or self.phase != "training":
            return True
        if self._overdue(version.fragment, held) and held.waits_for is not None and version.round >= held.waits_for:
            return True
        return self.step >= self.schedule.adopt_step(version.fragment, version.round, self.sync.overlap)

    def _overdue(self, fragment: int, held: Held) -> bool:
        if held.waits_for is None:
            return False
        return self.step >= self.schedule.adopt_step(fragment, held.waits_for, self.sync.overlap)

    def must_wait(self) -> bool:
        """Lock-step: is a fragment whose overlap is over still missing?"""
        if not self.sync.wait or self.phase != "training":
            return False
        return any(self._overdue(fragment, held) for fragment, held in enumerate(self.held))

    def adopted(self, version: Version) -> None:
        """The version is in the model now."""
        held = self.held[version.fragment]
        held.since = self.uncounted_since(version) if self.sync.adopt == "carry" else self.totals
        held.gives = [give for give in held.gives if give.steps > held.since.steps]
        held.version = version.version
        held.staged = held.undelivered = None
        if held.fetched is not None and held.fetched.version == version.version:
            held.fetched = None
        if held.waits_for is not None and version.round >= held.waits_for:
            held.waits_for = None

    def uncounted_since(self, version: Version) -> Mark:
        """The totals from which on progress is not part of this version: those of the answer it contains, or as before."""
        held = self.held[version.fragment]
        if held.version < 0:
            return self.totals
        return next((give for give in held.gives if give.steps == version.counted), held.since)
