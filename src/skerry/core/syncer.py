"""The syncer's decisions as a state machine: (state, event, now) → outcome. No tensors, sockets, threads, files or clock.

Rules:
 1. The run's step is the K-th largest step among learners that train. Reaching step t opens a round for every fragment
    due at t.
 2. A round asks every learner that trains. It merges when all asked have answered, or when K have and the grace window is over.
 3. One round per fragment at a time. A fragment due again while its round is open stays in that round; those who have not
    answered, and newcomers, are asked.
 4. A contribution counts once: a learner that gave is next asked for progress from the version that contains it, or later.
 5. A version is announced only after it is stored. If storing fails, nothing has changed and the merge is tried again.
 6. A learner whose stream broke is "away" for `silence_s`; in lock-step others wait that long for it, otherwise nobody does.
    A restarted syncer opens no round before the learners it knows are back, or have had the time to come back.
 7. A new session under the same name starts from the current versions and the run's step. What the old one was asked for is
    void, and the old one is turned away if it comes back.
 8. A learner that leaves gets one chance to give every fragment, and is waited for as long as silence is tolerated.
 9. A contribution that is not finite, or far larger than recent ones, counts as no answer. After `strikes` of them in a
    row the learner is in quarantine: it is asked as before, and merged again after as many healthy ones.
10. If the learners' loss stays far above its best (`rollback`), every fragment gets a new version with the values it had when
    all was well, without momentum, and progress from before is refused.
11. Data that a learner was given is its own until another session takes its place, it leaves, or it was away for `lease_s`.
    Then what is in no merge is given to others. A learner that returns after that starts over from the current versions.
12. A fragment whose data is not served has no rounds until it is. What was gathered for it is lost, and asked for again. A
    learner that leaves does not wait for it longer than silence is tolerated, nor does the end of a run wait for ever.
13. While exchanges take longer than they may, few rounds are open at a time, and the fragment that waits longest is next: see
    flow.py. Leaving learners and the end of a run are not held back.
14. At the budget the run closes: everyone stops, every fragment is merged once more from all who can be reached, then it ends.

rounds.py decides about contributions and merges, membership.py about learners; both change the RunState they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from skerry.config import SyncConfig
from skerry.core import records
from skerry.core.leases.policy import LeasePolicy
from skerry.core.membership import RETURN_S, Membership
from skerry.core.messages import (
    OVER,
    Action,
    Ask,
    CloseRequested,
    Contributed,
    DataDeclared,
    Event,
    FragmentRecovered,
    FragmentsAway,
    FragmentsBack,
    Goodbye,
    GoodCopyKept,
    Hello,
    LeaveRequested,
    NothingToGive,
    Outcome,
    Ready,
    Reported,
    RunEnded,
    StopTraining,
    Stored,
    StoreFailed,
    StreamEnded,
    Tick,
    Verdict,
    WakeAt,
)
from skerry.core.rollback import Rollback
from skerry.core.rounds import RESTORE_TRIES, Rounds
from skerry.core.schedule import Schedule
from skerry.core.schema import TapeRecord
from skerry.core.standing import Standing, known_learners, restore_fragments, standing_of
from skerry.core.state import FragmentProgress, LearnerState, RunPhase, RunState

__all__ = ["RETURN_S", "SyncerCore"]


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
        """`places` is each fragment's shard, if there are any."""
        standing = standing or Standing()
        self.run = run = RunState(
            sync,
            Schedule(sync, fragments),
            progress or [FragmentProgress() for _ in range(fragments)],
            known_learners(standing, sync.strikes, now),
            standing.step,
            standing.phase,
            standing.banked_tokens,
            standing.merges,
            standing.recoveries,
        )
        restore_fragments(standing, run, RESTORE_TRIES)
        self.rollback = Rollback(sync, standing)
        self._leases = LeasePolicy(run, standing.leases, now)
        self.rounds = Rounds(run, self._leases.leases, places or [0] * fragments)
        self._members = Membership(run, self.rounds, self._leases, now)
        self._handlers: dict[type[Any], Callable[[Any, float, list[Action]], Verdict | None]] = {
            Hello: self._members.hello,
            Ready: self._ready,
            Reported: self._reported,
            DataDeclared: self._leases.declare,
            Contributed: self.rounds.contributed,
            NothingToGive: self.rounds.nothing_to_give,
            LeaveRequested: self._members.leave_requested,
            StreamEnded: self._members.stream_ended,
            Stored: self.rounds.stored,
            StoreFailed: self.rounds.store_failed,
            GoodCopyKept: self.rollback.kept,
            FragmentsAway: self.rounds.fragments_away,
            FragmentsBack: self._fragments_back,
            FragmentRecovered: self.rounds.recovered,
            CloseRequested: self._close_requested,
            Tick: self._tick,
        }

    # ------------------------------------------------------------ what others may ask

    @property
    def sync(self) -> SyncConfig:
        return self.run.sync

    @property
    def step(self) -> int:
        return self.run.step

    @property
    def phase(self) -> RunPhase:
        return self.run.phase

    @property
    def tokens(self) -> int:
        return self.run.tokens

    @property
    def fragments(self) -> list[FragmentProgress]:
        return self.run.fragments

    @property
    def learners(self) -> dict[str, LearnerState]:
        return self.run.learners

    def standing(self) -> Standing:
        return standing_of(
            self.run,
            good_step=self.rollback.good_step,
            best_loss=self.rollback.health.best,
            rollbacks=self.rollback.count,
            leases=self._leases.leases.to_json(),
        )

    def retired(self, learner: str) -> tuple[str, ...]:
        """Sessions that had this name before the present one."""
        known = self.run.learners.get(learner)
        return tuple(known.retired) if known is not None else ()

    def donor_for(self, learner: str) -> str | None:
        """A healthy learner whose optimizer state another one may take over: the one that has come furthest."""
        peers = [p for p in self.run.in_phase("training") if p.name != learner and p.merges and not p.strikes]
        return max(peers, key=lambda peer: (peer.step, peer.name)).name if peers else None

    def is_asked(self, ask: Ask) -> bool:
        """Whether the answer to this question is still awaited."""
        return self.rounds.is_asked(ask)

    def why_refused(self, offer: Contributed) -> str | None:
        """Why this contribution would not be taken, before its bytes are received. The verdict comes from `handle`."""
        return self.rounds.why_refused(offer)

    def bytes_moved(self, learner: str, now: float) -> None:
        """A sign of life too frequent to be an event: part of a fragment went to or came from this learner."""
        known = self.run.learners.get(learner)
        if known is not None and known.phase != "gone":
            known.heard_at = known.moved_at = now

    def let_go_of_all(self, why: str) -> list[TapeRecord]:
        """No session of before will come back. The run goes on when enough new ones are there."""
        actions: list[Action] = []
        self._members.let_go_of_all(why, actions)
        return [action for action in actions if isinstance(action, TapeRecord)]

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> Outcome:
        actions: list[Action] = []
        verdict = self._handlers[type(event)](event, now, actions)
        self._members.notice_silence(now, actions)
        self._members.begin(actions)
        self._advance()
        self._close_when_spent(actions)
        self._check_health(actions)
        self.rounds.restore(self.rollback.good_step, now, actions)
        self.rounds.settle(now, actions)
        if self.run.phase != "running" or not self._members.waits_for_returns(now):
            self.rounds.open_due(now, actions)
        self._finish(now, actions)
        times = [time for time in self._members.wakes(now) + self.rounds.wakes(now) if time < math.inf]
        if times:
            actions.append(WakeAt(max(min(times), now)))
        return Outcome(actions, verdict)

    def _ready(self, event: Ready, now: float, actions: list[Action]) -> None:
        if event.learner in self.run.learners:
            self.run.learners[event.learner].ready = True

    def _reported(self, event: Reported, now: float, actions: list[Action]) -> None:
        if self._members.reported(event, now, actions):
            self.rollback.health.report(event.learner, event.loss)

    def _fragments_back(self, event: FragmentsBack, now: float, actions: list[Action]) -> None:
        for index in event.fragments:
            self.run.fragments[index].away_since = None

    def _close_requested(self, event: CloseRequested, now: float, actions: list[Action]) -> None:
        self._close("requested", actions)

    def _tick(self, event: Tick, now: float, actions: list[Action]) -> None:
        """What is due is done after every event."""

    # ------------------------------------------------------------ what follows from the state

    def _advance(self) -> None:
        """The run's step follows the K-th largest step of those who train (rule 1)."""
        run = self.run
        steps = sorted((learner.step for learner in run.learners.values() if run.is_askable(learner)), reverse=True)
        if run.phase == "running" and steps:
            needed = min(run.sync.quorum or len(steps), len(steps))
            run.step = max(run.step, steps[needed - 1])

    def _close_when_spent(self, actions: list[Action]) -> None:
        budget = self.run.sync.budget_tokens
        if self.run.phase == "running" and budget and self.run.tokens >= budget:
            self._close("budget", actions)

    def _close(self, why: str, actions: list[Action]) -> None:
        run = self.run
        if run.phase in ("closing", "ended"):
            return
        run.phase = "closing"
        actions.append(records.Closing(why, run.step, run.tokens))
        for learner in run.in_phase("training", "leaving"):
            actions.append(StopTraining(learner.name))
        for learner in run.in_phase("waiting"):
            actions.append(Goodbye(learner.name, OVER))
            learner.phase = "gone"

    def _check_health(self, actions: list[Action]) -> None:
        """Not while the model is being put back, nor at the end."""
        if self.run.phase != "running" or any(fragment.restoring for fragment in self.run.fragments):
            return
        training = [learner.name for learner in self.run.in_phase("training")]
        if self.rollback.check(self.run.step, training, actions):
            self.rounds.start_restore()

    def _finish(self, now: float, actions: list[Action]) -> None:
        """Leaving learners that are done, and the end of the run (rules 8, 14)."""
        run = self.run
        if run.phase != "closing":
            self._members.dismiss_leaving(now, actions)
        elif self.rounds.all_final:
            run.phase = "ended"
            actions.append(records.Ended(run.step, run.tokens, run.merges))
            for learner in run.in_phase("training", "leaving"):
                actions.append(Goodbye(learner.name, OVER))
                learner.phase = "gone"
            actions.append(RunEnded())
