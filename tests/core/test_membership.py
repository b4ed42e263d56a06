"""Learners that go and come back, to the same syncer or to one that was restarted."""

from __future__ import annotations

import json

import pytest
from scripted_syncer import SILENCE_S, asked, back, counted, of, recorded, running, welcomed

from skerry.core.messages import (
    Announce,
    Ask,
    Begin,
    Goodbye,
    LeaveRequested,
    Merge,
    Ready,
    StreamEnded,
    Tick,
    WakeAt,
    Welcome,
)
from skerry.core.standing import Standing
from skerry.core.syncer import RETURN_S

# ---------------------------------------------------------------- coming back to a syncer that was restarted


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
