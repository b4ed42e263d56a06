"""Goodput, uptime, stalls and recoveries, worked out by hand from small records."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.observe.accounting import RunAccount, account_of
from skerry.observe.text import account_lines


def seen(at: float, island: str, steps: int, **more: Any) -> dict[str, Any]:
    record = {"kind": "island", "at": at, "island": island, "state": "training", "session": "one", "steps": steps}
    return {**record, "counted": steps, "step_time_s": 0.1, "stall_s": 0.1, **more}


def happened(at: float, what: str, island: str = "", **more: Any) -> dict[str, Any]:
    return {"kind": "event", "at": at, "what": what, "island": island, **more}


def merge(at: float, *names: str, asked: int = 2) -> dict[str, Any]:
    return {"kind": "merge", "at": at, "contributors": dict.fromkeys(names, 1.0), "asked": asked}


def ended(at: float) -> dict[str, Any]:
    return {"kind": "run", "at": at, "phase": "ended"}


def steady(island: str, start: int, stop: int, first_step: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Ten steps a second, told once a second."""
    return [seen(at, island, first_step + 10 * (at - start), **more) for at in range(start, stop + 1)]


def account(*records: dict[str, Any] | list[dict[str, Any]]) -> RunAccount:
    flat = [r for record in records for r in (record if isinstance(record, list) else [record])]
    return account_of(sorted(flat, key=lambda record: record["at"]))


def test_a_run_without_trouble_is_all_useful() -> None:
    got = account(steady("a", 0, 100), steady("b", 0, 100), ended(100))
    assert (got.goodput, got.goodput_alive, got.uptime) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx(1.0))
    assert got.islands["a"].steps == 1000 and got.longest_pause_s == 1.0


def test_a_killed_island_is_allocated_but_not_alive_until_it_is_back() -> None:
    got = account(
        steady("a", 0, 40), happened(40.5, "killed", "a"), happened(41, "restarted", "a"), happened(59, "joined", "a"),
        merge(61, "a"), steady("a", 60, 100, session="two"), ended(100),
    )  # fmt: skip
    island = got.islands["a"]
    assert island.deaths == 1
    assert island.alive_s == pytest.approx(40.5 + 40)
    assert island.useful_s == pytest.approx(40 + 40)
    assert island.lost_s == pytest.approx(0.5)
    assert got.uptime == pytest.approx(0.805) and got.goodput == pytest.approx(0.8)
    [recovery] = got.recoveries
    assert (recovery.island, recovery.seconds, recovery.joined_after_s) == ("a", 20.5, 18.5)


def test_steps_no_merge_had_taken_die_with_their_process() -> None:
    records = [*steady("a", 0, 9, counted=0), seen(10, "a", 100, counted=70), happened(10, "killed", "a"), ended(20)]
    got = account(records)
    assert got.islands["a"].lost_s == pytest.approx(3.0) and got.islands["a"].useful_s == pytest.approx(7.0)


def test_an_outage_of_the_syncer_costs_nothing_if_the_island_stepped_on() -> None:
    got = account(steady("a", 0, 20), seen(80, "a", 800), steady("a", 81, 100, 810), ended(100))
    assert got.goodput == pytest.approx(1.0) and got.uptime == pytest.approx(1.0)


def test_an_outage_it_waited_through_was_alive_and_useless() -> None:
    stalled = {"stalled_s": 60.0}
    got = account(
        steady("a", 0, 20), seen(80, "a", 200, stall_s=60.0, **stalled), steady("a", 81, 100, 210, **stalled), ended(100)
    )
    assert got.uptime == pytest.approx(1.0) and got.goodput == pytest.approx(0.4)
    assert got.islands["a"].longest_stall_s == 60.0 and got.longest_pause_s == pytest.approx(61.0)


def test_freezing_is_neither_life_nor_a_stall() -> None:
    got = account(
        steady("a", 0, 20), happened(20, "fault", "a", fault="freeze"), seen(21, "a", 200), seen(25, "a", 200),
        happened(30, "healed", "a", fault="freeze"), seen(31, "a", 200), seen(32, "a", 210, stall_s=10.1, stalled_s=9.8),
        steady("a", 33, 50, 220, stalled_s=9.8), merge(33, "a"), ended(50),
    )  # fmt: skip
    island = got.islands["a"]
    assert island.alive_s == pytest.approx(40) and island.useful_s == pytest.approx(40) and island.longest_stall_s == 0.1
    assert [(recovery.what, recovery.seconds) for recovery in got.recoveries] == [("freeze", 13)]


def test_one_that_left_is_not_allocated_any_more() -> None:
    got = account(steady("a", 0, 100), steady("b", 0, 50), seen(50.5, "b", 500, state="left"), ended(100))
    assert got.islands["b"].allocated_s == pytest.approx(50.5) and got.goodput == pytest.approx(1.0)


def test_merges_of_one_are_counted_only_if_more_were_asked() -> None:
    got = account(seen(0, "a", 0), merge(1, "a"), merge(2, "a", "b"), merge(3, "a", asked=1), merge(4, "b", asked=4))
    assert (got.merges, got.merges_alone) == (4, 2)
    assert got.merged_share == pytest.approx((0.5 + 1 + 1 + 0.25) / 4)


def test_records_that_make_no_sense_change_nothing() -> None:
    strange = [{}, {"kind": "island"}, {"at": "now"}, {"at": 1.0, "kind": "merge", "contributors": 3}, {"at": True}]
    odd = [seen(1, "a", "many"), seen(2, "a", 3, session=None), happened(3, 7, "a"), happened(4, "killed", "nobody")]
    got = account_of([*strange, *odd])
    assert not got.islands and got.goodput is None and account_lines(got) == ""


def test_the_words_at_the_end_name_every_island() -> None:
    text = account_lines(account(steady("a", 0, 10), steady("b", 0, 10), merge(3, "a"), ended(10)))
    assert "goodput          100.0% of allocated island time" in text
    assert "merged alone     1 of 1 merges" in text and "  a " in text and "  b " in text
    assert account(steady("a", 0, 10)).to_json()["islands"]["a"]["steps"] == 100
