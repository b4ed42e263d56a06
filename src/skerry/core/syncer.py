"""The syncer's decisions as a state machine: (state, event, now) → outcome. No tensors, sockets, threads, files or clock.

Rules:
 1. The run's step is the K-th (`sync.quorum`) largest step among the learners that train. Reaching step t opens a round for
    every fragment due at t.
 2. A round asks every learner that trains. It merges when all of them have answered, or when K (`sync.quorum`) have contributed
    and the grace window is over. Once the last chance of a leaving learner or a closing run is over (rules 8, 14), it merges
    whatever has arrived, without a quorum.
 3. A fragment has at most one open round. If the fragment is due again meanwhile, the round stays open: learners that have not
    answered are reminded, and newcomers are asked.
 4. A contribution counts once. The learner is next asked for progress since the version that contains it, or a later one.
 5. A version is announced only after it is stored. If storing fails, nothing has changed and the merge is retried.
 6. A learner whose stream broke is "away" for up to `silence_s`. In lock-step and while the run closes, the others wait for it
    that long. A restarted syncer opens no round until the learners it knows are back or had time to reconnect.
 7. A new session under the same name starts from the current versions and the run's step. Open questions to the old session
    are void, and the old session is refused if it reconnects.
 8. A leaving learner gets one chance to contribute to every fragment. A round waits for it until no bytes have moved for
    `silence_s`, and at most 20 times that long.
 9. A contribution that is not finite, far larger than recent ones, or identical to the learner's previous one is not merged.
    After `strikes` of them in a row the learner is in quarantine: it is still asked, and is merged again after the same number
    of healthy contributions.
10. If the learners' loss stays far above its best (`rollback`), every fragment gets a new version with the values of the good
    copy and zero momentum, and progress since older versions is refused.
11. Leased data belongs to a learner until another session replaces it, it leaves, or it was gone for `lease_s`. Samples that
    are in no merge then go to others. A learner that returns later starts over from the current versions.
12. A fragment that no process serves has no rounds. Contributions gathered for it are lost and asked for again. A leaving
    learner waits for such a fragment for `silence_s`, the end of a run a bounded multiple of that.
13. While exchanges take longer than allowed, few rounds are open at a time, and the fragment merged longest ago is next (see
    flow.py). Leaving learners and the end of a run are exempt.
14. At the token budget the run closes: everyone stops, every fragment is merged a last time from all reachable learners, then
    the run ends.

rounds.py decides about contributions and merges, membership.py about learners. Both change the RunState they share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from skerry.config import SyncConfig
from skerry.core import records
from skerry.core.guard import make_guards
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
        """`progress` and `standing` are the state of an earlier syncer process. `places` is each fragment's shard."""
        standing = standing or Standing()
        self.run = run = RunState(
            sync,
            Schedule(sync, fragments),
            progress or [FragmentProgress() for _ in range(fragments)],
            known_learners(standing, sync.strikes, now),
            make_guards(sync, fragments),
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

    # ------------------------------------------------------------ queries

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
        """Earlier sessions under this learner's name."""
        known = self.run.learners.get(learner)
        return tuple(known.retired) if known is not None else ()

    def donor_for(self, learner: str) -> str | None:
        """The healthy learner with the most steps, whose optimizer state `learner` may copy; None if there is none."""
        peers = [p for p in self.run.in_phase("training") if p.name != learner and p.merges and not p.strikes]
        return max(peers, key=lambda peer: (peer.step, peer.name)).name if peers else None

    def is_asked(self, ask: Ask) -> bool:
        """Whether the answer to this question is still pending."""
        return self.rounds.is_asked(ask)

    def why_refused(self, offer: Contributed) -> str | None:
        """Why this contribution would be refused, or None. Checked before its bytes are received; `handle` decides."""
        return self.rounds.why_refused(offer)

    def bytes_moved(self, learner: str, now: float) -> None:
        """Note that part of a fragment was sent to or received from this learner. Too frequent to be an event."""
        known = self.run.learners.get(learner)
        if known is not None and known.phase != "gone":
            known.heard_at = known.moved_at = now

    def let_go_of_all(self, why: str) -> list[TapeRecord]:
        """Forget all sessions; none will return. The run continues once enough new learners have joined."""
        actions: list[Action] = []
        self._members.let_go_of_all(why, actions)
        return [action for action in actions if isinstance(action, TapeRecord)]

    # ------------------------------------------------------------ events

    def handle(self, event: Event, now: float) -> Outcome:
        """Apply one event, then everything that is due at `now`. The only method that makes decisions."""
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
        """Nothing to do: `handle` does what is due after every event."""

    # ------------------------------------------------------------ after every event

    def _advance(self) -> None:
        """Move the run's step to the K-th largest step of the learners that train (rule 1)."""
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
        """Start a rollback if the loss has diverged (rule 10), unless one is in progress or the run is closing."""
        if self.run.phase != "running" or any(fragment.restoring for fragment in self.run.fragments):
            return
        training = [learner.name for learner in self.run.in_phase("training")]
        if self.rollback.check(self.run.step, training, actions):
            for fragment in self.run.fragments:
                fragment.restoring = RESTORE_TRIES

    def _finish(self, now: float, actions: list[Action]) -> None:
        """Dismiss leaving learners that are done, or end the run (rules 8, 14)."""
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
