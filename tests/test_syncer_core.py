"""The syncer's decisions on a clock moved by hand: scenarios first, then random events against what must always hold."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import random
from collections import Counter
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from skerry.config import BeginConfig, SyncConfig
from skerry.core.messages import (
    LEFT,
    Action,
    Announce,
    Ask,
    Begin,
    Caution,
    CloseRequested,
    Contributed,
    Event,
    FragmentsAway,
    FragmentsBack,
    Goodbye,
    GoodCopyKept,
    Hello,
    KeepGood,
    LeaveRequested,
    Merge,
    NothingToGive,
    Ready,
    Reported,
    Restore,
    RunEnded,
    StopTraining,
    Stored,
    StoreFailed,
    StreamEnded,
    Tick,
    Verdict,
    WakeAt,
    Welcome,
)
from skerry.core.quorum import LONGEST
from skerry.core.records import Refused
from skerry.core.rollback import MAX_ROLLBACKS
from skerry.core.rounds import LAST_CHANCE, RETRY_STORE_S
from skerry.core.schema import TapeRecord
from skerry.core.standing import Standing
from skerry.core.state import Counted, FragmentProgress
from skerry.core.syncer import RETURN_S, SyncerCore

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


# ---------------------------------------------------------------- joining and starting


def test_a_learner_is_welcomed_with_a_slot_the_step_and_the_versions_and_begins_when_ready() -> None:
    run = Run(fragments=3)
    assert welcomed(run.join("a")) == ("a", 0, 0, False, (0, 0, 0))
    assert of(Begin, run.wait(1)) == []
    assert of(Begin, run.send(Ready("a"))) == [Begin("a", 0)]


def test_nobody_starts_before_enough_learners_are_ready() -> None:
    run = Run(start_with=3)
    assert of(Begin, run.enter("a", "b")) == []
    run.join("c")
    assert run.core.phase == "gathering", "joined is not yet ready"
    begun = run.send(Ready("c"))
    assert {begin.learner for begin in of(Begin, begun)} == {"a", "b", "c"}
    assert recorded(begun) == ["began"]
    assert of(Begin, run.enter("d")) == [Begin("d", 0)], "later ones start at once"


def test_a_learner_that_goes_while_the_run_gathers_does_not_count() -> None:
    run = Run(start_with=2)
    run.enter("a")
    run.send(StreamEnded("a", "first"))
    run.enter("b")
    assert run.core.phase == "gathering"
    run.join("a", held=(0,))
    assert run.core.phase == "running"


def test_waiting_for_others_is_not_silence_as_long_as_the_learner_is_heard() -> None:
    run = Run(start_with=2)
    run.enter("a")
    for _ in range(5):
        run.now += SILENCE_S - 1
        assert recorded(run.report("a", 0)) == []
    assert run.core.learners["a"].phase == "waiting"


def test_a_late_learner_takes_over_the_runs_step_and_the_next_free_slot() -> None:
    run = running("a", "b", every=50)
    run.report("a", 30)
    assert welcomed(run.join("c")) == ("c", 2, 30, False, (0,))
    assert of(Begin, run.send(Ready("c"))) == [Begin("c", 30)]


def test_while_a_run_begins_only_so_many_islands_train() -> None:
    run = Run(start_with=3, every=8, begin=BeginConfig(steps=20, every=8, islands=2))
    begun = of(Begin, run.enter("a", "b", "c"))
    assert [begin.learner for begin in begun] == ["a", "b"]
    assert of(Begin, run.report("a", 19)) == []
    assert of(Begin, run.report("a", 20)) == []  # the step is reached with this very event
    assert of(Begin, run.report("b", 20)) == [Begin("c", 20)]


def test_a_place_that_becomes_free_while_a_run_begins_is_given_on() -> None:
    run = Run(start_with=2, every=8, begin=BeginConfig(steps=20, every=8, islands=1))
    run.enter("a", "b")
    assert run.core.learners["b"].phase == "waiting"
    run.now += SILENCE_S
    assert of(Begin, run.report("b", 0)) == [Begin("b", 0)]


def test_enough_learners_must_be_there_though_the_syncer_is_restarted_while_it_gathers() -> None:
    run = Run(start_with=3)
    run.enter("a")
    again = run.restored()
    assert of(Begin, again.join("a", held=(0,))) == [] and again.core.phase == "gathering"
    again.enter("b")
    assert {begin.learner for begin in of(Begin, again.enter("c"))} == {"a", "b", "c"}


def test_an_island_held_back_while_a_run_begins_still_is_after_a_restart_of_the_syncer() -> None:
    run = Run(start_with=2, every=8, begin=BeginConfig(steps=50, every=8, islands=1))
    run.enter("a", "b")
    again = run.restored()
    again.join("a", step=1, tokens=10, held=(0,))
    assert of(Begin, again.join("b", held=(0,))) == []


@pytest.mark.parametrize("fetched", [True, False])
def test_a_newcomer_whose_stream_breaks_before_it_is_ready_can_still_begin(fetched: bool) -> None:
    run = Run()
    run.join("a")
    run.send(StreamEnded("a", "first"))
    back = run.join("a", held=(0,) if fetched else ())
    assert welcomed(back)[3] == fetched
    assert of(Begin, back if fetched else run.send(Ready("a"))) == [Begin("a", 0)]


def test_no_two_live_islands_have_one_slot() -> None:
    run = running("a", "b")
    run.send(StreamEnded("a", "first"))
    run.now += SILENCE_S
    run.report("b", 1)
    assert welcomed(run.join("c"))[1] == 0, "the place of one that is gone is given on"
    assert welcomed(run.join("a", step=1, tokens=10, held=(0,)))[1] == 2
    assert welcomed(run.join("b", "second"))[1] == 1, "a restarted process keeps its own"


def test_a_tick_at_the_time_asked_for_is_enough() -> None:
    for tenths in range(1000):
        run = Run(start_with=2, now=tenths * 0.1)
        [wake] = of(WakeAt, run.join("a"))
        run.now = wake.at
        run.send(Tick())
        assert run.core.learners["a"].phase == "gone", tenths


# ---------------------------------------------------------------- the run's step


@pytest.mark.parametrize("quorum, expected", [(1, 30), (2, 20), (3, 10), (9, 10), (0, 10)])
def test_the_runs_step_is_the_kth_largest(quorum: int, expected: int) -> None:
    run = running("a", "b", "c", quorum=quorum, every=1000)
    for name, step in (("a", 10), ("b", 30), ("c", 20)):
        run.report(name, step)
    assert run.core.step == expected


def test_the_runs_step_never_goes_back() -> None:
    run = running("a", "b", quorum=1, every=1000)
    run.report("a", 50)
    run.send(StreamEnded("a", "first"))
    run.report("b", 7)
    assert run.core.step == 50
    run.report("b", 3, tokens=5)
    assert run.core.learners["b"].step == 7 and run.core.learners["b"].tokens == 70


def test_a_jump_opens_each_fragment_once() -> None:
    run = running("a", fragments=4, every=4)
    actions = run.report("a", 43)
    assert sorted(asked(actions)) == [("a", 0, 40), ("a", 1, 41), ("a", 2, 42), ("a", 3, 43)]


# ---------------------------------------------------------------- guards


def a_round(run: Run, step: int, **norms: float) -> list[Action]:
    """Everybody reports this step and gives a contribution of this norm; what is merged is stored."""
    for name in norms:
        run.report(name, step)
    actions: list[Action] = []
    for name, norm in norms.items():
        actions += run.send(run.offer(name, norm=norm))
    if of(Merge, actions):
        actions += run.store()
    return actions


def names_merged(actions: list[Action]) -> list[str]:
    return [share.learner for merge in of(Merge, actions) for share in merge.shares]


@pytest.mark.parametrize("norm", [math.nan, math.inf, 100.0])
def test_an_unhealthy_contribution_is_named_at_once_and_the_merge_goes_on_without_it(norm: float) -> None:
    run = running("a", "b", "c", quorum=0)
    for turn in range(1, 5):
        assert names_merged(a_round(run, 4 * turn, a=1.0, b=1.1, c=0.9)) == ["a", "b", "c"]
    actions = a_round(run, 20, a=1.0, b=norm, c=1.0)
    assert names_merged(actions) == ["a", "c"] and of(Merge, actions)[0].presence == 1.0
    [record] = [r for r in of(TapeRecord, actions) if r.kind == "unhealthy"]
    assert (record.learner, record.fragment, record.round) == ("b", 0, 20)
    assert names_merged(a_round(run, 24, a=1.0, b=1.0, c=1.0)) == ["a", "b", "c"]


def test_nothing_is_an_outlier_before_enough_was_seen() -> None:
    run = running("a", "b", quorum=0)
    assert names_merged(a_round(run, 4, a=1.0, b=1e6)) == ["a", "b"]


def test_more_steps_may_go_further_in_proportion() -> None:
    """An island that trained on through an outage of the syncer comes back with much to give."""
    run = running("a", "b", quorum=0, outlier=10.0)
    for turn in range(1, 6):
        a_round(run, 4 * turn, a=1.0, b=1.0)
    for name in "ab":
        run.report(name, 24)
    run.send(run.offer("a", norm=1.0))
    assert names_merged(run.send(run.offer("b", norm=190.0, steps=40))) == ["a", "b"]
    run.store()
    for name in "ab":
        run.report(name, 28)
    run.send(run.offer("a", norm=1.0))
    assert names_merged(run.send(run.offer("b", norm=210.0, steps=40))) == ["a"]


def test_quarantine_after_repeats_and_out_of_it_after_as_many_healthy_ones() -> None:
    run = running("a", "b", quorum=0, strikes=2)
    outcome = []
    for turn, norm in enumerate([math.nan, 1.0, math.nan, math.nan, 1.0, math.nan, 1.0, 1.0, 1.0], start=1):
        actions = a_round(run, 4 * turn, a=1.0, b=norm)
        outcome.append((names_merged(actions), [c.quarantined for c in of(Caution, actions)]))
    assert outcome == [
        (["a"], []), (["a", "b"], []), (["a"], []), (["a"], [True]), (["a"], []), (["a"], []), (["a"], []),
        (["a", "b"], [False]), (["a", "b"], []),
    ]  # fmt: skip


def test_quarantine_and_the_measure_of_what_is_usual_survive_the_syncer() -> None:
    run = running("a", "b", quorum=0, strikes=1)
    for turn in range(1, 6):
        a_round(run, 4 * turn, a=1.0, b=1.0)
    a_round(run, 24, a=1.0, b=math.nan)
    again = run.restored()
    for name in "ab":
        held = tuple(f.version for f in again.core.fragments)
        actions = again.send(Hello(name, again.core.learners[name].session, step=24, tokens=240, held=held))
        assert of(Welcome, actions)[0].quarantined == (name == "b")
    assert names_merged(a_round(again, 28, a=99.0, b=1.0)) == ["b"]  # healthy, and out; the other one's is far too large


def test_when_everyone_goes_further_that_becomes_the_measure() -> None:
    run = running("a", "b", quorum=0, strikes=0)
    for turn in range(1, 10):
        a_round(run, 4 * turn, a=1.0, b=1.0)
    refused = 0
    for turn in range(10, 60):
        refused += not names_merged(a_round(run, 4 * turn, a=50.0, b=50.0))
    assert 0 < refused < 25 and names_merged(a_round(run, 240, a=50.0, b=50.0)) == ["a", "b"]


def test_one_that_is_in_quarantine_can_leave_and_the_run_can_end() -> None:
    run = running("a", "b", quorum=0, strikes=1, budget_tokens=10_000)
    a_round(run, 4, a=1.0, b=math.nan)
    run.send(LeaveRequested("b"))
    run.report("a", 8)
    actions = run.send(run.offer("a", norm=1.0)) + run.send(run.offer("b", norm=math.nan))
    assert names_merged(actions) == ["a"]
    assert Goodbye("b", LEFT) in actions + run.store()


# ---------------------------------------------------------------- going back


def lossy(run: Run, step: int, loss: float, *names: str) -> list[Action]:
    """Everyone reports this loss and gives what is asked for; merges and restorations are stored."""
    actions: list[Action] = []
    for name in names:
        actions += run.send(Reported(name, step, 10 * step, 0.1, loss))
    for index, fragment in enumerate(run.core.fragments):
        for name in sorted(fragment.round.asked) if fragment.round else ():
            if fragment.round is not None and run.core.why_refused(run.offer(name, index)) is None:
                actions += run.send(run.offer(name, index))
    for order in [*of(Merge, actions), *of(Restore, actions)]:
        actions += run.store(order.fragment)
    return actions


def healthy_run(**settings: Any) -> Run:
    run = running("a", "b", quorum=0, fragments=2, every=2, rollback=1.5, **settings)
    for step in range(1, 20):
        for keep in of(KeepGood, lossy(run, step, 2.0, "a", "b")):
            run.send(GoodCopyKept(keep.step))
    assert run.core.rollback.good_step is not None
    return run


def test_a_loss_that_stays_high_puts_every_fragment_back_to_the_good_copy() -> None:
    run = healthy_run()
    good, before = run.core.rollback.good_step, [f.version for f in run.core.fragments]
    step, orders = 20, []
    while not orders:
        orders = of(Restore, lossy(run, step, 9.0, "a", "b"))
        step += 1
        assert step < 60
    assert [(order.fragment, order.good_step) for order in orders] == [(0, good), (1, good)]
    assert all(order.version > version for order, version in zip(orders, before, strict=True))
    for order in orders:
        fragment = run.core.fragments[order.fragment]
        assert fragment.floor == order.version and not fragment.restoring
        # What was learned from the bad model is not wanted.
        run.report("a", step), run.report("b", step)
        reason = run.core.why_refused(run.offer("a", order.fragment, base=order.version - 1)) or ""
        assert "stale" in reason or "no round" in reason


def test_one_bad_batch_is_no_divergence() -> None:
    run = healthy_run()
    for step, loss in enumerate([1e6, 1e6, 2.0, 2.0] * 5, start=20):
        assert not of(Restore, lossy(run, step, loss, "a", "b"))


def test_one_bad_island_of_three_is_no_divergence() -> None:
    run = running("a", "b", "c", quorum=0, fragments=1, every=2, rollback=1.5)
    for step in range(1, 40):
        actions = run.send(Reported("c", step, 10 * step, 0.1, math.nan)) + lossy(run, step, 2.0, "a", "b")
        assert not of(Restore, actions)


def test_without_a_good_copy_or_after_many_times_it_is_only_written_down() -> None:
    run = running("a", "b", quorum=0, fragments=1, every=2, rollback=1.5)
    for step in range(1, 8):
        lossy(run, step, 2.0, "a", "b")
    records = [r for step in range(8, 30) for r in of(TapeRecord, lossy(run, step, math.nan, "a", "b")) if r.kind == "diverged"]
    assert records and not any(record.rolled_back for record in records)

    run = healthy_run()
    for step in range(20, 400):
        lossy(run, step, math.inf if step % 20 else 2.0, "a", "b")
    assert run.core.rollback.count == MAX_ROLLBACKS


def test_a_merge_under_way_ends_before_its_fragment_is_put_back() -> None:
    run = healthy_run()
    step = 20
    while not run.core.rollback.count:
        # Merges are ordered and never stored, so they are under way when the run turns out to have diverged.
        for name in "ab":
            actions = run.send(Reported(name, step, 10 * step, 0.1, 9.0))
            for index in range(2):
                offer = run.offer(name, index)
                if run.core.why_refused(offer) is None:
                    actions += run.send(offer)
        step += 1
        assert step < 60
    busy = [index for index, f in enumerate(run.core.fragments) if f.round and f.round.merging_since is not None]
    restored = [order.fragment for order in of(Restore, actions)]
    merging = [index for index in busy if index not in restored]
    assert merging, "nothing was under way"
    for index in merging:
        [order] = [o for o in of(Restore, run.store(index)) if o.fragment == index]
        assert order.version == run.core.fragments[index].version + 1


def test_a_rollback_that_was_cut_short_by_the_syncers_end_goes_on() -> None:
    run = healthy_run()
    step = 20
    while not run.core.rollback.count:
        for name in "ab":
            run.send(Reported(name, step, 10 * step, 0.1, 9.0))
        step += 1
    again = run.restored()
    assert sorted(order.fragment for order in of(Restore, again.send(Tick()))) == [0, 1]
    # A disk that fails for a moment only delays it.
    again.send(StoreFailed(0, "no space"))
    assert not of(Restore, again.wait(RETRY_STORE_S / 2)) and len(of(Restore, again.wait(RETRY_STORE_S))) == 1


# ---------------------------------------------------------------- coming back to a syncer that was restarted


def back(run: Run, name: str, step: int) -> list[Action]:
    held = tuple(fragment.version for fragment in run.core.fragments)
    return run.send(Hello(name, run.core.learners[name].session, step=step, tokens=10 * step, held=held))


def test_the_first_one_back_is_not_merged_alone_while_the_others_look_for_the_way() -> None:
    run = running("a", "b", quorum=1, grace=0.5)
    run.report("a", 3), run.report("b", 3)
    again = run.restored()
    assert not of(Ask, back(again, "a", 50))
    assert not of(Ask, again.wait(RETURN_S / 2))
    asked = {ask.learner for ask in of(Ask, back(again, "b", 48))}
    assert asked == {"a", "b"}


def test_one_that_does_not_come_back_is_not_waited_for_for_ever() -> None:
    run = running("a", "b", quorum=1, grace=0.5)
    run.report("a", 3), run.report("b", 3)
    again = run.restored()
    [wake] = of(WakeAt, back(again, "a", 50))
    assert wake.at <= again.now + RETURN_S
    assert {ask.learner for ask in of(Ask, again.wait(RETURN_S))} == {"a"}


# ---------------------------------------------------------------- quorum and grace


def test_the_round_opens_when_the_fragment_is_due_and_asks_all_who_train() -> None:
    run = running("a", "b", fragments=2, every=4, quorum=2)
    assert asked(run.report("a", 4)) == set()
    assert asked(run.report("b", 4)) == {("a", 0, 4), ("b", 0, 4), ("a", 1, 2), ("b", 1, 2)}


def test_all_present_merges_at_once() -> None:
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    assert of(Merge, run.give("a")) == []
    [merge] = of(Merge, run.give("b", tokens=40))
    assert (merge.fragment, merge.version, merge.round, merge.presence) == (0, 1, 4, 1.0)
    assert [(share.learner, share.base, share.weight) for share in merge.shares] == [("a", 0, 200.0), ("b", 0, 800.0)]
    [announce] = of(Announce, run.store())
    assert (announce.fragment, announce.version, announce.round) == (0, 1, 4)
    assert counted(announce) == {"a": 4, "b": 4}


def test_the_quorum_opens_a_grace_window_that_a_late_one_may_use() -> None:
    run = running("a", "b", "c", quorum=1, overlap=3, grace=0.5)
    for name in "abc":
        run.report(name, 3, step_time_s=2.0)
    run.report("a", 4)
    run.now = 1.0
    actions = run.give("a")
    # One second was spent on gathering; half of what is left of three steps of two seconds is for the others.
    assert of(Merge, actions) == [] and of(WakeAt, actions) == [WakeAt(1.0 + 0.5 * (3 * 2.0 - 1.0))]
    run.now = 2.0
    assert of(Merge, run.give("b")) == []
    run.now = 3.499
    assert of(Merge, run.send(Tick())) == []
    run.now = 3.5
    [merge] = of(Merge, run.send(Tick()))
    assert [share.learner for share in merge.shares] == ["a", "b"]
    assert merge.presence == pytest.approx(2 / 3)


def test_when_an_exchange_takes_longer_than_it_may_a_merge_waits_as_long_again() -> None:
    """Else every merge of a run with short steps would hold the first answer alone."""
    run = running("a", "b", quorum=1, overlap=1, grace=0.5)
    for name in "ab":
        run.report(name, 3, step_time_s=1.0)
    run.report("a", 4)
    run.now = 1.5
    assert of(WakeAt, run.give("a")) == [WakeAt(1.5 + 0.5 * 1.5)]
    run.now = 2.0
    assert len(of(Merge, run.give("b"))) == 1


def exchanges(run: Run, count: int, taken_s: float, step: int = 0) -> int:
    """So many merges, of which each takes so long; a step takes 0.1 s. Gives the step they end at."""
    for _ in range(count):
        step += 4
        run.report("a", step, step_time_s=0.1), run.report("b", step, step_time_s=0.1)
        run.now += taken_s / 2
        run.give("a"), run.give("b")
        run.now += taken_s / 2
        run.store()
    return step


def many_slow(**settings: Any) -> Run:
    """All of 24 fragments have been exchanged once, as they were due, each slowly."""
    run = running("a", "b", **{"fragments": 24, "quorum": 2, "overlap": 1, "every": 24, **settings})
    for step in range(1, 25):
        for name in "ab":
            run.report(name, step, step_time_s=0.1)
        finish(run, step % 24, 0.25)
    return run


def open_rounds(run: Run) -> list[int]:
    return [index for index, fragment in enumerate(run.core.fragments) if fragment.round]


def finish(run: Run, index: int, taken_s: float) -> list[Action]:
    run.now += taken_s / 2
    run.give("a", index), run.give("b", index)
    run.now += taken_s / 2
    return run.store(index)


def test_while_exchanges_take_longer_than_they_may_an_eighth_of_the_fragments_is_under_way() -> None:
    """Else islands would spend much of their time on work that is overwritten, and the more so the more is under way."""
    run = many_slow()
    for step in range(25, 60):
        run.report("a", step), run.report("b", step)
    assert open_rounds(run) == [1, 2, 3], "of 24; those that wait longest, and fragment 0 was due one step after them"
    for index in range(1, 8):
        opened = {ask.fragment for ask in of(Ask, finish(run, index, 0.25))}
        assert opened == {index + 3}, "the next has its turn without another report"
        assert open_rounds(run) == [index + 1, index + 2, index + 3]


def test_as_exchanges_become_quick_again_more_are_under_way_one_by_one() -> None:
    run = many_slow()
    [flow] = run.core.rounds.flows
    most = [flow.at_once]
    for step in range(25, 105):
        run.report("a", step), run.report("b", step)
        if open_rounds(run):
            finish(run, open_rounds(run)[0], 0.0)
        most.append(flow.at_once)
        assert len(open_rounds(run)) <= most[-1]
    assert most[0] == 3 and most[-1] == 24
    assert {after - before for before, after in itertools.pairwise(most)} == {0, 1}


def test_a_slow_shard_does_not_hold_up_the_fragments_of_another() -> None:
    quick = set(range(12))
    run = many_slow(places=[0] * 12 + [1] * 12)
    for step in range(25, 97):
        run.report("a", step), run.report("b", step)
        for index in open_rounds(run):
            finish(run, index, 0.0 if index in quick else 0.25)
    run.now += 1.0  # a little pause is over, because two of twelve are more than an eighth
    for step in range(97, 145):
        run.report("a", step), run.report("b", step)
    opened = set(open_rounds(run))
    assert quick < opened and len(opened - quick) == 2


@pytest.mark.parametrize("quorum", [0, 1, 2])
def test_rounds_that_nobody_answers_hold_up_the_others_for_a_while_only(quorum: int) -> None:
    """Islands may not reach a shard which the syncer reaches."""
    run = many_slow(quorum=quorum)
    for step in range(25, 60):
        run.report("a", step), run.report("b", step)
    stuck = open_rounds(run)
    assert len(stuck) == 3
    [wake] = of(WakeAt, run.send(Tick()))
    run.now = wake.at
    assert run.now < SILENCE_S / 2 + run.core.fragments[stuck[0]].round.opened_at  # type: ignore[union-attr]
    run.send(Tick())
    assert len(open_rounds(run)) == 6, "without another report"
    merged: set[int] = set()
    for step in range(60, 200):
        run.report("a", step), run.report("b", step)
        for index in set(open_rounds(run)) - set(stuck):
            finish(run, index, 0.25)
            merged.add(index)
        run.now += 0.1
    assert merged == set(range(24)) - set(stuck) and set(stuck) <= set(open_rounds(run))


@pytest.mark.parametrize("count", [1, 2, 5, 8, 12, 15, 16, 23, 24])
def test_while_exchanges_are_slow_a_fragment_is_under_way_for_an_eighth_of_the_time(count: int) -> None:
    """Exchanges take 1.2 s each, however many there are at a time."""
    run = running("a", "b", fragments=count, quorum=2, overlap=1, every=24)
    under_way, ends = 0.0, dict[int, float]()
    for step in range(1, 6000):
        run.report("a", step, step_time_s=0.1), run.report("b", step, step_time_s=0.1)
        for index in open_rounds(run):
            if index not in ends:
                ends[index] = run.now + 1.2
            elif ends[index] <= run.now + 1e-9:
                del ends[index]
                finish(run, index, 0.0)
        under_way += 0.1 * len(open_rounds(run)) if step > 1000 else 0.0
        run.now += 0.1
    assert 0.08 < under_way / count / 500 < 0.16


def test_those_who_leave_and_the_end_of_a_run_are_not_held_back_by_slow_exchanges() -> None:
    run = many_slow()
    for step in range(25, 60):
        run.report("a", step), run.report("b", step)
    left = {ask.fragment for ask in of(Ask, run.send(LeaveRequested("b"))) if ask.learner == "b"}
    assert left | {1, 2, 3} == set(range(24))
    run = many_slow()
    run.send(CloseRequested())
    assert open_rounds(run) == list(range(24))


def test_rounds_for_which_nothing_is_done_hold_up_no_others() -> None:
    run = many_slow()
    for step in range(25, 60):
        run.report("a", step), run.report("b", step)
    run.give("a", 1), run.give("b", 1), run.give("a", 2), run.give("b", 2)
    run.send(FragmentsAway((1,)))  # while it is being merged
    assert 4 in open_rounds(run)
    opened = of(Ask, run.send(StoreFailed(2, "no space left on device")))
    assert {ask.fragment for ask in opened} == {5}


def test_with_few_fragments_the_next_exchange_waits_while_they_are_slow() -> None:
    run = running("a", "b", quorum=2, overlap=1)
    step = exchanges(run, 1, 0.125)
    assert run.core.rounds.flows[0].paused_until(run.now) is None, "it may have been one stall"
    step = exchanges(run, 1, 0.125, step)
    paused_until = run.now + 7 * 0.125
    run.now += 0.5
    for later in (step + 4, step + 8):
        assert not of(Ask, run.report("a", later)) and not of(Ask, run.report("b", later)), "it is due, and waits"
    assert of(WakeAt, run.send(Tick())) == [WakeAt(paused_until)]
    run.now = paused_until
    assert {ask.learner for ask in of(Ask, run.send(Tick()))} == {"a", "b"}, "then it has its turn without another report"


def test_a_clock_that_is_put_back_ends_a_pause() -> None:
    run = running("a", "b", quorum=2, overlap=1)
    step = exchanges(run, 2, 0.125)
    assert run.core.rounds.flows[0].paused_until(run.now) is not None
    run.now -= 0.5
    run.report("a", step + 4)
    assert of(Ask, run.report("b", step + 4))


@pytest.mark.parametrize(
    ("taken_s", "settings"),
    [(0.25, {}), (0.75, {"quorum": 0, "wait": True}), (0.75, {"adopt": "carry"})],
    ids=["short enough", "lock-step", "nothing is overwritten"],
)
def test_nothing_is_held_back_without_need(taken_s: float, settings: dict[str, Any]) -> None:
    run = running("a", "b", **{"quorum": 2, "overlap": 3, **settings})
    step = exchanges(run, 4, taken_s)
    run.report("a", step + 4)
    assert of(Ask, run.report("b", step + 4))
    assert not run.core.rounds.flows[0].holds_back


def test_one_stall_that_holds_up_several_exchanges_is_one_stall() -> None:
    run = running("a", "b", fragments=2, quorum=2, overlap=1)
    for step in range(4, 12, 2):
        run.report("a", step, step_time_s=0.1), run.report("b", step, step_time_s=0.1)
        for index in open_rounds(run):
            finish(run, index, 0.0)
    run.report("a", 14), run.report("b", 14)
    assert open_rounds(run) == [0, 1]
    finish(run, 0, 5.0), finish(run, 1, 0.0)
    assert run.core.rounds.flows[0].holds_back and run.core.rounds.flows[0].paused_until(run.now) is None


def test_after_a_stall_nothing_waits_and_what_stays_slow_waits_as_long_as_it_takes() -> None:
    run = running("a", "b", quorum=2, overlap=1)
    flow, period = run.core.rounds.flows[0], run.core.sync.every * 0.1
    step = exchanges(run, 1, 1.5 * SILENCE_S, exchanges(run, 1, 0.0))
    assert flow.paused_until(run.now) is None, "one stall says nothing of the next exchange"
    assert run.core.rounds.grace.seconds(0.1) <= LONGEST * period
    step = exchanges(run, 1, 0.0, step)
    assert run.core.rounds.grace.taken(0.1) > period, "exchanges still seem to take long"
    assert flow.paused_until(run.now) is None, "but this one did not"
    exchanges(run, 2, 5 * LONGEST * period, step)
    paused_until = flow.paused_until(run.now)
    assert paused_until is not None and run.now + 3 * LONGEST * period < paused_until <= run.now + 7 * LONGEST * period


def test_the_time_to_merge_and_store_is_taken_off_the_next_grace_window() -> None:
    run = running("a", "b", quorum=1, overlap=4, grace=0.5)
    for name in "ab":
        run.report(name, 3, step_time_s=1.0)
    run.report("a", 4), run.give("a"), run.give("b")
    run.now = 1.0
    run.store()
    run.report("a", 8)
    assert of(WakeAt, run.give("a")) == [WakeAt(1.0 + 0.5 * (4.0 - 1.0))]


def test_a_contribution_after_the_merge_was_ordered_is_refused_and_the_next_round_takes_it() -> None:
    run = running("a", "b", quorum=1, grace=0.0)
    run.report("a", 4)
    offer = run.offer("b")
    assert len(of(Merge, run.give("a"))) == 1
    assert run.core.why_refused(offer) == "round 4 of fragment 0 is being merged already"
    assert recorded(run.send(offer)) == ["refused"]
    run.store()
    assert run.core.why_refused(offer) == "no round 4 is open for fragment 0"
    run.report("a", 8)
    [merge] = of(Merge, run.give("b", base=0))
    assert [(share.learner, share.base) for share in merge.shares] == [("b", 0)]


@pytest.mark.parametrize("damp, presence", [(True, 0.25), (False, 1.0)])
def test_a_lone_contribution_moves_the_model_by_its_share_of_those_asked(damp: bool, presence: float) -> None:
    run = running("a", "b", "c", "d", quorum=1, grace=0.0, damp_absent=damp)
    run.report("c", 4)
    [merge] = of(Merge, run.give("c"))
    assert merge.presence == presence
    run.store()
    assert list(run.core.rounds.participation) == [0.25]


def test_the_outer_settings_of_a_merge_are_those_of_its_round() -> None:
    begin = BeginConfig(steps=8, every=4, outer_lr=1.0, outer_momentum=0.0)
    run = running("a", every=8, quorum=1, outer_lr=0.5, outer_momentum=0.8, begin=begin)
    run.report("a", 4)
    [early] = of(Merge, run.give("a"))
    run.store()
    run.report("a", 8)
    [late] = of(Merge, run.give("a"))
    assert (early.outer_lr, early.outer_momentum) == (1.0, 0.0)
    assert (late.outer_lr, late.outer_momentum) == (0.5, 0.8)


def test_one_that_has_nothing_to_give_is_not_waited_for_and_does_not_damp() -> None:
    run = running("a", "b", quorum=0)
    run.report("a", 4), run.report("b", 4)
    assert of(Merge, run.give("a")) == []
    [merge] = of(Merge, run.nothing("b"))
    assert [share.learner for share in merge.shares] == ["a"] and merge.presence == 1.0


def test_a_round_in_which_nobody_has_anything_is_cancelled() -> None:
    run = running("a", "b")
    run.report("a", 4)
    run.nothing("a")
    assert "cancelled" in recorded(run.nothing("b"))
    assert run.core.fragments[0].round is None and run.versions == (0,)
    assert asked(run.report("a", 8)) == {("a", 0, 8), ("b", 0, 8)}


def test_an_answer_of_nothing_to_another_round_changes_nothing() -> None:
    run = running("a", "b")
    run.report("a", 4)
    before = run.whole_state()
    for fragment, step in ((0, 8), (5, 4), (-1, 4)):
        run.send(NothingToGive("a", fragment, step))
    assert run.whole_state() == before
    run.give("a")
    run.send(NothingToGive("a", 0, 4))
    gathering = run.core.fragments[0].round
    assert gathering is None or "a" in gathering.arrived


# ---------------------------------------------------------------- due again, stale, once


def test_a_fragment_due_again_stays_in_its_round_and_the_silent_ones_are_asked_again() -> None:
    run = running("a", "b", "c", quorum=2)
    for name in "abc":
        run.report(name, 4)
    run.give("a")
    again = [run.report(name, 8) for name in "abc"]
    assert [asked(actions) for actions in again] == [set(), {("b", 0, 4), ("c", 0, 4)}, set()]
    gathering = run.core.fragments[0].round
    assert gathering is not None and gathering.number == 4


def test_one_who_joined_since_is_asked_when_the_fragment_is_due_again() -> None:
    """Nobody should wait for an idle island, nor those who came later for a round that asks only that one."""
    run = running("a", quorum=1, grace=0.0)
    run.report("a", 4)  # in a long evaluation: heard of, but it has nothing to give
    run.enter("b")
    assert asked(run.report("b", 7)) == set()
    assert ("b", 0, 4) in asked(run.report("b", 8))
    [merge] = of(Merge, run.give("b"))
    assert [share.learner for share in merge.shares] == ["b"]


def test_a_turn_missed_while_a_merge_is_stored_gets_its_round_right_after() -> None:
    run = running("a", "b", quorum=1, grace=0.0)
    run.report("a", 4), run.give("a")
    assert asked(run.report("a", 8)) == set()
    assert asked(run.store()) == {("a", 0, 8), ("b", 0, 8)}


def test_the_same_progress_is_never_asked_for_twice() -> None:
    run = running("a", "b", quorum=1, grace=0.0, staleness=5)
    run.report("a", 4), run.give("a"), run.store()
    bases = {ask.learner: ask.min_base for ask in of(Ask, run.report("a", 8))}
    assert bases == {"a": 1, "b": 0}
    assert run.core.why_refused(run.offer("a", base=0)) == "stale: base version 0 of fragment 0, the newest is 1"


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_base_may_be_as_many_versions_old_as_is_set(staleness: int) -> None:
    run = running("a", "b", quorum=1, grace=0.0, staleness=staleness)
    for turn in range(1, 6):
        run.report("a", 4 * turn), run.give("a"), run.store()
    run.report("a", 24)
    assert run.core.why_refused(run.offer("b", base=5 - staleness)) is None
    assert str(run.core.why_refused(run.offer("b", base=4 - staleness))).startswith("stale")


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"fragment": 7}, "there is no fragment 7"),
    ({"fragment": -1}, "there is no fragment -1"),
    ({"learner": "nobody"}, "nobody is not in the run"),
    ({"learner": "gone"}, "gone is not in the run"),
    ({"learner": "new"}, "new is not in the run"),
    ({"round": 8}, "no round 8 is open for fragment 1"),
    ({"fragment": 0}, "no round 4 is open for fragment 0"),
    ({"learner": "b"}, "duplicate: b has answered round 4 of fragment 1"),
    ({"learner": "late"}, "late was not asked for fragment 1 in round 4"),
    ({"base": 1}, "base version 1 of fragment 1 does not exist; the newest is 0"),
    ({"base": -1}, "stale: base version -1 of fragment 1, the newest is 0"),
    ({"steps": 0}, "steps and tokens must be >= 1, got 0 and 20"),
    ({"tokens": 0}, "steps and tokens must be >= 1, got 2 and 0"),
    ({"tokens": -5}, "steps and tokens must be >= 1, got 2 and -5"),
]


@pytest.mark.parametrize("changed, reason", REFUSALS)
def test_a_contribution_that_does_not_fit_is_refused_with_the_reason_and_changes_nothing(
    changed: dict[str, Any], reason: str
) -> None:
    run = running("a", "b", "gone", fragments=2, every=8, quorum=3)
    run.send(StreamEnded("gone", "first"))
    run.report("a", 4), run.report("b", 4)  # fragment 1 is due, fragment 0 is not
    run.give("b", 1)
    run.join("new")
    run.enter("late")
    before = run.whole_state()
    offer = dataclasses.replace(Contributed("a", 1, 4, 0, 2, 20), **changed)
    assert run.core.why_refused(offer) == reason
    outcome = run.core.handle(offer, run.now)
    [record] = of(Refused, outcome.actions)
    assert outcome.verdict == Verdict(reason, merged=False) and record.reason == reason
    assert run.whole_state() == before
    assert run.core.why_refused(Contributed("a", 1, 4, 0, 2, 20)) is None


# ---------------------------------------------------------------- learners that go and come


def test_an_announcement_tells_each_learner_which_of_its_progress_is_in_it_now_or_since_before() -> None:
    run = running("a", "b", "c", quorum=1, grace=0.0, staleness=1)
    run.report("a", 4), run.give("a", at_step=3)
    [first] = of(Announce, run.store())
    assert counted(first) == {"a": 3, "b": 0, "c": 0}
    run.report("a", 8), run.give("b", base=0, at_step=7)
    [second] = of(Announce, run.store())
    assert counted(second) == {"a": 3, "b": 7, "c": 0}, "the first merge is part of the second version as well"


def test_a_learner_lost_in_the_middle_of_a_round_is_not_waited_for() -> None:
    run = running("a", "b", "c", quorum=3)
    for name in "abc":
        run.report(name, 4)
    run.give("a"), run.give("b")
    [merge] = of(Merge, run.send(StreamEnded("c", "first")))
    assert [share.learner for share in merge.shares] == ["a", "b"] and merge.presence == 1.0


def test_a_contribution_counts_though_its_learner_was_lost_after_giving_it() -> None:
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    run.give("a")
    assert of(Merge, run.send(StreamEnded("a", "first"))) == []
    [merge] = of(Merge, run.give("b"))
    assert [share.learner for share in merge.shares] == ["a", "b"]
    [announce] = of(Announce, run.store())
    assert announce.learners == ("b",)
    [welcome] = of(Welcome, run.join("a", step=5, tokens=50, held=(0,)))
    assert (welcome.counted, welcome.merged_rounds) == ((4,), (4,)), (
        "it hears on its return that its progress is part of the version it missed"
    )


def test_when_all_who_were_asked_are_lost_the_round_is_given_up() -> None:
    run = running("a", "b")
    run.report("a", 4)
    run.send(StreamEnded("a", "first"))
    assert "cancelled" in recorded(run.send(StreamEnded("b", "first")))
    assert run.core.fragments[0].round is None


def test_a_silent_learner_is_given_up_but_may_come_back() -> None:
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    run.now = 8.0
    run.give("a")
    run.now = SILENCE_S
    actions = run.send(Tick())
    assert of(Goodbye, actions) == [Goodbye("b", "silent", final=False)]
    assert [share.learner for share in of(Merge, actions)[0].shares] == ["a"]
    run.store()
    back = run.join("b", step=5, tokens=50, held=(0,))
    assert welcomed(back) == ("b", 1, 4, True, (1,))
    assert of(Begin, back) == [Begin("b", 5)]
    assert run.core.learners["b"].phase == "training"


def test_every_message_of_a_learner_that_is_heard_puts_off_its_silence() -> None:
    run = running("a", "b")
    run.report("a", 4)
    for _ in range(4):
        run.now += SILENCE_S - 0.5
        run.report("a", 4), run.report("b", 1)
    run.now += SILENCE_S - 0.5
    run.give("a"), run.report("b", 1)
    run.now += SILENCE_S - 0.5
    run.send(Tick())
    assert {learner.phase for learner in run.core.learners.values()} == {"training"}


def test_a_jump_of_the_clock_loses_learners_but_not_the_run() -> None:
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    run.give("a")
    actions = run.wait(100_000.0)
    assert {goodbye.learner for goodbye in of(Goodbye, actions)} == {"a", "b"}
    [merge] = of(Merge, actions)
    assert [share.learner for share in merge.shares] == ["a"]
    run.store()
    run.join("a", step=6, tokens=60, held=(0,)), run.join("b", step=6, tokens=60, held=(0,))
    run.report("a", 8)
    assert asked(run.report("b", 8)) == {("a", 0, 8), ("b", 0, 8)}


def test_lock_step_waits_for_one_that_is_away_until_it_counts_as_silent_and_not_longer() -> None:
    run = running("a", "b", quorum=0, wait=True, overlap=1)
    run.report("a", 4), run.report("b", 4)
    run.give("a")
    run.now = 3.0
    assert of(Merge, run.send(StreamEnded("b", "first"))) == []
    run.now = 3.0 + SILENCE_S - 0.01
    actions = run.report("a", 5)
    assert of(Merge, actions) == [] and of(WakeAt, actions) == [WakeAt(3.0 + SILENCE_S)]
    run.now = 3.0 + SILENCE_S
    actions = run.send(Tick())
    assert "lost" in recorded(actions)
    [merge] = of(Merge, actions)
    assert [share.learner for share in merge.shares] == ["a"] and merge.presence == 1.0


def test_in_lock_step_a_turn_nobody_was_left_for_is_opened_again_when_they_return() -> None:
    run = running("a", quorum=0, wait=True, overlap=0)
    run.report("a", 4)
    run.send(StreamEnded("a", "first"))
    assert "cancelled" in recorded(run.wait(SILENCE_S))
    back = run.join("a", step=4, tokens=40, held=(0,))
    assert asked(back) == {("a", 0, 4)}, "it stands at step 4 and waits for the merge of that turn"


def test_in_lock_step_a_turn_that_brought_nothing_is_announced_as_over() -> None:
    run = running("a", "b", quorum=0, wait=True, overlap=0)
    run.report("a", 4), run.report("b", 4)
    run.nothing("a")
    [announce] = of(Announce, run.nothing("b"))
    assert (announce.version, announce.round) == (0, 4)
    run.send(StreamEnded("b", "first"))
    [welcome] = of(Welcome, run.join("b", step=4, tokens=40, held=(0,)))
    assert welcome.merged_rounds == (4,), "and so hears one that missed it"


def test_in_lock_step_a_turn_that_comes_during_a_round_for_a_leaving_one_gets_its_own_round() -> None:
    run = running("a", "b", "c", quorum=0, wait=True, overlap=0, every=4)
    run.report("a", 4), run.report("b", 3), run.report("c", 3)
    run.send(LeaveRequested("c"))
    gathering = run.core.fragments[0].round
    assert gathering is not None and gathering.number == 3
    run.report("b", 4), run.report("c", 4)
    for name in "abc":
        run.give(name)
    assert asked(run.store()) == {("a", 0, 4), ("b", 0, 4)}


def test_in_lock_step_one_that_was_given_up_goes_on_where_the_others_are() -> None:
    run = running("a", "b", quorum=0, wait=True, overlap=1, every=50)
    run.report("a", 4), run.report("b", 4)
    run.send(StreamEnded("b", "first"))
    run.now = 9.0
    run.report("a", 20)
    run.wait(1.0)
    assert run.core.step == 20
    assert of(Begin, run.join("b", step=5, tokens=50, held=(0,))) == [Begin("b", 20)]


def test_lock_step_asks_one_that_is_away_as_well() -> None:
    run = running("a", "b", quorum=0, wait=True, overlap=1)
    run.report("b", 4)
    run.send(StreamEnded("b", "first"))
    assert asked(run.report("a", 4)) == {("a", 0, 4), ("b", 0, 4)}


@pytest.mark.parametrize("told", [True, False])
def test_a_reconnect_of_the_same_process_gets_its_open_question_again(told: bool) -> None:
    """`told`: whether the end of the old stream was noticed before the new one began."""
    run = running("a", "b", quorum=0, wait=True, overlap=1)
    run.report("a", 4), run.report("b", 4)
    run.give("a")
    if told:
        run.send(StreamEnded("b", "first"))
    actions = run.join("b", step=5, tokens=50, held=(0,))
    assert welcomed(actions) == ("b", 1, 4, True, (0,))
    assert of(Goodbye, actions) == []
    assert of(Ask, actions) == [Ask("b", 0, 4, 0)]
    assert len(of(Merge, run.give("b"))) == 1


def test_a_reconnect_is_not_asked_for_what_it_has_given_already() -> None:
    run = running("a", "b", quorum=0, wait=True, overlap=1)
    run.report("a", 4), run.report("b", 4)
    run.give("b")
    run.send(StreamEnded("b", "first"))
    assert of(Ask, run.join("b", step=5, tokens=50, held=(0,))) == []


def test_a_stream_that_ends_after_its_process_was_replaced_is_nobodys_loss() -> None:
    run = running("a", "b")
    run.join("a", "second")
    run.send(Ready("a"))
    before = run.whole_state()
    run.send(StreamEnded("a", "first"))
    assert run.whole_state() == before


@pytest.mark.parametrize("wait", [True, False])
def test_a_restarted_process_takes_its_place_and_what_the_old_one_was_asked_for_is_void(wait: bool) -> None:
    run = running("a", "b", quorum=0, wait=wait, overlap=1, every=4)
    run.report("a", 4, tokens=400), run.report("b", 4, tokens=300)
    assert run.core.tokens == 700
    offer = run.offer("b")
    actions = run.join("b", "second")
    assert of(Goodbye, actions) == [Goodbye("b", "another process joined as b")]
    assert welcomed(actions) == ("b", 1, 4, False, (0,))
    assert of(Ask, actions) == []
    assert (run.core.tokens, run.core.run.banked_tokens) == (700, 300)
    assert run.core.why_refused(offer) == "b is not in the run"
    assert of(Begin, run.send(Ready("b"))) == [Begin("b", 4)]
    assert run.core.why_refused(offer) == "b was not asked for fragment 0 in round 4"
    [merge] = of(Merge, run.give("a"))
    assert [share.learner for share in merge.shares] == ["a"]
    run.report("b", 5, tokens=50)
    assert run.core.tokens == 750


@pytest.mark.parametrize("ordered", [True, False])
def test_what_the_old_process_had_given_is_not_credited_to_the_new_one(ordered: bool) -> None:
    """They count their steps each from its own start. `ordered`: the merge was on its way when the process was replaced."""
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    run.give("a")
    if ordered:
        run.give("b")
    [welcome] = of(Welcome, run.join("a", "second"))
    run.send(Ready("a"))
    if not ordered:
        run.give("b")
    [announce] = of(Announce, run.store())
    assert welcome.counted == (0,) and counted(announce) == {"a": 0, "b": 4}
    run.report("b", 8)
    asks = of(Ask, run.report("a", 8))
    assert {(ask.learner, ask.min_base) for ask in asks} == {("a", 1), ("b", 1)}


def test_an_old_process_is_turned_away_after_another_has_taken_its_place() -> None:
    run = running("a", "b", every=1000)
    run.report("a", 10, tokens=1000)
    run.join("a", "second"), run.send(Ready("a"))
    before = run.whole_state()
    back = run.join("a", "first", step=10, tokens=1000, held=(0,))
    assert of(Welcome, back) == [] and recorded(back) == ["refused"]
    assert run.whole_state() == before and run.core.tokens == 1000


def test_what_the_old_process_had_given_still_counts() -> None:
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    run.give("b")
    run.join("b", "second"), run.send(Ready("b"))
    [merge] = of(Merge, run.give("a"))
    assert [share.learner for share in merge.shares] == ["a", "b"]
    [announce] = of(Announce, run.store())
    assert counted(announce) == {"a": 4, "b": 0}, "but not as progress of the new one, which counts its own steps"


def test_versions_from_another_future_are_not_resumed() -> None:
    run = running("a", fragments=2)
    for held in ((1, 0), (0,), (0, 0, 0), (0, -1)):
        [welcome] = of(Welcome, run.join("a", held=held, step=3, tokens=30))
        assert not welcome.resumed
        assert run.core.learners["a"].phase == "waiting"
    run.send(Ready("a"))
    assert run.core.learners["a"].phase == "training"


# ---------------------------------------------------------------- storing


def test_a_merge_that_could_not_be_stored_is_tried_again_with_all_it_had() -> None:
    run = running("a", "b", "c", quorum=2, grace=0.0)
    for name in "abc":
        run.report(name, 4)
    run.give("a")
    [first] = of(Merge, run.give("b"))
    failed = run.send(StoreFailed(0, "disk full"))
    assert of(Announce, failed) == [] and of(Merge, failed) == [] and run.versions == (0,)
    assert recorded(failed) == ["merge_failed"]
    assert of(WakeAt, failed) == [WakeAt(RETRY_STORE_S)]
    assert of(Merge, run.wait(RETRY_STORE_S / 2)) == []
    run.send(StreamEnded("a", "first"))
    [second] = of(Merge, run.wait(RETRY_STORE_S / 2))
    assert second == first
    run.send(StoreFailed(0, "disk still full"))
    run.give("c")
    [third] = of(Merge, run.wait(RETRY_STORE_S))
    assert [share.learner for share in third.shares] == ["a", "b", "c"] and third.version == 1
    [announce] = of(Announce, run.store())
    assert counted(announce) == {"b": 4, "c": 4} and run.versions == (1,)
    assert [run.core.learners[name].merges for name in "abc"] == [1, 1, 1] and run.core.run.merges == 1, (
        "tried thrice, counted once"
    )
    assert list(run.core.rounds.participation) == [1.0]


def test_a_version_is_announced_when_it_is_stored_and_not_before() -> None:
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    run.give("a")
    assert of(Announce, run.give("b")) == []
    assert of(Announce, run.wait(5)) == []
    run.join("c")
    [announce] = of(Announce, run.store())
    assert announce.learners == ("a", "b", "c"), "one that waits for its start needs the newest version as well"


# ---------------------------------------------------------------- a new syncer process


def test_a_restored_run_goes_on_where_it_was() -> None:
    run = running("a", "b", fragments=2, quorum=2, every=4)
    for turn in (4, 8):
        run.report("a", turn), run.report("b", turn)
        for fragment in (0, 1):
            run.give("a", fragment), run.give("b", fragment), run.store(fragment)
    again = run.restored()
    assert (again.core.step, again.core.phase, again.core.tokens) == (8, "running", run.core.tokens)
    assert again.core.standing() == run.core.standing()
    assert welcomed(again.join("a", step=9, tokens=90, held=(2, 2))) == ("a", 0, 8, True, (2, 2))
    again.join("b", step=9, tokens=90, held=(2, 2))
    again.report("a", 12)
    assert {(name, step) for name, _, step in asked(again.report("b", 12))} == {("a", 12), ("b", 12), ("a", 10), ("b", 10)}


def test_after_a_crash_between_store_and_announcement_nothing_is_counted_twice() -> None:
    run = running("a", "b", quorum=2, staleness=3)
    run.report("a", 4), run.report("b", 4)
    run.give("a"), run.give("b")
    run.store()  # the process dies before any learner hears of it
    again = run.restored()
    actions = again.join("a", step=5, tokens=50, held=(0,)) + again.join("b", step=5, tokens=50, held=(0,))
    assert [welcome.versions for welcome in of(Welcome, actions)] == [(1,), (1,)]
    assert of(Ask, actions) == [], "the round was merged"
    again.report("a", 8)
    asks = of(Ask, again.report("b", 8))
    assert {(ask.learner, ask.min_base) for ask in asks} == {("a", 1), ("b", 1)}
    assert str(again.core.why_refused(again.offer("a", base=0))).startswith("stale")


def test_after_a_crash_before_a_merge_was_stored_its_round_is_opened_again() -> None:
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    run.give("a"), run.give("b")
    run.report("a", 5), run.report("b", 5)
    again = run.restored()
    assert again.versions == (0,)
    again.join("a", step=6, tokens=60, held=(0,))
    actions = again.join("b", step=6, tokens=60, held=(0,)) + again.report("a", 7)
    opened = again.core.fragments[0].round
    assert opened is not None and opened.number == 4, asked(actions)


def test_in_lock_step_a_restored_run_waits_for_the_learners_it_knew() -> None:
    run = running("a", "b", quorum=0, wait=True, overlap=1)
    run.report("a", 4), run.report("b", 4)
    again = run.restored()
    again.join("a", step=5, tokens=50, held=(0,))
    assert of(Merge, again.give("a")) == []
    actions = again.join("b", step=5, tokens=50, held=(0,))
    assert ("b", 0, 4) in asked(actions)
    [merge] = of(Merge, again.give("b"))
    assert len(merge.shares) == 2


def test_learners_a_restored_run_does_not_see_again_are_given_up() -> None:
    run = running("a", "b", quorum=0, wait=True, overlap=1)
    run.report("a", 4), run.report("b", 4)
    again = run.restored()
    again.join("a", step=5, tokens=50, held=(0,))
    again.give("a")
    again.now += SILENCE_S - 0.5
    again.report("a", 5)
    [merge] = of(Merge, again.wait(0.5))
    assert [share.learner for share in merge.shares] == ["a"]
    assert again.core.tokens == run.core.tokens + 10, "the tokens of the lost one stay counted"


def test_a_learner_the_restored_run_has_never_seen_may_keep_its_progress() -> None:
    """It joined after the last write of the old process, so its name is in no record."""
    run = running("a")
    again = run.restored()
    actions = again.join("late", "own", step=3, tokens=30, held=(0,))
    assert of(Welcome, actions)[0].resumed and of(Begin, actions) == [Begin("late", 3)]
    assert again.core.tokens == run.core.tokens + 30


def test_standing_comes_back_from_json_unchanged() -> None:
    standing = Standing(7, 100, "closing", {"a": ("x", 0, 7, 50), "b": ("y", 3, 6, 25)})
    assert Standing.from_json(json.loads(json.dumps(standing.to_json()))) == standing
    assert standing.tokens == 175


# ---------------------------------------------------------------- the end


def test_the_budget_closes_the_run_everyone_is_asked_once_more_and_then_it_ends() -> None:
    run = running("a", "b", fragments=2, every=50, quorum=1, budget_tokens=100)
    assert of(StopTraining, run.report("a", 6)) == []
    closing = run.report("b", 4)
    assert {stop.learner for stop in of(StopTraining, closing)} == {"a", "b"}
    assert asked(closing) == {(name, fragment, 7) for name in "ab" for fragment in (0, 1)}
    assert run.core.phase == "closing"
    run.give("a", 0), run.give("a", 1), run.give("b", 0)
    assert run.core.fragments[0].round is not None and run.core.fragments[0].round.merging_since is not None
    run.store(0)
    [merge] = of(Merge, run.nothing("b", 1))
    assert [share.learner for share in merge.shares] == ["a"]
    actions = run.store(1)
    assert of(Announce, actions) and of(RunEnded, actions) == [RunEnded()]
    assert {goodbye.learner for goodbye in of(Goodbye, actions)} == {"a", "b"}
    assert run.core.phase == "ended" and run.versions == (1, 1)


def test_in_the_last_round_the_slower_one_is_waited_for_but_not_beyond_silence() -> None:
    run = running("a", "b", every=50, quorum=1, grace=0.0, budget_tokens=10)
    run.report("a", 6)
    run.now = 2.0
    assert of(Merge, run.give("a")) == []
    run.now = 9.0
    run.report("b", 1)
    assert of(Merge, run.wait(0.9)) == []
    [merge] = of(Merge, run.wait(0.1))
    assert [share.learner for share in merge.shares] == ["a"]


def test_the_last_round_ends_though_one_who_is_heard_never_answers() -> None:
    run = running("a", "b", quorum=0, every=50, budget_tokens=10)
    run.report("a", 2)
    run.give("a")
    merges: list[Merge] = []
    for _ in range(int(SILENCE_S)):
        assert merges == []
        run.now += 1.0
        merges += of(Merge, run.report("b", 0) + run.report("a", 2))
    assert [[share.learner for share in merge.shares] for merge in merges] == [["a"]]
    assert of(RunEnded, run.store()) == [RunEnded()]


def test_the_last_round_of_a_fragment_comes_after_the_one_that_is_open() -> None:
    run = running("a", "b", every=4, quorum=2, budget_tokens=100)
    run.report("a", 4), run.report("b", 4)
    run.give("a")
    assert asked(run.report("b", 7, tokens=70)) == set()
    assert run.core.phase == "closing"
    run.give("b")
    actions = run.store()
    assert of(RunEnded, actions) == []
    assert {(ask.learner, ask.round, ask.min_base) for ask in of(Ask, actions)} == {("a", 5, 1), ("b", 5, 1)}
    run.nothing("a")
    assert of(RunEnded, run.nothing("b")) == [RunEnded()]


def test_a_run_that_is_spent_ends_though_nobody_is_left() -> None:
    run = running("a", fragments=3, budget_tokens=100)
    run.report("a", 1, tokens=99)
    run.send(StreamEnded("a", "first"))
    run.now += SILENCE_S
    run.send(Tick())
    assert run.core.phase == "running"
    assert of(RunEnded, run.send(CloseRequested())) == [RunEnded()]


def test_a_closing_run_waits_for_the_lost_until_they_count_as_silent_and_then_ends() -> None:
    run = running("a", "b", fragments=2, every=50, budget_tokens=50)
    run.report("a", 6)
    assert run.core.phase == "closing"
    run.send(StreamEnded("a", "first"))
    run.send(StreamEnded("b", "first"))
    run.now = SILENCE_S - 0.1
    back = run.join("b", step=6, tokens=60, held=(0, 0))
    assert asked(back) == {("b", 0, 7), ("b", 1, 7)}
    run.nothing("b", 0), run.nothing("b", 1)
    assert run.core.phase == "closing"
    assert of(RunEnded, run.wait(0.1)) == [RunEnded()]


def test_a_run_restored_while_it_closes_hears_those_it_knew() -> None:
    run = running("a", "b", every=50, budget_tokens=50)
    run.report("a", 6), run.report("b", 6)
    again = run.restored()
    assert again.core.phase == "closing"
    assert of(RunEnded, again.join("a", step=7, tokens=70, held=(0,))) == []
    assert ("b", 0, 7) in asked(again.join("b", step=7, tokens=70, held=(0,)))
    again.give("a")
    [merge] = of(Merge, again.give("b"))
    assert [share.learner for share in merge.shares] == ["a", "b"]


def test_a_closing_run_ends_when_all_fall_silent() -> None:
    run = running("a", "b", fragments=2, every=50, budget_tokens=50, quorum=0, wait=True)
    run.report("a", 6)
    assert of(RunEnded, run.wait(SILENCE_S)) == [RunEnded()]


def test_a_run_can_be_closed_before_it_has_begun() -> None:
    run = Run(start_with=3)
    run.enter("a")
    actions = run.send(CloseRequested())
    assert of(Goodbye, actions) == [Goodbye("a", "the run is over")] and of(RunEnded, actions) == [RunEnded()]


def test_closing_is_asked_for_once() -> None:
    run = running("a", every=50)
    run.report("a", 2)
    first, second = run.send(CloseRequested()), run.send(CloseRequested())
    assert len(of(StopTraining, first)) == 1 and of(StopTraining, second) == [] and of(Ask, second) == []


def test_who_comes_back_while_the_run_closes_is_told_to_stop_and_strangers_are_turned_away() -> None:
    run = running("a", "b", every=50, quorum=0, wait=True, budget_tokens=50)
    run.send(StreamEnded("b", "first"))
    run.report("a", 6)
    actions = run.join("b", step=5, tokens=10, held=(0,))
    assert of(StopTraining, actions) == [StopTraining("b")] and asked(actions) == {("b", 0, run.core.step + 1)}
    assert of(Goodbye, run.join("stranger")) == [Goodbye("stranger", "the run is over")]
    run.give("a")
    run.give("b")
    assert of(RunEnded, run.store()) == [RunEnded()]


def test_after_the_end_everyone_is_turned_away() -> None:
    run = running("a")
    run.send(CloseRequested())
    run.nothing("a")
    assert run.core.phase == "ended"
    for session, held in (("first", (0,)), ("second", ())):
        assert of(Goodbye, run.join("a", session, held=held)) == [Goodbye("a", "the run is over")]
    assert run.restored().core.phase == "ended"


# ---------------------------------------------------------------- leaving


def test_a_leaving_learner_is_asked_for_everything_and_then_let_go() -> None:
    run = running("a", "b", fragments=2, every=50, quorum=1, grace=0.0)
    run.report("a", 5), run.report("b", 5)
    actions = run.send(LeaveRequested("a"))
    assert asked(actions) == {(name, fragment, 5) for name in "ab" for fragment in (0, 1)}
    for fragment in (0, 1):
        assert of(Merge, run.give("b", fragment)) == [], "one contribution would do, but this is the other one's last chance"
        [merge] = of(Merge, run.give("a", fragment))
        assert [share.learner for share in merge.shares] == ["a", "b"]
    assert of(Goodbye, run.store(0)) == []
    last = run.store(1)
    assert of(Goodbye, last) == [Goodbye("a", "left")]
    assert of(Announce, last)[0].learners == ("a", "b")
    assert run.core.learners["a"].phase == "gone" and run.core.phase == "running"
    assert run.core.tokens == 100, "its tokens stay counted"


def test_a_leaving_learner_is_asked_for_a_fragment_that_is_being_merged_as_soon_as_that_is_over() -> None:
    run = running("a", "b", quorum=1, grace=0.0)
    run.report("a", 4), run.report("b", 4)
    run.give("b")
    assert asked(run.send(LeaveRequested("a"))) == set()
    actions = run.store()
    assert of(Goodbye, actions) == [] and "a" in {name for name, _, _ in asked(actions)}


def test_a_round_that_was_open_already_waits_for_the_leaving_one_but_not_beyond_silence() -> None:
    run = running("a", "b", quorum=1, grace=0.0)
    run.report("a", 4), run.report("b", 4)
    run.send(LeaveRequested("a"))
    actions = run.give("b")
    assert of(Merge, actions) == [] and of(WakeAt, actions) == [WakeAt(SILENCE_S)]
    run.now = 9.0
    run.report("a", 4), run.report("b", 4)
    [merge] = of(Merge, run.wait(1.0))
    assert [share.learner for share in merge.shares] == ["b"]


def test_who_stopped_and_had_nothing_to_give_before_it_said_that_it_leaves_is_not_waited_for_in_that_round() -> None:
    run = running("a", "b", quorum=1, grace=0.0)
    run.report("a", 4), run.report("b", 4)
    run.nothing("a")
    assert asked(run.send(LeaveRequested("a"))) == set(), "it has answered this round"
    assert of(Merge, run.give("b")) != []
    [question] = [ask for ask in of(Ask, run.store()) if ask.learner == "a"]
    run.give("b", round=question.round)
    actions = run.send(NothingToGive("a", 0, question.round))
    assert of(Merge, actions) != []
    assert of(Goodbye, actions) == [Goodbye("a", "left")]


def test_one_that_leaves_and_keeps_moving_bytes_does_not_hold_a_round_for_ever() -> None:
    run = running("a", "b", quorum=1, grace=0.0)
    run.report("a", 4), run.report("b", 4)
    run.send(LeaveRequested("a"))
    run.give("b")
    while run.core.fragments[0].round is not None and run.core.fragments[0].round.merging_since is None:
        run.now += 1.0
        run.core.bytes_moved("a", run.now), run.report("a", 4), run.report("b", 4)
    assert 2 * SILENCE_S < run.now <= LAST_CHANCE * SILENCE_S


def test_saying_twice_that_it_leaves_changes_nothing() -> None:
    """A link says it again after a reconnect."""
    run = running("a", "b", quorum=0, wait=True, overlap=1)
    run.report("a", 2), run.report("b", 2)
    run.send(LeaveRequested("a"))
    before = run.whole_state()
    assert of(Goodbye, run.send(LeaveRequested("a"))) == []
    assert run.whole_state() == before


def test_a_leaving_learner_that_was_cut_off_is_asked_again_when_it_is_back() -> None:
    run = running("a", "b", quorum=1, every=50)
    run.report("a", 2), run.report("b", 2)
    run.send(LeaveRequested("a"))
    run.send(StreamEnded("a", "first"))
    back = run.join("a", step=2, tokens=20, held=(0,))
    assert of(Goodbye, back) == [] and "a" in {name for name, _, _ in asked(back)}


def test_a_leaving_learner_is_not_asked_for_the_turns_of_the_others() -> None:
    """Or with short turns and long ways some round would always have it, and it would never get away."""
    run = running("a", "b", fragments=2, every=4, quorum=1, grace=0.0)
    run.report("a", 4), run.report("b", 4)
    run.send(LeaveRequested("a"))
    run.give("b", 0), run.give("a", 0), run.store(0)
    # One more round takes what it did after that answer; then it is done with the fragment, whatever the others do.
    run.nothing("a", 0), run.give("b", 0), run.store(0)
    asks = asked(run.report("b", 8))
    assert ("b", 0, 8) in asks and ("a", 0, 8) not in asks


def test_leaving_a_run_that_closes_or_has_ended_opens_no_further_rounds() -> None:
    run = running("a", "b", fragments=2, every=50)
    run.report("a", 2), run.report("b", 2)
    run.send(CloseRequested())
    run.give("a", 0), run.give("b", 0), run.store(0)
    assert asked(run.send(LeaveRequested("a"))) == set()
    run.give("a", 1), run.give("b", 1), run.store(1)
    assert run.core.phase == "ended"
    assert asked(run.send(LeaveRequested("b"))) == set()
    assert all(fragment.round is None for fragment in run.core.fragments)


def test_a_leaving_learner_with_nothing_to_give_goes_at_once() -> None:
    run = running("a", fragments=2)
    run.send(LeaveRequested("a"))
    run.nothing("a", 0)
    assert of(Goodbye, run.nothing("a", 1)) == [Goodbye("a", "left")]


def test_one_that_never_began_may_just_go() -> None:
    run = Run(start_with=2)
    run.enter("a")
    assert of(Goodbye, run.send(LeaveRequested("a"))) == [Goodbye("a", "left")]
    run.enter("b")
    assert run.core.phase == "gathering"
    assert of(Goodbye, run.send(LeaveRequested("unknown"))) == [Goodbye("unknown", "left")]


def test_after_all_have_left_a_new_one_takes_the_run_up() -> None:
    run = running("a")
    run.send(LeaveRequested("a")), run.nothing("a")
    assert run.core.learners["a"].phase == "gone"
    [welcome] = of(Welcome, run.join("b"))
    assert welcome.slot == 0
    assert of(Begin, run.send(Ready("b"))) == [Begin("b", 0)]


# ---------------------------------------------------------------- anything in any order


NAMES = ("ann", "bob", "cid", "dan")
PHASES = ("gathering", "running", "closing", "ended")


@dataclasses.dataclass
class Peer:
    """The other end of a learner's stream, keeping the promises the server makes to the core."""

    session: int = 0
    connected: bool = False
    held: tuple[int, ...] = ()
    step: int = 0
    tokens: int = 0
    questions: dict[int, Ask] = dataclasses.field(default_factory=dict)
    answered: dict[int, int] = dataclasses.field(default_factory=dict)
    """Fragment → the round it last answered on this stream. A learner answers a question once."""


class World:
    """A core, its learners, its store and its clock. Every action is checked as it is seen, the whole state after it."""

    def __init__(self, sync: SyncConfig) -> None:
        self.sync = sync
        self.core = SyncerCore(sync, sync.fragments)
        self.now = 0.0
        self.wake: float | None = None
        self.peers = {name: Peer() for name in NAMES}
        self.ordered: dict[int, Merge] = {}
        self.asked: dict[int, set[tuple[int, str]]] = {index: set() for index in range(sync.fragments)}
        self.merged: Counter[tuple[str, int, int, int]] = Counter()
        self.givers: dict[tuple[int, str], tuple[int, int]] = {}
        """Which process gave a contribution, and up to how many of its own steps."""
        self.credit: dict[tuple[str, int, int], int] = {}
        """(learner, process, fragment) → up to how many of its own steps its progress is merged."""
        self.rows: list[dict[str, tuple[str, Counted]]] = [{} for _ in range(sync.fragments)]
        """What is stored of the last contribution of each learner, and for which of its processes."""
        self.standings: dict[int, Standing] = {}
        """Where the run stood when a merge was ordered: that is written together with it."""
        self.last = self._measures()
        self.durable = self._durable()

    # ---- plumbing

    def _measures(self) -> tuple[int, int, int, list[int]]:
        core = self.core
        return core.tokens, core.step, PHASES.index(core.phase), [fragment.version for fragment in core.fragments]

    def _durable(self) -> tuple[Standing, list[FragmentProgress]]:
        stored = [FragmentProgress(f.version, f.merged_round, dict(f.counted)) for f in self.core.fragments]
        return self.core.standing(), stored

    def apply(self, event: Event) -> list[Action]:
        stored = event.fragment if isinstance(event, Stored) else None
        actions = self.core.handle(event, self.now).actions
        for action in actions:
            if isinstance(action, Welcome):
                self.peers[action.learner].connected = True  # a goodbye before this is for the old stream
                self.peers[action.learner].answered.clear()
                slots = [self.core.learners[name].slot for name in self.connected()]
                assert len(set(slots)) == len(slots), "no two live learners have one slot"
            self._see(action)
        wakes = of(WakeAt, actions)
        assert len(wakes) <= 1
        self.wake = wakes[0].at if wakes else None
        assert self.wake is None or self.wake >= self.now
        tokens, step, phase, versions = self._measures()
        assert tokens >= self.last[0], "tokens never decrease"
        assert step >= self.last[1] and phase >= self.last[2]
        for index, (before, after) in enumerate(zip(self.last[3], versions, strict=True)):
            assert after == before + (index == stored), "versions go up one by one, and only when stored"
        self.last = (tokens, step, phase, versions)
        self.check()
        return actions

    def _see(self, action: Action) -> None:
        if isinstance(action, Goodbye):
            self.peers[action.learner].connected = False
            self.peers[action.learner].questions.clear()
        elif isinstance(action, Ask):
            assert self.core.phase != "ended"
            self.asked[action.fragment].add((action.round, action.learner))
            peer = self.peers[action.learner]
            if peer.connected:
                again = peer.answered.get(action.fragment) == action.round
                assert action.anew or not again, "nobody waits for a second answer in one round, unless the first was lost"
                peer.questions[action.fragment] = action
        elif isinstance(action, Announce):
            assert action.version == self.core.fragments[action.fragment].version, "only what is stored is announced"
            for name, at_step in counted(action).items():
                own = self.credit.get((name, self.peers[name].session, action.fragment), 0)
                assert at_step == own, "each hears which of its own steps are part of it"
        elif isinstance(action, Merge):
            assert self.core.phase != "ended" and action.fragment not in self.ordered
            assert action.version == self.core.fragments[action.fragment].version + 1
            assert action.shares and 0 < action.presence <= 1
            for share in action.shares:
                assert (action.round, share.learner) in self.asked[action.fragment], "only those who were asked are merged"
                assert share.weight > 0 and share.base < action.version
            self.ordered[action.fragment] = action
            self.standings[action.fragment] = self.core.standing()

    def check(self) -> None:
        assert all(times == 1 for times in self.merged.values()), "progress from one base is merged at most once"
        merging = {i for i, f in enumerate(self.core.fragments) if f.round and f.round.merging_since is not None}
        assert merging == set(self.ordered), "a merge in flight is one that was ordered"
        if self.core.phase == "ended":
            assert all(fragment.round is None for fragment in self.core.fragments), "an ended run has no open rounds"
        away = {i for i, f in enumerate(self.core.fragments) if f.away_since is not None and f.round}
        assert away <= merging, "what nobody serves has no rounds, but for a merge that was ordered before"
        waited_for = {"training", "leaving"}
        if self.sync.wait or self.core.phase == "closing":
            waited_for.add("away")
        for fragment in self.core.fragments:
            gathering = fragment.round
            if gathering is None or gathering.merging_since is not None or self.now < gathering.not_before:
                continue
            missing = gathering.asked - set(gathering.arrived)
            assert missing, "all have answered, and still the round is open"
            assert {self.core.learners[name].phase for name in missing} <= waited_for, "a round waits for nobody"
            waits = gathering.deadline is None or self.now < gathering.deadline or gathering.needed & missing
            assert waits or not gathering.arrived, "its time is over, and still it is open"
            if gathering.arrived and gathering.needed & missing:
                assert self.now < gathering.opened_at + SILENCE_S, "a last chance does not last for ever"

    def _count(self, order: Merge) -> None:
        for share in order.shares:
            session, at_step = self.givers[order.fragment, share.learner]
            self.merged[share.learner, session, order.fragment, share.base] += 1
            self.credit[share.learner, session, order.fragment] = at_step
            known = self.standings[order.fragment].sessions.get(share.learner)
            if known is not None:
                self.rows[order.fragment][share.learner] = (share.session, Counted(order.version, share.at_step))
        self.asked[order.fragment].clear()

    def connected(self) -> list[str]:
        return [name for name, peer in self.peers.items() if peer.connected]

    def cut_off(self) -> list[str]:
        return [name for name, peer in self.peers.items() if peer.session and not peer.connected]

    def training(self) -> list[str]:
        return [name for name in self.connected() if self.core.learners[name].phase == "training"]

    def questioned(self) -> list[str]:
        return [name for name in self.connected() if self.peers[name].questions]

    # ---- what learners do

    def start(self, name: str) -> None:
        self.peers[name] = Peer(self.peers[name].session + 1)
        self.apply(Hello(name, str(self.peers[name].session), 0, 0, ()))

    def reconnect(self, name: str) -> None:
        peer = self.peers[name]
        self.apply(Hello(name, str(peer.session), peer.step, peer.tokens, peer.held))

    def haunt(self, name: str) -> None:
        """A process whose place was taken, and that has not heard of it, connects again."""
        learner = self.core.learners.get(name)
        if learner is not None and learner.retired:
            session, tokens = learner.session, self.core.tokens
            actions = self.apply(Hello(name, learner.retired[-1], learner.step, 10_000, self.peers[name].held))
            assert of(Welcome, actions) == [] and "refused" in recorded(actions)
            assert (self.core.learners[name].session, self.core.tokens) == (session, tokens)

    def fetch(self, name: str) -> None:
        self.peers[name].held = tuple(fragment.version for fragment in self.core.fragments)
        self.apply(Ready(name))

    def train(self, name: str, steps: int) -> None:
        peer = self.peers[name]
        if steps:
            peer.step = max(peer.step, self.core.learners[name].step) + steps
        peer.tokens += 10 * steps
        self.apply(Reported(name, peer.step, peer.tokens, 0.5))

    def answer(self, name: str, index: int, behind: int = 0) -> None:
        question = self.peers[name].questions.pop(index)
        base = max(self.core.fragments[index].version - behind, 0)
        offer = Contributed(name, index, question.round, base, 2, 20, self.peers[name].step)
        if base < question.min_base:
            assert self.core.why_refused(offer) is not None, "what was not asked for is not taken"
        self.offer(offer)

    def answer_with_nothing(self, name: str, index: int) -> None:
        question = self.peers[name].questions.pop(index)
        self.peers[name].answered[index] = question.round
        self.apply(NothingToGive(name, index, question.round))

    def offer(self, offer: Contributed) -> None:
        refused = self.core.why_refused(offer) is not None
        if not refused:
            self.givers[offer.fragment, offer.learner] = (self.peers[offer.learner].session, offer.at_step)
            self.peers[offer.learner].answered[offer.fragment] = offer.round
        assert ("refused" in recorded(self.apply(offer))) == refused

    def lose_data(self, index: int) -> None:
        """Whoever has the data of a fragment dies. A merge that was ordered may have come through all the same, or not."""
        self.apply(FragmentsAway((index,)))

    def serve_again(self, index: int) -> None:
        self.apply(FragmentsBack((index,)))

    def lose(self, name: str) -> None:
        self.peers[name].connected = False
        self.peers[name].questions.clear()
        self.apply(StreamEnded(name, str(self.peers[name].session)))

    # ---- what the store and the clock do

    def store(self, index: int, works: bool = True) -> None:
        order = self.ordered.pop(index)
        if not works:
            self.apply(StoreFailed(index, "no space"))
            return
        self._count(order)
        self.apply(Stored(index, order.version))
        self.durable = self._durable()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        for _ in range(200):
            if self.wake is None or self.wake > end:
                break
            self.now = max(self.now, self.wake) + 1e-6  # a timer fires a little late
            self.apply(Tick())
        else:
            raise AssertionError("the core keeps asking to be woken without getting anywhere")
        self.now = max(self.now, end)
        self.apply(Tick())

    def crash(self, durable: bool) -> None:
        """The process dies and another takes over. `durable`: a merge in flight was written before, though nobody heard."""
        standing, stored = copy.deepcopy(self.durable)
        if durable and self.ordered:
            index, order = min(self.ordered.items())
            stored[index].version = order.version
            stored[index].merged_round = order.round
            standing = self.standings[index]
            self._count(order)
        for index, fragment in enumerate(stored):
            known = {name: session for name, (session, *_) in standing.sessions.items()}
            rows = self.rows[index].items()
            fragment.counted = {name: counted for name, (session, counted) in rows if known.get(name) == session}
        self.ordered.clear()
        for names in self.asked.values():
            names.clear()
        for peer in self.peers.values():
            peer.connected = False
            peer.questions.clear()
        self.now += 1.0
        self.durable = (standing, copy.deepcopy(stored))
        self.core = SyncerCore(self.sync, len(stored), now=self.now, progress=stored, standing=standing)
        self.last = self._measures()
        self.wake = None
        self.check()

    def left_alone(self) -> None:
        """When nobody says anything any more, every round comes to an end, and so does a run that was closing."""
        for _ in range(3 * self.sync.fragments + LAST_CHANCE):
            self.now += SILENCE_S
            self.apply(Tick())
            for index in list(self.ordered):
                self.store(index)
        assert all(fragment.round is None for fragment in self.core.fragments)
        assert self.core.phase != "closing"


@st.composite
def any_settings(draw: st.DrawFn) -> SyncConfig:
    islands, wait = draw(st.integers(0, 2)), draw(st.booleans())
    return SyncConfig(
        fragments=draw(st.integers(1, 3)),
        every=draw(st.integers(2, 4)),
        overlap=1,
        quorum=0 if wait else draw(st.integers(0, 3)),
        wait=wait,
        staleness=draw(st.integers(0, 2)),
        grace=0.5,
        start_with=draw(st.integers(1, 2)),
        budget_tokens=draw(st.sampled_from([0, 0, 600])),
        silence_s=SILENCE_S,
        begin=BeginConfig(steps=6 if islands else 0, every=2, islands=islands),
    )


class AnyOrder(RuleBasedStateMachine):
    @initialize(sync=any_settings(), present=st.integers(0, len(NAMES)))
    def begin(self, sync: SyncConfig, present: int) -> None:
        self.world = World(sync)
        for name in NAMES[:present]:
            self.world.start(name)
            self.world.fetch(name)

    @rule(name=st.sampled_from(NAMES))
    def a_process_starts(self, name: str) -> None:
        self.world.start(name)

    @precondition(lambda self: self.world.cut_off())
    @rule(data=st.data())
    def one_connects_again(self, data: st.DataObject) -> None:
        self.world.reconnect(data.draw(st.sampled_from(self.world.cut_off())))

    @rule(name=st.sampled_from(NAMES))
    def an_old_process_comes_back(self, name: str) -> None:
        self.world.haunt(name)

    @precondition(lambda self: self.world.connected())
    @rule(data=st.data())
    def one_fetches_everything(self, data: st.DataObject) -> None:
        self.world.fetch(data.draw(st.sampled_from(self.world.connected())))

    @precondition(lambda self: self.world.training())
    @rule(data=st.data(), steps=st.integers(1, 6))
    def one_trains(self, data: st.DataObject, steps: int) -> None:
        self.world.train(data.draw(st.sampled_from(self.world.training())), steps)

    @precondition(lambda self: self.world.questioned())
    @rule(data=st.data(), behind=st.integers(0, 2))
    def one_answers(self, data: st.DataObject, behind: int) -> None:
        name = data.draw(st.sampled_from(self.world.questioned()))
        self.world.answer(name, data.draw(st.sampled_from(sorted(self.world.peers[name].questions))), behind)

    @precondition(lambda self: self.world.questioned())
    @rule(data=st.data())
    def one_has_nothing(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.world.questioned()))
        self.world.answer_with_nothing(name, data.draw(st.sampled_from(sorted(self.world.peers[name].questions))))

    @rule(name=st.sampled_from((*NAMES, "eve")), fragment=st.integers(-1, 4), step=st.integers(0, 12), base=st.integers(-1, 4))
    def anything_is_offered(self, name: str, fragment: int, step: int, base: int) -> None:
        self.world.offer(Contributed(name, fragment, step, base, 1, 10))

    @precondition(lambda self: self.world.connected())
    @rule(data=st.data())
    def one_leaves(self, data: st.DataObject) -> None:
        self.world.apply(LeaveRequested(data.draw(st.sampled_from(self.world.connected()))))

    @precondition(lambda self: self.world.connected())
    @rule(data=st.data())
    def one_is_cut_off(self, data: st.DataObject) -> None:
        self.world.lose(data.draw(st.sampled_from(self.world.connected())))

    @precondition(lambda self: self.world.ordered)
    @rule(data=st.data(), works=st.booleans())
    def a_merge_is_stored(self, data: st.DataObject, works: bool) -> None:
        self.world.store(data.draw(st.sampled_from(sorted(self.world.ordered))), works)

    @rule(data=st.data(), back=st.booleans())
    def data_is_lost_or_there_again(self, data: st.DataObject, back: bool) -> None:
        index = data.draw(st.integers(0, self.world.sync.fragments - 1))
        self.world.serve_again(index) if back else self.world.lose_data(index)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 4.0, SILENCE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def the_run_is_closed(self) -> None:
        self.world.apply(CloseRequested())

    @rule(durable=st.booleans())
    def the_syncer_dies(self, durable: bool) -> None:
        self.world.crash(durable)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.left_alone()


AnyOrder.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
test_whatever_happens_in_whatever_order_the_rules_hold = AnyOrder.TestCase


def some_settings(rng: random.Random) -> SyncConfig:
    islands, wait = rng.choice([0, 0, 2]), rng.random() < 0.4
    return SyncConfig(
        fragments=rng.randint(1, 4), every=rng.randint(2, 5), overlap=1, quorum=0 if wait else rng.randint(0, 3), wait=wait,
        staleness=rng.randint(0, 2), grace=0.5, start_with=rng.randint(1, 3), budget_tokens=rng.choice([0, 500, 1500]),
        silence_s=SILENCE_S, begin=BeginConfig(steps=12 if islands else 0, every=2, islands=islands),
    )  # fmt: skip


@pytest.mark.parametrize("block", range(8))
def test_long_lives_of_runs_keep_the_rules(block: int) -> None:
    """Mostly ordinary work, with faults strewn in: what the search above is too short to reach."""
    ends: Counter[str] = Counter()
    for seed in range(30 * block, 30 * block + 30):
        rng = random.Random(seed)
        world = World(some_settings(rng))
        for name in NAMES:
            world.start(name)
            world.fetch(name)
        for _ in range(1500):
            _live(world, rng)
        ends[world.core.phase] += 1
        ends["merges"] += sum(world.merged.values())
        world.left_alone()
    assert ends["running"] and ends["ended"] and ends["merges"] > 500, "the lives were too short to show anything"


def _live(world: World, rng: random.Random) -> None:
    """One thing happens."""
    kinds = ["train"] * 8 + ["answer"] * 8 + ["store"] * 6 + ["time"] * 3 + ["fetch", "connect"] * 2
    kinds += ["nothing", "offer", "lose", "start", "leave", "crash", "freeze", "haunt", "lose_data"]
    kinds += ["serve_again"] * 2
    kind = rng.choice(kinds)
    if kind in ("lose", "lose_data", "start", "leave", "crash", "freeze") and rng.random() < 0.7:
        return
    if kind == "train" and (names := world.training()):
        world.train(rng.choice(names), rng.randint(1, 3))
    elif kind in ("answer", "nothing") and (names := world.questioned()):
        name = rng.choice(names)
        index = rng.choice(sorted(world.peers[name].questions))
        world.answer(name, index, rng.choice([0, 0, 0, 1, 2])) if kind == "answer" else world.answer_with_nothing(name, index)
    elif kind == "store" and world.ordered:
        world.store(rng.choice(sorted(world.ordered)), rng.random() < 0.8)
    elif kind == "time":
        world.pass_time(rng.choice([0.01, 0.1, 0.1, 1.0, 1.0]))
        for name in world.connected():
            world.train(name, 0)  # a sign of life
    elif kind == "freeze":
        world.pass_time(SILENCE_S + 1)
    elif kind == "fetch" and (names := world.connected()):
        world.fetch(rng.choice(names))
    elif kind == "connect" and (names := world.cut_off()):
        world.reconnect(rng.choice(names))
    elif kind == "offer":
        step, fragment = world.core.step - rng.randint(0, 3), rng.randrange(world.sync.fragments)
        world.offer(Contributed(rng.choice(NAMES), fragment, step, rng.randint(0, 5), 1, 10))
    elif kind == "lose" and (names := world.connected()):
        world.lose(rng.choice(names))
    elif kind == "start":
        world.start(rng.choice(NAMES))
    elif kind == "haunt":
        world.haunt(rng.choice(NAMES))
    elif kind == "lose_data":
        world.lose_data(rng.randrange(world.sync.fragments))
    elif kind == "serve_again":
        world.serve_again(rng.randrange(world.sync.fragments))
    elif kind == "leave" and (names := world.connected()):
        world.apply(LeaveRequested(rng.choice(names)))
    elif kind == "crash":
        world.crash(rng.random() < 0.5)


def test_who_had_nothing_to_give_is_not_waited_for_again_in_the_same_round() -> None:
    run = running("a", "b", quorum=0, wait=True, overlap=0, every=4)
    run.report("a", 3), run.report("b", 3)
    run.send(LeaveRequested("b"))  # round 3
    run.nothing("a")  # it waits for another fragment and has no progress on this one
    run.report("a", 4)  # due again
    gathering = run.core.fragments[0].round
    assert gathering is not None and "a" not in gathering.missing


def test_no_two_rounds_of_a_fragment_have_one_number() -> None:
    run = running("a", "b", "c", quorum=0, wait=True, overlap=0, every=50)
    for name in "abc":
        run.report(name, 5)
    run.send(LeaveRequested("a"))
    first = run.core.fragments[0].round
    assert first is not None
    for name in "abc":
        run.nothing(name)
    run.send(LeaveRequested("b"))
    second = run.core.fragments[0].round
    assert second is not None and second.number != first.number


def test_a_turn_that_falls_into_an_open_round_does_not_get_a_round_of_its_own_too() -> None:
    run = running("a", "b", "c", quorum=2)
    for name in "abc":
        run.report(name, 4)
    run.give("a")
    for name in "abc":
        run.report(name, 8)  # due again: stays in round 4, the others are reminded
    run.give("b")
    if run.core.fragments[0].round and run.core.fragments[0].round.merging_since is None:
        run.give("c")
    assert asked(run.store()) == set()


def test_a_closing_run_ends_though_the_only_one_asked_is_heard_and_never_answers() -> None:
    run = running("a", every=50, budget_tokens=10)
    run.report("a", 2)
    assert run.core.phase == "closing"
    for _ in range(100):
        run.now += 1.0
        run.report("a", 2)
    assert run.core.phase == "ended"


def test_a_slot_is_kept_over_a_restart_of_the_syncer() -> None:
    run = running("a", "b")
    run.send(LeaveRequested("a")), run.nothing("a"), run.nothing("b")
    assert run.core.learners["a"].phase == "gone"
    run.enter("c")
    assert run.core.learners["c"].slot == 0
    run.report("c", 1)
    again: Run = run.restored()
    again.join("c", step=1, tokens=10, held=(0,))
    assert again.core.learners["c"].slot == 0


def test_one_that_comes_back_while_the_last_round_gathers_is_asked_as_well() -> None:
    run = running("a", "b", every=50)
    run.report("a", 6), run.report("b", 6)
    run.send(StreamEnded("b", "first"))
    run.now = SILENCE_S
    run.report("a", 7)
    run.send(CloseRequested())  # the last round asks a alone
    back = run.join("b", step=9, tokens=90, held=(0,))
    assert [(ask.learner, ask.round) for ask in of(Ask, back)] == [("b", 8)]
    assert of(Merge, run.give("a")) == [], "it is waited for like everyone in the last round"


def test_what_a_leaving_island_did_after_an_answer_that_was_under_way_is_asked_for() -> None:
    run = running("a", "b", quorum=1, grace=0.0)
    run.report("a", 4), run.report("b", 4)
    offer = run.offer("a", at_step=4)  # taken at step 4, on its way
    run.report("a", 6)
    run.send(LeaveRequested("a"))
    run.send(offer)
    actions = run.store()
    assert of(Goodbye, actions) == [] and "a" in {ask.learner for ask in of(Ask, actions)}
    [question] = [ask for ask in of(Ask, actions) if ask.learner == "a"]
    last = run.send(NothingToGive("a", 0, question.round))
    assert of(Goodbye, last) == [Goodbye("a", "left")]


def test_a_restored_run_does_not_credit_what_an_old_process_gave_to_the_one_that_took_its_place() -> None:
    run = running("a", "b", quorum=2)
    run.report("a", 4), run.report("b", 4)
    run.give("a", at_step=4)
    [order] = of(Merge, run.give("b", at_step=4))
    run.join("a", "second"), run.send(Ready("a"))  # while the merge is computed
    run.store()
    assert run.core.fragments[0].counted_step("a") == 0
    # The store keeps a count only for the session that gave it.
    assert [share.session for share in order.shares] == ["first", "first"]
    assert run.core.standing().sessions["a"][0] == "second"


def test_a_restored_run_turns_away_one_whose_place_was_taken_though_the_new_one_had_not_begun() -> None:
    run = running("a", "b", quorum=1)
    run.report("a", 4), run.report("b", 4)
    run.give("b", at_step=4), run.store()
    run.join("a", "second")  # it fetches what there is
    again: Run = run.restored()
    assert of(Welcome, again.join("a", "first", step=6, tokens=60, held=(0,))) == []
    [welcome] = of(Welcome, again.join("a", "second"))
    assert not welcome.resumed
    assert again.core.tokens == run.core.tokens


def test_a_round_whose_answers_were_lost_keeps_its_number_whoever_declined_an_earlier_one() -> None:
    run = running("a", quorum=0, wait=True, overlap=0, every=4)
    run.report("a", 4)
    run.nothing("a")
    [asked] = of(Ask, run.report("a", 8))
    assert asked.round == 8
    run.send(FragmentsAway((0,)))
    [again] = of(Ask, run.send(FragmentsBack((0,))))
    assert (again.round, again.anew) == (8, True), "in lock-step it waits at step 8, and could not answer a later round"


def test_a_round_that_is_tried_again_after_a_later_one_was_lost_too_is_asked_for_anew(monkeypatch) -> None:
    """When H grows, the turn that was last due may be an earlier one than before."""
    run = running("a", "b", quorum=2, every=4)
    run.report("a", 4), run.report("b", 4)
    run.give("a", at_step=4)
    run.send(FragmentsAway((0,)))
    run.report("a", 8), run.report("b", 8)
    later = of(Ask, run.send(FragmentsBack((0,))))
    assert {ask.round for ask in later} == {8}
    run.send(FragmentsAway((0,)))
    monkeypatch.setattr(type(run.core.run.schedule), "last_due", lambda schedule, index, step: 4)
    again = of(Ask, run.send(FragmentsBack((0,))))
    assert {(ask.learner, ask.round, ask.anew) for ask in again} == {("a", 4, True), ("b", 4, True)}
