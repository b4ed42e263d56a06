"""Both sides of the exchange together in virtual time, with messages lost, delayed and repeated."""

from __future__ import annotations

import copy
import dataclasses
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from skerry.clock import VirtualClock
from skerry.config import BeginConfig, SyncConfig
from skerry.core import messages as m
from skerry.core.exchange import Exchange, Give, Question, Version
from skerry.core.standing import Standing
from skerry.core.state import Counted, FragmentProgress
from skerry.core.syncer import SyncerCore

RETRY_S = 0.05
BEAT_S = 1.0


@dataclasses.dataclass
class Island:
    """What the link and the training loop keep around an Exchange, without sockets or tensors."""

    name: str
    session: int
    exchange: Exchange
    stream: int | None = None
    """The connection as the island sees it; it is of use once the syncer has said welcome."""
    welcome: bool = False
    ready_sent: bool = False
    looping: bool = False
    blocked: bool = False
    leaving: bool = False
    over: bool = False


class Sea:
    """A syncer and islands in virtual time, with delays from a seed. Control messages keep their order, transfers do not."""

    def __init__(
        self,
        sync: SyncConfig,
        islands: int,
        seed: int,
        *,
        message_s: float = 0.02,
        transfer_s: float = 0.2,
        step_s: float = 0.1,
        says_leaving: bool = True,
    ) -> None:
        self.sync = sync
        self.says_leaving = says_leaving
        self.random = random.Random(seed)
        self.clock = VirtualClock()
        self.core = SyncerCore(sync, sync.fragments)
        self.message_s, self.transfer_s = message_s, transfer_s
        self.islands = {f"i{n}": Island(f"i{n}", 0, Exchange(sync, sync.fragments)) for n in range(islands)}
        self.step_s = {name: step_s * self.random.uniform(0.5, 2.0) for name in self.islands}
        self.streams: dict[str, int] = {}
        """The connections as the syncer sees them."""
        self.ended = False
        self.store_fails = 0.0
        self.merged: Counter[tuple[str, int, int, int]] = Counter()
        """(island, session, fragment, step) → how often that step is part of the global model."""
        self.adoptions: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in self.islands}
        """For each island (fragment, version, round, own step), in order."""
        self._published = [0] * sync.fragments
        self._offers: dict[tuple[int, str], tuple[int, int, int]] = {}
        self._durable = self._what_is_durable()
        self._life = 0
        self._up_at = 0.0
        self._numbers = itertools.count(1)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._arrivals: dict[tuple[str, str], float] = {}
        self._wake = 0
        for island in self.islands.values():
            self.after(self.random.uniform(0, 0.1), lambda island=island: self.connect(island))
            self._beat(island)

    # ---- time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.clock.now() + seconds, next(self._numbers), act))

    def run(self, until_s: float = 10_000.0) -> Sea:
        while self._queue and not self.ended:
            at, _, act = heapq.heappop(self._queue)
            assert at < until_s, self.describe()
            self.clock.advance(max(0.0, at - self.clock.now()))
            act()
        assert self.ended, self.describe()
        return self

    def describe(self) -> str:
        lines = [f"stuck at {self.clock.now():.1f} s: {self.core.phase}, step {self.core.step}, tokens {self.core.tokens}"]
        for name, island in self.islands.items():
            lines.append(
                f"{name}: {island.exchange.phase} step {island.exchange.step} blocked={island.blocked} "
                f"versions={[h.version for h in island.exchange.held]} waits={[h.waits_for for h in island.exchange.held]} "
                f"questions={[h.question for h in island.exchange.held if h.question]} "
                f"known as {self.core.learners[name].phase if name in self.core.learners else 'nobody'}"
            )
        return "\n".join(lines + [f"round {f.version}: {f.round}" for f in self.core.fragments if f.round])

    def _delay(self, mean_s: float) -> float:
        return mean_s * self.random.choice([0.5, 1.0, 1.0, 1.5, 4.0])

    def _in_order(self, who: str, way: str, act: Callable[[], None]) -> None:
        at = max(self.clock.now() + self._delay(self.message_s), self._arrivals.get((who, way), 0.0))
        self._arrivals[who, way] = at
        self.after(at - self.clock.now(), act)

    def _beat(self, island: Island) -> None:
        self._report(island)
        self.after(BEAT_S, lambda: self._beat(island))

    # ---- the syncer

    def dispatch(self, event: m.Event) -> None:
        for action in self._handle(event):
            self._perform(action)

    def _handle(self, event: m.Event) -> list[m.Action]:
        actions = self.core.handle(event, self.clock.now()).actions
        if any(isinstance(action, m.StopTraining) for action in actions):
            self._durable = self._what_is_durable()  # that the run closes is written down before anybody hears of it
        return actions

    def _perform(self, action: m.Action) -> None:
        if isinstance(action, m.Goodbye):
            self._tell(action.learner, action)
            self.streams.pop(action.learner, None)
        elif isinstance(action, (m.Welcome, m.Begin, m.Ask, m.StopTraining)):
            self._tell(action.learner, action)
        elif isinstance(action, m.Announce):
            for name, counted in zip(action.learners, action.counted, strict=True):
                self._tell(name, Version(action.fragment, action.version, action.round, counted))
        elif isinstance(action, m.Merge):
            units = [(share.learner, self._offers[action.fragment, share.learner]) for share in action.shares]
            life = self._life
            self.after(self._delay(self.message_s), lambda: self._store(action, units, life))
        elif isinstance(action, m.WakeAt):
            self._wake += 1
            wake, life = self._wake, self._life
            # A timer fires a little late.
            late = max(0.0, action.at - self.clock.now()) + 1e-6
            self.after(late, lambda: self.dispatch(m.Tick()) if (wake, life) == (self._wake, self._life) else None)
        elif isinstance(action, m.RunEnded):
            self.ended = True

    def _tell(self, name: str, message: Any) -> None:
        stream = self.streams.get(name)
        if stream is not None:
            island = self.islands[name]
            self._in_order(name, "out", lambda: self._hear(island, message) if island.stream == stream else None)

    def _store(self, order: m.Merge, units: list[tuple[str, tuple[int, int, int]]], life: int) -> None:
        if life != self._life:
            return
        if self.random.random() < self.store_fails:
            self.dispatch(m.StoreFailed(order.fragment, "no space"))
            return
        self._count(order, units)
        self._published[order.fragment] = order.version
        self._durable = self._what_is_durable(order)
        self.dispatch(m.Stored(order.fragment, order.version))

    def _count(self, order: m.Merge, units: list[tuple[str, tuple[int, int, int]]]) -> None:
        for name, (session, first, last) in units:
            for step in range(first + 1, last + 1):
                self.merged[name, session, order.fragment, step] += 1

    def _what_is_durable(self, order: m.Merge | None = None) -> tuple[Standing, list[FragmentProgress]]:
        stored = [FragmentProgress(f.version, f.merged_round, dict(f.counted)) for f in self.core.fragments]
        if order is not None:
            one = stored[order.fragment]
            one.version, one.merged_round = order.version, order.round
            one.counted.update({share.learner: Counted(order.version, share.at_step) for share in order.shares})
        return self.core.standing(), stored

    def crash(self, away_s: float = 0.5) -> None:
        """The syncer dies; another one takes over from what is durable."""
        self._life += 1
        self._up_at = self.clock.now() + away_s
        self.streams.clear()
        self._offers.clear()
        standing, stored = copy.deepcopy(self._durable)
        for island in self.islands.values():
            if island.stream is not None:
                self._lose(island, away_s)
        self.core = SyncerCore(self.sync, len(stored), now=self._up_at, progress=stored, standing=standing)

    # ---- connections

    def connect(self, island: Island) -> None:
        if island.over or island.stream is not None or self.islands[island.name] is not island:
            return
        if self.clock.now() < self._up_at:
            self.after(0.2, lambda: self.connect(island))
            return
        island.stream, island.welcome = next(self._numbers), False
        stream = island.stream
        exchange = island.exchange
        joined = m.Hello(island.name, str(island.session), exchange.step, exchange.totals.tokens, exchange.versions)

        def accept() -> None:
            if island.stream != stream:
                return
            for action in self._handle(joined):
                if isinstance(action, m.Welcome):
                    self.streams[island.name] = stream
                self._perform(action)
            if self.streams.get(island.name) != stream:
                island.over = True  # turned away

        self._in_order(island.name, "in", accept)

    def cut(self, name: str, away_s: float) -> None:
        """The connection breaks; both ends notice, and the island comes back after a while."""
        island = self.islands[name]
        stream = island.stream
        if stream is None:
            return
        self._lose(island, away_s)

        def noticed() -> None:
            if self.streams.get(name) == stream:
                del self.streams[name]
                self.dispatch(m.StreamEnded(name, str(island.session)))

        self.after(self._delay(self.message_s), noticed)

    def _lose(self, island: Island, away_s: float = 0.6) -> None:
        island.stream = None
        self.after(away_s * self.random.uniform(1.0, 1.2), lambda: self.connect(island))

    def restart(self, name: str) -> None:
        """The island's process dies and another one starts under its name; what was not given is lost."""
        old = self.islands[name]
        self.cut(name, 1e9)
        old.over = True
        old.looping = False
        new = self.islands[name] = Island(name, old.session + 1, Exchange(self.sync, self.sync.fragments))
        self.after(0.3, lambda: self.connect(new))
        self._beat(new)

    # ---- the island

    def _hear(self, island: Island, message: Any) -> None:
        exchange = island.exchange
        if isinstance(message, m.Welcome):
            island.welcome = True
            if not message.resumed and exchange.versions:
                exchange.start_over()
            island.ready_sent = message.resumed
            exchange.welcomed(message.versions, message.merged_rounds, message.counted, message.step)
            if island.leaving:
                self._send(island, m.LeaveRequested(island.name))
        elif isinstance(message, m.Begin):
            exchange.begin(message.step)
            if exchange.phase == "training" and not island.looping:
                island.looping = True
                self._next_step(island)
        elif isinstance(message, m.Ask):
            exchange.asked(Question(message.fragment, message.round, message.min_base))
        elif isinstance(message, Version):
            exchange.announced(message)
        elif isinstance(message, m.StopTraining):
            island.leaving = island.leaving or not self.says_leaving
            self.leave(island.name)
        elif isinstance(message, m.Goodbye):
            island.stream = None
            if message.final:
                exchange.stop()
                island.over = True
            else:
                self.after(0.3, lambda: self.connect(island))
        self._pump(island)

    def leave(self, name: str) -> None:
        """The loop ends between two steps, then the island hands over what is left."""
        island = self.islands[name]
        island.exchange.stop()
        island.looping = island.blocked = False
        if not island.leaving:
            island.leaving = True
            self._send(island, m.LeaveRequested(name))
        self._pump(island)

    def _send(self, island: Island, event: m.Event) -> None:
        stream = island.stream
        if stream is not None:
            deliver = lambda: self.dispatch(event) if self.streams.get(island.name) == stream else None  # noqa: E731
            self._in_order(island.name, "in", deliver)

    def _report(self, island: Island) -> None:
        exchange = island.exchange
        self._send(island, m.Reported(island.name, exchange.step, exchange.totals.tokens, self.step_s[island.name]))

    def _next_step(self, island: Island) -> None:
        self.after(self.step_s[island.name] * self.random.uniform(0.9, 1.1), lambda: self._step_done(island))

    def _step_done(self, island: Island) -> None:
        if not island.looping:
            return
        island.exchange.stepped(10)
        self._adopt(island)
        self._report(island)
        self._pump(island)
        island.blocked = island.exchange.must_wait()
        if not island.blocked:
            self._next_step(island)

    def _adopt(self, island: Island) -> None:
        exchange = island.exchange
        for new in exchange.adoptable():
            exchange.adopted(new)
            self.adoptions[island.name].append((new.fragment, new.version, new.round, exchange.step))

    def _pump(self, island: Island) -> None:
        """Everything that can be done now; between steps only where the training thread would be idle."""
        exchange = island.exchange
        if island.blocked or not island.looping:
            self._adopt(island)
            if island.blocked and not exchange.must_wait():
                island.blocked = False
                self._next_step(island)
        if island.stream is None or not island.welcome:
            return
        for wanted in exchange.to_fetch():
            self._fetch(island, wanted)
        if exchange.versions and not island.ready_sent:
            island.ready_sent = True
            self._send(island, m.Ready(island.name))
        for answer in exchange.answers():
            if isinstance(answer, Give):
                exchange.given(answer)
                self._upload(island, answer)
            else:
                self._send(island, m.NothingToGive(island.name, answer.question.fragment, answer.question.round))

    def _fetch(self, island: Island, wanted: Version) -> None:
        stream = island.stream

        def requested() -> None:
            there = self.streams.get(island.name) == stream and self._published[wanted.fragment] == wanted.version
            self.after(self._delay(self.transfer_s), lambda: done(there))

        def done(there: bool) -> None:
            if there and island.stream == stream:
                island.exchange.fetched(wanted)
                self._pump(island)
            else:
                self.after(RETRY_S, failed)

        def failed() -> None:
            island.exchange.fetch_failed(wanted)
            self._pump(island)

        self.after(self._delay(self.message_s), requested)

    def _upload(self, island: Island, answer: Give) -> None:
        stream, asked = island.stream, answer.question
        units = (island.session, answer.at.steps - answer.steps, answer.at.steps)
        offer = m.Contributed(
            island.name, asked.fragment, asked.round, answer.base, answer.steps, answer.tokens, answer.at.steps
        )

        def arrived() -> None:
            if self.streams.get(island.name) == stream and self.core.why_refused(offer) is None:
                self._offers[asked.fragment, island.name] = units
                self.dispatch(offer)

        self.after(self._delay(self.transfer_s), arrived)

    # ---- what came of it

    def repeated(self) -> list[tuple[str, int, int, int]]:
        return [unit for unit, times in self.merged.items() if times > 1]

    def lost(self) -> list[tuple[str, int, int, int]]:
        return [
            unit
            for name, island in self.islands.items()
            for fragment in range(self.sync.fragments)
            for step in range(1, island.exchange.totals.steps + 1)
            if not self.merged[unit := (name, island.session, fragment, step)]
        ]


def job(**settings: Any) -> SyncConfig:
    chosen: dict[str, Any] = {"fragments": 3, "every": 6, "overlap": 2, "start_with": 3, "budget_tokens": 1500}
    return SyncConfig(**{**chosen, **settings})


SEEDS = range(12)


@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
@pytest.mark.parametrize("overlap, every, fragments", [(0, 6, 3), (2, 6, 3), (5, 6, 2), (0, 1, 1), (1, 4, 6)])
def test_in_lock_step_every_island_adopts_the_same_versions_at_the_same_steps(
    overlap: int, every: int, fragments: int, adopt: str
) -> None:
    for seed in SEEDS:
        sync = job(wait=True, quorum=0, overlap=overlap, every=every, fragments=fragments, adopt=adopt)
        sea = Sea(sync, 3, seed).run()
        histories = []
        for adoptions in sea.adoptions.values():
            # The first versions come with the welcome, the last ones after the stop; all between have their step.
            while_training = [one for one in adoptions if one[1] > 0 and one[2] <= sea.core.step - every]
            assert all(own_step == step + overlap for _, _, step, own_step in while_training)
            histories.append(sorted(while_training))
        assert len(histories[0]) >= (sea.core.step // every - 2) * fragments > 0
        assert histories == [histories[0]] * len(histories)
        assert sea.repeated() == []


@pytest.mark.parametrize("overlap", [0, 2])
def test_in_lock_step_with_carrying_every_step_reaches_the_model_exactly_once(overlap: int) -> None:
    for seed in SEEDS:
        sea = Sea(job(wait=True, quorum=0, overlap=overlap, adopt="carry"), 3, seed).run()
        assert sea.repeated() == [] and sea.lost() == []


@pytest.mark.parametrize("quorum, staleness", [(0, 1), (1, 0), (1, 1), (1, 3), (2, 1)])
def test_without_faults_carrying_brings_every_step_into_the_model_exactly_once(quorum: int, staleness: int) -> None:
    for seed in SEEDS:
        sea = Sea(job(quorum=quorum, staleness=staleness, adopt="carry"), 4, seed).run()
        assert sea.repeated() == [] and sea.lost() == []


def test_uploads_slower_than_turns_are_not_merged_twice_nor_lost() -> None:
    for seed in SEEDS:
        sea = Sea(job(quorum=1, every=3, adopt="carry"), 4, seed, transfer_s=1.0).run()
        assert sea.repeated() == [] and sea.lost() == []


@pytest.mark.parametrize("quorum", [0, 1, 2])
def test_carrying_never_merges_a_step_twice_whatever_breaks(quorum: int) -> None:
    for seed in SEEDS:
        sea = Sea(job(quorum=quorum, adopt="carry", budget_tokens=2500, silence_s=3.0), 4, seed)
        sea.store_fails = 0.2
        strew(sea, cuts=12, restarts=2, crashes=2)
        assert sea.run().repeated() == []


@pytest.mark.parametrize("quorum", [0, 1, 2])
def test_overwriting_never_merges_a_step_twice(quorum: int) -> None:
    for seed in SEEDS:
        sea = Sea(job(quorum=quorum), 4, seed, transfer_s=0.4).run()
        assert sea.repeated() == []
        assert sum(sea.merged.values()) > 0


@pytest.mark.parametrize("quorum", [0, 1, 2])
def test_overwriting_never_merges_a_step_twice_whatever_breaks(quorum: int) -> None:
    for seed in SEEDS:
        sea = Sea(job(quorum=quorum, budget_tokens=2500, silence_s=3.0), 4, seed)
        sea.store_fails = 0.2
        strew(sea, cuts=12, restarts=2, crashes=2)
        sea.run()
        assert sea.repeated() == []
        assert sea.core.tokens >= 2500


@pytest.mark.parametrize("settings", [{"quorum": 0}, {"quorum": 1}, {"quorum": 2, "staleness": 3}, {"wait": True, "quorum": 0}])
def test_carrying_loses_nothing_of_what_was_done_while_connections_broke_and_the_syncer_died(settings: dict[str, Any]) -> None:
    for seed in SEEDS:
        sea = Sea(job(adopt="carry", budget_tokens=2500, **settings), 3, seed)
        sea.store_fails = 0.2
        for _ in range(6):
            away_s = sea.random.choice([0.1, 0.5, 2.0])
            cut = lambda sea=sea, away_s=away_s: sea.cut(sea.random.choice(sorted(sea.islands)), away_s)  # noqa: E731
            sea.after(sea.random.uniform(0.5, 4.0), cut)
        sea.after(sea.random.uniform(0.5, 4.0), sea.crash)
        sea.run()
        assert sea.repeated() == [] and sea.lost() == []


def strew(sea: Sea, cuts: int, restarts: int, crashes: int, over_s: float = 12.0) -> None:
    """Faults at random times; islands stay away for less or for more than counts as silence."""
    for _ in range(cuts):
        away_s = sea.random.choice([0.1, 0.5, sea.sync.silence_s + 1])
        sea.after(
            sea.random.uniform(0.5, over_s), lambda away_s=away_s: sea.cut(sea.random.choice(sorted(sea.islands)), away_s)
        )
    for _ in range(restarts):
        sea.after(sea.random.uniform(0.5, over_s), lambda: sea.restart(sea.random.choice(sorted(sea.islands))))
    for _ in range(crashes):
        sea.after(sea.random.uniform(0.5, over_s), sea.crash)


def test_islands_of_different_speed_all_take_part_without_waiting() -> None:
    for seed in SEEDS:
        sea = Sea(job(quorum=1, budget_tokens=3000), 3, seed).run()
        contributed = Counter(name for name, _, _, _ in sea.merged)
        assert set(contributed) == set(sea.islands)
        for name, island in sea.islands.items():
            spent = island.exchange.totals.steps * sea.step_s[name]
            assert spent == pytest.approx(sea.clock.now(), rel=0.25), "its time went into steps"


def test_a_run_goes_on_when_one_island_leaves() -> None:
    for seed in SEEDS:
        sea = Sea(job(quorum=1, every=12), 3, seed)
        sea.after(2.0, lambda sea=sea: sea.leave("i1"))
        sea.run()
        assert sea.repeated() == []
        assert sea.islands["i1"].over
        assert sea.islands["i0"].exchange.step > sea.islands["i1"].exchange.step or sea.step_s["i0"] > sea.step_s["i1"]


def test_the_beginning_of_a_run_with_growing_turns_ends_like_any_other() -> None:
    begin = BeginConfig(steps=30, every=1, islands=2)
    for seed in SEEDS:
        sea = Sea(job(quorum=1, every=8, begin=begin), 3, seed).run()
        assert sea.repeated() == []
        assert sea.core.tokens >= 1500


@pytest.mark.parametrize("islands", [0, 2])
def test_in_lock_step_turns_may_grow_and_islands_come_late(islands: int) -> None:
    for seed in SEEDS:
        begin = BeginConfig(steps=30, every=1, islands=islands)
        sea = Sea(job(quorum=0, wait=True, every=8, begin=begin), 3, seed).run()
        assert sea.repeated() == []
        assert all(island.exchange.totals.steps for island in sea.islands.values())


def lock_step_sea(seed: int, islands: int = 3, **settings: Any) -> Sea:
    return Sea(job(wait=True, quorum=0, silence_s=3.0, **settings), islands, seed)


def test_lock_step_survives_short_losses_of_a_connection() -> None:
    for seed in SEEDS:
        sea = lock_step_sea(seed)
        for at in (1.5, 2.5, 3.5, 4.5, 5.5):
            sea.after(at, lambda sea=sea: sea.cut("i1", 0.3))
        assert sea.run().repeated() == []


def test_lock_step_survives_an_outage_longer_than_silence() -> None:
    for seed in SEEDS:
        sea = lock_step_sea(seed)
        for name in sea.islands:
            sea.after(3.0, lambda sea=sea, name=name: sea.cut(name, 5.0))
        assert sea.run().repeated() == []


def test_lock_step_goes_on_without_one_that_is_gone_and_takes_it_back() -> None:
    for seed in SEEDS:
        sea = lock_step_sea(seed, budget_tokens=3000)
        sea.after(3.0, lambda sea=sea: sea.cut("i1", 8.0))
        assert sea.run().repeated() == []
        merged = [step for name, _, _, step in sea.merged if name == "i1"]
        assert max(merged) == sea.islands["i1"].exchange.totals.steps, "what it did after its return counts"


def test_lock_step_goes_on_when_one_leaves() -> None:
    for seed in SEEDS:
        sea = lock_step_sea(seed)
        sea.after(3.0, lambda sea=sea: sea.leave("i1"))
        sea.run()
        assert sea.islands["i1"].over and sea.core.tokens >= 1500


@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
def test_lock_step_survives_everything_together(adopt: str) -> None:
    for seed in SEEDS:
        sea = lock_step_sea(seed, 4, budget_tokens=2500, adopt=adopt)
        sea.store_fails = 0.1
        strew(sea, cuts=8, restarts=2, crashes=2)
        sea.after(4.0, lambda sea=sea: sea.leave("i2"))
        assert sea.run().repeated() == []


def test_a_run_starts_though_connections_break_while_it_gathers() -> None:
    for seed in range(40):
        sea = Sea(job(quorum=1, budget_tokens=300), 3, seed, message_s=0.1)
        for name in sea.islands:
            sea.after(sea.random.uniform(0.3, 2.0), lambda sea=sea, name=name: sea.cut(name, 0.3))
        sea.run()


def test_an_island_gets_away_though_turns_are_shorter_than_its_ways() -> None:
    for seed in range(4):
        sea = Sea(job(quorum=1, fragments=8, every=8, budget_tokens=8000), 3, seed, message_s=0.1, transfer_s=0.1)
        sea.step_s.update(i0=0.02, i1=0.02, i2=0.02)
        sea.after(2.0, lambda sea=sea: sea.leave("i2"))
        sea.run()
        assert sea.islands["i2"].over


def test_lock_step_goes_on_when_two_leave_one_after_the_other() -> None:
    stuck = []
    for seed in (12, 24, 38, 49, 59):
        sea = Sea(job(wait=True, quorum=0, overlap=seed % 3, fragments=6, every=6, budget_tokens=2500), 4, seed)
        sea.after(3.0, lambda sea=sea: sea.leave("i1"))
        sea.after(3.0 + 0.1 * (seed % 5), lambda sea=sea: sea.leave("i2"))
        try:
            sea.run(400.0)
        except AssertionError as error:
            stuck.append(f"{seed}: {error}"[:900])
    assert stuck == []


def test_carrying_loses_nothing_of_one_that_leaves() -> None:
    lost = {}
    for seed in range(12):
        sea = Sea(job(quorum=1, adopt="carry", budget_tokens=2500), 3, seed, transfer_s=0.4)
        sea.after(3.0, lambda sea=sea: sea.leave("i1"))
        if found := [unit for unit in sea.run().lost() if unit[0] == "i1"]:
            lost[seed] = found[:3]
    assert lost == {}
