"""The syncer may die at any instruction, and the disk may fail at any: what was announced is there afterwards, once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crash_scripts
import grpc
import pytest
from crash_scripts import SYNC
from faulty_disk import FaultyDisk
from islands import DEADLINE_S, RawLearner, small_model, tape, versions

import skerry
from skerry.core import records, rounds
from skerry.core.schema import TapeRecord
from skerry.core.standing import Standing
from skerry.errors import StoreError
from skerry.syncer.storage import tape as tapes
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.store import RunStore
from skerry.tensors.codecs.codec import raw_bytes

pytestmark = pytest.mark.slow  # hundreds of processes that crash


@pytest.fixture
def memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is fast to sync, where there is one."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


# ---------------------------------------------------------------- every call in turn


def run_script(place: Path, script: str, seed: int, points: int) -> None:
    command = [sys.executable, crash_scripts.__file__, script, str(seed), str(place)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"seed {seed}"
    result = json.loads(done.stdout.splitlines()[-1])
    failures = result["failures"]
    assert not failures, f"seed {seed}: {len(failures)} of {result['outcomes']} outcomes, such as\n" + "\n".join(failures[:5])
    assert result["points"] >= points


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_goes_on_from_what_was_announced_wherever_the_process_or_the_power_is_cut(memory_disk: Path, seed: int) -> None:
    run_script(memory_disk, "die_everywhere", seed, 50)


def test_what_a_process_finds_after_a_kill_is_not_lost_in_a_power_cut_later(memory_disk: Path) -> None:
    run_script(memory_disk, "die_everywhere_then_cut", 1, 80)


def test_a_run_is_created_whole_or_not_at_all_wherever_the_process_or_the_power_is_cut(memory_disk: Path) -> None:
    run_script(memory_disk, "die_creating", 4, 60)


def test_a_repair_is_finished_by_the_next_opening_wherever_the_process_or_the_power_is_cut(memory_disk: Path) -> None:
    run_script(memory_disk, "die_repairing", 7, 30)


@pytest.mark.parametrize("seed", [5, 6])
def test_any_call_may_fail_for_a_while_and_the_process_be_killed_then(memory_disk: Path, seed: int) -> None:
    run_script(memory_disk, "fail_everywhere", seed, 50)


# ---------------------------------------------------------------- a syncer that is killed a dozen times


class Saw:
    """What learners saw of a run, over all lives of its syncer."""

    def __init__(self) -> None:
        self.newest = [0] * SYNC.fragments
        self.bytes: dict[tuple[int, int], bytes] = {}
        self.events = 0

    def announced(self, fragment: int, version: int) -> None:
        assert version >= self.newest[fragment], f"fragment {fragment} was announced at {self.newest[fragment]}, now {version}"
        self.newest[fragment] = version

    def fetched(self, fragment: int, version: int, data: bytes) -> None:
        before = self.bytes.setdefault((fragment, version), data)
        assert before == data, f"version {version} of fragment {fragment} was another one before"


class Gone(Exception):
    """The syncer was killed."""


async def fetch(raw: RawLearner, fragment: int, version: int) -> bytes | None:
    """None if the syncer has a newer one."""
    try:
        header, data = await raw.download(fragment, version)
    except AssertionError:
        raise Gone from None
    if header.reason:
        return None
    if len(data) < header.size_bytes:
        raise Gone
    return data


async def island(raw: RawLearner, saw: Saw, happened: Callable[[], None]) -> None:
    """Exchange as fast as can be, until the syncer is gone."""

    async def look(fragment: int, version: int) -> None:
        saw.announced(fragment, version)
        data = await fetch(raw, fragment, version)
        if data is not None:
            saw.fetched(fragment, version, data)

    with contextlib.suppress(Gone, grpc.RpcError, StopAsyncIteration, ConnectionError, asyncio.InvalidStateError):
        async with raw:
            welcome = await raw.join()
            for fragment, version in enumerate(welcome.versions):
                await look(fragment, version)
            step = welcome.step
            while True:
                step += 1
                raw.report(step)
                message = await raw.receive("ask", "announce")
                happened()
                if message.WhichOneof("message") == "ask":
                    await raw.give(message.ask)
                else:
                    await look(message.announce.fragment, message.announce.version)


@pytest.mark.parametrize("seed", [7])
def test_a_syncer_killed_a_dozen_times_under_load_loses_nothing_it_announced(memory_disk: Path, seed: int) -> None:
    folder = skerry.create(memory_disk / "run", small_model(), SYNC)
    chance = random.Random(seed)
    saw = Saw()
    command = [sys.executable, crash_scripts.__file__, "syncers", "0", str(folder)]
    nursery = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert nursery.stdin is not None and nursery.stdout is not None

    async def live(life: int, pid: int, port: int, kill_after: int) -> None:
        before = saw.events

        def happened() -> None:
            saw.events += 1
            if saw.events - before == kill_after:
                os.kill(pid, signal.SIGKILL)

        islands = [RawLearner(f"127.0.0.1:{port}", small_model(), SYNC.fragments, name, f"{name}-{life}") for name in "ab"]
        await asyncio.wait_for(asyncio.gather(*(island(raw, saw, happened) for raw in islands)), DEADLINE_S)

    lives = listened = alive = 0
    try:
        while listened < 12:
            lives += 1
            dies_at, kill_after = (chance.randint(1, 400), 0) if lives % 2 else (0, chance.randint(1, 150))
            nursery.stdin.write(f"{dies_at}\n")
            nursery.stdin.flush()
            first = json.loads(nursery.stdout.readline())
            if isinstance(first, list):
                listened += 1
                alive = first[0]
                asyncio.run(live(lives, first[0], first[1], kill_after))
                first = json.loads(nursery.stdout.readline())
                alive = 0
            assert first == -signal.SIGKILL, f"seed {seed}, life {lives}: the syncer ended by itself"
            stored = versions(folder)
            assert all(now >= seen for now, seen in zip(stored, saw.newest, strict=True)), f"seed {seed}, life {lives}"
    finally:
        nursery.stdin.close()
        if alive:
            os.kill(alive, signal.SIGKILL)
        nursery.wait(60)
        nursery.stdout.close()

    assert min(saw.newest) > listened, f"seed {seed}: hardly anything was merged"
    store = RunStore(folder)
    for fragment, (state, progress) in enumerate(zip(*store.load()[:2], strict=True)):
        saw.announced(fragment, progress.version)
        saw.fetched(fragment, progress.version, bytes(raw_bytes(state.values)))
        merged = [entry["version"] for entry in tape(folder, "merged") if entry["fragment"] == fragment]
        assert merged == list(range(1, progress.version + 1)), f"seed {seed}"
    store.close()


# ---------------------------------------------------------------- a full disk


FULL = {
    "the files of versions": lambda what, path: what == "write" and "/fragments/" in path,
    "the tape": lambda what, path: what == "sqlite write",
    "the syncing of the tape": lambda what, path: what == "sqlite sync",
    "everything": lambda what, path: what in ("open", "write", "mkdir", "sqlite open", "sqlite write", "sqlite truncate"),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    skerry.create(tmp_path / "run", small_model(), dataclasses.replace(SYNC, quorum=0, silence_s=600.0))
    with FaultyDisk(tmp_path / "run").installed() as disk:
        yield disk


@pytest.fixture
def failures(monkeypatch) -> list[dict[str, Any]]:
    """Every failed merge as it is recorded."""
    recorded: list[dict[str, Any]] = []
    record = tapes.Tape.record

    def spy(self: tapes.Tape, written: TapeRecord) -> None:
        if isinstance(written, records.MergeFailed):
            recorded.append(written.to_json())
        record(self, written)

    monkeypatch.setattr(tapes.Tape, "record", spy)
    return recorded


async def happens(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), DEADLINE_S)


async def answer_all(raw: RawLearner, step: int) -> None:
    """Report a step and give every fragment, when asked."""
    raw.report(step)
    for _ in range(SYNC.fragments):
        reply = await raw.give((await raw.receive("ask")).ask)
        assert reply.accepted, reply.reason


async def hear_all(raw: RawLearner) -> dict[int, int]:
    """The next version of every fragment."""
    heard = [(await raw.receive("announce")).announce for _ in range(SYNC.fragments)]
    return {announce.fragment: announce.version for announce in heard}


@pytest.mark.parametrize("full", FULL)
def test_a_full_disk_pauses_merging_and_nothing_else(disk, failures, start_syncer, monkeypatch, full: str) -> None:
    monkeypatch.setattr(rounds, "RETRY_STORE_S", 0.02)
    folder = Path(disk.root)
    syncer = start_syncer(folder)
    fragments = range(SYNC.fragments)

    async def scenario() -> None:
        async with (
            RawLearner(syncer.address, small_model(), SYNC.fragments, "a") as a,
            RawLearner(syncer.address, small_model(), SYNC.fragments, "b") as b,
            RawLearner(syncer.address, small_model(), SYNC.fragments, "c") as c,
        ):
            await a.join()
            await b.join()
            await asyncio.gather(answer_all(a, 1), answer_all(b, 1))
            assert await hear_all(a) == await hear_all(b) == dict.fromkeys(fragments, 1)
            before = [await fetch(a, fragment, 1) for fragment in fragments]

            disk.full = FULL[full]
            await asyncio.gather(answer_all(a, 2), answer_all(b, 2))
            await happens(lambda: all(sum(f["fragment"] == fragment for f in failures) >= 5 for fragment in fragments))
            assert [await fetch(b, fragment, 1) for fragment in fragments] == before, "what was announced is still handed out"
            assert list((await c.join()).versions) == [1] * SYNC.fragments, "others may join"
            a.report(7)
            b.report(7)
            c.report(7)
            await happens(lambda: not list((folder / "fragments").glob(".*")))  # between tries nothing half is left
            step = 0
            while step < 7:
                message = await a.receive("progress", "announce")
                assert message.WhichOneof("message") == "progress", "nothing is announced"
                step = message.progress.step
            files = [path for path in (folder / "fragments").iterdir() if not path.name.startswith(".")]
            # Two versions that are kept, what a and b gave, and the same with c absent.
            assert len(files) <= 4 * SYNC.fragments, "no try leaves a copy of its own"

            disk.full = lambda what, path: False
            for raw in (a, b, c):
                assert await hear_all(raw) == dict.fromkeys(fragments, 2)
            after = [await fetch(c, fragment, 2) for fragment in fragments]
            assert all(new is not None and new != old for new, old in zip(after, before, strict=True))

    asyncio.run(scenario())
    syncer.stop()
    merged = [entry for entry in tape(folder, "merged") if entry["version"] == 2]
    names = [{share["learner"] for share in entry["shares"]} for entry in merged]
    assert names == [{"a", "b"}] * SYNC.fragments, "all was kept"
    written = tape(folder, "merge_failed")
    assert sum(entry.get("times", 1) for entry in written) == len(failures)
    if full != "the files of versions":
        assert len(written) < len(failures), "while the tape cannot be written, failures are counted"
    assert [entry["learner"] for entry in tape(folder, "joined")] == ["a", "b", "c"]
    RunStore(folder).close()


def test_a_merge_that_fails_is_not_tried_again_before_its_time(disk, failures, start_syncer, monkeypatch) -> None:
    monkeypatch.setattr(rounds, "RETRY_STORE_S", 3600.0)
    syncer = start_syncer(Path(disk.root))

    async def scenario() -> None:
        async with RawLearner(syncer.address, small_model(), SYNC.fragments, "a") as a:
            await a.join()
            disk.full = FULL["everything"]
            await answer_all(a, 1)
            await happens(lambda: len(failures) >= SYNC.fragments)
            for step in range(2, 200):
                a.report(step)
            while (await a.receive("progress")).progress.step < 199:
                pass
            disk.full = lambda what, path: False

    asyncio.run(scenario())
    syncer.stop()
    assert sorted(failure["fragment"] for failure in failures) == list(range(SYNC.fragments))


def test_a_full_disk_does_not_stop_merging_if_only_metrics_cannot_be_written(disk, failures, start_syncer) -> None:
    syncer = start_syncer(Path(disk.root))

    async def scenario() -> None:
        async with RawLearner(syncer.address, small_model(), SYNC.fragments, "a") as a:
            await a.join()
            disk.full = lambda what, path: path.endswith("metrics.jsonl")
            for step in range(1, 4):
                a.report(step)
                heard: dict[int, int] = {}
                while len(heard) < SYNC.fragments:  # a fragment may be announced before another one is asked for
                    message = await a.receive("ask", "announce")
                    if message.HasField("ask"):
                        assert (await a.give(message.ask)).accepted
                    else:
                        heard[message.announce.fragment] = message.announce.version
                assert heard == dict.fromkeys(range(SYNC.fragments), step)
            disk.full = lambda what, path: False

    asyncio.run(scenario())
    syncer.stop()
    assert not failures


class FullStore:
    """A store whose disk takes nothing for a while."""

    def __init__(self) -> None:
        self.full = True
        self.entries: list[TapeEntry] = []
        self.commits: list[int] = []

    def commit(self, merges: list[Any], standing: Standing, entries: list[TapeEntry]) -> None:
        self.commits.append(len(entries))
        if self.full:
            raise StoreError("the disk is full")
        self.entries += entries


def test_what_waits_for_a_full_disk_is_bounded_and_the_gap_is_on_the_tape(monkeypatch) -> None:
    monkeypatch.setattr(tapes, "WAITING", 100)

    async def scenario(store: FullStore) -> None:
        tape = tapes.Tape(store, Standing)
        for number in range(1000):
            tape.record(records.Opened(number, 1, ()) if number % 3 else records.Refused("no", fragment=number))
            tape.record(records.MergeFailed(number % 2, 5, "full"))
            if number == 500:
                tape.record(records.Closing("requested", 0, 0))
            if number % 7 == 0:
                await tape.flush()
        store.full = False
        tape.record(records.Ended(0, 0, 0))
        await tape.close()

    store = FullStore()
    asyncio.run(scenario(store))
    assert max(store.commits) <= 100 + 1 + 2
    kinds = [entry.record.kind for entry in store.entries]
    assert kinds.count("closing") == kinds.count("ended") == kinds.count("tape_gap") == 1
    numbers = [e.record.fragment for e in store.entries if isinstance(e.record, (records.Opened, records.Refused))]
    assert numbers == list(range(98)), "the first are kept, in their order"
    [gap] = [entry for entry in store.entries if isinstance(entry.record, records.TapeGap)]
    assert sum(gap.record.missing.values()) == 1000 - 98 and gap.record.missing.keys() == {"opened", "refused"}
    assert gap.at <= gap.record.until
    failed = {e.record.fragment: e.record.times for e in store.entries if isinstance(e.record, records.MergeFailed)}
    assert failed == {0: 500, 1: 500} and kinds.count("merge_failed") == 2
