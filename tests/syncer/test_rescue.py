"""A version that the disk lost is asked of the islands that hold it, and if none has it the fragment goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_runs import GOOD, NEWEST, SESSIONS, a_copy_of, fast_disk, file_of, make_runs, spoil, values_of
from islands import poll, tape, versions

from skerry.core import messages as m
from skerry.core.standing import Standing
from skerry.durable import Disk
from skerry.errors import StoreError
from skerry.syncer import rescue as rescues
from skerry.syncer.rescue import Rescue
from skerry.syncer.storage.recovery import VERSION_STRIDE
from skerry.syncer.storage.run_folder import read_standing
from skerry.syncer.storage.store import RunStore
from skerry.tensors.codecs.codec import raw_bytes
from skerry.wire import skerry_pb2 as pb

LOST = 1
"""The fragment whose newest version is damaged."""
HELD = (NEWEST,) * 3
REFUSED, LATER = pb.State(reason="not held here"), pb.State(reason="others are being served", again=True)

Answer = tuple[pb.State, memoryview]


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Path]]:
    with fast_disk() as place:
        yield make_runs(place)


class Situation:
    """A run with a damaged version, islands as lists of answers, and what became of it."""

    def __init__(self, store: RunStore) -> None:
        self.store, self.tape, self.clock = store, self, self
        self.rescue = Rescue(store, self, self, self.served_again)  # type: ignore[arg-type]
        self.answers: dict[str, list[Answer | asyncio.Future[Answer]]] = {}
        self.asked: list[str] = []
        self.served: list[int] = []
        self.events: list[m.Event] = []
        self.seconds = 0.0
        self.committing = asyncio.Lock()
        self.news = asyncio.Event()
        """Something was asked or served."""

    @property
    def values(self) -> memoryview:
        return raw_bytes(torch.full((self.store.identity.layout.fragments[LOST].numel,), float(NEWEST)))

    def now(self) -> float:
        return self.seconds

    def dispatch(self, event: m.Event) -> None:
        self.events.append(event)

    async def served_again(self, fragment: int) -> None:
        self.served.append(fragment)
        self.news.set()

    async def between_commits(self, work: Callable[..., Any], *arguments: Any) -> Any:
        async with self.committing:  # as the tape does: in a thread, one at a time, while the event loop goes on
            return await asyncio.get_running_loop().run_in_executor(None, lambda: work(*arguments))

    async def ask_held(self, learner: str, fragment: int, version: int, wait_s: float) -> Answer:
        assert (fragment, version) == (LOST, NEWEST)
        self.asked.append(learner)
        self.news.set()
        answer = self.answers[learner].pop(0)
        return await answer if isinstance(answer, asyncio.Future) else answer

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 20)


@pytest.fixture
def play(made: dict[str, Path], monkeypatch) -> Iterator[Callable[[Callable[[Situation], Coroutine[Any, Any, None]]], None]]:
    monkeypatch.setattr(rescues, "RETRY_S", 0.0)
    with a_copy_of(made["closed"]) as folder:
        spoil(file_of(folder, LOST), "in half")
        store = RunStore(folder)

        async def main(script: Callable[[Situation], Coroutine[Any, Any, None]]) -> None:
            situation = Situation(store)
            await script(situation)
            assert asyncio.all_tasks() == {asyncio.current_task()}, "no task is left"

        yield lambda script: asyncio.run(main(script))
        store.close()


def rescued(situation: Situation) -> bool:
    """Under its own number, with the values it had."""
    states, progress, _ = situation.store.load()
    return (float(states[LOST].values[0]), progress[LOST].version, situation.events) == (NEWEST, NEWEST, [])


def fell_back(situation: Situation) -> bool:
    states, progress, _ = situation.store.load()
    return (float(states[LOST].values[0]), progress[LOST].version) == (NEWEST - 1, VERSION_STRIDE) and situation.events == [
        m.FragmentRecovered(LOST, VERSION_STRIDE)
    ]


def test_an_island_that_never_answers_does_not_cost_the_answer_of_another(play) -> None:
    async def script(s: Situation) -> None:
        never: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        s.answers = {"mute": [never], "wrong": [(pb.State(), memoryview(b"wrong"))], "whole": [(pb.State(), s.values)]}
        for name in s.answers:
            s.rescue.joined(name, HELD)
        s.rescue.joined("behind", (NEWEST, NEWEST - 1, NEWEST))
        running = asyncio.create_task(s.rescue.run())
        await s.until(lambda: bool(s.served))
        assert s.asked == ["mute", "wrong", "whole"], "all that hold the version, and nobody else"
        assert rescued(s)
        never.set_result((REFUSED, memoryview(b"")))
        await running
        assert s.rescue.over.is_set() and s.served == [LOST]

    play(script)


def test_two_islands_that_deliver_the_same_version_at_once_are_one_rescue(play) -> None:
    async def script(situation: Situation) -> None:
        both = asyncio.get_running_loop().create_future()
        situation.answers = {"a": [both], "b": [both]}
        for name in "ab":
            situation.rescue.joined(name, HELD)
        running = asyncio.ensure_future(situation.rescue.run())
        await situation.until(lambda: sorted(situation.asked) == ["a", "b"])
        both.set_result((pb.State(), situation.values))
        await running
        assert situation.served == [LOST] and rescued(situation)

    play(script)


def test_an_island_that_says_later_is_asked_again(play) -> None:
    async def script(s: Situation) -> None:
        s.answers = {"a": [(LATER, memoryview(b""))] * 3 + [(pb.State(), s.values)]}
        s.rescue.joined("a", HELD)
        await s.rescue.run()
        assert s.asked == ["a"] * 4 and rescued(s)

    play(script)


def test_an_island_that_says_later_for_ever_does_not_keep_the_fragment_from_going_on(play) -> None:
    async def script(s: Situation) -> None:
        class Later(list[Answer]):
            def pop(self, _: int = 0) -> Answer:  # type: ignore[override]
                s.seconds += 1.0
                return LATER, memoryview(b"")

        s.answers = {"a": Later()}  # type: ignore[dict-item]
        s.rescue.joined("a", HELD)
        await asyncio.wait_for(s.rescue.run(), 20)
        assert fell_back(s) and s.served == [LOST] and len(s.asked) >= rescues.RETURN_S

    play(script)


def test_an_island_that_joins_again_is_asked_again(play) -> None:
    async def script(s: Situation) -> None:
        s.answers = {"a": [(REFUSED, memoryview(b"")), (pb.State(), s.values)]}
        s.rescue.joined("a", HELD)
        running = asyncio.create_task(s.rescue.run())
        await s.until(lambda: s.asked == ["a"])
        s.rescue.joined("a", HELD)
        await asyncio.wait_for(running, 20)
        assert s.asked == ["a", "a"] and rescued(s)

    play(script)


def test_bytes_that_a_full_disk_refused_are_asked_for_again(play) -> None:
    class FullOnce(Disk):
        refused = 0

        def write_durably(self, path: Path, *parts: bytes | memoryview) -> None:
            self.refused += 1
            if self.refused <= 2:
                raise OSError(28, "No space left on device")
            super().write_durably(path, *parts)

    async def script(s: Situation) -> None:
        s.store.disk = FullOnce()
        s.answers = {"a": [(pb.State(), s.values)] * 3}
        s.rescue.joined("a", HELD)
        await s.rescue.run()
        assert len(s.asked) == 3 and rescued(s)

    play(script)


def test_going_on_without_the_version_is_tried_until_the_disk_takes_it(play, monkeypatch) -> None:
    monkeypatch.setattr(rescues, "RETURN_S", 0.0)

    async def script(s: Situation) -> None:
        real, tries = s.store.fall_back, []

        def refuse_twice(fragment: int) -> int:
            tries.append(fragment)
            if len(tries) <= 2:
                raise StoreError("the disk is full")
            return real(fragment)

        s.store.fall_back = refuse_twice  # type: ignore[method-assign]
        await s.rescue.run()
        assert tries == [LOST] * 3 and s.served == [LOST]
        assert s.events == [m.FragmentRecovered(LOST, VERSION_STRIDE)]

    play(script)


@pytest.mark.parametrize("moment", ["an answer", "news", "nothing"])
def test_a_rescue_that_is_closed_ends_at_once_and_leaves_the_damage_to_the_next_process(play, monkeypatch, moment: str) -> None:
    monkeypatch.setattr(rescues, "RETURN_S", 1000.0)

    async def script(s: Situation) -> None:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        s.answers = {"a": [answer if moment == "an answer" else (REFUSED, memoryview(b""))]}
        if moment != "nothing":
            s.rescue.joined("a", HELD)
        running = asyncio.create_task(s.rescue.run())
        if moment != "nothing":
            await s.until(lambda: s.asked == ["a"])
        s.rescue.close()
        assert s.rescue.over.is_set()
        if moment == "an answer":
            answer.set_result((pb.State(reason="the syncer stops"), memoryview(b"")))  # as the relay does when it closes
        await asyncio.wait_for(running, 20)
        assert list(s.store.fallbacks) == [LOST] and not s.served and not s.events

    play(script)


def test_a_rollback_waits_for_a_lost_version_and_then_puts_all_fragments_back(
    made: dict[str, Path], start_syncer, monkeypatch
) -> None:
    monkeypatch.setattr(rescues, "RETURN_S", 0.2)
    with a_copy_of(made["closed"]) as folder:
        store = RunStore(folder)
        standing = Standing(3 * NEWEST, 10 * NEWEST, "running", SESSIONS, good_step=GOOD, restoring=(0, 1, 2), rollbacks=1)
        store.commit([], standing, [])
        store.close()
        spoil(file_of(folder, LOST), "in half")
        syncer = start_syncer(folder)
        poll(lambda: versions(folder) == [NEWEST + 1, VERSION_STRIDE + 1, NEWEST + 1], "every fragment to be put back")
        poll(lambda: len(tape(folder, "restored")) == 3, "the tape to say so")
        syncer.stop()
        assert [entry["fragment"] for entry in tape(folder, "recovered")] == [LOST]
        assert values_of(folder) == [-1.0] * 3 and read_standing(folder).restoring == ()
