"""Rounds: when one opens, how long it waits, when it merges, and what happens if storing fails."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from scripted_syncer import SILENCE_S, Run, asked, counted, of, recorded, running

from skerry.config import BeginConfig
from skerry.core.messages import (
    Action,
    Announce,
    Ask,
    CloseRequested,
    FragmentsAway,
    LeaveRequested,
    Merge,
    NothingToGive,
    StoreFailed,
    StreamEnded,
    Tick,
    WakeAt,
)
from skerry.core.quorum import LONGEST
from skerry.core.rounds import RETRY_STORE_S

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
