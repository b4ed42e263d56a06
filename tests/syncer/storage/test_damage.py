"""A damaged run folder: every file in turn is deleted, truncated, flipped, emptied or replaced by an older copy.

The run goes on from the newest state that is whole, or says in one line why not; and no other file is gone."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SyncerThread
from islands import assert_same, batches, loss_of, poll, small_model, tape, tape_kinds, versions
from safetensors.torch import load_file
from torch import Tensor, nn

import skerry
from skerry.admin import take_snapshot
from skerry.config import SyncConfig
from skerry.core.messages import Merge
from skerry.core.standing import Standing
from skerry.errors import StoreError
from skerry.observe.ledger import audit_run
from skerry.syncer.storage import database as db
from skerry.syncer.storage import store as stores
from skerry.syncer.storage.recovery import VERSION_STRIDE
from skerry.syncer.storage.restore import manifest_text, newest_complete, read_manifest, restore
from skerry.syncer.storage.run_folder import read_identity, read_model, read_standing
from skerry.syncer.storage.standing_copy import read_count, read_standing_copy
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.version_file import numbers_of

SYNC = SyncConfig(fragments=3, every=3, rollback=5.0, silence_s=3.0)
DAMAGES = ("deleted", "truncated", "flipped", "emptied", "older")


def model_with_fixed_tensors(seed: int = 3) -> nn.Module:
    model = small_model(seed)
    model.register_buffer("classes", torch.tensor([3, 1, 2]))
    model.register_parameter("frozen", nn.Parameter(torch.randn(5), requires_grad=False))
    return model


class Island:
    """A learner that leases data and trains a little at a time."""

    def __init__(self, address: str, name: str, keep: Path | None = None) -> None:
        self.model = model_with_fixed_tensors()
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)
        self.learner = skerry.join(address, self.model, self.optimizer, name=name, tokens_per_step=4, keep=keep)
        self.batches = iter(self.learner.sampler(100, batch=4))

    def step(self) -> None:
        next(self.batches)
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batches(0, 1)[0])
        loss.backward()
        self.learner.report(loss.item())
        self.optimizer.step()

    def until(self, ready: Callable[[], bool], what: str) -> None:
        poll(lambda: self.step() or ready(), what)


@dataclasses.dataclass
class Template:
    """A run folder as it lies there after a crash, or after an orderly end, with an older copy of each of its files."""

    folder: Path
    older: Path

    def files(self) -> list[str]:
        return [path.relative_to(self.folder).as_posix() for path in sorted(self.folder.rglob("*")) if path.is_file()]


def copy_of(folder: Path, target: Path) -> Path:
    """Everything but SQLite's shared memory, which no crash leaves and no copy needs."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*-shm"))
    return target


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Template]:
    place = tmp_path_factory.mktemp("damage")
    patch = pytest.MonkeyPatch()
    patch.setattr("skerry.syncer.storage.store.COPY_EVERY_S", 0.0)  # steps here take less than a millisecond
    run = skerry.create(place / "run", model_with_fixed_tensors(), SYNC)
    syncer = SyncerThread(run).start()
    island = Island(syncer.address, "a", keep=run / "islands")
    island.until(lambda: min(versions(run)) >= 3 and bool(tape(run, "good_kept")), "merges and a good copy")
    paused(syncer, lambda: copy_of(run, place / "without-older"))
    island.until(lambda: min(versions(run)) >= 5, "merges")
    paused(syncer, lambda: copy_of(run, place / "without"))
    assert take_snapshot(syncer.address, None)["islands"] == {"a": "kept"}
    island.until(lambda: min(versions(run)) >= 7, "merges")
    paused(syncer, lambda: copy_of(run, place / "older"))
    island.until(lambda: min(versions(run)) >= 9 and '"kind":"island"' in (run / "metrics.jsonl").read_text(), "merges")
    paused(syncer, lambda: copy_of(run, place / "crashed"))
    island.learner.detach()
    syncer.stop()
    patch.undo()
    copy_of(run, place / "closed")
    return {
        "crashed": Template(place / "crashed", place / "older"),
        "closed": Template(place / "closed", place / "older"),
        "without a snapshot": Template(place / "without", place / "without-older"),
    }


def paused(syncer: SyncerThread, act: Callable[[], Any]) -> None:
    """At a moment when nothing is being written, so that what is copied is what a crash would leave."""
    assert syncer._loop is not None
    folder, done = syncer.folder, False

    def newest_files() -> list[int]:
        numbers = [numbers_of(path.name) or (0, 0) for path in (folder / "fragments").iterdir()]
        return [max(version for fragment, version in numbers if fragment == index) for index in range(SYNC.fragments)]

    def stand_still() -> None:
        nonlocal done
        half = list((folder / "fragments").glob(".*"))
        length, noted = len(tape_kinds(folder)), read_count(folder, generation(folder))
        copy = read_standing_copy(folder, read_identity(folder).run_id)
        # With every commit standing.json is written too, just after it.
        copied = stores.COPY_EVERY_S > 0 or (copy is not None and copy.entries == length)
        if not half and newest_files() == versions(folder) and noted in (0, length) and copied:
            act()
            done = True

    def try_it() -> bool:
        tried = threading.Event()
        assert syncer._loop is not None
        syncer._loop.call_soon_threadsafe(lambda: (stand_still(), tried.set()))
        return tried.wait(30) and done

    poll(try_it, "a quiet moment")


def generation(folder: Path) -> str:
    return db.ask(folder, lambda database: db.meta(database, "generation")) or ""


def damage(path: Path, how: str, older: Path) -> bool:
    """False if there is nothing to be done."""
    data = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif how == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :] if data else b"x")
    elif not older.exists() or older.read_bytes() == data:
        return False
    else:
        path.write_bytes(older.read_bytes())
    return True


def fragments_of(folder: Path) -> list[Tensor]:
    store = RunStore(folder)
    try:
        return [state.values for state in store.load()[0]]
    finally:
        store.close()


def missing_files(before: dict[str, bytes], folder: Path) -> list[str]:
    """Those whose bytes are nowhere any more. Of files that go on being written the name is enough."""
    now = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    aside = {path.name: path for name, path in now.items() if name.startswith("aside/")}
    grows = ("tape.sqlite", "standing.json", "metrics.jsonl")
    return [
        name
        for name, data in before.items()
        if not any(
            path is not None and (Path(name).name in grows or path.read_bytes() == data)
            for path in (now.get(name), aside.get(Path(name).name))
        )
        and not name.endswith(("-wal", "-shm", "lock"))  # SQLite moves its log into the tape
    ]


def merge_once(store: RunStore) -> None:
    """The next version of every fragment."""
    states, progress, standing = store.load()
    for fragment, (state, found) in enumerate(zip(states, progress, strict=True)):
        order = Merge(fragment, found.version + 1, found.merged_round + 1, (), 0.5, 0.5, 1.0)
        state.values.add_(1.0)
        store.commit([store.write(order, state)], standing, [])


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["crashed", "closed", "without a snapshot"])
def test_every_file_may_be_damaged(templates: dict[str, Template], tmp_path: Path, kind: str, how: str) -> None:
    template = templates[kind]
    whole = fragments_of(copy_of(template.folder, tmp_path / "whole"))
    tokens = read_standing(tmp_path / "whole").tokens
    tried = 0
    for name in template.files():
        folder = copy_of(template.folder, tmp_path / "run")
        if damage(folder / name, how, template.older / name):
            tried += 1
            check_one(folder, name, whole, tokens, f"{name} {how}", kind)
        shutil.rmtree(folder)
    assert tried >= (2 if how == "older" else 10)


def check_one(folder: Path, name: str, whole: list[Tensor], tokens: int, what: str, kind: str) -> None:
    others = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).as_posix() != name
    }
    store = RunStore(folder)
    if name == "fixed.safetensors" and kind == "without a snapshot":
        with pytest.raises(StoreError, match=str(folder / name)) as raised:
            store.fixed_bytes()
        store.close()
        assert "\n" not in str(raised.value) and not missing_files(others, folder), what
        return
    states, progress, standing = store.load()
    # Everything is the newest there was, but for a fragment whose own newest file was hit.
    numbers = numbers_of(Path(name).name) if name.startswith("fragments/") else None
    for fragment, (state, expected) in enumerate(zip(states, whole, strict=True)):
        hit = numbers is not None and numbers[0] == fragment and not torch.equal(state.values, expected)
        assert hit or torch.equal(state.values, expected), f"{what}: fragment {fragment}"
        if hit:
            assert progress[fragment].version == VERSION_STRIDE == progress[fragment].floor, what
            assert float((state.values - expected).abs().max()) < 0.1, f"{what}: not the version before"
            assert any(name in line for line in store.problems), f"{what}: {store.problems}"
    assert standing.tokens == tokens, f"{what}: {standing.tokens} of {tokens} tokens, {store.problems}"
    assert all("\n" not in line for line in store.problems), what
    store.close()
    assert not missing_files(others, folder), f"{what}: gone: {missing_files(others, folder)}"
    store = RunStore(folder)
    merge_once(store)
    store.close()
    again = RunStore(folder)
    assert again.problems == [], f"{what}: {again.problems}"
    after = [state.values for state in again.load()[0]]
    assert all(torch.equal(b, a.values + 1.0) for a, b in zip(states, after, strict=True)), what
    again.close()


@pytest.mark.parametrize("kind", ["crashed", "closed"])
def test_a_byte_of_the_tape_may_be_flipped_anywhere(templates: dict[str, Template], tmp_path: Path, kind: str) -> None:
    """Nowhere does it pass for another number: the model is the newest, and no more is forgotten than is said."""
    template = templates[kind]
    whole = fragments_of(copy_of(template.folder, tmp_path / "whole"))
    tokens = read_standing(tmp_path / "whole").tokens
    chance = random.Random(7)
    found = 0
    for name in ("tape.sqlite", "tape.sqlite-wal") if kind == "crashed" else ("tape.sqlite",):
        for _ in range(40):
            folder = copy_of(template.folder, tmp_path / "run")
            data = bytearray((folder / name).read_bytes())
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(data)
            check_one(folder, name, whole, tokens, f"bit {bit} of {name} flipped", kind)
            found += (folder / "aside").exists()
            shutil.rmtree(folder)
    assert found > 10, "most of a tape is rows, in which a flipped bit is found"


def test_a_damaged_schema_that_is_not_utf_8_is_repaired(templates: dict[str, Template], tmp_path: Path) -> None:
    """SQLite quotes the schema in its message, which the sqlite3 module then cannot decode."""
    folder = copy_of(templates["closed"].folder, tmp_path / "run")
    whole, tokens = fragments_of(copy_of(folder, tmp_path / "whole")), read_standing(folder).tokens
    schema = b"seq INTEGER PRIMARY KEY"
    data = (folder / "tape.sqlite").read_bytes()
    assert data.count(schema) == 1
    (folder / "tape.sqlite").write_bytes(data.replace(schema, b"seq INTEGER PRIMARY K\xc4Y"))
    check_one(folder, "tape.sqlite", whole, tokens, "schema damaged", "closed")


def hit_newest(folder: Path, fragment: int) -> Path:
    """One flipped byte in the newest version of a fragment."""
    newest = max(
        (path for path in (folder / "fragments").iterdir() if path.name.startswith(f"{fragment:04d}-")),
        key=lambda path: numbers_of(path.name) or (0, 0),
    )
    damage(newest, "flipped", newest)
    return newest


def test_a_fragment_whose_newest_version_is_damaged_goes_on_from_the_one_before(
    templates: dict[str, Template], tmp_path: Path, start_syncer
) -> None:
    folder = copy_of(templates["closed"].folder, tmp_path / "run")
    newest = versions(folder)
    path = hit_newest(folder, 1)
    store = RunStore(folder)
    assert [line for line in store.problems if str(path) in line], store.problems
    store.close()
    syncer = start_syncer(folder)
    island = Island(syncer.address, "b")  # of another name: nobody who held the version comes back
    island.until(lambda: versions(folder)[1] >= VERSION_STRIDE + 2, "merges of the fragment")
    island.learner.leave()
    syncer.stop()
    [entry] = tape(folder, "recovered")
    assert (entry["fragment"], entry["lost"], entry["version"]) == (1, newest[1], VERSION_STRIDE)
    assert entry["source"] == f"version {newest[1] - 1}"
    assert_same({n: t for n, t in read_model(folder).items() if "frozen" in n}, {"frozen": island.model.state_dict()["frozen"]})
    ledger = audit_run(folder)
    assert ledger.adds_up and not ledger.recovered, ledger.discrepancies


def test_a_live_island_gives_back_the_version_that_the_disk_lost(tmp_path: Path, start_syncer, free_port: int) -> None:
    folder = skerry.create(tmp_path / "run", model_with_fixed_tensors(), dataclasses.replace(SYNC, rollback=0.0))
    syncer = start_syncer(folder, free_port)
    island = Island(syncer.address, "a")
    island.until(lambda: min(versions(folder)) >= 4, "merges")
    poll(lambda: island.step() or all(h.version >= 4 for h in island.learner._exchange.held), "adoptions")
    syncer.stop()
    held = [found.version for found in island.learner._exchange.held]
    newest = versions(folder)
    lost = next(fragment for fragment in range(3) if held[fragment] == newest[fragment])
    path = hit_newest(folder, lost)
    syncer = start_syncer(folder, free_port)
    poll(lambda: tape(folder, "recovered"), "the fragment to be recovered")
    [entry] = tape(folder, "recovered")
    assert entry == {"fragment": lost, "lost": newest[lost], "version": newest[lost], "source": "a"}
    rescued = load_file(folder / "fragments" / f"{lost:04d}-{newest[lost]:08d}-rescued.safetensors")
    assert torch.equal(rescued["values"], island.learner._replica.held(lost)), "to the bit what the islands have"
    assert [found.name for found in (folder / "aside").rglob("*.safetensors")] == [path.name], "the damaged file is kept"
    island.until(lambda: versions(folder)[lost] >= newest[lost] + 2, "more merges of it")
    island.learner.leave()
    syncer.stop()
    assert audit_run(folder).adds_up


def test_shards_go_on_from_the_version_before_as_well(
    templates: dict[str, Template], tmp_path: Path, start_syncer, start_shard
) -> None:
    folder = copy_of(templates["closed"].folder, tmp_path / "run")
    hit_newest(folder, 2)
    syncer = start_syncer(folder, shards=2)
    shards = [start_shard(syncer, number) for number in range(2)]
    island = Island(syncer.address, "b")
    island.until(lambda: versions(folder)[2] >= VERSION_STRIDE + 2, "merges of the fragment")
    island.learner.leave()
    for shard in shards:
        shard.stop()
    syncer.stop()
    assert [entry["fragment"] for entry in tape(folder, "recovered")] == [2]


def test_islands_that_remember_more_than_the_tape_train_on(tmp_path: Path, start_syncer, free_port: int) -> None:
    """The log of the tape is gone, with leases that the island has: it starts over from the newest files."""
    folder = skerry.create(tmp_path / "run", model_with_fixed_tensors(), SYNC)
    syncer = start_syncer(folder, free_port)
    island = Island(syncer.address, "a")
    island.until(lambda: min(versions(folder)) >= 4, "merges")
    paused(syncer, lambda: copy_of(folder, tmp_path / "copy"))
    syncer.stop()
    shutil.rmtree(folder)
    copy_of(tmp_path / "copy", folder)
    assert (folder / "tape.sqlite-wal").stat().st_size > 0
    (folder / "tape.sqlite-wal").unlink()
    files = {path.name for path in (folder / "fragments").iterdir() if path.suffix == ".safetensors"}
    RunStore(folder).close()
    assert files <= {path.name for path in folder.rglob("*.safetensors")}, "opening a folder removes no file"
    syncer = start_syncer(folder, free_port)
    island.until(lambda: min(versions(folder)) >= VERSION_STRIDE + 3, "merges after the recovery")
    island.learner.leave()
    syncer.stop()
    assert island.learner.failure is None
    assert len(tape(folder, "tape_recovered")) == 1 and audit_run(folder).recovered


def test_standing_is_copied_and_never_ahead_of_the_tape(templates: dict[str, Template]) -> None:
    folder = templates["closed"].folder
    copy = read_standing_copy(folder, read_identity(folder).run_id)
    assert copy is not None and copy.standing == read_standing(folder)


def test_a_copy_made_while_the_run_goes_on_can_be_read_and_served(tmp_path: Path, start_syncer) -> None:
    # Merges so far apart that a fragment is not replaced twice while a few files are copied.
    folder = skerry.create(tmp_path / "run", model_with_fixed_tensors(), dataclasses.replace(SYNC, every=100))
    syncer = start_syncer(folder)
    island = Island(syncer.address, "a")
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            island.step()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for number in range(15):
            before = versions(folder)
            copy = tmp_path / f"copy-{number}"
            copy.mkdir()
            # The tape before its files, or after them: a tool that copies may do either.
            for name in ["run.json", "fixed.safetensors", "tape.sqlite", "tape.sqlite-wal", "fragments"][:: number % 2 * 2 - 1]:
                subprocess.run(["cp", "-r", str(folder / name), str(copy)], check=False, stderr=subprocess.DEVNULL)
            assert set(read_model(copy)) == set(read_model(folder))
            audit_run(copy)
            poll(lambda before=before: versions(folder) != before, "a merge")
    finally:
        stop.set()
        thread.join()
    island.learner.leave()
    syncer.stop()
    for number in range(15):
        store = RunStore(tmp_path / f"copy-{number}")
        merge_once(store)
        store.close()


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_readers_work_on_read_only_media(templates: dict[str, Template], tmp_path: Path) -> None:
    expected = fragments_of(copy_of(templates["crashed"].folder, tmp_path / "writable"))
    medium = tmp_path / "medium"
    copy_of(templates["crashed"].folder, medium)
    assert (medium / "tape.sqlite-wal").stat().st_size > 0
    before = {path: path.read_bytes() for path in medium.rglob("*") if path.is_file()}
    mounted = subprocess.run(["mount", "--bind", "-o", "ro", str(medium), str(medium)], check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(OSError, match="Read-only"):
            (medium / "anything").write_text("")
        for words in (
            ["export", str(medium), str(tmp_path / "m.safetensors")],
            ["ledger", str(medium)],
            ["account", str(medium)],
        ):
            done = subprocess.run([sys.executable, "-m", "skerry", *words], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{words}: {done.stderr}"
        exported = read_model(medium)
        assert float(sum(t.float().sum() for n, t in exported.items() if n not in ("frozen", "classes"))) == pytest.approx(
            float(sum(values.sum() for values in expected)), rel=1e-4
        )
    finally:
        subprocess.run(["umount", str(medium)], check=True)
    assert {path: path.read_bytes() for path in medium.rglob("*") if path.is_file()} == before


def test_restore_takes_the_newest_snapshot_that_has_every_island(templates: dict[str, Template], tmp_path: Path) -> None:
    folder = copy_of(templates["closed"].folder, tmp_path / "run")
    newer = copy_of(folder / "snapshots" / "000001", folder / "snapshots" / "000002")
    (newer / "manifest.json").write_text(manifest_text({**read_manifest(newer), "islands": {"a": "a is away"}}))
    said: list[str] = []
    found = newest_complete(folder, said.append)
    assert found.name == "000001" and len(said) == 1 and "lacks the inner state of a" in said[0]
    restore(found, tmp_path / "elsewhere")
    shutil.rmtree(folder / "snapshots" / "000001")
    assert newest_complete(folder, said.append).name == "000002"
    assert "no snapshot has the state of every island" in said[-1]


def test_a_run_whose_run_file_is_gone_is_never_made_anew(templates: dict[str, Template], tmp_path: Path) -> None:
    folder = copy_of(templates["closed"].folder, tmp_path / "run")
    (folder / "run.json").unlink()
    with pytest.raises(StoreError, match="already holds a run"):
        skerry.create(folder, model_with_fixed_tensors(), SYNC)
    RunStore(folder).close()
    assert (folder / "run.json").read_bytes() == (templates["closed"].folder / "run.json").read_bytes()


def test_a_full_disk_is_not_taken_for_damage(templates: dict[str, Template], tmp_path: Path, monkeypatch) -> None:
    folder = copy_of(templates["crashed"].folder, tmp_path / "run")
    before = sorted(folder.rglob("*"))

    def full(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(db, "problem_of", full)
    with pytest.raises(StoreError, match="tape.sqlite cannot be read: database or disk is full"):
        RunStore(folder)
    monkeypatch.undo()
    assert sorted(path for path in folder.rglob("*") if not path.name.endswith("-shm")) == before
    store = RunStore(folder)
    assert store.problems == [] and store.load()[2] != Standing()
    store.close()
