"""How a run ends and how a learner leaves."""

from __future__ import annotations

from scripted_syncer import SILENCE_S, Run, asked, of, running

from skerry.core.messages import (
    Announce,
    Ask,
    Begin,
    CloseRequested,
    Goodbye,
    LeaveRequested,
    Merge,
    NothingToGive,
    Ready,
    RunEnded,
    StopTraining,
    StreamEnded,
    Tick,
    WakeAt,
    Welcome,
)
from skerry.core.rounds import LAST_CHANCE

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
