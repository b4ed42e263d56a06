"""The run folder: what is durable when, what a crash may leave behind, and that tensors come back as they were."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from islands import assert_same, small_model, tape, tensors_of, versions
from safetensors.torch import load_file
from torch import Tensor, nn

import skerry
from skerry.config import SyncConfig
from skerry.core import records
from skerry.core.messages import Merge
from skerry.core.share import Share
from skerry.core.standing import Standing
from skerry.durable import Disk
from skerry.errors import StoreError
from skerry.syncer.storage import database
from skerry.syncer.storage import store as stores
from skerry.syncer.storage.create import create_run, gather
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.run_folder import identity_text, read_identity, read_model, read_standing
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.version_file import Label, state_checksum, write_version
from skerry.tensors.merge import FragmentState
from skerry.tensors.model import model_tensors

SYNC = SyncConfig(fragments=3, every=3)


class Various(nn.Module):
    """Everything a model may hold: tied weights, two float types, buffers of both kinds, frozen parameters, empty ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(4, 3, dtype=torch.float64), requires_grad=False)
        self.frozen_half = nn.Parameter(torch.randn(5).half(), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("large", torch.tensor([2**24 + 1, 2**53 + 1, -(2**62) - 3]))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("average", torch.randn(7))
        self.register_buffer("scratch", torch.randn(2), persistent=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return skerry.create(tmp_path / "run", small_model(), SYNC)


def order(version: int, fragment: int = 0, step: int = 3) -> Merge:
    return Merge(fragment, version, step, (Share("island-0", "first", version - 1, 3, 30, 300.0, 3 * version),), 0.7, 0.6, 1.0)


def commit(store: RunStore, version: int, fragment: int = 0, step: int = 3) -> FragmentState:
    """The next version: all values moved by one, momentum equal to the version."""
    state = store.load()[0][fragment]
    new = FragmentState(state.values + 1, {"momentum": torch.full_like(state.values, float(version))})
    entry = TapeEntry(float(version), records.Merged(fragment, version, step, (), 0.7, 0.6, 1.0))
    standing = Standing(step, 10 * version, "running", {"island-0": ("first", 0, step, 0)})
    store.commit([store.write(order(version, fragment, step), new)], standing, [entry])
    return new


# ---------------------------------------------------------------- creation


def test_a_folder_takes_one_run(folder: Path) -> None:
    before = read_model(folder)
    with pytest.raises(StoreError, match=f"{folder} already holds a run"):
        skerry.create(folder, small_model(seed=9), SYNC)
    assert_same(read_model(folder), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["2.weight", "4.bias"])
def test_initial_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float, name: str) -> None:
    model = small_model()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    with pytest.raises(StoreError, match=f"initial weights must be finite, tensor '{name}' is not"):
        skerry.create(tmp_path / "run", model, SYNC)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_creation_that_was_cut_short_is_no_run_and_can_be_repeated(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    real = Disk.write_durably

    def write(disk: Disk, path: Path, *data: bytes) -> None:
        full() if path.name == "run.json" else real(disk, path, *data)

    monkeypatch.setattr(Disk, "write_durably", write)
    with pytest.raises(StoreError, match="cannot create a run in .*: .*No space left on device"):
        skerry.create(tmp_path / "run", small_model(seed=8), SYNC)
    with pytest.raises(StoreError, match="holds no run"):
        RunStore(tmp_path / "run")
    monkeypatch.undo()
    skerry.create(tmp_path / "run", small_model(), SYNC)
    assert_same(read_model(tmp_path / "run"), tensors_of(small_model()))
    assert [entry["fragments"] for entry in tape(tmp_path / "run", "created")] == [3]


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    for ask in (RunStore, read_identity, read_model):
        with pytest.raises(StoreError, match=f"{tmp_path} holds no run"):
            ask(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 5}'])
def test_a_damaged_run_file_is_named(folder: Path, text: str) -> None:
    good = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text)
    with pytest.raises(StoreError, match=f"{folder}/run.json cannot be read"):
        read_identity(folder)
    (folder / "tape.sqlite").rename(folder / "elsewhere.sqlite")  # and with it the copy of run.json
    with pytest.raises(StoreError, match=f"{folder}/run.json cannot be read"):
        RunStore(folder)
    (folder / "elsewhere.sqlite").rename(folder / "tape.sqlite")
    RunStore(folder).close()
    assert (folder / "run.json").read_text() == good


def test_a_run_of_another_format_is_refused(folder: Path) -> None:
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(identity_text({**json.loads(text), "format": 1}))
    with pytest.raises(StoreError, match=f"{folder} has run format 1, this Skerry reads 5"):
        read_identity(folder)


def test_the_identity_comes_back(tmp_path: Path) -> None:
    model = Various()
    sync = dataclasses.replace(SYNC, outer_lr=0.31, adopt="carry", send="fp32")
    made = create_run(tmp_path / "run", model_tensors(model), sync, '{"train": {"lr": 0.5}}')
    read = read_identity(tmp_path / "run")
    assert read == made
    assert read.sync == sync and read.job_json == '{"train": {"lr": 0.5}}'
    assert read.layout.tensors == tuple(spec for spec, _ in model_tensors(model))


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("fragments", [1, 4, 50])
def test_a_model_comes_back_exactly_and_in_its_own_types(tmp_path: Path, fragments: int) -> None:
    model = Various()
    folder = skerry.create(tmp_path / "run", model, dataclasses.replace(SYNC, fragments=fragments))
    found = read_model(folder)
    expected = tensors_of(model)
    assert "head.weight" not in found and "embedding.weight" in found  # tied: once, under the first name
    assert "scratch" not in found  # not part of the model's state
    assert_same(found, expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name


def test_integers_beyond_what_floats_hold_survive_a_restart(tmp_path: Path) -> None:
    folder = skerry.create(tmp_path / "run", Various(), SYNC)
    store = RunStore(folder)
    commit(store, 1)
    store.close()
    found = read_model(folder)
    assert found["large"].tolist() == [2**24 + 1, 2**53 + 1, -(2**62) - 3]
    assert found["frozen"].dtype == torch.float64 and torch.equal(found["frozen"], Various().frozen)
    assert found["flags"].tolist() == [True, False, True]


def test_a_commit_moves_one_fragment_and_nothing_else(folder: Path) -> None:
    before = read_model(folder)
    store = RunStore(folder)
    commit(store, 1, fragment=1)
    store.close()
    layout = read_identity(folder).layout
    moved = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for piece in layout.fragments[1].pieces:
        moved[layout.tensors[piece.tensor].name].view(-1)[piece.start : piece.stop] = 1.0
    assert_same(read_model(folder), {name: before[name] + moved[name] for name in before})
    assert versions(folder) == [0, 1, 0]


# ---------------------------------------------------------------- one process at a time


def test_two_syncers_cannot_have_one_folder(folder: Path) -> None:
    first = RunStore(folder)
    with pytest.raises(StoreError, match=f"{folder} is in use by another syncer"):
        RunStore(folder)
    commit(first, 1)
    first.close()
    second = RunStore(folder)
    commit(second, 2)
    second.close()
    assert versions(folder) == [2, 0, 0]


def test_a_store_may_be_closed_twice(folder: Path) -> None:
    store = RunStore(folder)
    store.close()
    descriptor = os.open(folder / "run.json", os.O_RDONLY)  # takes the number that the lock had
    store.close()
    os.close(descriptor)


def test_a_model_can_be_read_beside_a_running_syncer(folder: Path) -> None:
    store = RunStore(folder)
    before = read_model(folder)
    for version in range(1, 5):
        commit(store, version)
        found = read_model(folder)
        assert max(float((found[name] - before[name]).max()) for name in before) == pytest.approx(version, abs=1e-4)
        assert read_standing(folder).banked_tokens == 10 * version
    store.close()


def test_only_the_newest_files_stay(folder: Path) -> None:
    store = RunStore(folder)
    for version in range(1, 7):
        commit(store, version)
    store.close()
    kept = sorted(path.name for path in (folder / "fragments").iterdir() if path.name.startswith("0000"))
    assert kept == ["0000-00000005.safetensors", "0000-00000006.safetensors"]


# ---------------------------------------------------------------- after a crash


def test_leftovers_of_a_crash_are_moved_aside_and_the_newest_committed_version_is_used(folder: Path) -> None:
    store = RunStore(folder)
    committed = commit(store, 1)
    # Written, synced and renamed, but its row never came.
    left = FragmentState(committed.values + 100, committed.state)
    label = Label(store.identity.run_id, 0, 2, 6)
    write_version(folder, "0000-00000002.safetensors", left, label, state_checksum(left))
    (folder / "fragments" / ".0001-00000001.safetensors.partial").write_bytes(b"half")
    store.close()

    store = RunStore(folder)
    states, progress, _ = store.load()
    assert [found.version for found in progress] == [1, 0, 0]
    assert torch.equal(states[0].values, committed.values) and torch.equal(states[0].momentum, committed.momentum)
    assert sorted(path.name for path in (folder / "fragments").iterdir()) == [
        "0000-00000000.safetensors",
        "0000-00000001.safetensors",
        "0001-00000000.safetensors",
        "0002-00000000.safetensors",
    ]
    [moved] = (folder / "aside" / "0001-leftovers").iterdir()
    assert torch.equal(load_file(moved)["values"], left.values) and not store.problems
    commit(store, 2)  # the number is free again
    store.close()
    assert versions(folder) == [2, 0, 0]


def test_what_healthy_openings_moved_aside_does_not_pile_up(folder: Path) -> None:
    for number in range(5):
        (folder / "fragments" / f"0000-{number + 10:08d}.safetensors").write_bytes(b"never counted")
        RunStore(folder).close()
    assert sorted(path.name for path in (folder / "aside").iterdir()) == ["0004-leftovers", "0005-leftovers"]


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_to_tensors_nobody_trains_is_found(tmp_path: Path, damage: str) -> None:
    folder = skerry.create(tmp_path / "run", Various(), SYNC)
    path = folder / "fixed.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    store = RunStore(folder)
    for ask in (store.fixed_bytes, lambda: read_model(folder)):
        with pytest.raises(StoreError, match=str(path)):
            ask()
    store.close()


def test_a_commit_that_fails_leaves_the_version_before(folder: Path, monkeypatch) -> None:
    store = RunStore(folder)
    first = commit(store, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="version 2 of fragment 0 cannot be written: .*No space left"):
        commit(store, 2)
    monkeypatch.undo()
    states, progress, standing = store.load()
    assert progress[0].version == 1 and torch.equal(states[0].values, first.values)
    assert standing.banked_tokens == 10
    commit(store, 2)
    store.close()
    assert [entry["version"] for entry in tape(folder, "merged")] == [1, 2]


def fail_to_commit(store: RunStore, written: stores.Written, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(database, "append", full)
        with pytest.raises(StoreError, match="the tape cannot be written: database or disk is full"):
            store.commit([written], Standing(), [])


def test_the_file_of_a_commit_that_failed_stays_as_it_is_until_another_has_succeeded(folder: Path, monkeypatch) -> None:
    """A crash may show that it did happen, and then its row counts on its file."""
    store = RunStore(folder)
    state = store.load()[0][0]
    results = [FragmentState.fresh(state.values + number) for number in range(3)]
    tried = []
    for result in results:
        tried.append(store.write(order(1), result))
        fail_to_commit(store, tried[-1], monkeypatch)
    paths = [folder / "fragments" / written.file for written in tried]
    assert len(set(paths)) == 3 and all(path.exists() for path in paths)
    again = store.write(order(1), results[1])
    assert again == tried[1], "the same result needs no other file"
    assert [torch.equal(load_file(path)["values"], r.values) for path, r in zip(paths, results, strict=True)] == [True] * 3
    store.commit([again], Standing(), [])
    assert [path.exists() for path in paths] == [False, True, False]
    assert torch.equal(store.load()[0][0].values, results[1].values)
    store.close()
    store = RunStore(folder)
    assert torch.equal(store.load()[0][0].values, results[1].values)
    for version in range(2, 5):
        commit(store, version)
    store.close()
    kept = sorted(path.name for path in (folder / "fragments").iterdir() if path.name.startswith("0000"))
    assert kept == ["0000-00000003.safetensors", "0000-00000004.safetensors"]


def test_a_file_that_is_used_again_survives_the_commit_of_another_fragment(folder: Path, monkeypatch) -> None:
    store = RunStore(folder)
    result = FragmentState.fresh(store.load()[0][0].values + 1)
    fail_to_commit(store, store.write(order(1), result), monkeypatch)
    again = store.write(order(1), result)
    commit(store, 1, fragment=1)
    store.commit([again], Standing(), [])
    assert torch.equal(store.load()[0][0].values, result.values)
    store.close()
    assert versions(folder) == [1, 1, 0]


def test_a_write_that_fails_leaves_nothing_behind(folder: Path, monkeypatch) -> None:
    store = RunStore(folder)
    before = sorted((folder / "fragments").iterdir())
    real = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) < 100:
            raise OSError(28, "No space left on device")
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreError, match="version 1 of fragment 0 cannot be written: .*No space left"):
        commit(store, 1)
    assert sorted((folder / "fragments").iterdir()) == before
    monkeypatch.undo()
    commit(store, 1)
    store.close()


def test_a_number_cannot_be_committed_twice(folder: Path) -> None:
    store = RunStore(folder)
    commit(store, 1)
    with pytest.raises(StoreError, match="the tape cannot be written: UNIQUE constraint"):
        commit(store, 1)
    store.close()


KILLED = """
import os, sys
from pathlib import Path
import torch
from skerry.tensors.merge import FragmentState
from skerry.core.messages import Merge
from skerry.core.records import Repaired
from skerry.core.share import Share
from skerry.core.standing import Standing
from skerry.syncer.storage import database
from skerry.syncer.storage import store as stores

folder, when = Path(sys.argv[1]), sys.argv[2]
store = stores.RunStore(folder)
state = store.load()[0][0]
if when == "before the file":
    os.replace = Path.replace = lambda *_: os._exit(7)
elif when == "before the row":
    database.put_standing = lambda *_: os._exit(7)
elif when == "before the row is durable":
    database.append = lambda *_: os._exit(7)
order = Merge(0, 1, 3, (Share("island-0", "first", 0, 3, 30, 300.0, at_step=3),), 0.7, 0.6, 1.0)
written = store.write(order, FragmentState(state.values + 1, {"momentum": state.momentum + 2}))
standing = Standing(3, 30, "running", {"island-0": ("first", 0, 3, 0)})
store.commit([written], standing, [stores.TapeEntry(1.0, Repaired("1"))])
os._exit(7)
"""


@pytest.mark.parametrize("when", ["before the file", "before the row", "before the row is durable", "after it returned"])
def test_a_commit_is_there_after_a_kill_once_it_returned_and_not_before(folder: Path, when: str) -> None:
    before = read_model(folder)
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(folder), when], timeout=100, check=False)
    assert process.returncode == 7
    there = when == "after it returned"
    store = RunStore(folder)
    states, progress, standing = store.load()
    assert (progress[0].version, standing.step, standing.banked_tokens) == ((1, 3, 30) if there else (0, 0, 0))
    assert progress[0].counted_step("island-0") == (3 if there else 0)
    assert float(states[0].momentum.max()) == (2.0 if there else 0.0)
    commit(store, 2 if there else 1)
    store.close()
    assert len(list((folder / "fragments").iterdir())) == 4
    after = read_model(folder)
    assert max(float((after[n] - before[n]).max()) for n in before) == pytest.approx(2.0 if there else 1.0, abs=1e-4)


# ---------------------------------------------------------------- the tape


def test_the_tape_keeps_the_order_in_which_things_were_decided(folder: Path) -> None:
    store = RunStore(folder)
    store.commit([], Standing(), [TapeEntry(9.0, records.Leaving("a")), TapeEntry(8.0, records.Leaving("b"))])
    commit(store, 1)
    store.commit([], Standing(4), [])
    store.commit([], Standing(5), [TapeEntry(1.0, records.Left("a"))])
    store.close()
    store = RunStore(folder)
    commit(store, 2)
    found = [(entry.record.kind, entry.at) for entry in store.tape()]
    assert found[1:] == [("leaving", 9.0), ("leaving", 8.0), ("merged", 1.0), ("left", 1.0), ("merged", 2.0)]
    assert found[0][0] == "created"
    store.close()


def test_standing_and_shares_come_back(folder: Path) -> None:
    store = RunStore(folder)
    standing = Standing(12, 340, "closing", {"island-0": ("s", 1, 12, 99), "élan": ("t", 0, 11, 98)})
    store.commit([], standing, [])
    store.close()
    store = RunStore(folder)
    assert store.load()[2] == standing and read_standing(folder) == standing
    assert standing.tokens == 340 + 99 + 98
    store.close()


def test_a_restart_knows_how_much_of_whose_progress_was_merged(folder: Path) -> None:
    store = RunStore(folder)
    state = store.load()[0][0]
    sessions = {name: (f"session of {name}", 0, 0, 0) for name in "abc"}
    for version, name in enumerate(["a", "b", "a", "c"], start=1):
        share = Share(name, f"session of {name}", version - 1, 1, 1, 1.0, at_step=100 + version)
        merged = dataclasses.replace(order(version), shares=(share,), round=10 * version)
        store.commit([store.write(merged, state)], Standing(sessions=sessions), [])
    # A process that took over a name since then counts its own steps.
    store.commit([], Standing(sessions={**sessions, "c": ("a later session", 0, 0, 0)}), [])
    store.close()
    store = RunStore(folder)
    found = store.load()[1][0]
    assert {name: found.counted_step(name) for name in "abcd"} == {"a": 103, "b": 102, "c": 0, "d": 0}
    assert (found.version, found.merged_round) == (4, 40)
    store.close()


def test_merges_of_several_fragments_are_committed_as_one(folder: Path, monkeypatch) -> None:
    store = RunStore(folder)
    state = store.load()[0]
    written = [store.write(order(1, fragment), FragmentState.fresh(state[fragment].values + 1)) for fragment in range(3)]
    monkeypatch.setattr(database, "append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.commit(written, Standing(), [])
    assert versions(folder) == [0, 0, 0]
    monkeypatch.undo()
    store.commit(written, Standing(), [])
    assert versions(folder) == [1, 1, 1]
    store.close()


def test_gathering_a_fragment_keeps_its_values(tmp_path: Path) -> None:
    model = Various()
    layout = read_identity(skerry.create(tmp_path / "run", model, SYNC)).layout
    tensors: dict[str, Tensor] = tensors_of(model)
    for fragment in layout.fragments:
        flat = gather(layout, fragment, tensors)
        assert flat.dtype == torch.float32 and flat.shape == (fragment.numel,)
        parts = [tensors[layout.tensors[p.tensor].name].reshape(-1)[p.start : p.stop].float() for p in fragment.pieces]
        assert torch.equal(flat, torch.cat(parts))
