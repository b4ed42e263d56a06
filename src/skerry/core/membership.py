"""Membership: learners join, are replaced, fall silent and leave. Part of the syncer's state machine; see its rules."""

from __future__ import annotations

from skerry.core import records
from skerry.core.leases.policy import LeasePolicy
from skerry.core.messages import (
    LEFT,
    OVER,
    Action,
    Begin,
    Goodbye,
    Hello,
    LeaveRequested,
    Reported,
    StopTraining,
    StreamEnded,
    Verdict,
    Welcome,
)
from skerry.core.rounds import Rounds
from skerry.core.state import LearnerState, RunState

RETURN_S = 7.0
"""Time for learners to reconnect to a restarted syncer. Their back-off is at most 6.5 seconds."""
REMEMBERED = 500
"""Gone learners to remember, in case they come back."""


class Membership:
    def __init__(self, run: RunState, rounds: Rounds, leases: LeasePolicy, now: float) -> None:
        self._run, self._rounds, self._leases = run, rounds, leases
        # Only non-empty after a restart. In lock-step, rounds wait for learners that are away in any case.
        self._returning = set() if run.sync.wait else {learner.name for learner in run.in_phase("away")}
        self._expected_until = now + RETURN_S

    # ------------------------------------------------------------ joining

    def hello(self, event: Hello, now: float, actions: list[Action]) -> Verdict:
        """Admit a learner or refuse it (rules 6, 7, 11)."""
        run, name = self._run, event.learner
        self._returning.discard(name)
        known = run.learners.get(name)
        reason = self._why_refused(event, known)
        if reason is not None:
            actions.append(records.Refused(reason, name))
            return Verdict(reason)
        versions = tuple(fragment.version for fragment in run.fragments)
        # Progress since versions of this run is accepted even if this syncer process does not remember the learner.
        resumed = len(event.held) == len(versions) and all(0 <= h <= v for h, v in zip(event.held, versions, strict=True))
        resumed = self._leases.settle(event, resumed, actions)
        learner = self._admit(event, known, resumed, now, actions)
        actions.append(self._welcome(event, learner, resumed, versions))
        actions.append(records.Joined(name, event.session, learner.slot, resumed, run.step, event.platform))
        if run.phase == "ended" or (run.phase == "closing" and learner.phase == "waiting"):
            actions.append(Goodbye(name, OVER))
            learner.phase = "gone"
        elif learner.phase in ("training", "leaving"):
            self._go_on(learner, actions)
        return Verdict()

    def _why_refused(self, event: Hello, known: LearnerState | None) -> str | None:
        if known is not None and event.session in known.retired:
            return "another process has taken its place"
        if event.leased > self._leases.given_to(event.learner, event.session) and not self._run.recoveries:
            # The learner was forgotten, and with it which of its samples are in a merge.
            return "the syncer has no record of its leases"
        return None

    def _admit(
        self, event: Hello, known: LearnerState | None, resumed: bool, now: float, actions: list[Action]
    ) -> LearnerState:
        run = self._run
        if known is not None and known.session == event.session:
            learner = known
        else:
            learner = LearnerState(event.learner, event.session, self._free_slot(), "waiting")
            if known is not None:
                self._replace(known, learner, actions)
            run.learners[event.learner] = learner
        learner.region = event.region
        learner.heard_at = now
        learner.ready = resumed
        learner.began = resumed and (learner.began or event.step > 0)
        if resumed:
            learner.step = max(learner.step, event.step)
            learner.tokens = max(learner.tokens, event.tokens)
        if any(other.slot == learner.slot and other is not learner for other in run.live()):
            learner.slot = self._free_slot()
        learner.phase = "waiting" if not learner.began else "leaving" if learner.leaving else "training"
        return learner

    def _replace(self, old: LearnerState, new: LearnerState, actions: list[Action]) -> None:
        if old.phase in ("training", "leaving", "waiting"):
            actions.append(Goodbye(old.name, f"another process joined as {old.name}"))
        self._bank(old, actions)
        self._rounds.replaced(old)
        new.slot = old.slot
        new.retired = old.retired
        if old.session:
            new.retired.append(old.session)

    def _welcome(self, event: Hello, learner: LearnerState, resumed: bool, versions: tuple[int, ...]) -> Welcome:
        fragments = self._run.fragments
        return Welcome(
            event.learner,
            learner.slot,
            self._run.step,
            resumed,
            versions,
            tuple(fragment.merged_round for fragment in fragments),
            tuple(fragment.counted_step(event.learner) for fragment in fragments),
            quarantined=learner.quarantined,
            leased=self._leases.given_to(event.learner, event.session),
        )

    def _go_on(self, learner: LearnerState, actions: list[Action]) -> None:
        """Let a learner that reconnected continue training."""
        run = self._run
        if run.phase == "gathering":
            run.phase = "running"
        if run.sync.wait:
            # In lock-step the others may have moved on, so the learner skips to their step.
            learner.step = max(learner.step, run.step)
        actions.append(Begin(learner.name, learner.step))
        if run.phase == "closing":
            actions.append(StopTraining(learner.name))
        self._rounds.ask_returned(learner.name, actions)

    def begin(self, actions: list[Action]) -> None:
        """Start the learners that are ready, once there are enough of them."""
        run = self._run
        waiting = [learner for learner in run.in_phase("waiting") if learner.ready]
        if run.phase == "gathering" and len(waiting) >= run.sync.start_with:
            run.phase = "running"
            actions.append(records.Began(tuple(sorted(learner.name for learner in waiting))))
        if run.phase != "running":
            return
        limit = run.sync.begin.islands if run.step < run.sync.begin.steps else 0
        for learner in sorted(waiting, key=lambda learner: learner.slot):
            if limit and len(run.in_phase("training", "leaving")) >= limit:
                break
            learner.phase = "training"
            learner.began = True
            learner.step = run.step
            actions.append(Begin(learner.name, run.step))

    def waits_for_returns(self, now: float) -> bool:
        """Whether known learners may still reconnect after a restart, so that merging the first one alone is premature."""
        return bool(self._returning) and now < self._expected_until

    # ------------------------------------------------------------ reports, silence, leaving

    def reported(self, event: Reported, now: float, actions: list[Action]) -> bool:
        """Apply a heartbeat. Returns False if this learner is not in the run."""
        learner = self._run.learners.get(event.learner)
        if learner is None or learner.phase == "gone":
            return False
        learner.heard_at = now
        learner.step = max(learner.step, event.step)
        learner.tokens = max(learner.tokens, event.tokens)
        if event.step_time_s > 0:
            learner.step_time.add(event.step_time_s)
        if self._run.phase not in ("closing", "ended"):
            self._leases.give(event, actions)
        return True

    def leave_requested(self, event: LeaveRequested, now: float, actions: list[Action]) -> None:
        run, learner = self._run, self._run.learners.get(event.learner)
        if learner is None or run.phase == "ended" or learner.phase in ("waiting", "away", "gone"):
            if learner is not None and learner.phase == "waiting":
                self._leases.take_back(event.learner, "it has left", actions)
                learner.phase = "gone"
            actions.append(Goodbye(event.learner, LEFT))
        elif learner.phase == "training" and run.phase != "closing":
            learner.phase = "leaving"
            learner.owes = set(range(len(run.fragments)))
            self._rounds.need_everything_from(event.learner)
            actions.append(records.Leaving(event.learner))

    def stream_ended(self, event: StreamEnded, now: float, actions: list[Action]) -> None:
        learner = self._run.learners.get(event.learner)
        if learner is None or learner.session != event.session or learner.phase in ("away", "gone"):
            return
        learner.phase = "away"
        learner.heard_at = now
        self._leases.disconnected(event.learner)
        actions.append(records.Disconnected(event.learner))
        if not self._run.is_askable(learner):
            self._rounds.drop_unanswered(event.learner)

    def notice_silence(self, now: float, actions: list[Action]) -> None:
        """Give up learners that have been silent for `silence_s`, and reclaim expired leases."""
        for learner in self._run.live():
            if now >= learner.heard_at + self._run.sync.silence_s:
                if learner.phase != "away":
                    # Not final: a process that was only frozen finds its stream closed and reconnects with the same session.
                    actions.append(Goodbye(learner.name, "silent", final=False))
                actions.append(records.Lost(learner.name, round(now - learner.heard_at, 3)))
                learner.phase, learner.gone_at = "gone", now
                self._leases.disconnected(learner.name)
                self._rounds.drop_unanswered(learner.name)
        self._leases.expire(now, actions)
        self._forget_long_gone(actions)

    def _forget_long_gone(self, actions: list[Action]) -> None:
        """Forget the oldest gone learners, so that memory stays bounded. Their tokens stay counted."""
        gone = self._run.in_phase("gone")
        if len(gone) <= REMEMBERED:
            return
        in_rounds = {name for round_ in self._run.open_rounds() for name in round_.arrived}
        for learner in sorted(gone, key=lambda learner: learner.heard_at)[: len(gone) - REMEMBERED]:
            if learner.name not in in_rounds:
                self._leases.end(learner.name, "it is forgotten", actions)
                del self._run.learners[learner.name]
                self._bank(learner, actions)
                for fragment in self._run.fragments:
                    fragment.counted.pop(learner.name, None)

    def dismiss_leaving(self, now: float, actions: list[Action]) -> None:
        """Dismiss leaving learners that have contributed everything they can (rule 8)."""
        for learner in self._run.in_phase("leaving"):
            if self._rounds.has_given_all(learner, now):
                learner.phase = "gone"
                self._leases.take_back(learner.name, "it has left", actions)
                actions.append(records.Left(learner.name))
                actions.append(Goodbye(learner.name, LEFT))

    def let_go_of_all(self, why: str, actions: list[Action]) -> None:
        """Forget all sessions; none will return. Their tokens stay counted, their leased data goes to others."""
        if self._run.phase == "running":
            self._run.phase = "gathering"
        self._leases.end_all(why, actions)
        for learner in list(self._run.learners.values()):
            self._bank(learner, actions)
        self._run.learners.clear()
        self._returning.clear()

    def _bank(self, learner: LearnerState, actions: list[Action]) -> None:
        """Keep counting the tokens of a session that is over."""
        if learner.tokens:
            self._run.banked_tokens += learner.tokens
            actions.append(records.Banked(learner.name, learner.session, learner.tokens))

    def _free_slot(self) -> int:
        taken = {learner.slot for learner in self._run.live()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def wakes(self, now: float) -> list[float]:
        """Times at which something is due here even if no event arrives."""
        times = [learner.heard_at + self._run.sync.silence_s for learner in self._run.live()]
        return times + ([self._expected_until] if self.waits_for_returns(now) else [])
