"""Who may join a run and when it begins, the run's step, and what is let into a merge."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from scripted_syncer import SILENCE_S, Run, asked, of, recorded, running, welcomed

from skerry.config import BeginConfig
from skerry.core.messages import (
    Ask,
    Begin,
    Contributed,
    Merge,
    Ready,
    StreamEnded,
    Tick,
    Verdict,
    WakeAt,
)
from skerry.core.records import Refused

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
