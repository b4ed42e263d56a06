"""Data leases: who holds which samples, what becomes of them, and that the ledger would notice if anything were wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.config import SyncConfig
from skerry.core import records
from skerry.core.leases.cursor import LeaseCursor
from skerry.core.leases.ranges import Leases, Need, Pool, Range
from skerry.core.messages import (
    Contributed,
    DataDeclared,
    Hello,
    Lease,
    LeaveRequested,
    Merge,
    NoLease,
    NothingToGive,
    Ready,
    Reported,
    Stored,
    StreamEnded,
    Tick,
    Welcome,
)
from skerry.core.schema import TapeRecord
from skerry.core.share import Share
from skerry.core.syncer import SyncerCore
from skerry.data.shuffle import Shuffle
from skerry.observe.ledger import Auditor

POOL = Pool("", 100)


def need(wanted: int, given: int = 0, taken: int = 0, least: int = 0) -> Need:
    return Need(given, taken, wanted, least or taken)


def holder(leases: Leases, name: str, *, session: str = "s", region: str = "", pools: tuple[Pool, ...] = (POOL,)) -> None:
    assert leases.declare(name, session, region, pools) is None


def ranges(found: tuple[list[tuple[int, Range]], list[tuple[int, Range]]]) -> list[tuple[int, int, int]]:
    return [(position, given.start, given.stop) for position, given in found[0]]


# ---------------------------------------------------------------- who holds what


def test_ranges_follow_each_other_and_what_comes_back_goes_out_first() -> None:
    leases = Leases()
    holder(leases, "a")
    holder(leases, "b")
    assert ranges(leases.give("a", need(20), 2)) == [(0, 0, 20)]
    assert ranges(leases.give("b", need(20), 2)) == [(0, 20, 40)]
    leases.merged("a", "s", 8)
    assert leases.take_back("a") == ("s", 8, [Range("", 8, 12)])
    assert ranges(leases.give("b", need(45, given=20, taken=10), 1)) == [(20, 8, 20), (32, 40, 53)]


def test_a_range_is_given_once_on_a_connection_and_again_on_a_new_one() -> None:
    leases = Leases()
    holder(leases, "a")
    first = ranges(leases.give("a", need(20), 1))
    assert ranges(leases.give("a", need(20), 1)) == [], "its first request may still be on its way"
    leases.connected("a")
    holder(leases, "a")
    assert ranges(leases.give("a", need(20, given=5), 1)) == [(5, 5, 20)]
    leases.connected("a")
    holder(leases, "a")
    assert ranges(leases.give("a", need(20, given=0), 1)) == first


def test_towards_the_end_of_an_epoch_ranges_become_small() -> None:
    """So that all islands end it together: nobody holds more than its share of what is left."""
    leases = Leases()
    holder(leases, "a")
    holder(leases, "b")
    sizes = []
    used = Counter[str]()
    given = Counter[str]()
    while leases.pools[""].given < POOL.size:
        for name in ("a", "b"):
            for _, found in leases.give(name, Need(given[name], used[name], used[name] + 1000, used[name] + 2), 2)[1]:
                sizes.append(found.count)
                given[name] += found.count
            used[name] = given[name]
    assert sizes[0] == 25 and sizes[-1] <= 4 and max(sizes) == 25


def test_data_pinned_to_a_region_goes_to_that_region_alone() -> None:
    leases = Leases({"eu-text": "eu"})
    both = (Pool("eu-text", 50), POOL)
    assert leases.declare("a", "s", "us", both) == "pool 'eu-text' is pinned to region 'eu', and a is in region 'us'"
    assert leases.declare("a", "s", "", both) == "pool 'eu-text' is pinned to region 'eu', and a is in no region"
    assert ranges(leases.give("a", need(20), 1)) == []
    holder(leases, "b", region="eu", pools=both)
    pools = Counter(found.pool for _, found in leases.give("b", need(60), 1)[1])
    assert set(pools) == {"eu-text", ""}


def test_pools_are_read_at_the_same_pace() -> None:
    leases = Leases()
    pools = (Pool("small", 100), Pool("large", 10_000))
    holder(leases, "a", pools=pools)
    for used in range(0, 5000, 200):
        leases.give("a", Need(used, used, used + 200, used + 200), 1)
    small, large = leases.pools["small"], leases.pools["large"]
    assert small.given + large.given == pytest.approx(5000, abs=200)
    assert small.given / 100 == pytest.approx(large.given / 10_000, abs=0.3)


@pytest.mark.parametrize("other", [Pool("", 101), Pool("", 100, fingerprint=7)])
def test_all_readers_of_a_pool_must_read_the_same_data(other: Pool) -> None:
    leases = Leases()
    holder(leases, "a")
    assert "pool '' has 100 samples in this run, b reads" in str(leases.declare("b", "s", "", (other,)))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_whatever_happens_a_number_has_one_holder(seed: int) -> None:
    """Against a list of who holds which number, kept beside it."""
    chance = random.Random(seed)
    leases = Leases()
    held: dict[str, list[int]] = {}
    merged: dict[str, int] = {}
    done: set[int] = set()
    names = ["a", "b", "c"]
    for _ in range(chance.randint(5, 60)):
        name = chance.choice(names)
        if name not in held:
            holder(leases, name, pools=(Pool("", 17),))
            held[name], merged[name] = [], 0
        act = chance.choice(["give", "give", "merge", "end", "reload"])
        if act == "give":
            used = chance.randint(merged[name], len(held[name]))
            wanted = used + chance.randint(0, 9)
            _, fresh = leases.give(name, Need(len(held[name]), used, wanted, used + chance.randint(0, 5)), len(held))
            for position, found in fresh:
                assert position == len(held[name])
                others = {number for other in held.values() for number in other} | done
                numbers = list(range(found.start, found.stop))
                assert not others & set(numbers), "held by another, or used up"
                held[name] += numbers
        elif act == "merge" and held[name]:
            merged[name] = chance.randint(merged[name], len(held[name]))
            leases.merged(name, "s", merged[name])
        elif act == "end":
            _, position, back = leases.take_back(name)
            assert position == merged[name]
            assert [n for r in back for n in range(r.start, r.stop)] == held[name][position:]
            leases.forget(name)
            done |= set(held.pop(name)[:position])
        else:
            again = Leases()
            again.restore(json.loads(json.dumps(leases.to_json())))
            leases = again
            for other in held:
                holder(leases, other, pools=(Pool("", 17),))
        waiting = {n for a, b in leases.pools[""].returned for n in range(a, b)}
        everywhere = [*waiting, *done, *(number for other in held.values() for number in other)]
        assert sorted(everywhere) == list(range(leases.pools[""].given)), "every number is in one place"


# ---------------------------------------------------------------- reading


def test_what_was_taken_counts_as_used_when_its_step_is_done() -> None:
    book = LeaseCursor(3)
    book.granted(0, Range("", 10, 7))
    assert book.take() == [Range("", 10, 3)] and book.take() == [Range("", 13, 3)]
    assert (book.taken, book.used, book.held) == (6, 0, 1)
    assert book.step_done() == 3 and book.used == 3
    book.granted(7, Range("", 90, 4))
    assert book.take() == [Range("", 16, 1), Range("", 90, 2)]


def test_ranges_that_come_again_or_too_early_are_passed_over() -> None:
    book = LeaseCursor()
    book.granted(0, Range("", 0, 5))
    book.granted(0, Range("", 0, 5))
    book.granted(9, Range("", 9, 5))
    assert book.given == 5


def test_when_nothing_is_left_the_last_samples_are_read_again_and_do_not_count() -> None:
    book = LeaseCursor(2)
    assert book.take() == [], "nothing to repeat yet"
    book.granted(0, Range("", 0, 5))
    read = [book.take() for _ in range(4)]
    assert read == [[Range("", 0, 2)], [Range("", 2, 2)], [Range("", 0, 2)], [Range("", 2, 2)]]
    assert [book.step_done() for _ in range(4)] == [2, 2, 0, 0]
    assert (book.used, book.repeats) == (4, 4)
    book.granted(5, Range("", 40, 5))
    assert book.take() == [Range("", 4, 1), Range("", 40, 1)]
    assert book.take() and book.take(), "the rest"
    assert book.take(may_repeat=False) == []


def test_gradients_accumulated_over_batches_are_one_step() -> None:
    book = LeaseCursor(4, batches_per_step=2)
    book.granted(0, Range("", 0, 100))
    for _ in range(6):
        book.take()
    assert book.step_done() == 8 and book.used == 8
    assert book.need(0.0, 60.0).least == 24 + 16 * 8
    book.skip_step()
    assert book.step_done() == 16 and book.used == 24, "what was read and left out counts with the next step"


def test_void_leases_do_not_count_even_if_a_batch_is_being_trained_on() -> None:
    book = LeaseCursor(4)
    book.granted(0, Range("", 0, 10))
    book.take()
    book.void(10)
    assert book.step_done() == 0 and (book.given, book.used, book.held) == (10, 10, 0)
    assert book.take() == [Range("", 0, 4)], "better than to stand still; it does not count"


# ---------------------------------------------------------------- the state machine


class Run:
    """A core with learners that lease data; every record goes to an auditor, as the tape would."""

    def __init__(self, **sync: Any) -> None:
        self.core = SyncerCore(SyncConfig(fragments=1, every=4, grace=0.0, silence_s=5.0, **sync), 1)
        self.now = 0.0
        self.records: list[TapeRecord] = []

    def send(self, event: Any, at: float | None = None) -> list[Any]:
        self.now = at if at is not None else self.now
        actions = self.core.handle(event, self.now).actions
        self.records += [action for action in actions if isinstance(action, TapeRecord)]
        for order in [action for action in actions if isinstance(action, Merge)]:
            self.records.append(merge_of(*order.shares))
            actions += self.send(Stored(order.fragment, order.version))
        return actions

    def start(self, name: str, session: str, wanted: int = 40, **more: Any) -> list[Lease]:
        self.send(Hello(name, session, **more))
        self.send(DataDeclared(name, (POOL,)))
        self.send(Ready(name))
        actions = self.send(Reported(name, 0, 0, 0.1, need=need(wanted, given=more.get("leased", 0))))
        return [action for action in actions if isinstance(action, Lease)]

    def give(self, name: str, step: int, samples: tuple[int, int], tokens: int) -> str | None:
        """A contribution at this step. Says why it was refused, or None."""
        gathering = self.core.fragments[0].round
        assert gathering is not None
        offer = Contributed(name, 0, gathering.number, self.core.fragments[0].version, 4, 40, step,
                            session=self.core.learners[name].session, samples=samples, at_tokens=tokens)  # fmt: skip
        reason = self.core.why_refused(offer)
        self.send(offer)
        return reason

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record.to_json() for record in self.records if record.kind == kind]

    def ledger(self) -> Any:
        auditor = Auditor(1)
        for record in self.records:
            auditor.apply(record)
        for learner in self.core.learners.values():
            auditor.trained(learner.session, learner.name, learner.tokens)
        return auditor.ledger()


def test_a_restarted_island_gives_back_what_is_in_no_merge() -> None:
    run = Run()
    assert [(lease.start, lease.count) for lease in run.start("a", "first")] == [(0, 40)]
    run.send(Reported("a", 4, 40, 0.1))
    assert run.give("a", 4, (0, 16), 40) is None
    assert [(lease.start, lease.count) for lease in run.start("a", "second")] == [(16, 24), (40, 16)]
    (returned,) = run.of("returned")
    assert (returned["session"], returned["position"], returned["ranges"]) == ("first", 16, [["", 16, 24]])
    ledger = run.ledger()
    assert ledger.adds_up and (ledger.leased, ledger.applied, ledger.returned, ledger.open) == (80, 16, 24, 40)
    assert ledger.trained == 40 and ledger.tokens[0].applied == 40


def test_what_has_arrived_and_is_not_merged_yet_is_not_given_back() -> None:
    run = Run(quorum=2, start_with=2)
    run.start("a", "first")
    run.start("b", "other")
    for name in ("a", "b"):
        run.send(Reported(name, 4, 40, 0.1))
    assert run.give("a", 4, (0, 16), 40) is None
    run.start("a", "second")
    (returned,) = run.of("returned")
    assert returned["position"] == 16
    assert run.give("b", 4, (0, 8), 40) is None
    ledger = run.ledger()
    assert ledger.adds_up and ledger.applied == 24, ledger.discrepancies


def test_an_island_that_is_away_keeps_its_leases_until_their_time_is_over() -> None:
    run = Run(lease_s=60.0)
    run.start("a", "first")
    run.send(StreamEnded("a", "first"))
    run.send(Tick(), 50.0)
    assert run.of("lost") and not run.of("returned")
    actions = run.send(Hello("a", "first", 8, 80, (0,), leased=40))
    assert next(action for action in actions if isinstance(action, Welcome)).resumed, "it trained on meanwhile, and that counts"
    run.send(StreamEnded("a", "first"), 51.0)
    run.send(Tick(), 60.0)
    run.send(Tick(), 121.0)
    assert run.of("returned")[0]["position"] == 0
    welcome = next(a for a in run.send(Hello("a", "first", 12, 120, (0,), leased=40)) if isinstance(a, Welcome))
    assert (welcome.resumed, welcome.leased) == (False, 40), "others have its samples now: it starts over"
    run.send(Ready("a"))
    run.send(Reported("a", 16, 160, 0.1))
    assert "are not leased to a" in str(run.give("a", 16, (0, 16), 160))


def test_a_process_whose_leases_are_not_known_is_refused() -> None:
    run = Run()
    assert not [a for a in run.send(Hello("a", "stranger", 8, 80, (0,), leased=10)) if isinstance(a, Welcome)]
    assert run.of("refused") == [{"learner": "a", "reason": "the syncer has no record of its leases"}]


def test_the_place_of_one_that_gave_all_it_had_can_be_taken() -> None:
    run = Run(quorum=2, start_with=2)
    run.start("a", "first")
    run.start("b", "other")
    for name in ("a", "b"):
        run.send(Reported(name, 4, 40, 0.1))
    assert run.give("a", 4, (0, 40), 40) is None
    assert run.start("a", "second"), "it gets leases of its own"
    assert not run.of("returned")


def test_one_that_left_and_did_not_hear_the_goodbye_goes_on_with_its_positions() -> None:
    run = Run()
    run.start("a", "first")
    run.send(Reported("a", 4, 40, 0.1))
    assert run.give("a", 4, (0, 16), 40) is None
    run.send(LeaveRequested("a"))
    run.send(NothingToGive("a", 0, run.core.fragments[0].round.number))
    assert run.of("left") and run.of("returned")[0]["position"] == 16
    welcome = next(a for a in run.send(Hello("a", "first", 4, 40, (1,), leased=40)) if isinstance(a, Welcome))
    assert (welcome.resumed, welcome.leased) == (False, 40)
    run.send(DataDeclared("a", (POOL,)))
    leases = [a for a in run.send(Reported("a", 4, 40, 0.1, need=need(50, given=40, taken=40))) if isinstance(a, Lease)]
    assert leases and leases[0].position == 40
    assert run.ledger().adds_up


def test_a_syncer_that_stood_still_does_not_take_everybodys_leases() -> None:
    run = Run(lease_s=60.0)
    run.start("a", "first")
    run.send(Tick(), 500.0)
    assert run.of("lost") and not run.of("returned")
    run.send(Tick(), 561.0)
    assert run.of("returned")


def test_what_can_never_be_contributed_is_not_remembered() -> None:
    leases = Leases()
    holder(leases, "a")
    holder(leases, "b")
    given = Counter[str]()
    for _ in range(300):
        for name in ("a", "b"):
            found = Need(given[name], given[name], given[name] + 8, given[name] + 8, settled=max(0, given[name] - 20))
            given[name] += sum(fresh.count for _, fresh in leases.give(name, found, 2)[1])
    assert len(leases.holdings["a"].ranges) < 8 and leases.take_back("a")[1] >= given["a"] - 40


def test_a_learner_cannot_ask_for_more_than_it_may_hold() -> None:
    leases = Leases()
    holder(leases, "a")
    leases.give("a", Need(0, 1 << 50, 1 << 52, 1 << 50), 1)
    assert leases.pools[""].given <= 1 << 32


def test_samples_that_were_never_leased_cannot_be_contributed() -> None:
    run = Run()
    run.start("a", "first")
    run.send(Reported("a", 4, 40, 0.1))
    assert "samples 0 to 41 are not leased to a: it was given 0 to 40" in str(run.give("a", 4, (0, 41), 40))


def test_a_read_of_another_regions_data_is_refused_and_recorded() -> None:
    run = Run(pins=("eu-text=eu",))
    run.send(Hello("a", "s", region="us"))
    (answer,) = [action for action in run.send(DataDeclared("a", (Pool("eu-text", 9),))) if isinstance(action, NoLease)]
    assert answer.reason == "pool 'eu-text' is pinned to region 'eu', and a is in region 'us'"
    assert run.of("refused") == [{"learner": "a", "reason": answer.reason}]
    assert not [a for a in run.send(Reported("a", 0, 0, 0.1, need=need(9))) if isinstance(a, Lease)]


# ---------------------------------------------------------------- the ledger


def share(session: str, tokens: int, at_tokens: int, samples: tuple[int, int]) -> Share:
    return Share("a", session, 0, 1, tokens, 1.0, at_tokens=at_tokens, samples=samples)


def merge_of(*shares: Share) -> records.Merged:
    return records.Merged(0, 1, 1, shares, 0.5, 0.5, 1.0)


def entries() -> list[TapeRecord]:
    return [
        records.Joined("a", "s", 0, False, 0),
        records.Leased("a", "s", 0, "", 0, 30),
        merge_of(share("s", 40, 40, (0, 10))),
        merge_of(share("s", 20, 70, (12, 16))),
        records.Returned("a", "s", 20, (("", 20, 10),), "it has left"),
        records.Banked("a", "s", 90),
        records.Joined("a", "t", 0, False, 0),
        records.Leased("a", "t", 0, "", 20, 5),
    ]


def audited(found: list[TapeRecord]) -> Any:
    auditor = Auditor(1)
    for record in found:
        auditor.apply(record)
    return auditor.ledger()


def test_every_sample_and_every_token_ends_somewhere() -> None:
    ledger = audited(entries())
    assert ledger.adds_up
    assert (ledger.leased, ledger.applied, ledger.dropped, ledger.returned, ledger.open) == (35, 14, 6, 10, 5)
    assert (ledger.numbers, ledger.waiting) == ({"": 30}, {"": 5})
    tokens = ledger.tokens[0]
    assert (ledger.trained, tokens.applied, tokens.replaced, tokens.lost, tokens.open) == (90, 60, 10, 20, 0)


def leased(start: int, count: int, position: int = 5, session: str = "t") -> TapeRecord:
    return records.Leased("a", session, position, "", start, count)


def merged(samples: list[int], session: str = "s", tokens: int = 1) -> TapeRecord:
    return merge_of(share(session, tokens, 80, (samples[0], samples[1])))


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (leased(10, 5), "samples 10 to 15 of pool '' were held by process s, expected nobody"),
        (leased(22, 5), "samples 22 to 25 of pool '' were held by process t"),
        (leased(40, 5), "only 30 were ever leased"),
        (leased(25, 2, position=7), "was leased position 7, expected 5"),
        (merged([16, 21]), "returned are also in its own merged contributions"),
        (merged([8, 14]), "are in fragment 0 twice"),
        (merged([0, 31]), "contributed samples up to 31, but was leased 30"),
        (merged([0, 3], session="t"), "trained on 0 tokens, but fragment 0 contains 80"),
        (merged([16, 17], tokens=15), "are in fragment 0 twice"),
        (records.Returned("a", "t", 1, (("", 21, 3),), "it has left"), "returned samples up to 4, but was leased 5"),
    ],
)
def test_what_cannot_be_is_said(entry: TapeRecord, complaint: str) -> None:
    assert any(complaint in what for what in audited([*entries(), entry]).discrepancies)


def test_a_shuffle_shows_every_item_once_in_an_epoch() -> None:
    shuffle = Shuffle(50, seed=3)
    assert sorted(shuffle.indices(0, 50)) == sorted(shuffle.indices(100, 50)) == list(range(50))
    assert shuffle.indices(0, 50) != shuffle.indices(50, 50)
    assert shuffle.indices(40, 20) == shuffle.indices(40, 10) + shuffle.indices(50, 10)


def test_one_that_did_not_hear_that_it_lost_its_leases_is_told_again() -> None:
    run = Run(lease_s=20.0)
    run.start("a", "first")
    run.send(StreamEnded("a", "first"))
    run.send(Tick(), 10.0)
    run.send(Tick(), 31.0)
    assert run.of("returned")
    for _ in range(2):  # the first answer is lost with the connection
        welcome = next(a for a in run.send(Hello("a", "first", 8, 80, (0,), leased=40)) if isinstance(a, Welcome))
        assert (welcome.resumed, welcome.leased) == (False, 40)
        run.send(StreamEnded("a", "first"))
    welcome = next(a for a in run.send(Hello("a", "first", 9, 90, (0,), leased=40, lease_floor=40)) if isinstance(a, Welcome))
    assert welcome.resumed
