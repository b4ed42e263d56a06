"""The syncer's decisions as a state machine: (state, event, now) → actions. No tensors, sockets, threads, files or clock.

Rules:
 1. The run's step is the K-th largest step among learners that train. Reaching step t opens a round for every fragment
    due at t.
 2. A round asks every learner that trains. It merges when all asked have answered, or K have and the grace window is over.
 3. One round a fragment at a time. A fragment due again while its round is open stays in that round; those who have not
    answered, and newcomers, are asked.
 4. A contribution counts once: a learner that gave is next asked for progress from the version that contains it, or later.
 5. A version is announced only after it is stored. If storing fails, nothing has changed and the merge is tried again.
 6. A learner whose stream broke is "away" for `silence_s`; in lock-step others wait that long for it, otherwise nobody does.
    A syncer that was restarted opens no round before those it knows are back, or have had the time to come back.
 7. A new process of the same name starts from the current versions and the run's step; what the old one was asked for is
    void, and the old one is turned away if it comes back.
 8. A learner that leaves gets one chance to give every fragment, and is waited for as long as silence is tolerated.
 9. A contribution that is not finite, or far larger than what came lately, counts as no answer. After `strikes` such in a
    row the learner is in quarantine: it is asked as before, and merged again after as many healthy ones.
10. If the learners' loss stays far above its best (`rollback`), every fragment gets a new version with the values it had when
    all was well, without momentum, and progress from before is refused.
11. Data that a learner was given is its own until another process takes its place, it leaves, or it was away for `lease_s`;
    then what is in no merge is given to others. One that returns after that starts over from the current versions.
12. A fragment whose data is not served has no rounds until it is. What was gathered for it is lost, and asked for again. One
    who leaves does not wait for it longer than silence is tolerated, nor does the end of a run for ever.
13. While exchanges take longer than they may, few rounds are open at a time, and the fragment that waits longest is next: see
    flow.py. Those who leave and the end of a run are not held back.
14. At the budget the run closes: everyone stops, every fragment is merged once more from all who can be reached, then it ends.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from skerry.config import SyncConfig
from skerry.core.flow import Flow
from skerry.core.guard import SizeHistory, why_unhealthy
from skerry.core.leases.policy import LeaseDesk
from skerry.core.messages import (
    LEFT,
    OVER,
    Action,
    Announce,
    Ask,
    Begin,
    Caution,
    CloseRequested,
    Contributed,
    Declared,
    Disconnected,
    Ended,
    Event,
    FragmentsAway,
    FragmentsBack,
    Goodbye,
    GoodKept,
    Joined,
    Leaving,
    Merge,
    NothingToGive,
    Ready,
    Record,
    Recovered,
    Reported,
    Restore,
    Share,
    StopTraining,
    Stored,
    StoreFailed,
    Tick,
    WakeAt,
    Welcome,
)
from skerry.core.quorum import GraceWindow
from skerry.core.rollback import Rollback
from skerry.core.schedule import Schedule
from skerry.core.standing import Counted, FragmentProgress, LearnerState, Round, RunPhase, Standing
from skerry.core.weight import weight

RETRY_STORE_S = 1.0
RETURN_S = 7.0
"""A learner that lost the syncer tries again after 6.5 seconds at the latest."""
RESTORE_TRIES = 10
LAST_CHANCE = 20
"""One that leaves is waited for while its bytes move, but a round is not kept open longer than this many times `silence_s`."""
REMEMBERED = 500
"""Learners that are gone but still known, in case they come back."""


class SyncerCore:
    def __init__(
        self,
        sync: SyncConfig,
        fragments: int,
        *,
        now: float = 0.0,
        progress: list[FragmentProgress] | None = None,
        standing: Standing | None = None,
        places: Sequence[int] = (),
    ) -> None:
        """`places` has for each fragment its shard, if there are any."""
        self.sync = sync
        self.schedule = Schedule(sync, fragments)
        self.fragments = progress or [FragmentProgress() for _ in range(fragments)]
        standing = standing or Standing()
        self.step = standing.step
        self.phase: RunPhase = standing.phase
        self.banked_tokens = standing.banked_tokens
        self.grace = GraceWindow(sync.grace, sync.overlap, sync.every)
        places = places or [0] * fragments
        together = {place: [index for index in range(fragments) if places[index] == place] for place in set(places)}
        flows = {place: Flow(indices, sync.silence_s) for place, indices in together.items()}
        self.flows = list(flows.values())
        self._flow_of = [flows[place] for place in places]
        self.merges = standing.merges
        self._recoveries = standing.recoveries
        self.participation: deque[float] = deque(maxlen=200)
        # Learners the last syncer process knew are away, not unknown: in lock-step their return is worth waiting for.
        self.learners = {
            name: LearnerState(name, session, slot, "away", step, tokens, heard_at=now, gone_at=now, ready=True, began=True)
            for name, (session, slot, step, tokens) in standing.sessions.items()
        }
        for name in standing.gone:
            self.learners[name].phase = "gone"
        for name, sessions in standing.retired.items():
            # Of one that had not begun no more is known than whose place it had taken.
            self.learners.setdefault(name, LearnerState(name, "", 0, "gone")).retired.extend(sessions)
        for name in standing.quarantined:
            self.learners[name].quarantined, self.learners[name].strikes = True, sync.strikes
        for fragment, sizes in zip(self.fragments, standing.sizes, strict=False):
            fragment.sizes = SizeHistory.restored(sizes)
        for fragment, floor in zip(self.fragments, standing.floors, strict=False):
            fragment.floor = max(fragment.floor, floor)
        for index in standing.restoring:
            self.fragments[index].restoring = RESTORE_TRIES
        self.rollback = Rollback(sync, standing)
        self._desk = LeaseDesk(sync, standing, self.fragments, self.learners, now)
        self.leases = self._desk.leases
        self._last_rounds_due = set(range(fragments))
        # In lock-step they are waited for anyway.
        self._returning = set() if sync.wait else {name for name, known in self.learners.items() if known.phase == "away"}
        self._expected_until = now + RETURN_S

    # ------------------------------------------------------------ what others may ask

    @property
    def tokens(self) -> int:
        """Tokens trained on by all islands together, whoever they were."""
        return self.banked_tokens + sum(learner.tokens for learner in self.learners.values())

    def standing(self) -> Standing:
        sessions = {
            learner.name: (learner.session, learner.slot, learner.step, learner.tokens)
            for learner in self.learners.values()
            if learner.began or learner.tokens
        }
        gone = tuple(name for name in sessions if self.learners[name].phase == "gone")
        retired = {learner.name: tuple(learner.retired) for learner in self.learners.values() if learner.retired}
        quarantined = tuple(name for name in sessions if self.learners[name].quarantined)
        sizes = tuple(fragment.sizes.summary() for fragment in self.fragments)
        return Standing(
            self.step,
            self.banked_tokens,
            self.phase,
            sessions,
            gone,
            retired,
            quarantined,
            sizes,
            self.rollback.good_step,
            self.rollback.health.best,
            tuple(fragment.floor for fragment in self.fragments),
            tuple(index for index, fragment in enumerate(self.fragments) if fragment.restoring),
            self.rollback.count,
            self.leases.to_json(),
            self.merges,
            self._recoveries,
        )

    def retired(self, name: str) -> tuple[str, ...]:
        """Processes that had this name before the present one."""
        learner = self.learners.get(name)
        return tuple(learner.retired) if learner is not None else ()

    def let_go_of_all(self, why: str) -> list[Record]:
        """No process of before will come back. What they trained on stays counted, what they held is given to others. The run
        goes on when enough new ones are there."""
        if self.phase == "running":
            self.phase = "gathering"
        actions: list[Action] = []
        for name in list(self.leases.holdings):
            self._desk.end(name, why, actions)
        for learner in list(self.learners.values()):
            self._bank(learner, actions)
        self.learners.clear()
        self._returning.clear()
        return [action for action in actions if isinstance(action, Record)]

    def bytes_moved(self, name: str, now: float) -> None:
        """A sign of life that is too frequent to be an event: part of a fragment went to or came from this learner."""
        learner = self.learners.get(name)
        if learner is not None and learner.phase != "gone":
            learner.heard_at = learner.moved_at = now

    def donor_for(self, name: str) -> str | None:
        """A healthy learner whose optimizer state another one may take over: the one that has come furthest."""
        healthy = [
            learner
            for learner in self.learners.values()
            if learner.phase == "training" and learner.name != name and learner.merges and not learner.strikes
        ]
        return max(healthy, key=lambda learner: (learner.step, learner.name)).name if healthy else None

    def is_asked(self, ask: Ask) -> bool:
        """Whether the answer to this question is still waited for."""
        gathering = self.fragments[ask.fragment].round
        return gathering is not None and gathering.step == ask.step and ask.name in gathering.missing

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
        return self.leases.why_refused(offer.name, learner.session, offer.samples)

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> list[Action]:
        actions: list[Action] = []
        if isinstance(event, Joined):
            self._joined(event, now, actions)
        elif isinstance(event, Ready):
            self._ready(event)
        elif isinstance(event, Reported):
            self._reported(event, now, actions)
        elif isinstance(event, Declared):
            self._desk.declare(event, actions)
        elif isinstance(event, Contributed):
            self._contributed(event, now, actions)
        elif isinstance(event, NothingToGive):
            self._nothing(event)
        elif isinstance(event, Leaving):
            self._leaving(event, actions)
        elif isinstance(event, Disconnected):
            self._disconnected(event, now, actions)
        elif isinstance(event, Stored):
            self._stored(event, now, actions)
        elif isinstance(event, StoreFailed):
            self._store_failed(event, now, actions)
        elif isinstance(event, GoodKept):
            self.rollback.kept(event, actions)
        elif isinstance(event, FragmentsAway):
            self._fragments_away(event, now, actions)
        elif isinstance(event, FragmentsBack):
            for index in event.fragments:
                self.fragments[index].away_since = None
        elif isinstance(event, Recovered):
            self._recovered(event, actions)
        elif isinstance(event, CloseRequested):
            self._close("requested", actions)
        else:
            assert isinstance(event, Tick)
        self._notice_silence(now, actions)
        self._begin_learners(actions)
        self._advance()
        self._close_when_spent(actions)
        self._check_health(actions)
        self._restore_fragments(now, actions)
        self._settle_rounds(now, actions)
        self._open_rounds(now, actions)
        self._say_goodbyes(now, actions)
        wake = self._next_wake(now)
        if wake is not None:
            actions.append(WakeAt(wake))
        return actions

    def _joined(self, event: Joined, now: float, actions: list[Action]) -> None:
        self._returning.discard(event.name)
        known = self.learners.get(event.name)
        if known is not None and event.session in known.retired:
            # Without a welcome the caller turns it away.
            actions.append(Record("refused", {"learner": event.name, "reason": "another process has taken its place"}))
            return
        unknown = event.leased > self.leases.of(event.name, event.session).given
        if unknown and not self._recoveries:
            # It was forgotten, and what it did with the data it was given cannot be told any more.
            actions.append(Record("refused", {"learner": event.name, "reason": "its leases are not known"}))
            return
        versions = tuple(fragment.version for fragment in self.fragments)
        # Progress made since versions of this run is welcome, whether or not this syncer process remembers the learner.
        resumed = len(event.held) == len(versions) and all(0 <= h <= v for h, v in zip(event.held, versions, strict=True))
        resumed = self._desk.settle(event, resumed and not unknown, actions) and resumed and not unknown
        if known is not None and known.session == event.session:
            learner = known
        else:
            learner = LearnerState(event.name, event.session, self._free_slot(), "waiting")
            if known is not None:
                self._replace(known, learner, actions)
            self.learners[event.name] = learner
        learner.region = event.region
        learner.heard_at = now
        learner.ready = resumed
        learner.began = resumed and (learner.began or event.step > 0)
        if resumed:
            learner.step = max(learner.step, event.step)
            learner.tokens = max(learner.tokens, event.tokens)
        if any(other.slot == learner.slot and other is not learner for other in self._live()):
            learner.slot = self._free_slot()
        learner.phase = "waiting" if not learner.began else "leaving" if learner.leaving else "training"
        merged_steps = tuple(fragment.merged_step for fragment in self.fragments)
        counted = tuple(fragment.counted_upto(event.name) for fragment in self.fragments)
        place = (event.name, learner.slot, self.step, resumed, versions, merged_steps, counted)
        leased = self.leases.of(event.name, event.session).given
        actions.append(Welcome(*place, quarantined=learner.quarantined, leased=leased))
        actions.append(Record("joined", {"learner": event.name, "session": event.session, "slot": learner.slot,
                                         "resumed": resumed, "step": self.step, "platform": event.platform}))  # fmt: skip
        if self.phase == "ended" or (self.phase == "closing" and learner.phase == "waiting"):
            actions.append(Goodbye(event.name, OVER))
            learner.phase = "gone"
        elif learner.phase in ("training", "leaving"):
            if self.phase == "gathering":
                self.phase = "running"
            if self.sync.wait:
                # The others may have gone on without it; in lock-step it goes on from where they are.
                learner.step = max(learner.step, self.step)
            actions.append(Begin(event.name, learner.step))
            if self.phase == "closing":
                actions.append(StopTraining(event.name))
            for index, fragment in enumerate(self.fragments):
                gathering = fragment.round
                if gathering is None or gathering.merging_since is not None or event.name in gathering.arrived:
                    continue
                if self.phase == "closing":
                    # It had been given up; what it did meanwhile is welcome all the same.
                    gathering.asked.add(event.name)
                    gathering.needed.add(event.name)
                if event.name in gathering.asked:
                    actions.append(self._ask(event.name, index, gathering.step))

    def _replace(self, old: LearnerState, new: LearnerState, actions: list[Action]) -> None:
        """Another process takes over a name. Its open questions are void, what it has given still counts."""
        if old.phase in ("training", "leaving", "waiting"):
            actions.append(Goodbye(old.name, f"another process joined as {old.name}"))
        self._bank(old, actions)
        self._drop_unanswered(old.name)
        for fragment in self.fragments:
            # The new process counts its own steps from zero, and starts from versions that hold all the old one gave.
            fragment.counted.pop(old.name, None)
            if fragment.round and old.name in fragment.round.arrived:
                given = fragment.round.arrived[old.name]
                fragment.round.arrived[old.name] = dataclasses.replace(given, session=given.session or old.session)
        new.slot = old.slot
        new.retired = old.retired
        if old.session:
            new.retired.append(old.session)

    def _bank(self, learner: LearnerState, actions: list[Action]) -> None:
        """This process is no more, but what it trained on stays counted."""
        if learner.tokens:
            self.banked_tokens += learner.tokens
            actions.append(Record("banked", {"learner": learner.name, "session": learner.session, "tokens": learner.tokens}))

    def _ready(self, event: Ready) -> None:
        learner = self.learners.get(event.name)
        if learner is not None:
            learner.ready = True

    def _reported(self, event: Reported, now: float, actions: list[Action]) -> None:
        learner = self.learners.get(event.name)
        if learner is None or learner.phase == "gone":
            return
        learner.heard_at = now
        learner.step = max(learner.step, event.step)
        learner.tokens = max(learner.tokens, event.tokens)
        if event.step_time_s > 0:
            learner.step_time.add(event.step_time_s)
        self.rollback.health.report(event.name, event.loss)
        if self.phase not in ("closing", "ended"):
            self._desk.give(event, actions)

    def _contributed(self, event: Contributed, now: float, actions: list[Action]) -> None:
        reason = self.why_refused(event)
        if reason is not None:
            actions.append(Record("refused", {"learner": event.name, "fragment": event.fragment, "step": event.step,
                                              "reason": reason}))  # fmt: skip
            return
        fragment = self.fragments[event.fragment]
        gathering = fragment.round
        assert gathering is not None
        learner = self.learners[event.name]
        learner.heard_at = now
        learner.tokens = max(learner.tokens, event.upto_tokens)
        why = self.why_unhealthy(event)
        if math.isfinite(event.norm):
            fragment.sizes.add(event.norm, event.steps, fragment.sizes.limit(self.sync.outlier, event.steps))
        if why is not None:
            actions.append(Record("unhealthy", {"learner": event.name, "fragment": event.fragment, "step": event.step,
                                                "reason": why}))  # fmt: skip
        self._judge(learner, why, actions)
        if why is not None or learner.quarantined:
            self._decline(event.name, event.fragment, gathering)
            return
        gathering.arrived[event.name] = event
        if learner.owes is not None and event.name in gathering.final:
            learner.owes.discard(event.fragment)

    def why_unhealthy(self, offer: Contributed) -> str | None:
        sizes = self.fragments[offer.fragment].sizes
        return why_unhealthy(sizes, offer.norm, offer.steps, self.sync.outlier, offer.repeated)

    def _judge(self, learner: LearnerState, why: str | None, actions: list[Action]) -> None:
        changed = learner.judged(why is None, self.sync.strikes)
        if changed == "quarantined":
            actions.append(Record("quarantined", {"learner": learner.name, "reason": why}))
            actions.append(Caution(learner.name, True, why or ""))
        elif changed == "readmitted":
            actions.append(Record("readmitted", {"learner": learner.name}))
            actions.append(Caution(learner.name, False, f"{self.sync.strikes} healthy contributions in a row"))

    def _nothing(self, event: NothingToGive) -> None:
        if not 0 <= event.fragment < len(self.fragments):
            return
        gathering = self.fragments[event.fragment].round
        if gathering is None or gathering.step != event.step or event.name not in gathering.missing:
            return
        self._decline(event.name, event.fragment, gathering)

    def _decline(self, name: str, fragment: int, gathering: Round) -> None:
        """This learner's answer is in, and there is nothing in it to merge."""
        gathering.asked.discard(name)
        gathering.declined.add(name)
        owes = self.learners[name].owes
        if owes is not None:
            owes.discard(fragment)

    def _leaving(self, event: Leaving, actions: list[Action]) -> None:
        learner = self.learners.get(event.name)
        if learner is None or self.phase == "ended" or learner.phase in ("waiting", "away", "gone"):
            if learner is not None and learner.phase == "waiting":
                self._desk.take_back(event.name, "it has left", actions)
                learner.phase = "gone"
            actions.append(Goodbye(event.name, LEFT))
        elif learner.phase == "training" and self.phase != "closing":
            learner.phase = "leaving"
            learner.owes = set(range(len(self.fragments)))
            for fragment in self.fragments:
                if fragment.round and event.name in fragment.round.asked:
                    fragment.round.needed.add(event.name)
            actions.append(Record("leaving", {"learner": event.name}))

    def _disconnected(self, event: Disconnected, now: float, actions: list[Action]) -> None:
        learner = self.learners.get(event.name)
        if learner is None or learner.session != event.session or learner.phase in ("away", "gone"):
            return
        learner.phase = "away"
        learner.heard_at = now
        self.leases.disconnected(event.name)
        actions.append(Record("disconnected", {"learner": event.name}))
        if not self._worth_asking(learner):
            self._drop_unanswered(event.name)

    def _stored(self, event: Stored, now: float, actions: list[Action]) -> None:
        fragment = self.fragments[event.fragment]
        gathering = fragment.round
        assert gathering is not None and gathering.merging_since is not None, "stored a merge that was not ordered"
        assert event.version == fragment.version + 1, "versions go up one by one"
        fragment.version = event.version
        if gathering.restores:
            fragment.restoring, fragment.floor, fragment.round = 0, event.version, None
            self._announce(event.fragment, gathering.step, actions)
            return
        fragment.merged_step = max(fragment.merged_step, gathering.step if self.sync.wait else gathering.due)
        fragment.round = None
        self.merges += 1
        self.participation.append(len(gathering.arrived) / len(gathering.asked | set(gathering.arrived)))
        self.grace.sync_time.add(min(now - gathering.merging_since, LAST_CHANCE * self.sync.silence_s))
        if not self.sync.wait and self.sync.adopt != "carry":  # what is carried over is not lost
            step_s = self._step_time()
            limits = self.grace.allowed(step_s), self.grace.longest(step_s)
            self._flow_of[event.fragment].merged(event.fragment, now, gathering.taken_s(now), *limits)
        total = sum(weight(offer.tokens, offer.steps) for offer in gathering.arrived.values())
        for name, offer in gathering.arrived.items():
            learner = self.learners[name]
            session = offer.session or learner.session
            # A process that took the place of the giver counts its own steps.
            upto, samples = (offer.upto, offer.samples[1]) if session == learner.session else (0, 0)
            fragment.counted[name] = Counted(event.version, upto, samples)
            self.leases.merged(name, session, offer.samples[1])
            learner.merges += 1
            learner.last_share = weight(offer.tokens, offer.steps) / total
        self._announce(event.fragment, gathering.step, actions)

    def _announce(self, index: int, step: int, actions: list[Action]) -> None:
        fragment = self.fragments[index]
        names = tuple(name for name, learner in self.learners.items() if learner.phase in ("training", "leaving", "waiting"))
        counted = tuple(fragment.counted_upto(name) for name in names)
        actions.append(Announce(names, index, fragment.version, step, counted))

    def _fragments_away(self, event: FragmentsAway, now: float, actions: list[Action]) -> None:
        for index in event.fragments:
            fragment = self.fragments[index]
            fragment.away_since = now if fragment.away_since is None else fragment.away_since
            gathering = fragment.round
            if gathering is None or gathering.restores:
                continue
            gathering.void = True
            if gathering.merging_since is None:
                self._drop_void(index, gathering, actions)

    def _recovered(self, event: Recovered, actions: list[Action]) -> None:
        """The fragment goes on from an older state, under a number that no version had."""
        fragment = self.fragments[event.fragment]
        assert fragment.round is None and event.version > fragment.version, "a fragment that was lost has no rounds"
        fragment.version = fragment.floor = event.version
        fragment.counted.clear()
        self._announce(event.fragment, fragment.merged_step, actions)

    def _drop_void(self, index: int, gathering: Round, actions: list[Action]) -> None:
        """As if it had not been opened: whoever gave still has what it gave, on top of the version it was counted from."""
        fragment = self.fragments[index]
        fragment.round, fragment.dropped_round = None, max(fragment.dropped_round, gathering.step)
        fragment.declined = set()  # of an earlier round, whose number this one does not have
        for name in gathering.final & set(gathering.arrived):
            owes = self.learners[name].owes if name in self.learners else None
            if owes is not None:
                owes.add(index)
        if self.phase == "closing":
            self._last_rounds_due.add(index)
        actions.append(Record("dropped", {"fragment": index, "step": gathering.step, "lost": sorted(gathering.arrived)}))

    def _store_failed(self, event: StoreFailed, now: float, actions: list[Action]) -> None:
        fragment = self.fragments[event.fragment]
        gathering = fragment.round
        assert gathering is not None and gathering.merging_since is not None, "a merge failed that was not ordered"
        gathering.merging_since = None
        if gathering.restores:
            fragment.restoring -= 1
            if not fragment.restoring:
                # Better to go on from what there is than to stand still.
                fragment.round = None
                actions.append(Record("not_restored", {"fragment": event.fragment, "reason": event.reason}))
                return
        if gathering.void:
            self._drop_void(event.fragment, gathering, actions)
            return
        # While it was being merged, nobody was struck off.
        gathering.asked = {name for name in gathering.asked if name in gathering.arrived or self._may_answer(name)}
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
                actions.append(Goodbye(learner.name, OVER))
                learner.phase = "gone"

    # ------------------------------------------------------------ what follows from the state

    def _notice_silence(self, now: float, actions: list[Action]) -> None:
        for learner in self._live():
            if now >= learner.heard_at + self.sync.silence_s:
                if learner.phase != "away":
                    # It may only be frozen: then it finds its stream ended and connects again as the same session.
                    actions.append(Goodbye(learner.name, "silent", final=False))
                actions.append(Record("lost", {"learner": learner.name, "silent_s": round(now - learner.heard_at, 3)}))
                learner.phase, learner.gone_at = "gone", now
                self.leases.disconnected(learner.name)
                self._drop_unanswered(learner.name)
        self._desk.expire(now, actions)
        self._forget_the_long_gone(actions)

    def _forget_the_long_gone(self, actions: list[Action]) -> None:
        """Names of learners that come and go for ever must not pile up; their tokens stay counted."""
        gone = [learner for learner in self.learners.values() if learner.phase == "gone"]
        if len(gone) <= REMEMBERED:
            return
        in_rounds = {name for f in self.fragments if f.round for name in f.round.arrived}
        for learner in sorted(gone, key=lambda learner: learner.heard_at)[: len(gone) - REMEMBERED]:
            if learner.name not in in_rounds:
                self._desk.end(learner.name, "it is forgotten", actions)
                del self.learners[learner.name]
                self._bank(learner, actions)
                for fragment in self.fragments:
                    fragment.counted.pop(learner.name, None)

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

    def _advance(self) -> None:
        """The run's step follows the K-th largest step of those who train."""
        steps = sorted((learner.step for learner in self.learners.values() if self._worth_asking(learner)), reverse=True)
        if self.phase == "running" and steps:
            needed = min(self.sync.quorum or len(steps), len(steps))
            self.step = max(self.step, steps[needed - 1])

    def _waits_for_returns(self, now: float) -> bool:
        """After a restart: whoever is back first must not be merged alone while the others are looking for the way."""
        return bool(self._returning) and now < self._expected_until

    def _open_rounds(self, now: float, actions: list[Action]) -> None:
        if self.phase == "running" and self._waits_for_returns(now):
            return
        leaving = [learner for learner in self.learners.values() if learner.phase == "leaving"]
        room = {flow: flow.room(self.fragments, now) for flow in self.flows}
        for index in sorted(range(len(self.fragments)), key=lambda index: self.fragments[index].merged_step):
            fragment = self.fragments[index]
            waits = fragment.away_since is not None and not (self.phase == "closing" and self._given_up(fragment, now))
            if fragment.restoring or waits:
                continue
            if self.phase == "closing":
                self._open_last_round(index, now, actions)
                continue
            if self.phase != "running":
                return
            due = self.schedule.last_due(index, self.step)
            owing = {learner.name for learner in leaving if index in (learner.owes or ())}
            if fragment.round is not None:
                self._ask_again(index, fragment.round, due, owing, actions)
            elif owing or (due > fragment.merged_step and room[self._flow_of[index]] > 0):
                trains = {learner.name for learner in self.learners.values() if self._worth_asking(learner)}
                # A turn that was cancelled is tried again, but not with those who have answered it.
                again = due == fragment.last_round and bool(fragment.declined & (trains | owing))
                step = due if due > fragment.merged_step and not again else fragment.next_round(self.step)
                self._open(index, now, step, trains, owing, actions)
                room[self._flow_of[index]] -= 1

    def _open_last_round(self, index: int, now: float, actions: list[Action]) -> None:
        """While the run closes each fragment gets one last round, once its present one is over."""
        if index in self._last_rounds_due and self.fragments[index].round is None:
            self._last_rounds_due.discard(index)
            if self.fragments[index].away_since is not None:
                actions.append(Record("left_out", {"fragment": index, "version": self.fragments[index].version}))
                return
            able = {learner.name for learner in self.learners.values() if self._worth_asking(learner)}
            self._open(index, now, self.fragments[index].next_round(self.step + 1), able, able, actions)

    def _open(self, index: int, now: float, step: int, asked: set[str], needed: set[str], actions: list[Action]) -> None:
        asked = asked | needed
        if not asked:
            return
        fragment = self.fragments[index]
        fragment.round = Round(step, now, asked, set(needed), frozenset(needed), due=step)
        fragment.last_round = max(fragment.last_round, step)
        actions.append(Record("opened", {"fragment": index, "step": step, "asked": sorted(asked)}))
        actions.extend(self._ask(name, index, step) for name in sorted(asked))

    def _ask_again(self, index: int, gathering: Round, due: int, owing: set[str], actions: list[Action]) -> None:
        """A fragment that is due again while its round is open stays in it: newcomers are asked too, and reminders sent."""
        if gathering.merging_since is not None:
            return
        # One that has answered this round hears no more of it; what it owes since then is asked for in the next.
        owing = owing - set(gathering.arrived) - gathering.declined
        late = owing - gathering.asked
        if due > gathering.due:
            gathering.due = due
            trains = {learner.name for learner in self.learners.values() if self._worth_asking(learner)}
            gathering.asked |= trains - set(gathering.arrived) - gathering.declined
            late |= gathering.missing
        gathering.asked |= late
        gathering.needed |= owing
        actions.extend(self._ask(name, index, gathering.step) for name in sorted(late))

    def _ask(self, name: str, index: int, step: int) -> Ask:
        fragment = self.fragments[index]
        # A turn whose round was dropped may be followed by the next one, that be dropped too, and the first be tried again.
        return Ask(name, index, step, self._min_base(name, fragment), anew=step <= fragment.dropped_round)

    def _min_base(self, name: str, fragment: FragmentProgress) -> int:
        counted = fragment.counted.get(name)
        return max(0, fragment.version - self.sync.staleness, counted.version if counted else 0, fragment.floor)

    def _worth_asking(self, learner: LearnerState) -> bool:
        """In lock-step, and at the end, a learner that is only briefly away still is."""
        if learner.phase == "away":
            return learner.began and (self.sync.wait or self.phase == "closing")
        return learner.phase == "training" or (learner.phase == "leaving" and self.phase == "closing")

    def _may_answer(self, name: str) -> bool:
        learner = self.learners.get(name)
        return learner is not None and (learner.phase == "leaving" or self._worth_asking(learner))

    def _close_when_spent(self, actions: list[Action]) -> None:
        if self.phase == "running" and self.sync.budget_tokens and self.tokens >= self.sync.budget_tokens:
            self._close("budget", actions)

    def _check_health(self, actions: list[Action]) -> None:
        """While the model is being put back, and at the end, nothing is checked."""
        if self.phase != "running" or any(fragment.restoring for fragment in self.fragments):
            return
        training = [learner.name for learner in self.learners.values() if learner.phase == "training"]
        if self.rollback.check(self.step, training, actions):
            for fragment in self.fragments:
                fragment.restoring = RESTORE_TRIES

    def _restore_fragments(self, now: float, actions: list[Action]) -> None:
        """A merge that is under way ends first; what was gathered for the next is dropped."""
        for index, fragment in enumerate(self.fragments):
            under_way = fragment.round
            if not fragment.restoring or (under_way and (under_way.merging_since is not None or now < under_way.not_before)):
                continue
            assert self.rollback.good_step is not None
            fragment.round = Round(self.step, now, set(), due=self.step, merging_since=now, restores=True)
            actions.append(Restore(index, fragment.version + 1, self.step, self.rollback.good_step))

    def _settle_rounds(self, now: float, actions: list[Action]) -> None:
        for index, fragment in enumerate(self.fragments):
            gathering = fragment.round
            if gathering is None or gathering.merging_since is not None or now < gathering.not_before or fragment.restoring:
                continue
            missing = gathering.missing
            if not gathering.arrived:
                if not missing or (gathering.needed and now >= self._deadline(gathering)):
                    self._cancel(index, fragment, gathering, actions)
                continue
            quorum = min(self.sync.quorum or len(gathering.asked), len(gathering.asked))
            if gathering.quorum_at is None and len(gathering.arrived) >= quorum:
                gathering.quorum_at = now
                self.grace.quorum_time.add(min(now - gathering.opened_at, LAST_CHANCE * self.sync.silence_s))
                gathering.deadline = now + self.grace.seconds(self._step_time())
            if not missing or (now >= self._deadline(gathering)):
                self._order_merge(index, fragment, gathering, now, actions)

    def _deadline(self, gathering: Round) -> float:
        waited_for = gathering.needed & gathering.missing
        moved = [self.learners[name].moved_at for name in waited_for]
        given_up = gathering.opened_at + LAST_CHANCE * self.sync.silence_s
        last_chance = min(max([gathering.opened_at, *moved]) + self.sync.silence_s, given_up)
        if waited_for:
            return last_chance
        if gathering.deadline is not None:
            return gathering.deadline
        return last_chance if gathering.needed else math.inf

    def _cancel(self, index: int, fragment: FragmentProgress, gathering: Round, actions: list[Action]) -> None:
        """Nobody had anything to give, or nobody is left."""
        fragment.round, fragment.declined = None, gathering.declined
        actions.append(Record("cancelled", {"fragment": index, "step": gathering.step}))
        if any(learner.phase == "training" for learner in self.learners.values()):
            # The turn is over all the same. Those in lock-step who wait for it are told that the version they have stands.
            fragment.merged_step = max(fragment.merged_step, gathering.step)
            if self.sync.wait:
                self._announce(index, gathering.step, actions)

    def _order_merge(self, index: int, fragment: FragmentProgress, gathering: Round, now: float, actions: list[Action]) -> None:
        gathering.merging_since = now
        offers = [gathering.arrived[name] for name in sorted(gathering.arrived)]
        shares = tuple(
            Share(
                o.name,
                o.base,
                o.steps,
                o.tokens,
                weight(o.tokens, o.steps),
                o.upto,
                o.session or self.learners[o.name].session,
                o.samples,
                o.upto_tokens,
            )
            for o in offers
        )
        expected = len(gathering.asked | set(gathering.arrived))
        presence = len(shares) / expected if self.sync.damp_absent else 1.0
        stage = self.schedule.stage(gathering.step)
        version = fragment.version + 1
        merge = Merge(index, version, gathering.step, shares, stage.outer_lr, stage.outer_momentum, presence, expected)
        actions.append(merge)

    def _given_up(self, fragment: FragmentProgress, now: float) -> bool:
        """It is away for so long that nobody waits for it any more."""
        return fragment.away_since is not None and now >= self._patience(fragment)

    def _patience(self, fragment: FragmentProgress) -> float:
        assert fragment.away_since is not None
        return fragment.away_since + self.sync.silence_s * (LAST_CHANCE if self.phase == "closing" else 1)

    def _say_goodbyes(self, now: float, actions: list[Action]) -> None:
        if self.phase == "closing":
            if not self._last_rounds_due and all(fragment.round is None for fragment in self.fragments):
                self.phase = "ended"
                actions.append(Record("ended", {"step": self.step, "tokens": self.tokens, "merges": self.merges}))
                for learner in self.learners.values():
                    if learner.phase in ("training", "leaving"):
                        actions.append(Goodbye(learner.name, OVER))
                        learner.phase = "gone"
                actions.append(Ended())
            return
        for learner in self.learners.values():
            if learner.phase != "leaving":
                continue
            if any(not self._given_up(self.fragments[index], now) for index in learner.owes or ()):
                continue
            rounds = [fragment.round for fragment in self.fragments if fragment.round]
            if not any(learner.name in gathering.asked or learner.name in gathering.arrived for gathering in rounds):
                learner.phase = "gone"
                self._desk.take_back(learner.name, "it has left", actions)
                actions.append(Record("left", {"learner": learner.name}))
                actions.append(Goodbye(learner.name, LEFT))

    def _drop_unanswered(self, name: str) -> None:
        """Nobody waits for this learner any more; what it has already given still counts."""
        for fragment in self.fragments:
            if fragment.round and fragment.round.merging_since is None and name not in fragment.round.arrived:
                fragment.round.asked.discard(name)

    def _live(self) -> list[LearnerState]:
        return [learner for learner in self.learners.values() if learner.phase != "gone"]

    def _free_slot(self) -> int:
        taken = {learner.slot for learner in self._live()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _step_time(self) -> float:
        times = [learner.step_time.get() for learner in self.learners.values()
                 if learner.phase == "training" and learner.step_time.value is not None]  # fmt: skip
        return sum(times) / len(times) if times else 0.0

    def _next_wake(self, now: float) -> float | None:
        open_rounds = [f.round for f in self.fragments if f.round and f.round.merging_since is None]
        open_rounds = [r for r in open_rounds if r.arrived or r.needed]
        times = [max(self._deadline(r) if r.missing else now, r.not_before) for r in open_rounds]
        times += [self._expected_until] if self._waits_for_returns(now) else []
        times += [f.round.not_before for f in self.fragments if f.restoring and f.round and f.round.merging_since is None]
        times += [learner.heard_at + self.sync.silence_s for learner in self._live()]
        if self.phase == "closing" or any(learner.phase == "leaving" for learner in self.learners.values()):
            times += [self._patience(f) for f in self.fragments if f.away_since is not None and not self._given_up(f, now)]
        times += [time for flow in self.flows for time in flow.wakes(self.fragments, now)]
        times = [time for time in times if time < math.inf]
        return max(min(times), now) if times else None
