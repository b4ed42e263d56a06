"""A syncer whose fragments are spread over shards: the same training to the bit, and a shard that dies stops only its own."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import sqlite3
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from islands import assert_same, batches, poll, small_model, tape, together, train, versions
from learner_runs import LOCK_STEP, OVERLAPPING, Killed, join, sgd, two_islands

import skerry
from skerry.config import SyncConfig
from skerry.errors import RunFailed
from skerry.learner.transport import reachability
from skerry.syncer.sharding import shard as shard_process
from skerry.syncer.sharding.shards import spread
from skerry.syncer.storage.run_folder import read_model
from skerry.syncer.storage.store import RunStore, Written
from skerry.tensors.fragments import TensorSpec, split
from skerry.tensors.model import model_tensors


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 24), st.integers(1, 9))
def test_fragments_are_spread_evenly(sizes: list[int], fragments: int, shards: int) -> None:
    layout = split([TensorSpec(f"t{n}", (size,), "float32", "learn") for n, size in enumerate(sizes)], fragments)
    place = spread(layout, shards)
    load = [0] * shards
    for fragment in layout.fragments:
        load[place[fragment.index]] += fragment.numel
    assert len(place) == len(layout.fragments) and all(0 <= shard < shards for shard in place)
    assert max(load) - min(load) <= max(fragment.numel for fragment in layout.fragments)


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("sync", [
    LOCK_STEP,
    OVERLAPPING,
    dataclasses.replace(LOCK_STEP, fragments=3, send="int8", publish="int4"),
    dataclasses.replace(LOCK_STEP, send="topk3", publish="bf16", merge="mean"),
], ids=["plain", "overlapping", "coarse", "sparse"])  # fmt: skip
def test_training_with_shards_equals_training_without_bit_for_bit(
    tmp_path: Path, start_syncer, start_shard, sync: SyncConfig
) -> None:
    steps = 10 + sync.overlap // 2
    skerry.create(tmp_path / "one", small_model(), sync)
    two_islands(start_syncer(tmp_path / "one").address, steps)
    skerry.create(tmp_path / "sharded", small_model(), sync)
    syncer = start_syncer(tmp_path / "sharded", shards=2)
    for number in range(2):
        start_shard(syncer, number)
    two_islands(syncer.address, steps)
    assert versions(tmp_path / "sharded") == versions(tmp_path / "one")
    assert_same(read_model(tmp_path / "sharded"), read_model(tmp_path / "one"))


def dies(monkeypatch: pytest.MonkeyPatch, place: str, number: int) -> None:
    """The shard that comes to this place for that time dies there, and no other after it."""
    count, lock = [0], threading.Lock()

    def reached() -> bool:
        with lock:
            count[0] += 1
            return count[0] == number

    write, judge, publish = shard_process.Shard._write, shard_process.RemoteAdmission.judge, shard_process.Shard._publish

    def dying_write(shard, order, state):
        if place == "before writing" and reached():
            raise Killed
        written = write(shard, order, state)
        if place == "after writing" and reached():
            raise Killed
        return written

    async def dying_publish(shard, said, send):
        if place == "before publishing" and reached():
            raise Killed
        await publish(shard, said, lambda message: send(message) if place != "after publishing" else None)
        if place == "after publishing":
            if reached():
                raise Killed
            send(shard_process.pb.FromShard(published=said))

    monkeypatch.setattr(shard_process.Shard, "_write", dying_write)
    monkeypatch.setattr(shard_process.Shard, "_publish", dying_publish)
    if place == "with one of two contributions":

        async def dying_judge(admission, *offer):
            found = await judge(admission, *offer)
            if reached():
                admission.failed.set_exception(Killed())
            return found

        monkeypatch.setattr(shard_process.RemoteAdmission, "judge", dying_judge)
        make = shard_process.Shard.__init__

        def remembers(shard, *arguments):
            make(shard, *arguments)
            shard._admission.failed = shard.failed

        monkeypatch.setattr(shard_process.Shard, "__init__", remembers)


PLACES = ["with one of two contributions", "before writing", "after writing", "before publishing", "after publishing"]


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("place", PLACES)
def test_lock_step_with_a_shard_that_dies_equals_an_uninterrupted_run_bit_for_bit(
    tmp_path: Path, start_syncer, start_shard, monkeypatch, place: str, number: int
) -> None:
    skerry.create(tmp_path / "one", small_model(), LOCK_STEP)
    two_islands(start_syncer(tmp_path / "one").address, 10)
    skerry.create(tmp_path / "sharded", small_model(), LOCK_STEP)
    syncer = start_syncer(tmp_path / "sharded", shards=2)
    dies(monkeypatch, place, number)
    shards = [start_shard(syncer, number) for number in range(2)]

    def bring_back() -> None:
        dead = poll(lambda: [number for number, shard in enumerate(shards) if shard.error is not None], "a shard to die")
        assert isinstance(shards[dead[0]].error, Killed)
        shards[dead[0]] = start_shard(syncer, dead[0])

    together(lambda: two_islands(syncer.address, 10), bring_back)
    assert tape(tmp_path / "sharded", "shard_lost")
    assert versions(tmp_path / "sharded") == versions(tmp_path / "one")
    assert_same(read_model(tmp_path / "sharded"), read_model(tmp_path / "one"))
    files = {path.name.split("-")[0] for path in (tmp_path / "sharded" / "fragments").iterdir()}
    assert len(files) == 2 and len(list((tmp_path / "sharded" / "fragments").iterdir())) <= 4, "no file is left behind"


# ---------------------------------------------------------------- decoupled


DECOUPLED = SyncConfig(fragments=4, every=4, overlap=1, start_with=1, silence_s=3.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def fragments_of(shard: int) -> list[int]:
    """With two shards."""
    place = spread(split([spec for spec, _ in model_tensors(small_model())], DECOUPLED.fragments), 2)
    return [fragment for fragment, number in enumerate(place) if number == shard]


class Trains:
    """An island that trains until it is told to leave."""

    def __init__(self, address: str, name: str = "island-0") -> None:
        self.model = small_model()
        self.steps = 0
        self._over = threading.Event()
        self._address, self._name = address, name
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            optimizer = sgd(self.model)
            learner = join(self._address, self.model, optimizer, self._name, tokens_per_step=1)
            while not self._over.is_set():
                train(self.model, optimizer, batches(0, 1))
                self.steps += 1
                self._over.wait(0.002)
            learner.leave(timeout_s=30)
        except BaseException as error:
            self._error.append(error)

    def leave(self) -> None:
        self._over.set()
        self._thread.join(40)
        assert not self._thread.is_alive(), "the island did not leave"
        if self._error:
            raise self._error[0]


def test_a_shard_that_is_away_stops_only_its_fragments(folder: Path, start_syncer, start_shard) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder, shards=2)
    mine, others = fragments_of(0), fragments_of(1)
    shards = [start_shard(syncer, number) for number in range(2)]
    island = Trains(syncer.address)
    poll(lambda: min(versions(folder)) > 1, "all fragments to be merged")
    shards[0].stop()
    poll(lambda: tape(folder, "shard_lost"), "the syncer to notice")
    stands = versions(folder)
    steps = island.steps
    poll(lambda: all(versions(folder)[fragment] > stands[fragment] + 3 for fragment in others), "the others to be merged")
    assert all(versions(folder)[fragment] == stands[fragment] for fragment in mine), "nobody could have merged these"
    assert island.steps > steps
    start_shard(syncer, 0)
    poll(
        lambda: all(versions(folder)[fragment] > stands[fragment] + 1 for fragment in mine), "its fragments to be merged again"
    )
    island.leave()


def test_islands_wait_for_shards_that_come_late_and_for_those_of_a_syncer_started_again(
    folder: Path, start_syncer, start_shard
) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder, shards=2)
    island = Trains(syncer.address)
    poll(lambda: tape(folder, "joined"), "the island to knock")
    assert island.steps == 0
    shards = [start_shard(syncer, number) for number in range(2)]
    poll(lambda: min(versions(folder)) > 1, "all fragments to be merged")
    syncer.stop()
    before = versions(folder)
    again = start_syncer(folder, syncer.port, shards=2)
    poll(lambda: all(now > then + 1 for now, then in zip(versions(folder), before, strict=True)), "merging to go on")
    assert all(shard.error is None for shard in shards), "they found the syncer again by themselves"
    island.leave()
    again.stop()


def test_an_island_says_once_which_shard_it_does_not_reach(
    folder: Path, start_syncer, start_shard, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(reachability, "WARN_S", 0.0)
    caplog.set_level("DEBUG", logger="skerry.learner")
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder, shards=2)
    shards = [start_shard(syncer, number) for number in range(2)]
    island = Trains(syncer.address)
    poll(lambda: min(versions(folder)) > 1, "all fragments to be merged")
    shards[1].stop()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        hidden = start_shard(syncer, 1, address)

        def lines(level: str, words: str) -> list[str]:
            said = [record.getMessage() for record in caplog.records if record.levelname == level]
            return [line for line in said if words in line]

        poll(lambda: lines("WARNING", address), "the island to say so")
        tried = len(lines("DEBUG", "was not"))
        poll(lambda: len(lines("DEBUG", "was not")) > tried + 1, "it to try again")
        assert len(lines("WARNING", address)) == 1
        hidden.stop()
    stands = versions(folder)
    start_shard(syncer, 1)
    poll(lambda: all(versions(folder)[f] > stands[f] for f in fragments_of(1)), "its fragments to be merged again")
    island.leave()


def test_leaving_does_not_wait_for_ever_for_a_shard_that_is_away(folder: Path, start_syncer, start_shard) -> None:
    skerry.create(folder, small_model(), dataclasses.replace(DECOUPLED, silence_s=1.0))
    syncer = start_syncer(folder, shards=2)
    shards = [start_shard(syncer, number) for number in range(2)]
    island = Trains(syncer.address)
    poll(lambda: min(versions(folder)) > 1, "all fragments to be merged")
    shards[1].stop()
    island.leave()
    poll(lambda: tape(folder, "left"), "that it left to be written down")


def test_a_run_ends_with_its_shards_and_one_that_is_away_is_left_out(folder: Path, start_syncer, start_shard) -> None:
    skerry.create(folder, small_model(), dataclasses.replace(DECOUPLED, silence_s=0.2, budget_tokens=600))
    syncer = start_syncer(folder, shards=2)
    shards = [start_shard(syncer, number) for number in range(2)]
    island = Trains(syncer.address)
    poll(lambda: min(versions(folder)) > 1, "all fragments to be merged")
    shards[1].stop()
    assert syncer.wait(), "the run has ended"
    assert shards[0].wait(), "and its shard was told so"
    assert sorted(entry["fragment"] for entry in tape(folder, "left_out")) == fragments_of(1)
    island.leave()


# ---------------------------------------------------------------- who may be a shard


def test_a_second_process_of_the_same_number_takes_its_place(folder: Path, start_syncer, start_shard) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder, shards=1)
    first = start_shard(syncer, 0)
    island = Trains(syncer.address)
    poll(lambda: min(versions(folder)) > 1, "all fragments to be merged")
    start_shard(syncer, 0)
    with pytest.raises(RunFailed, match="another process has replaced shard 0"):
        first.wait()
    before = versions(folder)
    poll(lambda: all(now > then + 1 for now, then in zip(versions(folder), before, strict=True)), "merging to go on")
    island.leave()


@pytest.mark.parametrize("shards, number, reason", [
    (0, 0, "this syncer has no shards"),
    (2, 2, "there is no shard 2"),
])  # fmt: skip
def test_a_shard_nobody_expects_is_turned_away(folder: Path, start_syncer, start_shard, shards, number, reason) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    shard = start_shard(start_syncer(folder, shards=shards), number)
    with pytest.raises(RunFailed, match=reason):
        shard.wait()


def test_a_shard_of_another_run_is_turned_away(tmp_path: Path, start_syncer, start_shard) -> None:
    for name in ("one", "other"):
        skerry.create(tmp_path / name, small_model(), DECOUPLED)
    syncer = start_syncer(tmp_path / "one", shards=1)
    syncer.folder = tmp_path / "other"  # from here on only where the shard looks
    shard = start_shard(syncer, 0)
    with pytest.raises(RunFailed, match="this syncer serves run"):
        shard.wait()


@pytest.mark.parametrize("address", ["10.1.2.3:7000", "shard.example.org", "shard.example.org:seven"])
def test_a_shard_that_no_island_could_reach_is_turned_away(folder: Path, start_syncer, start_shard, address: str) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    shard = start_shard(start_syncer(folder, shards=1), 0, address)
    with pytest.raises(RunFailed, match="learners cannot reach shard 0"):
        shard.wait()


def test_a_shard_that_has_a_copy_of_the_folder_is_not_let_in(tmp_path: Path, start_syncer, start_shard) -> None:
    folder = skerry.create(tmp_path / "run", small_model(), DECOUPLED)
    shutil.copytree(folder, tmp_path / "copy")
    syncer = start_syncer(folder, shards=1)
    syncer.folder = tmp_path / "copy"  # from here on only where the shard looks
    shard = start_shard(syncer, 0)
    poll(lambda: any("does not see the run folder" in entry["reason"] for entry in tape(folder, "refused")), "the refusal")
    shard.stop()
    assert not tape(folder, "shard_joined")


# ---------------------------------------------------------------- the disk


def test_commits_that_fail_leave_no_files_behind(folder: Path, start_syncer, start_shard, monkeypatch) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder, shards=1)
    start_shard(syncer, 0)
    failing, insert = threading.Event(), RunStore._insert
    tries: list[int] = []

    def fail(store: RunStore, written: Written) -> None:
        if failing.is_set():
            tries.append(written.order.fragment)
            raise sqlite3.OperationalError("disk I/O error")
        insert(store, written)

    monkeypatch.setattr(RunStore, "_insert", fail)
    island = Trains(syncer.address)
    poll(lambda: min(versions(folder)) > 1, "all fragments to be merged")
    failing.set()
    poll(lambda: len(tries) >= 5, "several commits to fail")
    assert len(list((folder / "fragments").iterdir())) <= 4 * 3, "two versions that count and the one that does not"
    failing.clear()
    before = versions(folder)
    poll(lambda: all(now > then + 1 for now, then in zip(versions(folder), before, strict=True)), "merging to go on")
    island.leave()
    assert len(list((folder / "fragments").iterdir())) == 4 * 2


def test_what_a_killed_shard_was_writing_is_removed_when_another_comes(folder: Path, start_syncer, start_shard) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder, shards=2)
    start_shard(syncer, 0)
    mine, others = fragments_of(0)[0], fragments_of(1)[0]
    poll(lambda: tape(folder, "shard_joined"), "the first to join")
    for fragment in (mine, others):
        for name in (
            f".{fragment:04d}-00000001-abcdef01-1.safetensors.partial",
            f"{fragment:04d}-00000001-abcdef01-2.safetensors",
        ):
            (folder / "fragments" / name).write_bytes(b"half")
    start_shard(syncer, 1)
    poll(lambda: len(tape(folder, "shard_joined")) == 2, "the second to join")
    left = {path.name for path in (folder / "fragments").iterdir() if "abcdef01" in path.name}
    assert {name.lstrip(".")[:4] for name in left} == {f"{mine:04d}"}, (
        "its own are gone, those of the other are not its business"
    )
