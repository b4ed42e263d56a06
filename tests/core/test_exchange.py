"""The learner's side of the exchange: what it fetches, gives and adopts, and when it waits."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_exchange import give, question, steps, take, training, version

from skerry.config import SyncConfig
from skerry.core.exchange import Exchange, Give, GiveNothing, Mark

# ---------------------------------------------------------------- joining


def test_a_newcomer_fetches_everything_before_it_can_say_what_it_holds() -> None:
    exchange = Exchange(SyncConfig(fragments=3), 3)
    exchange.welcomed((4, 0, 2), (15, 0, 9), (0, 0, 0), 17)
    wanted = exchange.to_fetch()
    assert [(v.fragment, v.version) for v in wanted] == [(0, 4), (1, 0), (2, 2)]
    assert exchange.to_fetch() == [], "each download starts once"
    for number, one in enumerate(wanted):
        assert exchange.versions == (), number
        assert exchange.fetched(one)
        exchange.adopted(one)
    assert exchange.versions == (4, 0, 2)
    exchange.begin(17)
    assert (exchange.phase, exchange.step, exchange.totals) == ("training", 17, Mark())


def test_beginning_again_after_a_reconnect_changes_nothing() -> None:
    exchange = training(step=5)
    steps(exchange, 3)
    exchange.begin(100)
    assert exchange.step == 8
    exchange.stop()
    exchange.begin(100)
    assert (exchange.phase, exchange.step) == ("stopped", 8)


# ---------------------------------------------------------------- giving


def test_progress_is_counted_from_adoption() -> None:
    exchange = training()
    steps(exchange, 3)
    take(exchange, version(1))
    steps(exchange, 2, tokens=7)
    exchange.asked(question(8))
    answer = give(exchange)
    assert (answer.base, answer.steps, answer.tokens, answer.at) == (1, 2, 14, Mark(5, 44))
    assert not answer.staged


def test_each_fragment_is_counted_from_its_own_adoption() -> None:
    exchange = training(fragments=2)
    steps(exchange, 3)
    take(exchange, version(1, fragment=1))
    steps(exchange, 1)
    exchange.asked(question(8, 0)), exchange.asked(question(8, 1))
    assert [(a.question.fragment, a.base, a.steps) for a in exchange.answers() if isinstance(a, Give)] == [(0, 0, 4), (1, 1, 1)]


def test_a_question_is_answered_once_and_not_before_there_is_progress() -> None:
    exchange = training()
    exchange.asked(question(8))
    assert not exchange.can_answer() and exchange.answers() == []
    steps(exchange, 1)
    assert exchange.can_answer()
    give(exchange)
    assert not exchange.can_answer() and exchange.answers() == []


def test_an_answer_needs_a_base_the_syncer_still_takes() -> None:
    exchange = training()
    steps(exchange, 4)
    exchange.asked(question(8, min_base=1))
    assert exchange.answers() == []
    take(exchange, version(1))
    assert exchange.answers() == [], "there is no progress from the new base yet"
    steps(exchange, 1)
    assert give(exchange).base == 1


def test_a_newer_question_replaces_an_open_one() -> None:
    exchange = training()
    exchange.asked(question(8, min_base=3))
    exchange.asked(question(16))
    steps(exchange, 1)
    assert give(exchange).question.round == 16


def test_an_answer_that_did_not_get_through_is_wanted_until_its_round_is_over() -> None:
    exchange = training()
    steps(exchange, 2)
    exchange.asked(question(8))
    first = give(exchange).question
    assert exchange.still_wanted(first)
    exchange.asked(first)
    assert exchange.still_wanted(first) and exchange.answers() == [], "a reminder"
    exchange.announced(version(1))
    assert not exchange.still_wanted(first)


@pytest.mark.parametrize("what", ["another question is answered", "a new welcome"])
def test_an_answer_that_did_not_get_through_is_not_wanted_any_more_after(what: str) -> None:
    exchange = training()
    steps(exchange, 2)
    exchange.asked(question(8))
    first = give(exchange).question
    if what == "a new welcome":
        exchange.welcomed((0,) * len(exchange.held), (0,) * len(exchange.held), (0,) * len(exchange.held), 0)
    else:
        exchange.asked(question(16))
        give(exchange)
    assert not exchange.still_wanted(first)


def test_a_stopped_learner_gives_what_it_has_and_then_has_nothing() -> None:
    exchange = training()
    steps(exchange, 2)
    exchange.stop()
    exchange.asked(question(3))
    assert give(exchange).steps == 2
    take(exchange, version(1, counted=2))
    exchange.asked(question(4, min_base=1))
    assert exchange.answers() == [GiveNothing(question(4, min_base=1))]
    exchange.asked(question(5, min_base=2))
    assert exchange.answers() == [], "first the version it is asked about must be here"
    take(exchange, version(2))
    assert exchange.answers() == [GiveNothing(question(5, min_base=2))]


def test_without_lock_step_nothing_waits_and_nothing_is_staged() -> None:
    exchange = training(fragments=2, every=2)
    assert steps(exchange, 9) == []
    assert not exchange.must_wait()
    exchange.announced(version(1, step=50)), exchange.to_fetch(), exchange.fetched(version(1, step=50))
    assert exchange.adoptable() == [version(1, step=50)]


# ---------------------------------------------------------------- fetching


def test_only_the_newest_version_is_fetched_and_one_at_a_time() -> None:
    exchange = training()
    exchange.announced(version(1)), exchange.announced(version(2))
    assert exchange.to_fetch() == [version(2)]
    exchange.announced(version(3))
    assert exchange.to_fetch() == [], "the one under way is finished first"
    assert exchange.fetched(version(2))
    assert exchange.to_fetch() == [version(3)]
    assert exchange.adoptable() == [version(2)]
    exchange.adopted(version(2))
    assert exchange.fetched(version(3))
    exchange.adopted(version(3))
    assert exchange.versions == (3,) and exchange.to_fetch() == [] and exchange.adoptable() == []


def test_a_version_overtaken_before_adoption_is_dropped() -> None:
    exchange = training()
    exchange.announced(version(1)), exchange.to_fetch(), exchange.fetched(version(1))
    exchange.announced(version(2)), exchange.to_fetch(), exchange.fetched(version(2))
    assert exchange.adoptable() == [version(2)]
    exchange.adopted(version(2))
    assert not exchange.fetched(version(1)), "late and useless"
    assert exchange.adoptable() == [] and exchange.versions == (2,)


def test_old_news_is_no_news() -> None:
    exchange = training()
    take(exchange, version(2))
    exchange.announced(version(1)), exchange.announced(version(2))
    exchange.welcomed((2,), (4,), (0,), 5)
    assert exchange.to_fetch() == []


def test_a_failed_download_is_started_again_with_what_is_newest_then() -> None:
    exchange = training()
    exchange.announced(version(1)), exchange.to_fetch()
    exchange.fetch_failed(version(1))
    assert exchange.to_fetch() == [version(1)]
    exchange.announced(version(2))
    exchange.fetch_failed(version(1))
    assert exchange.to_fetch() == [version(2)]
    exchange.fetch_failed(version(1))
    assert exchange.to_fetch() == [], "the failure of an old download says nothing about this one"


def test_a_reconnect_voids_questions_and_transfers_and_learns_what_came_out_meanwhile() -> None:
    exchange = training(fragments=2)
    steps(exchange, 2)
    exchange.asked(question(8))
    exchange.announced(version(1)), exchange.to_fetch()
    assert exchange.versions == (0, 0)
    exchange.welcomed((3, 0), (28, 0), (0, 0), 30)
    assert exchange.answers() == []
    assert [(v.fragment, v.version) for v in exchange.to_fetch()] == [(0, 3)]
    assert exchange.step == 2 and exchange.totals.steps == 2
    exchange.asked(question(32, fragment=1))
    assert give(exchange).steps == 2, "progress made while away is still worth giving"


def test_starting_over_forgets_all_versions_and_fetches_them_again() -> None:
    exchange = training(fragments=2, adopt="carry")
    steps(exchange, 4)
    exchange.asked(question(8)), give(exchange)
    exchange.announced(version(5)), exchange.to_fetch(), exchange.fetched(version(5))
    exchange.start_over()
    exchange.welcomed((1, 1), (2, 2), (0, 0), 3)
    assert exchange.versions == () and exchange.adoptable() == []
    for one in exchange.to_fetch():
        assert exchange.fetched(one)
        exchange.adopted(one)
        assert exchange.held[one.fragment].since == exchange.totals, "progress from versions nobody knows does not count"
    assert exchange.versions == (1, 1)
    steps(exchange, 1)
    exchange.asked(question(8, min_base=1))
    assert give(exchange).steps == 1


# ---------------------------------------------------------------- what is kept at adoption


def test_overwriting_drops_what_was_done_after_the_snapshot() -> None:
    exchange = training(adopt="overwrite")
    steps(exchange, 4)
    exchange.asked(question(4)), give(exchange)
    steps(exchange, 2)
    assert take(exchange, version(1, counted=4)) == exchange.totals == Mark(6, 60)


def test_carrying_keeps_what_was_done_after_a_snapshot_that_was_merged() -> None:
    exchange = training(adopt="carry")
    steps(exchange, 4)
    exchange.asked(question(4)), give(exchange)
    steps(exchange, 2)
    assert take(exchange, version(1, counted=4)) == Mark(4, 40)
    exchange.asked(question(8, min_base=1))
    answer = give(exchange)
    assert (answer.base, answer.steps, answer.tokens) == (1, 2, 20)


def test_carrying_keeps_everything_when_the_snapshot_was_not_merged() -> None:
    exchange = training(adopt="carry")
    steps(exchange, 4)
    exchange.asked(question(4)), give(exchange)
    steps(exchange, 2)
    assert take(exchange, version(1, counted=0)) == Mark(0, 0)
    exchange.asked(question(8))
    answer = give(exchange)
    assert (answer.base, answer.steps) == (1, 6)


def test_carrying_knows_a_merge_that_came_in_with_an_overtaken_version() -> None:
    exchange = training(adopt="carry")
    steps(exchange, 4)
    exchange.asked(question(4)), give(exchange)
    steps(exchange, 2)
    exchange.announced(version(1, counted=4))
    exchange.announced(version(2, counted=4))
    [newest] = exchange.to_fetch()
    exchange.fetched(newest)
    exchange.adopted(newest)
    assert exchange.held[0].since == Mark(4, 40)


def test_carrying_knows_a_merge_it_hears_of_on_reconnecting() -> None:
    exchange = training(adopt="carry")
    steps(exchange, 4)
    exchange.asked(question(4)), give(exchange)
    steps(exchange, 2)
    exchange.welcomed((1,), (4,), (4,), 6)
    [newest] = exchange.to_fetch()
    exchange.fetched(newest)
    exchange.adopted(newest)
    assert exchange.held[0].since == Mark(4, 40)


def test_carrying_knows_an_answer_that_was_under_way_when_another_version_was_adopted() -> None:
    exchange = training(adopt="carry")
    steps(exchange, 4)
    exchange.asked(question(8)), give(exchange)
    assert take(exchange, version(1, counted=0)) == Mark(0, 0), "merged from others while our answer was on its way"
    steps(exchange, 1)
    assert take(exchange, version(2, counted=4)) == Mark(4, 40), "this one contains it"
    exchange.asked(question(16, min_base=2))
    assert give(exchange).steps == 1


def test_a_question_asked_again_while_its_answer_is_under_way_is_not_answered_twice() -> None:
    exchange = training(adopt="carry")
    steps(exchange, 4)
    exchange.asked(question(4)), give(exchange)
    steps(exchange, 2)
    exchange.asked(question(4))
    assert exchange.answers() == []
    assert take(exchange, version(1, step=4, counted=4)) == Mark(4, 40)
    exchange.asked(question(8, min_base=1))
    assert give(exchange).steps == 2


def test_after_a_reconnect_a_question_may_be_answered_again() -> None:
    exchange = training()
    steps(exchange, 4)
    exchange.asked(question(4)), give(exchange)
    exchange.welcomed((0,), (0,), (0,), 4)
    exchange.asked(question(4))
    assert give(exchange).steps == 4


def test_a_learner_without_a_snapshot_carries_all_it_has() -> None:
    exchange = training(adopt="carry")
    steps(exchange, 3)
    assert take(exchange, version(1)) == Mark(0, 0)
    assert take(exchange, version(2)) == Mark(0, 0)


# ---------------------------------------------------------------- lock-step


def lock_step(fragments: int = 1, overlap: int = 2, every: int = 8, **settings: Any) -> Exchange:
    return training(fragments, wait=True, quorum=0, overlap=overlap, every=every, **settings)


def test_in_lock_step_a_due_fragment_is_snapshot_at_its_very_step() -> None:
    exchange = lock_step(fragments=4)
    assert steps(exchange, 1) == []
    assert steps(exchange, 1) == [1]
    assert steps(exchange, 2) == [2]
    assert steps(exchange, 4) == [3, 0]


def test_in_lock_step_the_answer_is_what_was_staged_however_late_the_question() -> None:
    exchange = lock_step()
    steps(exchange, 9)
    exchange.asked(question(8))
    answer = give(exchange)
    assert answer.staged and (answer.steps, answer.tokens, answer.at) == (8, 80, Mark(8, 80))


def test_in_lock_step_a_question_about_a_step_not_reached_yet_waits() -> None:
    exchange = lock_step()
    steps(exchange, 7)
    exchange.asked(question(8))
    assert exchange.answers() == []
    steps(exchange, 1)
    assert give(exchange).staged


@pytest.mark.parametrize("overlap", [0, 1, 2, 7])
def test_in_lock_step_a_version_is_adopted_at_its_step_and_training_does_not_pass_it(overlap: int) -> None:
    exchange = lock_step(overlap=overlap)
    steps(exchange, 8)
    new = version(1, step=8, counted=8)
    exchange.announced(new), exchange.to_fetch(), exchange.fetched(new)
    for _ in range(overlap):
        assert exchange.adoptable() == [] and not exchange.must_wait()
        steps(exchange, 1)
    assert exchange.must_wait() and exchange.adoptable() == [new]
    exchange.adopted(new)
    assert not exchange.must_wait() and exchange.adoptable() == []


def test_in_lock_step_the_wait_is_for_the_merge_that_is_due_and_no_older_one() -> None:
    exchange = lock_step(overlap=0)
    steps(exchange, 8)
    old = version(1, step=0)
    exchange.announced(old), exchange.to_fetch(), exchange.fetched(old)
    exchange.adopted(old)
    assert exchange.must_wait()
    take(exchange, version(2, step=8))
    assert not exchange.must_wait()


def test_in_lock_step_one_missing_fragment_is_enough_to_wait() -> None:
    exchange = lock_step(fragments=2, overlap=0, every=2)
    steps(exchange, 1)
    assert exchange.must_wait()
    take(exchange, version(1, fragment=1, step=1))
    assert not exchange.must_wait()


def test_in_lock_step_carrying_keeps_the_steps_of_the_overlap() -> None:
    exchange = lock_step(overlap=2, adopt="carry")
    steps(exchange, 9)
    exchange.asked(question(8)), give(exchange)
    steps(exchange, 1)
    assert take(exchange, version(1, step=8, counted=8)) == Mark(8, 80)


def test_in_lock_step_a_missed_announcement_is_adopted_where_the_learner_waits() -> None:
    exchange = lock_step(overlap=2)
    steps(exchange, 8)
    exchange.asked(question(8)), give(exchange)
    steps(exchange, 2)
    assert exchange.must_wait()
    exchange.welcomed((1,), (8,), (8,), 9)  # the run's step has moved on
    for one in exchange.to_fetch():
        exchange.fetched(one)
    [missed] = exchange.adoptable()
    exchange.adopted(missed)
    assert not exchange.must_wait()


def test_in_lock_step_one_that_was_given_up_goes_on_where_the_others_are() -> None:
    exchange = lock_step(overlap=2)
    steps(exchange, 10)
    assert exchange.must_wait()
    exchange.welcomed((3,), (24,), (0,), 27)
    for one in exchange.to_fetch():
        exchange.fetched(one)
    [newest] = exchange.adoptable()
    exchange.adopted(newest)
    assert (exchange.step, exchange.must_wait()) == (27, False)
    assert steps(exchange, 5) == [0]


def test_in_lock_step_one_that_waits_and_has_nothing_says_so() -> None:
    """Its round would never end otherwise, and it cannot make any progress before that."""
    exchange = lock_step(overlap=2)
    steps(exchange, 10)
    take(exchange, version(1, step=0))  # the merge of an older round came late and took its progress
    assert exchange.must_wait()
    exchange.asked(question(8))
    assert exchange.answers() == [GiveNothing(question(8))]


def test_in_lock_step_a_turn_that_brought_nothing_ends_the_wait() -> None:
    exchange = lock_step(overlap=0)
    steps(exchange, 8)
    exchange.announced(version(0, step=0))
    assert exchange.must_wait()
    exchange.announced(version(0, step=8))
    assert not exchange.must_wait()


def test_the_last_answer_is_everything_and_not_what_was_staged() -> None:
    exchange = lock_step(overlap=2, adopt="carry")
    steps(exchange, 10)
    exchange.stop()
    exchange.asked(question(8))  # the last round's number may be that of a turn
    answer = give(exchange)
    assert answer.steps == 10 and not answer.staged


def test_a_stopped_learner_neither_waits_nor_stages_and_adopts_at_once() -> None:
    exchange = lock_step(overlap=1)
    steps(exchange, 9)
    assert exchange.must_wait()
    exchange.stop()
    assert not exchange.must_wait()
    exchange.asked(question(10))
    assert isinstance(exchange.answers()[0], Give), "the last round asks for a step nobody reaches"
    new = version(1, step=10)
    exchange.announced(new), exchange.to_fetch(), exchange.fetched(new)
    assert exchange.adoptable() == [new]
    assert steps(exchange, 8) == []
