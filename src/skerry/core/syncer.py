"""The syncer's decisions as a state machine: (state, event, now) → actions. No tensors, sockets, threads, files or clock.

Rules:
 1. The run's step is the K-th largest step among learners that train. Reaching step t opens a round for every fragment
    due at t.
 2. A round asks every learner that trains. It merges when all asked have answered, or K have and the grace window is over.
 3. One round a fragment at a time. A fragment due again while its round is open stays in that round; those who have not
    answered are asked again.
 4. A contribution counts once: a learner whose progress from base b was merged is only asked for progress from a later base.
 5. A version is announced only after it is stored. If storing fails, nothing has changed and the merge is tried again.
 6. A learner whose stream broke is "away" for `silence_s`; in lock-step others wait that long for it, otherwise nobody does.
 7. A new process of the same name starts from the current versions and the run's step; what the old one was asked for is void.
 8. At the budget the run closes: everyone stops, every fragment is merged once more from all who can be reached, then it ends.
"""

from __future__ import annotations

from collections import deque

from skerry.config import SyncConfig
from skerry.core import merge as merging
from skerry.core.messages import (
    Action,
    Announce,
    Ask,
    Begin,
    CloseRequested,
    Contributed,
    Disconnected,
    Ended,
    Event,
    Goodbye,
    Joined,
    Leaving,
    Merge,
    NothingToGive,
    Ready,
    Record,
    Reported,
    Share,
    StopTraining,
    Stored,
    StoreFailed,
    Tick,
    WakeAt,
    Welcome,
)
from skerry.core.quorum import GraceWindow
from skerry.core.schedule import Schedule
from skerry.core.standing import FragmentProgress, LearnerState, Round, RunPhase, Standing

RETRY_STORE_S = 1.0


class SyncerCore:
    def __init__(
        self,
        sync: SyncConfig,
        fragments: int,
        *,
        now: float = 0.0,
        progress: list[FragmentProgress] | None = None,
        standing: Standing | None = None,
    ) -> None:
        self.sync = sync
        self.schedule = Schedule(sync, fragments)
        self.fragments = progress or [FragmentProgress() for _ in range(fragments)]
        standing = standing or Standing()
        self.step = standing.step
        self.phase: RunPhase = standing.phase
        self.banked_tokens = standing.banked_tokens
        self.grace = GraceWindow(sync.grace, sync.overlap)
        self.merges = 0
        self.participation: deque[float] = deque(maxlen=200)
        # Learners the last syncer process knew are away, not unknown: in lock-step their return is worth waiting for.
        self.learners = {
            name: LearnerState(name, session, slot, "away", step, tokens, heard_at=now, ready=True, began=True)
            for name, (session, slot, step, tokens) in standing.sessions.items()
        }
        # A turn shortly before the stored step may have been opened but not merged: look at those again.
        self._opened_upto = max(0, self.step - 2 * sync.every) if self.step else 0
        self._last_rounds_due = set(range(fragments))

    # ------------------------------------------------------------ what others may ask

    @property
    def tokens(self) -> int:
        """Tokens trained on by all islands together, whoever they were."""
        return self.banked_tokens + sum(learner.tokens for learner in self.learners.values())

    def standing(self) -> Standing:
        sessions = {
            learner.name: (learner.session, learner.slot, learner.step, learner.tokens)
            for learner in self.learners.values()
            if learner.began
        }
        return Standing(self.step, self.banked_tokens, self.phase, sessions)

    def why_refused(self, offer: Contributed) -> str | None:
        """Why this contribution cannot be taken, or None. Asked before the bytes are read, and again when they are in."""
        if not 0 <= offer.fragment < len(self.fragments):
            return f"there is no fragment {offer.fragment}"
        fragment = self.fragments[offer.fragment]
        learner = self.learners.get(offer.name)
        if learner is None or learner.phase not in ("training", "leaving"):
            return f"{offer.name} is not in the run"
        gathering = fragment.round
        if gathering is None or gathering.step != offer.step:
            return f"no round {offer.step} is open for fragment {offer.fragment}"
        if gathering.merging_since is not None:
            return f"round {offer.step} of fragment {offer.fragment} is being merged already"
        if offer.name in gathering.arrived:
            return f"duplicate: {offer.name} has answered round {offer.step} of fragment {offer.fragment}"
        if offer.name not in gathering.asked:
            return f"{offer.name} was not asked for fragment {offer.fragment} in round {offer.step}"
        if offer.base > fragment.version:
            return f"base version {offer.base} of fragment {offer.fragment} does not exist; the newest is {fragment.version}"
        if offer.base < self._min_base(offer.name, fragment):
            return f"stale: base version {offer.base} of fragment {offer.fragment}, the newest is {fragment.version}"
        if offer.steps < 1 or offer.tokens < 1:
            return f"steps and tokens must be >= 1, got {offer.steps} and {offer.tokens}"
        return None

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> list[Action]:
        actions: list[Action] = []
        if isinstance(event, Joined):
            self._joined(event, now, actions)
        elif isinstance(event, Ready):
            self._ready(event)
        elif isinstance(event, Reported):
            self._reported(event, now)
        elif isinstance(event, Contributed):
            self._contributed(event, now, actions)
        elif isinstance(event, NothingToGive):
            self._nothing(event)
        elif isinstance(event, Leaving):
            self._leaving(event, now, actions)
        elif isinstance(event, Disconnected):
            self._disconnected(event, now, actions)
        elif isinstance(event, Stored):
            self._stored(event, now, actions)
        elif isinstance(event, StoreFailed):
            self._store_failed(event, now, actions)
        elif isinstance(event, CloseRequested):
            self._close("requested", actions)
        else:
            assert isinstance(event, Tick)
        self._notice_silence(now, actions)
        self._begin_learners(actions)
        self._advance(now, actions)
        self._close_when_spent(actions)
        self._settle_rounds(now, actions)
        self._finish(now, actions)
        wake = self._next_wake(now)
        if wake is not None:
            actions.append(WakeAt(wake))
        return actions

    def _joined(self, event: Joined, now: float, actions: list[Action]) -> None:
        known = self.learners.get(event.name)
        if known is not None and known.session != event.session:
            if known.phase in ("training", "leaving", "waiting"):
                actions.append(Goodbye(event.name, f"another process joined as {event.name}"))
            self.banked_tokens += known.tokens
            self._drop_unanswered(event.name)
        versions = tuple(fragment.version for fragment in self.fragments)
        # Progress made since versions of this run is welcome, whether or not this syncer process remembers the learner.
        resumed = len(event.held) == len(versions) and all(0 <= h <= v for h, v in zip(event.held, versions, strict=True))
        if known is not None and known.session == event.session:
            learner = known
        else:
            slot = known.slot if known is not None else self._free_slot()
            learner = LearnerState(event.name, event.session, slot, "waiting", ready=resumed, began=resumed)
            self.learners[event.name] = learner
        learner.heard_at = now
        if resumed:
            learner.step = max(learner.step, event.step)
            learner.tokens = max(learner.tokens, event.tokens)
        else:
            learner.ready = learner.began = False
        learner.phase = "leaving" if learner.leaving else "training" if learner.began else "waiting"
        counted = tuple(fragment.counted(event.name) for fragment in self.fragments)
        actions.append(Welcome(event.name, learner.slot, self.step, resumed, versions, counted))
        actions.append(Record("joined", {"learner": event.name, "session": event.session, "slot": learner.slot,
                                         "resumed": resumed, "step": self.step}))  # fmt: skip
        if self.phase == "ended" or (self.phase == "closing" and learner.phase == "waiting"):
            actions.append(Goodbye(event.name, "the run is over"))
            learner.phase = "gone"
        elif learner.phase in ("training", "leaving"):
            if self.phase == "gathering":
                self.phase = "running"
            actions.append(Begin(event.name, learner.step))
            if self.phase == "closing":
                actions.append(StopTraining(event.name))
            for index, fragment in enumerate(self.fragments):
                gathering = fragment.round
                if gathering and gathering.merging_since is None and event.name in gathering.asked - set(gathering.arrived):
                    actions.append(self._ask(event.name, index, gathering.step))

    def _ready(self, event: Ready) -> None:
        learner = self.learners.get(event.name)
        if learner is not None:
            learner.ready = True

    def _reported(self, event: Reported, now: float) -> None:
        learner = self.learners.get(event.name)
        if learner is None or learner.phase == "gone":
            return
        learner.heard_at = now
        learner.step = max(learner.step, event.step)
        learner.tokens = max(learner.tokens, event.tokens)
        if event.step_time_s > 0:
            learner.step_time.add(event.step_time_s)

    def _contributed(self, event: Contributed, now: float, actions: list[Action]) -> None:
        reason = self.why_refused(event)
        if reason is not None:
            actions.append(Record("refused", {"learner": event.name, "fragment": event.fragment, "step": event.step,
                                              "reason": reason}))  # fmt: skip
            return
        gathering = self.fragments[event.fragment].round
        assert gathering is not None
        gathering.arrived[event.name] = event
        self.learners[event.name].heard_at = now

    def _nothing(self, event: NothingToGive) -> None:
        if not 0 <= event.fragment < len(self.fragments):
            return
        gathering = self.fragments[event.fragment].round
        if gathering and gathering.step == event.step and event.name not in gathering.arrived:
            gathering.asked.discard(event.name)

    def _leaving(self, event: Leaving, now: float, actions: list[Action]) -> None:
        learner = self.learners.get(event.name)
        if learner is None or learner.phase != "training":
            if learner is not None and learner.phase == "waiting":
                learner.phase = "gone"
            actions.append(Goodbye(event.name, "left"))
            return
        learner.leaving = True
        learner.phase = "leaving"
        actions.append(Record("leaving", {"learner": event.name}))
        for index in range(len(self.fragments)):
            self._open(index, now, self.step, actions, everyone=True)

    def _disconnected(self, event: Disconnected, now: float, actions: list[Action]) -> None:
        learner = self.learners.get(event.name)
        if learner is None or learner.session != event.session or learner.phase in ("away", "gone"):
            return
        learner.phase = "away"
        learner.heard_at = now
        actions.append(Record("disconnected", {"learner": event.name}))
        if not self._counts(learner):
            self._drop_unanswered(event.name)

    def _stored(self, event: Stored, now: float, actions: list[Action]) -> None:
        fragment = self.fragments[event.fragment]
        gathering = fragment.round
        assert gathering is not None and gathering.merging_since is not None, "stored a merge that was not ordered"
        assert event.version == fragment.version + 1, "versions go up one by one"
        fragment.version = event.version
        fragment.merged_step = gathering.step
        fragment.merged_base.update({name: offer.base for name, offer in gathering.arrived.items()})
        fragment.round = None
        self.merges += 1
        self.grace.sync_time.add(now - gathering.merging_since)
        names = tuple(learner.name for learner in self.learners.values() if learner.phase in ("training", "leaving", "waiting"))
        counted = tuple(fragment.counted(name) for name in names)
        actions.append(Announce(names, event.fragment, event.version, gathering.step, counted))

    def _store_failed(self, event: StoreFailed, now: float, actions: list[Action]) -> None:
        fragment = self.fragments[event.fragment]
        gathering = fragment.round
        assert gathering is not None and gathering.merging_since is not None, "a merge failed that was not ordered"
        gathering.merging_since = None
        gathering.not_before = now + RETRY_STORE_S
        actions.append(Record("merge_failed", {"fragment": event.fragment, "step": gathering.step, "reason": event.reason}))

    def _close(self, why: str, actions: list[Action]) -> None:
        if self.phase in ("closing", "ended"):
            return
        self.phase = "closing"
        actions.append(Record("closing", {"why": why, "step": self.step, "tokens": self.tokens}))
        for learner in self.learners.values():
            if learner.phase in ("training", "leaving"):
                actions.append(StopTraining(learner.name))
            elif learner.phase == "waiting":
                actions.append(Goodbye(learner.name, "the run is over"))
                learner.phase = "gone"

    # ------------------------------------------------------------ what follows from the state

    def _notice_silence(self, now: float, actions: list[Action]) -> None:
        for learner in self.learners.values():
            if learner.phase != "gone" and now - learner.heard_at >= self.sync.silence_s:
                if learner.phase != "away":
                    # It may only be frozen: then it finds its stream ended and connects again as the same session.
                    actions.append(Goodbye(learner.name, "silent", final=False))
                actions.append(Record("lost", {"learner": learner.name, "silent_s": round(now - learner.heard_at, 3)}))
                learner.phase = "gone"
                self._drop_unanswered(learner.name)

    def _begin_learners(self, actions: list[Action]) -> None:
        waiting = [learner for learner in self.learners.values() if learner.phase == "waiting" and learner.ready]
        if self.phase == "gathering" and len(waiting) >= self.sync.start_with:
            self.phase = "running"
            actions.append(Record("began", {"learners": sorted(learner.name for learner in waiting)}))
        if self.phase != "running":
            return
        limit = self.sync.begin.islands if self.step < self.sync.begin.steps else 0
        for learner in sorted(waiting, key=lambda learner: learner.slot):
            training = sum(other.phase in ("training", "leaving") for other in self.learners.values())
            if limit and training >= limit:
                break
            learner.phase = "training"
            learner.began = True
            learner.step = self.step
            actions.append(Begin(learner.name, self.step))

    def _advance(self, now: float, actions: list[Action]) -> None:
        if self.phase != "running":
            return
        steps = sorted((learner.step for learner in self.learners.values() if self._counts(learner)), reverse=True)
        if not steps:
            return
        needed = min(self.sync.quorum or len(steps), len(steps))
        self.step = max(self.step, steps[needed - 1])
        for step, index in self.schedule.due_between(self._opened_upto, self.step):
            if step > self.fragments[index].merged_step:
                self._open(index, now, step, actions)
        self._opened_upto = self.step

    def _open(self, index: int, now: float, step: int, actions: list[Action], *, everyone: bool = False) -> None:
        fragment = self.fragments[index]
        able = {learner.name for learner in self.learners.values() if self._counts(learner)}
        if fragment.round is not None:
            if fragment.round.merging_since is None:
                for name in sorted(fragment.round.asked - set(fragment.round.arrived)):
                    actions.append(self._ask(name, index, fragment.round.step))
            return
        if not able:
            return
        fragment.round = Round(step, now, able, everyone)
        actions.append(Record("opened", {"fragment": index, "step": step, "asked": sorted(able)}))
        actions.extend(self._ask(name, index, step) for name in sorted(able))

    def _ask(self, name: str, index: int, step: int) -> Ask:
        return Ask(name, index, step, self._min_base(name, self.fragments[index]))

    def _min_base(self, name: str, fragment: FragmentProgress) -> int:
        return max(0, fragment.version - self.sync.staleness, fragment.counted(name))

    def _counts(self, learner: LearnerState) -> bool:
        """Is it worth asking? In lock-step, and at the end, a learner that is only briefly away still is."""
        if learner.phase == "away":
            return learner.began and (self.sync.wait or self.phase == "closing")
        return learner.phase in ("training", "leaving")

    def _close_when_spent(self, actions: list[Action]) -> None:
        if self.phase == "running" and self.sync.budget_tokens and self.tokens >= self.sync.budget_tokens:
            self._close("budget", actions)

    def _settle_rounds(self, now: float, actions: list[Action]) -> None:
        for index, fragment in enumerate(self.fragments):
            gathering = fragment.round
            if gathering is None or gathering.merging_since is not None or now < gathering.not_before:
                continue
            missing = gathering.asked - set(gathering.arrived)
            if not gathering.arrived:
                if not missing:
                    fragment.round = None
                    actions.append(Record("cancelled", {"fragment": index, "step": gathering.step}))
                continue
            quorum = min(self.sync.quorum or len(gathering.asked), len(gathering.asked))
            if gathering.quorum_at is None and len(gathering.arrived) >= quorum:
                gathering.quorum_at = now
                self.grace.quorum_time.add(now - gathering.opened_at)
                wait = self.sync.silence_s if gathering.everyone else self.grace.seconds(self._step_time())
                gathering.deadline = now + wait
            if not missing or (gathering.deadline is not None and now >= gathering.deadline):
                self._order_merge(index, fragment, gathering, now, actions)

    def _order_merge(self, index: int, fragment: FragmentProgress, gathering: Round, now: float, actions: list[Action]) -> None:
        gathering.merging_since = now
        shares = []
        for name in sorted(gathering.arrived):
            offer = gathering.arrived[name]
            shares.append(Share(name, offer.base, offer.steps, offer.tokens, merging.weight(offer.tokens, offer.steps)))
        total = sum(share.weight for share in shares)
        for share in shares:
            learner = self.learners[share.name]
            learner.merges += 1
            learner.last_share = share.weight / total
        expected = len(gathering.asked | set(gathering.arrived))
        presence = len(shares) / expected if self.sync.damp_absent else 1.0
        self.participation.append(len(shares) / expected)
        stage = self.schedule.stage(gathering.step)
        order = Merge(
            index, fragment.version + 1, gathering.step, tuple(shares), stage.outer_lr, stage.outer_momentum, presence
        )
        actions.append(order)

    def _finish(self, now: float, actions: list[Action]) -> None:
        """Closing and leaving: merge what is left, then say goodbye."""
        if self.phase == "closing":
            # Each fragment gets one last round, once its present one is over.
            for index in sorted(self._last_rounds_due):
                if self.fragments[index].round is None:
                    self._open(index, now, self.step + 1, actions, everyone=True)
                    self._last_rounds_due.discard(index)
            if not self._last_rounds_due and all(fragment.round is None for fragment in self.fragments):
                self.phase = "ended"
                actions.append(Record("ended", {"step": self.step, "tokens": self.tokens, "merges": self.merges}))
                actions.extend(
                    Goodbye(learner.name, "the run is over")
                    for learner in self.learners.values()
                    if learner.phase in ("training", "leaving")
                )
                actions.append(Ended())
            return
        for learner in self.learners.values():
            if learner.phase == "leaving" and not any(
                f.round and (learner.name in f.round.asked or learner.name in f.round.arrived) for f in self.fragments
            ):
                learner.phase = "gone"
                actions.append(Record("left", {"learner": learner.name}))
                actions.append(Goodbye(learner.name, "left"))

    def _drop_unanswered(self, name: str) -> None:
        """Nobody waits for this learner any more; what it has already given still counts."""
        for fragment in self.fragments:
            if fragment.round and fragment.round.merging_since is None and name not in fragment.round.arrived:
                fragment.round.asked.discard(name)

    def _free_slot(self) -> int:
        taken = {learner.slot for learner in self.learners.values() if learner.phase != "gone"}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _step_time(self) -> float:
        times = [
            learner.step_time.get()
            for learner in self.learners.values()
            if learner.phase == "training" and learner.step_time.value is not None
        ]
        return sum(times) / len(times) if times else 0.0

    def _next_wake(self, now: float) -> float | None:
        open_rounds = [f.round for f in self.fragments if f.round and f.round.merging_since is None]
        times = [max(r.deadline, r.not_before) for r in open_rounds if r.deadline is not None]
        times += [learner.heard_at + self.sync.silence_s for learner in self.learners.values() if learner.phase != "gone"]
        return max(min(times), now) if times else None
