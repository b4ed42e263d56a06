"""Unhealthy contributions, quarantine, and going back to a good copy."""

from __future__ import annotations

import math
from typing import Any

import pytest
from scripted_syncer import Run, of, running

from skerry.core.messages import (
    LEFT,
    Action,
    Caution,
    CloseRequested,
    FragmentsAway,
    FragmentsBack,
    Goodbye,
    GoodCopyKept,
    Hello,
    KeepGood,
    LeaveRequested,
    Merge,
    Reported,
    Restore,
    StoreFailed,
    Tick,
    WakeAt,
    Welcome,
)
from skerry.core.rollback import MAX_ROLLBACKS
from skerry.core.rounds import RETRY_STORE_S
from skerry.core.schema import TapeRecord

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


def diverging_while_its_shard_is_away(*, failed_once: bool) -> Run:
    """Fragment 0 is to be rolled back, and the shard that serves it is away."""
    run = healthy_run(places=[0, 1])
    if not failed_once:
        run.send(FragmentsAway((0,)))
    step = 20
    while not run.core.rollback.count:
        for name in "ab":
            run.send(Reported(name, step, 10 * step, 0.1, 9.0))
        step += 1
        assert step < 80
    if failed_once:
        run.send(StoreFailed(0, "no space"))
        run.send(FragmentsAway((0,)))
    run.store(1)
    return run


def test_a_rollback_that_waits_for_a_shard_does_not_keep_the_syncer_awake() -> None:
    run = diverging_while_its_shard_is_away(failed_once=True)
    run.wait(2 * RETRY_STORE_S)
    assert all(wake.at > run.now for wake in of(WakeAt, run.send(Tick())))
    orders = of(Restore, run.send(FragmentsBack((0,))))
    assert [order.fragment for order in orders] == [0], "it is put back once its shard is"


@pytest.mark.parametrize("failed_once", [False, True])
def test_a_run_ends_although_a_fragment_cannot_be_rolled_back(failed_once: bool) -> None:
    run = diverging_while_its_shard_is_away(failed_once=failed_once)
    run.send(CloseRequested())
    records: list[str] = []
    while run.core.phase != "ended":
        actions = run.wait(5.0)
        records += [action.kind for action in actions if isinstance(action, TapeRecord)]
        for index, fragment in enumerate(run.core.fragments):
            if fragment.round is not None and fragment.round.merging_since is not None:
                run.store(index)
            for name in sorted(fragment.round.missing) if fragment.round is not None else []:
                run.nothing(name, index)
        assert run.now < 10_000, "and does not wait for ever"
    assert {"not_restored", "left_out"} <= set(records)
