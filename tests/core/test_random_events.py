"""Random events in any order, against what must always hold."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scripted_syncer import SILENCE_S, Run, asked, counted, of, recorded, running

from skerry.config import BeginConfig, SyncConfig
from skerry.core.messages import (
    Action,
    Announce,
    Ask,
    CloseRequested,
    Contributed,
    Event,
    FragmentsAway,
    FragmentsBack,
    Goodbye,
    Hello,
    LeaveRequested,
    Merge,
    NothingToGive,
    Ready,
    Reported,
    Stored,
    StoreFailed,
    StreamEnded,
    Tick,
    WakeAt,
    Welcome,
)
from skerry.core.rounds import LAST_CHANCE
from skerry.core.standing import Standing
from skerry.core.state import Counted, FragmentProgress
from skerry.core.syncer import SyncerCore

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
