"""The learner's half of the protocol as a state machine: what to fetch, contribute and adopt, and when to wait.

It tracks counters and versions, not tensors. The caller owns threads, sockets and the model, and consults it after every event.

Rules:
 1. Progress counts from the last adopted version. A fragment's steps and tokens restart at every adoption, except that
    "carry" keeps progress that is not part of the adopted version.
 2. An answer needs a base that the syncer accepts (min_base) and at least one step of progress; until then the question
    stays open. A learner that cannot make progress (it has stopped, or waits) says so. A question is answered once. An
    undelivered answer is sent again unchanged, also after a reconnect, because part of it may have arrived.
 3. Only the newest version of a fragment is fetched. A fetched version that is superseded before adoption is dropped.
 4. Outside lock-step nothing ever waits. In lock-step a fragment due at step t is snapshot at t and adopted exactly at t + τ
    (or just before it is due again, if that is earlier). No further step starts without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from skerry.config import SyncConfig
from skerry.core.schedule import Schedule

KEPT_GIVES = 4
"""Unconfirmed answers to remember per fragment. More than one occurs only when connections break."""


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
    """The round in which it was merged."""
    counted: int
    """How many of the learner's own steps it contains, through this merge or earlier ones."""


@dataclass(frozen=True)
class Mark:
    """The learner's totals at a point in time."""

    steps: int = 0
    tokens: int = 0
    samples: int = 0
    """Leased samples used, as a position in the session's lease sequence."""


@dataclass(frozen=True)
class Give:
    """Answer a question with the progress of `steps` and `tokens` since version `base`. If `staged`, the snapshot exists
    already."""

    question: Question
    base: int
    steps: int
    tokens: int
    at: Mark
    staged: bool
    samples: tuple[int, int] = (0, 0)
    """Leased samples it covers, as (from, to) positions."""
    again: bool = False
    """This repeats an answer that was not delivered."""


@dataclass(frozen=True)
class GiveNothing:
    """Answer a question with no progress."""

    question: Question


@dataclass
class Held:
    """The learner's state of one fragment."""

    version: int = -1
    """The adopted version; -1 before the first."""
    since: Mark = field(default_factory=Mark)
    """Totals from which progress is not part of the adopted version."""
    question: Question | None = None
    """The open question."""
    answered: int | None = None
    """The round of the last answer, until that round is over."""
    undelivered: Give | None = None
    """The last answer, from its encoding until the syncer confirms it."""
    gives: list[Mark] = field(default_factory=list)
    """Totals at the snapshots of answers that the adopted version may not contain."""
    staged: tuple[int, Mark, int] | None = None
    """In lock-step: (step, totals, version) of the snapshot taken when the fragment was due."""
    waits_for: int | None = None
    """In lock-step: the due round whose merge has not been adopted yet."""
    newest: Version | None = None
    """The newest announced version."""
    fetching: Version | None = None
    """The version whose download is in flight."""
    fetched: Version | None = None
    """The version that is downloaded but not adopted."""


Phase = Literal["joining", "training", "stopped"]


class Exchange:
    def __init__(self, sync: SyncConfig, fragments: int) -> None:
        self.sync = sync
        self.schedule = Schedule(sync, fragments)
        self.held = [Held() for _ in range(fragments)]
        self.totals = Mark()
        self.step = 0
        """The learner's step in the run. Starts at the run's step."""
        self.phase: Phase = "joining"

    @property
    def versions(self) -> tuple[int, ...]:
        """Adopted versions, for a reconnect; empty until every fragment has one."""
        held = tuple(h.version for h in self.held)
        return held if all(version >= 0 for version in held) else ()

    # ------------------------------------------------------------ from the syncer

    def welcomed(
        self, versions: tuple[int, ...], merged_rounds: tuple[int, ...], counted: tuple[int, ...], run_step: int
    ) -> None:
        """The syncer admitted this learner. Earlier questions are void, and newer versions are to be fetched."""
        for fragment, version in enumerate(versions):
            held = self.held[fragment]
            held.question = None
            held.answered = None
            held.fetching = None
            self.announced(Version(fragment, version, merged_rounds[fragment], counted[fragment]))
        if self.sync.wait and self.phase == "training":
            # The others may have moved on without this learner.
            self.step = max(self.step, run_step)

    def begin(self, step: int) -> None:
        if self.phase == "joining":
            self.phase = "training"
            self.step = max(self.step, step)

    def announced(self, version: Version) -> None:
        held = self.held[version.fragment]
        if version.version > held.version:
            held.answered = None  # the answered round is over
            if held.newest is None or version.version > held.newest.version:
                held.undelivered = None
            if held.newest is None or version.version >= held.newest.version:
                held.newest = version
            if held.fetched is not None and held.fetched.version == version.version:
                held.fetched = version  # a later round was cancelled: the same version counts for it
        elif held.waits_for is not None and version.round >= held.waits_for:
            held.waits_for = None  # the awaited round was cancelled, so the adopted version stands

    def asked(self, question: Question, anew: bool = False) -> None:
        """Record a question. A question that was answered is ignored, unless the syncer lost the answer (`anew`)."""
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
                continue  # the common case: this runs after every event
            if held.fetched is None or newest.version > held.fetched.version:
                held.fetching = newest
                wanted.append(newest)
        return wanted

    def fetched(self, version: Version) -> bool:
        """Record a complete download. Returns False if it is superseded."""
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
        """Exclude the leased samples up to this position from future answers, because the lease was taken back."""
        self.totals = dataclasses.replace(self.totals, samples=position)
        for held in self.held:
            held.since = dataclasses.replace(held.since, samples=position)

    @property
    def settled_samples(self) -> int:
        """The position up to which no future answer contains leased samples."""
        return min(held.since.samples for held in self.held)

    def start_over(self) -> None:
        """Discard all adopted versions, because the syncer does not accept them. Every fragment is fetched again."""
        for fragment in range(len(self.held)):
            self.held[fragment] = Held(since=self.totals)

    def has_questions(self) -> bool:
        return any(held.question is not None for held in self.held)

    def can_answer(self) -> bool:
        return any(held.question is not None and self._answer(held) is not None for held in self.held)

    def answers(self, busy: Collection[int] = ()) -> list[Give | GiveNothing]:
        """Answers that can be given now; each is returned once. Questions about busy fragments stay open."""
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
        """Record that the snapshot for this answer was taken."""
        held = self.held[give.question.fragment]
        held.gives = [*held.gives, give.at][-KEPT_GIVES:]

    def encoded(self, give: Give) -> None:
        """Record that this answer is encoded. Its bytes are kept until it is delivered or obsolete."""
        held = self.held[give.question.fragment]
        if held.version == give.base and held.gives and held.gives[-1] == give.at:
            held.undelivered = give

    def delivered(self, question: Question) -> None:
        """Record that the syncer has replied to the answer."""
        held = self.held[question.fragment]
        if held.undelivered is not None and held.undelivered.question.round == question.round:
            held.undelivered = None

    def still_wanted(self, question: Question) -> bool:
        """Whether an undelivered answer to this question should be sent again."""
        return self.held[question.fragment].answered == question.round

    # ------------------------------------------------------------ the training loop

    def stepped(self, tokens: int, samples: int = 0) -> list[int]:
        """Count one inner step. Returns the fragments to snapshot at exactly this step (lock-step only)."""
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
        """Fetched versions that may be adopted at this step boundary."""
        return [held.fetched for held in self.held if held.fetched is not None and self._may_adopt(held, held.fetched)]

    def _may_adopt(self, held: Held, version: Version) -> bool:
        if not self.sync.wait or self.phase != "training":
            return True
        if self._overdue(version.fragment, held) and held.waits_for is not None and version.round >= held.waits_for:
            return True
        return self.step >= self.schedule.adopt_step(version.fragment, version.round, self.sync.overlap)

    def _overdue(self, fragment: int, held: Held) -> bool:
        """In lock-step: whether the merge this fragment waits for has to be adopted before the next step."""
        if held.waits_for is None:
            return False
        return self.step >= self.schedule.adopt_step(fragment, held.waits_for, self.sync.overlap)

    def must_wait(self) -> bool:
        """In lock-step: whether the next step has to wait for a merge."""
        if not self.sync.wait or self.phase != "training":
            return False
        return any(self._overdue(fragment, held) for fragment, held in enumerate(self.held))

    def adopted(self, version: Version) -> None:
        """Record that this version is in the model now."""
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
        """Totals from which progress is not part of this version: those of the newest answer it contains."""
        held = self.held[version.fragment]
        if held.version < 0:
            return self.totals
        return next((give for give in held.gives if give.steps == version.counted), held.since)
