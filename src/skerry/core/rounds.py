"""Rounds: when contributions to a fragment are requested, judged, merged and announced. Part of the syncer's state machine.

The numbered rules are in syncer.py. Methods change the shared RunState and append to the `actions` they are given.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from skerry.core import records
from skerry.core.admission import why_refused
from skerry.core.flow import Flow
from skerry.core.guard import why_unhealthy
from skerry.core.leases.ranges import Leases
from skerry.core.messages import (
    Action,
    Announce,
    Ask,
    Caution,
    Contributed,
    FragmentRecovered,
    FragmentsAway,
    Merge,
    NothingToGive,
    Restore,
    Stored,
    StoreFailed,
    Verdict,
)
from skerry.core.quorum import GraceWindow
from skerry.core.share import Share, weight
from skerry.core.state import Counted, FragmentProgress, LearnerState, Round, RunState

RETRY_STORE_S = 1.0
RESTORE_TRIES = 10
LAST_CHANCE = 20
"""Multiple of `silence_s`: the longest a round waits for a leaving learner whose bytes still move, and the longest a closing
run waits for a fragment that no process serves."""


class Rounds:
    def __init__(self, run: RunState, leases: Leases, places: Sequence[int]) -> None:
        """`places` is each fragment's shard."""
        sync, count = run.sync, len(run.fragments)
        self._run, self._leases = run, leases
        self.grace = GraceWindow(sync.grace, sync.overlap, sync.every)
        flows = {place: Flow([i for i in range(count) if places[i] == place], sync.silence_s) for place in set(places)}
        self.flows = list(flows.values())
        self._flow_of = [flows[place] for place in places]
        self.participation: deque[float] = deque(maxlen=200)
        self._last_rounds_due = set(range(count))

    # ------------------------------------------------------------ opening

    def open_due(self, now: float, actions: list[Action]) -> None:
        """Open rounds for fragments that are due or owed by a leaving learner, oldest merge first (rules 1, 3, 12, 13)."""
        run = self._run
        leaving = run.in_phase("leaving")
        room = {flow: flow.room(run.fragments, now) for flow in self.flows}
        for index in sorted(range(len(run.fragments)), key=lambda index: run.fragments[index].merged_round):
            fragment = run.fragments[index]
            waits = fragment.away_since is not None and not (run.phase == "closing" and self.is_given_up(fragment, now))
            if fragment.restoring or waits:
                continue
            if run.phase == "closing":
                self._open_last(index, now, actions)
                continue
            if run.phase != "running":
                return
            due = run.schedule.last_due(index, run.step)
            owing = {learner.name for learner in leaving if index in (learner.owes or ())}
            if fragment.round is not None:
                self._ask_again(index, fragment.round, due, owing, actions)
            elif owing or (due > fragment.merged_round and room[self._flow_of[index]] > 0):
                trains = run.askable()
                # A cancelled round is retried. Learners that declined it answer each number once, so they need a new number.
                again = due == fragment.last_round and bool(fragment.declined & (trains | owing))
                number = due if due > fragment.merged_round and not again else fragment.next_round(run.step)
                self._open(index, now, number, trains, owing, actions)
                room[self._flow_of[index]] -= 1

    def _open_last(self, index: int, now: float, actions: list[Action]) -> None:
        """Open a fragment's last round while the run closes, once its current round is over."""
        run, fragment = self._run, self._run.fragments[index]
        if index not in self._last_rounds_due or fragment.round is not None:
            return
        self._last_rounds_due.discard(index)
        if fragment.away_since is not None:
            actions.append(records.LeftOut(index, fragment.version))
            return
        able = run.askable()
        self._open(index, now, fragment.next_round(run.step + 1), able, able, actions)

    def _open(self, index: int, now: float, number: int, asked: set[str], needed: set[str], actions: list[Action]) -> None:
        asked = asked | needed
        if not asked:
            return
        fragment = self._run.fragments[index]
        fragment.round = Round(number, now, asked, set(needed), frozenset(needed), due=number)
        fragment.last_round = max(fragment.last_round, number)
        actions.append(records.Opened(index, number, tuple(sorted(asked))))
        actions.extend(self.ask(name, index, number) for name in sorted(asked))

    def _ask_again(self, index: int, round_: Round, due: int, owing: set[str], actions: list[Action]) -> None:
        """Extend an open round when its fragment is due again: ask newcomers, and remind those that have not answered."""
        if round_.merging_since is not None:
            return
        # A learner that has answered this round is not asked again. What it owes since then belongs to the next round.
        owing = owing - set(round_.arrived) - round_.declined
        late = owing - round_.asked
        if due > round_.due:
            round_.due = due
            round_.asked |= self._run.askable() - set(round_.arrived) - round_.declined
            late |= round_.missing
        round_.asked |= late
        round_.needed |= owing
        actions.extend(self.ask(name, index, round_.number) for name in sorted(late))

    def ask(self, learner: str, index: int, number: int) -> Ask:
        fragment = self._run.fragments[index]
        # <= and not ==: a round may be retried after it and a later one were both dropped.
        return Ask(learner, index, number, self._min_base(learner, fragment), anew=number <= fragment.dropped_round)

    def ask_returned(self, learner: str, actions: list[Action]) -> None:
        """Repeat the unanswered questions to a learner that reconnected."""
        for index, fragment in enumerate(self._run.fragments):
            round_ = fragment.round
            if round_ is None or round_.merging_since is not None or learner in round_.arrived:
                continue
            if self._run.phase == "closing":
                # This is the last round, so progress is welcome even from a learner that was given up.
                round_.asked.add(learner)
                round_.needed.add(learner)
            if learner in round_.asked:
                actions.append(self.ask(learner, index, round_.number))

    def is_asked(self, ask: Ask) -> bool:
        """Whether the answer to this question is still pending."""
        round_ = self._run.fragments[ask.fragment].round
        return round_ is not None and round_.number == ask.round and ask.learner in round_.missing

    def _min_base(self, learner: str, fragment: FragmentProgress) -> int:
        """The oldest version from which this learner's progress is accepted."""
        counted = fragment.counted.get(learner)
        return max(0, fragment.version - self._run.sync.staleness, counted.version if counted else 0, fragment.floor)

    # ------------------------------------------------------------ gathering

    def why_refused(self, offer: Contributed) -> str | None:
        """Why this contribution is refused, or None. Checked before its bytes are received and again when they are complete."""
        known = 0 <= offer.fragment < len(self._run.fragments)
        min_base = self._min_base(offer.learner, self._run.fragments[offer.fragment]) if known else 0
        return why_refused(offer, self._run, min_base, self._leases)

    def contributed(self, offer: Contributed, now: float, actions: list[Action]) -> Verdict:
        """Judge a complete contribution and add it to its round if it is healthy (rules 4, 9)."""
        reason = self.why_refused(offer)
        if reason is not None:
            actions.append(records.Refused(reason, offer.learner, fragment=offer.fragment, round=offer.round))
            return Verdict(reason, merged=False)
        fragment, learner = self._run.fragments[offer.fragment], self._run.learners[offer.learner]
        round_ = fragment.round
        assert round_ is not None
        learner.heard_at = now
        learner.tokens = max(learner.tokens, offer.at_tokens)
        unhealthy = why_unhealthy(self._run.guards[offer.fragment], offer)
        if unhealthy is not None:
            actions.append(records.Unhealthy(offer.learner, offer.fragment, offer.round, unhealthy))
        self._count_strike(learner, unhealthy, actions)
        if unhealthy is not None or learner.quarantined:
            self._decline(learner, offer.fragment, round_)
            return Verdict(unhealthy or "", unhealthy=unhealthy is not None, merged=False)
        round_.arrived[offer.learner] = offer
        if learner.owes is not None and offer.learner in round_.final:
            learner.owes.discard(offer.fragment)
        return Verdict()

    def _count_strike(self, learner: LearnerState, unhealthy: str | None, actions: list[Action]) -> None:
        strikes = self._run.sync.strikes
        changed = learner.judged(unhealthy is None, strikes)
        if changed == "quarantined":
            actions.append(records.Quarantined(learner.name, unhealthy or ""))
            actions.append(Caution(learner.name, True, unhealthy or ""))
        elif changed == "readmitted":
            actions.append(records.Readmitted(learner.name))
            actions.append(Caution(learner.name, False, f"{strikes} healthy contributions in a row"))

    def nothing_to_give(self, event: NothingToGive, now: float, actions: list[Action]) -> None:
        if not 0 <= event.fragment < len(self._run.fragments):
            return
        round_ = self._run.fragments[event.fragment].round
        if round_ is not None and round_.number == event.round and event.learner in round_.missing:
            self._decline(self._run.learners[event.learner], event.fragment, round_)

    def _decline(self, learner: LearnerState, index: int, round_: Round) -> None:
        """Record that this learner has answered with nothing to merge."""
        round_.asked.discard(learner.name)
        round_.declined.add(learner.name)
        if learner.owes is not None:
            learner.owes.discard(index)

    def need_everything_from(self, learner: str) -> None:
        """Make the open rounds that asked this learner wait for it, because it is leaving."""
        for round_ in self._run.open_rounds():
            if learner in round_.asked:
                round_.needed.add(learner)

    def drop_unanswered(self, learner: str) -> None:
        """Stop waiting for this learner. Contributions that have arrived still count."""
        for round_ in self._run.open_rounds():
            if round_.merging_since is None and learner not in round_.arrived:
                round_.asked.discard(learner)

    def replaced(self, old: LearnerState) -> None:
        """Void open questions to a session that was replaced. Its contributions that have arrived still count."""
        self.drop_unanswered(old.name)
        for fragment in self._run.fragments:
            # The new session counts its steps from zero and starts from versions that contain everything merged so far.
            fragment.counted.pop(old.name, None)
            if fragment.round and old.name in fragment.round.arrived:
                given = fragment.round.arrived[old.name]
                fragment.round.arrived[old.name] = dataclasses.replace(given, session=given.session or old.session)

    # ------------------------------------------------------------ merging

    def settle(self, now: float, actions: list[Action]) -> None:
        """Order the merge of every round that is complete, or has its quorum and is past its deadline (rule 2).

        After the last chance of a leaving learner or a closing run, a merge needs no quorum (rules 8, 14).
        """
        for index, fragment in enumerate(self._run.fragments):
            round_ = fragment.round
            if round_ is None or round_.merging_since is not None or now < round_.not_before or fragment.restoring:
                continue
            missing = round_.missing
            if not round_.arrived:
                if not missing or (round_.needed and now >= self._deadline(round_)):
                    self._cancel(index, fragment, round_, actions)
                continue
            quorum = min(self._run.sync.quorum or len(round_.asked), len(round_.asked))
            if round_.quorum_at is None and len(round_.arrived) >= quorum:
                round_.quorum_at = now
                self.grace.quorum_time.add(min(now - round_.opened_at, self._longest_s))
                round_.deadline = now + self.grace.seconds(self._run.step_time_s())
            if not missing or now >= self._deadline(round_):
                round_.merging_since = now
                actions.append(self._merge_of(index, round_))

    @property
    def _longest_s(self) -> float:
        return LAST_CHANCE * self._run.sync.silence_s

    def _deadline(self, round_: Round) -> float:
        """When to stop waiting: leaving learners get their last chance, all others the grace window."""
        waited_for = round_.needed & round_.missing
        moved = [self._run.learners[name].moved_at for name in waited_for]
        last_chance = min(max([round_.opened_at, *moved]) + self._run.sync.silence_s, round_.opened_at + self._longest_s)
        if waited_for:
            return last_chance
        if round_.deadline is not None:
            return round_.deadline
        return last_chance if round_.needed else math.inf

    def _cancel(self, index: int, fragment: FragmentProgress, round_: Round, actions: list[Action]) -> None:
        """End a round without contributions."""
        fragment.round, fragment.declined = None, round_.declined
        actions.append(records.Cancelled(index, round_.number))
        if self._run.in_phase("training"):
            # Learners in lock-step wait for this round: announce that the current version stands.
            fragment.merged_round = max(fragment.merged_round, round_.number)
            if self._run.sync.wait:
                self._announce(index, round_.number, actions)

    def _merge_of(self, index: int, round_: Round) -> Merge:
        shares = tuple(self._share(round_.arrived[name]) for name in sorted(round_.arrived))
        expected = len(round_.asked | set(round_.arrived))
        presence = len(shares) / expected if self._run.sync.damp_absent else 1.0
        stage = self._run.schedule.stage(round_.number)
        version = self._run.fragments[index].version + 1
        outer = (stage.outer_lr, stage.outer_momentum)
        return Merge(index, version, round_.number, shares, *outer, presence, expected, self._run.tokens)

    def _share(self, offer: Contributed) -> Share:
        return Share(
            offer.learner,
            offer.session or self._run.learners[offer.learner].session,
            offer.base,
            offer.steps,
            offer.tokens,
            weight(offer.tokens, offer.steps),
            offer.at_step,
            offer.at_tokens,
            offer.samples,
        )

    def stored(self, event: Stored, now: float, actions: list[Action]) -> None:
        """Count and announce a merge that is now durable (rule 5)."""
        run, fragment = self._run, self._run.fragments[event.fragment]
        round_ = fragment.round
        assert round_ is not None and round_.merging_since is not None, "stored a merge that was not ordered"
        assert event.version == fragment.version + 1, "versions go up one by one"
        fragment.version = event.version
        if round_.restores:
            fragment.restoring, fragment.floor, fragment.round = 0, event.version, None
            self._announce(event.fragment, round_.number, actions)
            return
        fragment.merged_round = max(fragment.merged_round, round_.number if run.sync.wait else round_.due)
        fragment.round = None
        run.merges += 1
        self.participation.append(len(round_.arrived) / len(round_.asked | set(round_.arrived)))
        self.grace.sync_time.add(min(now - round_.merging_since, self._longest_s))
        if not run.sync.wait and run.sync.adopt != "carry":  # with "carry" slow exchanges lose no work
            step_s = run.step_time_s()
            limits = self.grace.allowed(step_s), self.grace.longest(step_s)
            self._flow_of[event.fragment].merged(event.fragment, now, round_.exchange_s(now), *limits)
        self._count(event, round_)
        self._announce(event.fragment, round_.number, actions)

    def _count(self, event: Stored, round_: Round) -> None:
        """Note for each learner which of its progress the stored version contains (rule 4)."""
        fragment = self._run.fragments[event.fragment]
        total = sum(weight(offer.tokens, offer.steps) for offer in round_.arrived.values())
        for name, offer in round_.arrived.items():
            learner = self._run.learners[name]
            session = offer.session or learner.session
            # If the session was replaced meanwhile, the new one counts its own steps from zero.
            at_step, samples = (offer.at_step, offer.samples[1]) if session == learner.session else (0, 0)
            fragment.counted[name] = Counted(event.version, at_step, samples)
            self._leases.merged(name, session, offer.samples[1])
            learner.merges += 1
            learner.last_share = weight(offer.tokens, offer.steps) / total

    def _announce(self, index: int, number: int, actions: list[Action]) -> None:
        fragment = self._run.fragments[index]
        names = tuple(learner.name for learner in self._run.in_phase("training", "leaving", "waiting"))
        counted = tuple(fragment.counted_step(name) for name in names)
        actions.append(Announce(names, index, fragment.version, number, counted))

    def store_failed(self, event: StoreFailed, now: float, actions: list[Action]) -> None:
        fragment = self._run.fragments[event.fragment]
        round_ = fragment.round
        assert round_ is not None and round_.merging_since is not None, "a merge failed that was not ordered"
        round_.merging_since = None
        if round_.restores:
            fragment.restoring -= 1
            if not fragment.restoring:
                # Continuing with the current values is better than blocking the fragment.
                fragment.round = None
                actions.append(records.NotRestored(event.fragment, event.reason))
                return
        if round_.void:
            self._drop_void(event.fragment, round_, actions)
            return
        # drop_unanswered skips rounds that are being merged, so remove lost learners now.
        round_.asked = {name for name in round_.asked if name in round_.arrived or self._may_answer(name)}
        round_.not_before = now + RETRY_STORE_S
        actions.append(records.MergeFailed(event.fragment, round_.number, event.reason))

    def _may_answer(self, name: str) -> bool:
        learner = self._run.learners.get(name)
        return learner is not None and (learner.phase == "leaving" or self._run.is_askable(learner))

    # ------------------------------------------------------------ fragments that no process serves

    def fragments_away(self, event: FragmentsAway, now: float, actions: list[Action]) -> None:
        for index in event.fragments:
            fragment = self._run.fragments[index]
            fragment.away_since = now if fragment.away_since is None else fragment.away_since
            round_ = fragment.round
            if round_ is None or round_.restores:
                continue
            round_.void = True
            if round_.merging_since is None:
                self._drop_void(index, round_, actions)

    def _drop_void(self, index: int, round_: Round, actions: list[Action]) -> None:
        """Discard a round whose contributions are lost. Learners still have their progress and are asked for it again."""
        fragment = self._run.fragments[index]
        fragment.round, fragment.dropped_round = None, max(fragment.dropped_round, round_.number)
        fragment.declined = set()  # left over from an earlier round
        for name in round_.final & set(round_.arrived):
            owes = self._run.learners[name].owes if name in self._run.learners else None
            if owes is not None:
                owes.add(index)
        if self._run.phase == "closing":
            self._last_rounds_due.add(index)
        actions.append(records.Dropped(index, round_.number, tuple(sorted(round_.arrived))))

    def recovered(self, event: FragmentRecovered, now: float, actions: list[Action]) -> None:
        """Continue a fragment from an older state, under a new version number."""
        fragment = self._run.fragments[event.fragment]
        assert fragment.round is None and event.version > fragment.version, "a lost fragment has no rounds"
        fragment.version = fragment.floor = event.version
        fragment.counted.clear()
        self._announce(event.fragment, fragment.merged_round, actions)

    def is_given_up(self, fragment: FragmentProgress, now: float) -> bool:
        """Whether this fragment has been unserved for so long that nobody waits for it any more."""
        return fragment.away_since is not None and now >= self._patience(fragment)

    def _patience(self, fragment: FragmentProgress) -> float:
        assert fragment.away_since is not None
        return fragment.away_since + self._run.sync.silence_s * (LAST_CHANCE if self._run.phase == "closing" else 1)

    # ------------------------------------------------------------ rollback to the good copy

    def restore(self, good_step: int | None, now: float, actions: list[Action]) -> None:
        """Order the restore of each fragment that is to be rolled back (rule 10). A merge in progress finishes first;
        contributions gathered for the next one are dropped."""
        for index, fragment in enumerate(self._run.fragments):
            busy = fragment.round
            if not fragment.restoring or (busy and busy.merging_since is not None):
                continue
            if fragment.away_since is not None:
                if self._run.phase == "closing" and self.is_given_up(fragment, now):
                    fragment.restoring, fragment.round = 0, None
                    actions.append(records.NotRestored(index, "the run ends while its bytes are away"))
                continue
            if busy and now < busy.not_before:
                continue
            assert good_step is not None
            fragment.round = Round(self._run.step, now, set(), due=self._run.step, merging_since=now, restores=True)
            actions.append(Restore(index, fragment.version + 1, self._run.step, good_step))

    # ------------------------------------------------------------ end of the run, timers

    @property
    def all_final(self) -> bool:
        """Whether every fragment has had its last round, while the run closes."""
        return not self._last_rounds_due and not any(True for _ in self._run.open_rounds())

    def has_given_all(self, learner: LearnerState, now: float) -> bool:
        """Whether a leaving learner owes nothing that can still be merged and is part of no open round."""
        if any(not self.is_given_up(self._run.fragments[index], now) for index in learner.owes or ()):
            return False
        return not any(learner.name in r.asked or learner.name in r.arrived for r in self._run.open_rounds())

    def wakes(self, now: float) -> list[float]:
        """Times at which something is due here even if no event arrives."""
        fragments = self._run.fragments
        waiting = [r for r in self._run.open_rounds() if r.merging_since is None and (r.arrived or r.needed)]
        times = [max(self._deadline(r) if r.missing else now, r.not_before) for r in waiting]
        restoring = [f for f in fragments if f.restoring and f.away_since is None]
        times += [f.round.not_before for f in restoring if f.round and f.round.merging_since is None]
        if self._run.phase == "closing" or self._run.in_phase("leaving"):
            times += [self._patience(f) for f in fragments if f.away_since is not None and not self.is_given_up(f, now)]
        return times + [time for flow in self.flows for time in flow.wakes(fragments, now)]
