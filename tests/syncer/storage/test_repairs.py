"""Repairs of a run folder, one defect at a time: what is believed, what a state is recovered from, and that nothing is removed.

Version N of a fragment has the value N everywhere (damaged_runs.py). Runs with islands are damaged in test_damage.py."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from damaged_runs import (
    CUT,
    GOOD,
    NEWEST,
    NEWEST_OF_ALL,
    SQLITE,
    SYNC,
    a_copy_of,
    change,
    contents,
    fast_disk,
    file_of,
    flip,
    make_runs,
    merge,
    merge_all,
    rot,
    spoil,
    states_of,
    take_snapshot,
    values_of,
    with_fixed_tensors,
    written_over,
)
from faulty_disk import FaultyDisk
from islands import small_model, tape
from safetensors.torch import load_file

import skerry
from skerry.checksum import file_checksum
from skerry.config import Config
from skerry.errors import StoreError
from skerry.launch.local import create_job
from skerry.syncer import snapshots
from skerry.syncer.storage import database as db
from skerry.syncer.storage import store as stores
from skerry.syncer.storage.recovery import NEW_TAPE, VERSION_STRIDE
from skerry.syncer.storage.restore import check, newest_complete, restore
from skerry.syncer.storage.run_folder import find_identity, is_run, read_identity, read_standing
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.version_file import Label, label_of, prove, state_checksum, write_version
from skerry.tensors.merge import FragmentState


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Path]]:
    with fast_disk() as place:
        yield make_runs(place)


@pytest.fixture
def folder(made: dict[str, Path]) -> Iterator[Path]:
    """A copy of the run that ended in order."""
    with a_copy_of(made["closed"]) as copy:
        yield copy


# ---------------------------------------------------------------- is there a run


@pytest.mark.parametrize("evidence", ["run.json", "standing.json", "good", "snapshots", "fragments", "aside", "tape.sqlite"])
def test_a_folder_with_any_evidence_of_a_run_is_never_made_anew(folder: Path, evidence: str) -> None:
    if evidence == "aside":
        (folder / "aside" / "0001-repair").mkdir(parents=True)
        file_of(folder, 0).rename(folder / "aside" / "0001-repair" / file_of(folder, 0).name)
    for path in folder.iterdir():
        if path.name != evidence and not (evidence == "tape.sqlite" and path.name.startswith("tape")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(folder)
    assert is_run(folder)
    for make in (lambda: skerry.create(folder, small_model(), SYNC), lambda: create_job(Config(), folder)):
        with pytest.raises(StoreError, match="already holds a run"):
            make()
    assert contents(folder) == before


def test_a_folder_with_nothing_but_versions_0_is_no_run(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "fragments").mkdir()
    file_of(folder, 0, 0).write_bytes(b"of a creation that was cut short")
    assert not is_run(folder)


# ---------------------------------------------------------------- what a fragment goes on from


def test_the_newest_state_wins_wherever_it_lies_and_a_good_copy_comes_last(folder: Path) -> None:
    """Each time the state that was used is damaged too."""
    spoil(file_of(folder, 1), "in half")
    assert values_of(folder) == [7.0, 6.0, 7.0], "the version before, by its row"
    state = FragmentState.fresh(torch.full_like(load_file(file_of(folder, 1, NEWEST - 1))["values"], 5.0))
    label, aside = Label(read_identity(folder).run_id, 1, 5, 15), folder / "aside" / "0099-leftovers"
    spoil(file_of(folder, 1, NEWEST - 1), "in half")
    write_version(folder, file_of(folder, 1, 5).name, state, label, state_checksum(state))
    aside.mkdir()
    file_of(folder, 1, 5).rename(aside / file_of(folder, 1, 5).name)
    assert values_of(folder) == [7.0, 5.0, 7.0], "a file in aside/, by its label"
    for path in [*folder.glob("fragments/0001-*"), *aside.iterdir()]:
        spoil(path, "in half")
    assert values_of(folder) == [7.0, 4.0, 7.0], "the snapshot's"
    for path in folder.glob("**/0001-*.safetensors"):
        spoil(path, "in half")
    values, found, said = states_of(folder)
    assert values == [7.0, -1.0, 7.0] and f"the good copy of step {GOOD}" in said[-1]
    assert found == [7, 4 * VERSION_STRIDE, 7], "each time under a number that no version had"
    for path in [*(folder / "good").iterdir(), *folder.glob("**/0001-0*.safetensors")]:
        spoil(path, "in half")
    before = written_over(folder)
    with pytest.raises(StoreError, match="0001-04000000.* no older state of fragment 1 is intact"):
        RunStore(folder)
    assert written_over(folder) == before, "without anything to go on from nothing is changed"


@pytest.mark.parametrize("where", ["snapshot", "aside"])
def test_the_newest_version_is_taken_from_another_whole_copy_of_it(folder: Path, where: str) -> None:
    store = RunStore(folder)
    take_snapshot(store, 2)
    store.close()
    if where == "aside":
        (folder / "aside" / "0001-leftovers").mkdir(parents=True)
        (folder / "snapshots" / "000002" / "fragments" / file_of(folder, 2).name).rename(
            folder / "aside" / "0001-leftovers" / file_of(folder, 2).name
        )
    damaged = file_checksum(flip(file_of(folder, 2)))
    file_of(folder, 0).unlink()
    values, found, said = states_of(folder)
    assert values == NEWEST_OF_ALL and found == [NEWEST] * 3, "the same version under its own number"
    assert len(said) == 2 and all("rewrote it from" in line and "nothing is lost" in line for line in said)
    assert damaged in contents(folder / "aside").values()
    assert states_of(folder) == (NEWEST_OF_ALL, [NEWEST] * 3, [])


def test_a_restored_run_with_a_damaged_tape_opens_at_its_newest_version(folder: Path, tmp_path: Path) -> None:
    restored = tmp_path / "restored"
    restore(folder / "snapshots" / "000001", restored)
    labels = [label_of(path) for path in sorted((restored / "fragments").iterdir())]
    run_id = read_identity(restored).run_id
    assert [label and label[0] for label in labels] == [Label(run_id, f, CUT, 3 * CUT, 10 * CUT) for f in range(3)]
    change(restored, "UPDATE versions SET seal = 0 WHERE fragment = 1")
    values, found, said = states_of(restored)
    assert values == [float(CUT)] * 3 and min(found) >= VERSION_STRIDE and len(said) == 1
    assert read_standing(restored).tokens == 10 * CUT + 7


# ---------------------------------------------------------------- snapshots


def test_a_damaged_version_gets_into_no_snapshot(folder: Path) -> None:
    store = RunStore(folder)
    flip(file_of(folder, 1))
    with pytest.raises(StoreError, match=f"{file_of(folder, 1)} is damaged"):
        take_snapshot(store, 2)
    store.close()
    store = RunStore(folder)
    assert list(store.fallbacks) == [1]
    with pytest.raises(StoreError, match=r"fragments \[1\] are damaged and not yet recovered"):
        take_snapshot(store, 2)
    store.load()
    assert check(take_snapshot(store, 3))["number"] == 3
    store.close()


def test_the_newest_snapshot_with_every_island_outlives_newer_ones_without(folder: Path) -> None:
    store = RunStore(folder)
    for number, islands in enumerate([{"a": "kept"}, {"a": "away"}, {"a": "away"}, {"a": "away"}], start=2):
        take_snapshot(store, number, islands)
    keeper = object.__new__(snapshots.Snapshots)
    keeper._store = store
    kept = SYNC.snapshots_kept
    keeper._remove_old()
    store.close()
    found = sorted(path.name for path in (folder / "snapshots").glob("0*"))
    assert found == sorted({"000002", *[f"{number:06d}" for number in range(6 - kept, 6)]})
    assert newest_complete(folder, lambda _: None).name == "000002"


@pytest.mark.parametrize("how", ["flipped", "emptied", "a list", "not text", "lacks facts", "deleted"])
def test_a_snapshot_whose_manifest_is_damaged_is_passed_over_and_its_files_still_count(folder: Path, how: str) -> None:
    manifest = folder / "snapshots" / "000001" / "manifest.json"
    if how == "flipped":
        flip(manifest)
    elif how == "deleted":
        manifest.unlink()
    else:
        manifest.write_bytes(
            {"emptied": b"", "a list": b"[1]", "not text": b"\xff\xfe", "lacks facts": b'{"manifest": {}}'}[how]
        )
    said: list[str] = []
    with pytest.raises(StoreError, match="has no intact snapshot"):
        newest_complete(folder, said.append)
    assert len(said) == 1 and "\n" not in said[0]
    for version in (NEWEST, NEWEST - 1):
        file_of(folder, 0, version).unlink()
    assert values_of(folder) == [float(CUT), 7.0, 7.0]


# ---------------------------------------------------------------- run.json and fixed.safetensors


@pytest.mark.parametrize("how", ["deleted", "flipped", "emptied", "a list"])
@pytest.mark.parametrize("source", ["the tape", "snapshot 000001"])
def test_the_identity_is_found_elsewhere(folder: Path, how: str, source: str) -> None:
    whole = (folder / "run.json").read_bytes()
    if how == "deleted":
        (folder / "run.json").unlink()
    elif how == "flipped":
        flip(folder / "run.json")
    else:
        (folder / "run.json").write_bytes(b"" if how == "emptied" else b"[]")
    if source != "the tape":
        change(folder, "UPDATE meta SET seal = 1 WHERE key = 'identity'")
    before = contents(folder)
    assert find_identity(folder)[2] == source
    assert contents(folder) == before, "whoever only looks repairs nothing"
    values, _, said = states_of(folder)
    assert values == NEWEST_OF_ALL and (folder / "run.json").read_bytes() == whole
    assert said[0] == f"run.json was missing or damaged; rewrote it from {source}; nothing is lost"
    assert how == "deleted" or before["run.json"] in contents(folder / "aside").values()


def test_a_run_without_any_copy_of_its_identity_says_so_and_stays_as_it_is(folder: Path) -> None:
    shutil.rmtree(folder / "snapshots")
    change(folder, "UPDATE meta SET seal = 1 WHERE key = 'identity'")
    flip(folder / "run.json")
    before = written_over(folder)
    with pytest.raises(StoreError, match=r"/run\.json cannot be read: [^\n]*$"):
        RunStore(folder)
    assert written_over(folder) == before


def test_damage_to_the_fixed_tensors_reaches_no_snapshot_and_damage_to_the_spare_not_the_run(folder: Path) -> None:
    [spare] = (folder / "snapshots").glob("fixed-*.safetensors")
    whole = spare.read_bytes()
    store = RunStore(folder)
    shutil.rmtree(folder / "snapshots" / "000001")  # a copy, which has no file with two names
    assert spare.samefile(take_snapshot(store, 1) / "fixed.safetensors")
    store.close()
    rot(folder / "fixed.safetensors")
    store = RunStore(folder)
    assert store.problems == [
        "fixed.safetensors was missing or damaged; rewrote it from snapshots/000001/fixed.safetensors; nothing is lost"
    ]
    assert store.fixed_bytes() == whole
    rot(spare)
    assert store.fixed_bytes() == whole
    assert check(take_snapshot(store, 2)) and spare.read_bytes() == whole, "the next snapshot finds that the spare is damaged"
    store.close()
    shutil.rmtree(folder / "snapshots" / "000002")
    rot(folder / "fixed.safetensors")
    store = RunStore(folder)
    assert store.fixed_bytes() == whole and f"rewrote it from snapshots/{spare.name}" in store.problems[0]
    store.close()


def test_a_lost_folder_of_fragments_is_made_again(folder: Path) -> None:
    shutil.rmtree(folder / "fragments")
    values, found, said = states_of(folder)
    assert values == [float(CUT)] * 3 and found == [VERSION_STRIDE] * 3 and len(said) == 6


# ---------------------------------------------------------------- rows that are not what was written


@pytest.mark.parametrize("table", ["tape", "versions", "standing", "meta", "counted"])
def test_a_row_without_its_seal_is_not_believed(folder: Path, table: str) -> None:
    store = RunStore(folder)
    with store._database:
        db.put_counted(store._database, [(0, "a", "s", NEWEST, 3, 1)])
    store.close()
    lies = {
        "tape": "UPDATE tape SET data = '{}' WHERE seq = 100",
        "versions": f"UPDATE versions SET version = 99 WHERE version = {NEWEST} AND fragment = 2",
        "standing": """UPDATE standing SET data = replace(data, '"banked_tokens": 70', '"banked_tokens": 90')""",
        "meta": "UPDATE meta SET value = 'x' WHERE key = 'generation'",
        "counted": "UPDATE counted SET at_step = 99",
    }
    change(folder, lies[table])
    values, found, said = states_of(folder)
    assert values == NEWEST_OF_ALL and min(found) == VERSION_STRIDE
    assert said[0].startswith(f"tape.sqlite is damaged: a row of table {table} is damaged; rebuilt from")
    assert read_standing(folder).tokens == 77


def test_rows_of_a_table_without_seals_are_not_believed(folder: Path) -> None:
    change(folder, "ALTER TABLE versions RENAME TO sealed", "CREATE TABLE versions AS SELECT * FROM sealed")
    change(folder, "ALTER TABLE versions DROP COLUMN seal", "UPDATE versions SET file = '0000-00000006.safetensors'")
    assert values_of(folder) == NEWEST_OF_ALL


def test_rows_that_a_damaged_page_leads_to_twice_are_saved_once(folder: Path) -> None:
    path = folder / "tape.sqlite"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    inner = next(at for at in range(size, len(data), size) if data[at] == 5 and data[at + 4] >= 1)  # a page of pointers
    count = int.from_bytes(data[inner + 3 : inner + 5], "big")
    cells = [inner + int.from_bytes(data[inner + 12 + 2 * n : inner + 14 + 2 * n], "big") for n in range(count)]
    assert len(cells) >= 4
    data[cells[2] : cells[2] + 4] = data[cells[1] : cells[1] + 4]
    path.write_bytes(data)
    assert values_of(folder) == NEWEST_OF_ALL
    notes = [entry["what"] for entry in tape(folder, "repaired")]
    assert len(notes) == len(set(notes)) and len(notes) > 50


# ---------------------------------------------------------------- files whose header lies


def test_no_bit_of_a_header_makes_a_version_another_one_or_an_error_of_another_kind(folder: Path) -> None:
    identity = read_identity(folder)
    fragment = identity.layout.fragments[0]
    path = file_of(folder, 0)
    whole = path.read_bytes()
    row = db.ask(folder, lambda database: dict(db.newest_row(database, 0)))
    length = 8 + int.from_bytes(whole[:8], "little")
    beside = folder / "fragments" / "0000-00000008.safetensors"
    texts = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(length)]
    for old in (b'"dtype":"F32"', b'"dtype": "F32"'):
        for new in (b"F16", b"I32", b"F64", b"U32", b"BF16", b"F8_E4M3", b"BOOL"):
            header = whole[8:length].replace(old, old.replace(b"F32", new))
            texts.append(len(header).to_bytes(8, "little") + header + whole[length:])
    for text in texts:
        beside.write_bytes(text)
        with contextlib.suppress(StoreError):
            state = stores.read_version(folder, fragment, {**row, "file": beside.name})
            assert float(state.values[0]) == NEWEST == float(state.values[-1]) and state.values.dtype == torch.float32
        proven = prove(beside, identity.run_id, fragment)
        assert proven is None or float(proven.state.values[0]) == NEWEST


@pytest.mark.parametrize("dtype", ["F16", "I32", "BF16", "F64"])
def test_a_version_with_another_type_in_its_header_is_damaged_and_costs_one_version(folder: Path, dtype: str) -> None:
    path = file_of(folder, 0)
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = data[8:length].replace(b'"F32"', f'"{dtype}"'.encode())
    assert header != data[8:length]
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[length:])
    values, _, said = states_of(folder)
    assert values == [6.0, 7.0, 7.0] and f"{path} is damaged" in said[0]


# ---------------------------------------------------------------- a full disk while repairing


@pytest.mark.parametrize("kind", ["versions", "versions in a snapshot", "tape"])
def test_a_disk_that_fills_up_while_repairing_loses_nothing_and_the_next_opening_finishes(
    made: dict[str, Path], kind: str
) -> None:
    expected = {"versions": [6.0, 7.0, 6.0], "versions in a snapshot": [4.0, 7.0, 4.0], "tape": NEWEST_OF_ALL}[kind]
    for call in itertools.count(2, 7 if kind == "tape" else 3):
        with a_copy_of(made["closed"]) as folder:
            if kind == "tape":
                change(folder, "UPDATE tape SET seal = 0 WHERE seq = 5")
            else:
                for fragment, version in itertools.product((0, 2), (NEWEST, NEWEST - 1)):
                    if version == NEWEST or kind == "versions in a snapshot":
                        flip(file_of(folder, fragment, version))
            before = written_over(folder)
            disk, done = FaultyDisk(folder), False
            disk.fail_at(call, sys.maxsize)
            with disk.installed(), contextlib.suppress(StoreError):
                values_of(folder)
                done = disk.calls < call
            what = f"the disk takes nothing from call {call} on"
            assert set(before.values()) <= set(written_over(folder).values()), what
            values, found, _ = states_of(folder)
            assert values == expected, what
            assert [version >= VERSION_STRIDE for version in found] == [kind == "tape" or v < NEWEST for v in expected], what
            assert kind == "tape" or not tape(folder, "tape_recovered"), f"{what}: the tape was whole"
            assert set(before.values()) <= set(written_over(folder).values()), what
            assert states_of(folder)[2] == [], what
        if done:
            break
    assert call > 10


# ---------------------------------------------------------------- a tape that is not this run's newest


@pytest.fixture(scope="module")
def foreign(made: dict[str, Path]) -> bytes:
    """The tape of another run, longer than ours."""
    other = skerry.create(made["closed"].parent / "other", with_fixed_tensors(), SYNC)
    store = RunStore(other)
    for version in range(1, NEWEST + 3):
        merge_all(store, version)
    store.close()
    return (other / "tape.sqlite").read_bytes()


def test_the_tape_of_another_run_is_not_believed(folder: Path, foreign: bytes) -> None:
    (folder / "tape.sqlite").write_bytes(foreign)
    values, found, said = states_of(folder)
    assert values == NEWEST_OF_ALL and found == [VERSION_STRIDE] * 3
    assert said[0].startswith("tape.sqlite belongs to another run; rebuilt from the tape of snapshot 000001")
    assert read_standing(folder).tokens == 77, "by standing.json"
    assert max(entry["version"] for entry in tape(folder, "merged")) == CUT, "no row of the other run"
    assert [path.read_bytes() for path in folder.glob("aside/*/tape.sqlite")] == [foreign]
    assert states_of(folder)[2] == []


def test_the_tape_of_another_run_does_not_make_a_folder_without_run_file_that_run(folder: Path, foreign: bytes) -> None:
    run_file = (folder / "run.json").read_bytes()
    (folder / "run.json").unlink()
    (folder / "tape.sqlite").write_bytes(foreign)
    assert find_identity(folder)[2] == "snapshot 000001"
    assert values_of(folder) == NEWEST_OF_ALL and (folder / "run.json").read_bytes() == run_file
    (folder / "run.json").unlink()
    (folder / "tape.sqlite").write_bytes(foreign)
    shutil.rmtree(folder / "snapshots")
    before = written_over(folder)
    with pytest.raises(StoreError, match=r"run\.json is missing"):
        RunStore(folder)
    assert written_over(folder) == before


@pytest.mark.parametrize("spares", ["both", "lock", "standing.json", "neither"])
def test_an_older_copy_of_the_tape_is_found_out(made: dict[str, Path], folder: Path, spares: str) -> None:
    shutil.copyfile(made["older"] / "tape.sqlite", folder / "tape.sqlite")
    for name in ("lock", "standing.json"):
        if spares not in ("both", name):
            (folder / name).unlink()
    values, found, said = states_of(folder)
    assert values == NEWEST_OF_ALL and found == [VERSION_STRIDE] * 3
    lost = "has lost at least its last 6 entries" if spares != "neither" else "is older than the files it names"
    assert said[0].startswith(f"tape.sqlite {lost}"), said


def test_a_copy_of_the_tape_from_before_it_was_repaired_is_found_out(folder: Path) -> None:
    """Its files are those that it names: only its generation gives it away."""
    before = (folder / "tape.sqlite").read_bytes()
    change(folder, "UPDATE tape SET seal = 0 WHERE seq = 5")
    assert states_of(folder)[1] == [VERSION_STRIDE] * 3
    (folder / "tape.sqlite").write_bytes(before)
    values, found, said = states_of(folder)
    assert values == NEWEST_OF_ALL and said[0].startswith("tape.sqlite is a copy from before it was repaired")
    assert found == [2 * VERSION_STRIDE] * 3, "islands may hold the number that was used in between"
    assert states_of(folder)[2] == []


def test_a_tape_that_was_repaired_and_never_noted_is_the_newest(folder: Path) -> None:
    """A process that dies right after a repair leaves spares of the tape before."""
    spares = {name: (folder / name).read_bytes() for name in ("lock", "standing.json")}
    change(folder, "UPDATE tape SET seal = 0 WHERE seq = 5")
    states_of(folder)
    for name, data in spares.items():
        (folder / name).write_bytes(data)
    assert states_of(folder) == (NEWEST_OF_ALL, [VERSION_STRIDE] * 3, [])


@pytest.mark.parametrize("ahead", [2, 3])
def test_files_two_or_more_versions_ahead_show_that_the_tape_is_old(folder: Path, ahead: int) -> None:
    """Although nothing says how long the tape was."""
    run_id = read_identity(folder).run_id
    for version in range(NEWEST + 1, NEWEST + ahead + 1):
        state = load_file(file_of(folder, 1))
        newer = FragmentState(state["values"] - NEWEST + version, {"momentum": state["momentum"]})
        write_version(folder, file_of(folder, 1, version).name, newer, Label(run_id, 1, version, 3), state_checksum(newer))
    values, found, said = states_of(folder)
    assert values == [7.0, 7.0 + ahead, 7.0] and found == [VERSION_STRIDE] * 3
    assert said[0].startswith("tape.sqlite is older than the files it names"), said


@pytest.mark.parametrize("place_of_number", ["aside", "snapshots"])
def test_a_number_is_never_used_again_although_only_a_file_elsewhere_knows_of_it(folder: Path, place_of_number: str) -> None:
    name = f"0001-{VERSION_STRIDE + 5:08d}.safetensors"
    known = folder / ("aside/odd name" if place_of_number == "aside" else "snapshots/000009/fragments") / name
    known.parent.mkdir(parents=True)
    known.write_bytes(b"damaged")
    flip(file_of(folder, 1))
    assert states_of(folder)[1] == [NEWEST, 2 * VERSION_STRIDE, NEWEST]


@pytest.mark.parametrize("text", [b"", b"[]", b"5", b"null", b'{"checksum": 1, "text": 5}', b"\xff", b"\0" * 50])
def test_a_spare_that_is_something_else_says_nothing(folder: Path, text: bytes) -> None:
    for name in ("standing.json", "lock"):
        (folder / name).write_bytes(text)
    assert states_of(folder) == (NEWEST_OF_ALL, [NEWEST] * 3, [])


# ---------------------------------------------------------------- fallbacks and what is tidied away


def test_a_fragment_goes_on_from_the_file_that_is_there_without_a_copy(folder: Path) -> None:
    flip(file_of(folder, 1))
    assert values_of(folder) == [7.0, 6.0, 7.0]
    assert sorted(path.name for path in (folder / "fragments").glob("0001-*")) == [file_of(folder, 1, NEWEST - 1).name]
    for number in range(1, 4):
        store = RunStore(folder)
        assert not store.problems and store.load()[1][1].version == VERSION_STRIDE + number - 1
        merge(store, 1, VERSION_STRIDE + number)
        store.close()
    assert [path.name for path in sorted((folder / "fragments").glob("0001-*"))] == [
        file_of(folder, 1, VERSION_STRIDE + number).name for number in (2, 3)
    ], "a file goes once nothing names it"


def test_a_file_that_two_versions_name_stays_while_one_of_them_is_kept(folder: Path) -> None:
    for repair in range(1, 3):
        change(folder, "UPDATE tape SET seal = 0 WHERE seq = 5")
        assert states_of(folder)[1] == [repair * VERSION_STRIDE] * 3
    store = RunStore(folder)
    merge(store, 1, 2 * VERSION_STRIDE + 1)
    store.close()
    assert file_of(folder, 1).exists(), "readers may be in the middle of the version before"


def test_what_a_fragment_may_go_on_from_is_kept_until_it_does(folder: Path) -> None:
    """Neither an opening nor a shard that takes over removes it, although no newest row names it."""
    for version in (NEWEST, NEWEST - 1):
        flip(file_of(folder, 1, version))
    label, source = Label(read_identity(folder).run_id, 1, 5, 15), file_of(folder, 1, 5)
    state = FragmentState.fresh(torch.full_like(load_file(file_of(folder, 1, NEWEST - 1))["values"], 5.0))
    write_version(folder, source.name, state, label, state_checksum(state))
    store = RunStore(folder)
    assert store.fallbacks[1].source.file == source.name
    store.newest(range(3))
    assert source.exists()
    assert float(store.load()[0][1].values[0]) == 5.0
    store.close()
    assert states_of(folder) == ([7.0, 5.0, 7.0], [NEWEST, VERSION_STRIDE, NEWEST], [])


def test_odd_things_in_aside_are_in_nobodys_way(folder: Path) -> None:
    aside = folder / "aside"
    (aside / "0007-repair").mkdir(parents=True)
    (aside / "notes").mkdir()
    (aside / "0009-something else").mkdir()
    (aside / "0008-repair").write_bytes(b"a file")
    (aside / "notes" / "0001-x.safetensors").write_bytes(b"no version")
    (aside / "README").write_text("moved here by hand")
    before = contents(aside)
    flip(file_of(folder, 1))
    assert values_of(folder) == [7.0, 6.0, 7.0]
    assert before.items() <= contents(aside).items()
    assert (aside / "0009-repair" / file_of(folder, 1).name).exists()


def test_of_two_files_with_one_number_the_one_among_the_fragments_is_used(folder: Path) -> None:
    """The other one was moved aside because it never counted."""
    leftover = FragmentState.fresh(torch.full_like(load_file(file_of(folder, 0))["values"], 100.0))
    name = f"0000-{NEWEST:08d}-1.safetensors"
    write_version(folder, name, leftover, Label(read_identity(folder).run_id, 0, NEWEST, 3), state_checksum(leftover))
    (folder / "aside" / "0001-leftovers").mkdir(parents=True)
    (folder / "fragments" / name).rename(folder / "aside" / "0001-leftovers" / name)
    (folder / "tape.sqlite").unlink()
    assert values_of(folder) == NEWEST_OF_ALL


@pytest.mark.parametrize("how", ["flipped", "deleted"])
def test_a_damaged_version_before_costs_nothing_and_is_not_removed(folder: Path, how: str) -> None:
    before = file_of(folder, 1, NEWEST - 1)
    flip(before) if how == "flipped" else before.unlink()
    (folder / "fragments" / ".0001-00000008.safetensors.partial").write_bytes(b"half")
    found = written_over(folder)
    assert states_of(folder) == (NEWEST_OF_ALL, [NEWEST] * 3, [])
    assert set(found.values()) <= set(written_over(folder).values()) or how == "deleted"


# ---------------------------------------------------------------- the lock


def test_a_lock_that_a_dying_process_holds_for_a_moment_is_waited_for(folder: Path, monkeypatch) -> None:
    held = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.close(held)  # the process is gone

    monkeypatch.setattr(stores.time, "sleep", wait)
    assert values_of(folder) == NEWEST_OF_ALL and len(waits) == 3


def test_a_lock_that_stays_is_somebody_elses_run(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(stores, "LOCK_S", 0.0)
    store = RunStore(folder)
    before = contents(folder)
    with pytest.raises(StoreError, match="is in use by another syncer"):
        RunStore(folder)
    assert contents(folder) == before
    store.close()


# ---------------------------------------------------------------- a tape that is cut short


@pytest.mark.parametrize("kind", ["closed", "crashed"])
def test_a_tape_may_be_cut_short_anywhere(made: dict[str, Path], kind: str) -> None:
    size, log = (made["closed"] / "tape.sqlite").stat().st_size, (made["crashed"] / "tape.sqlite-wal").stat().st_size
    assert log > 10_000
    cuts = [("tape.sqlite", end) for end in (100, 1000, 4000)] + [("tape.sqlite", size // 2 + odd) for odd in (0, 1, 2049)]
    if kind == "crashed":
        size = (made["crashed"] / "tape.sqlite").stat().st_size
        cuts = [("tape.sqlite", end) for end in (100, 1000, 4000) if end < size]
        cuts += [("tape.sqlite-wal", end) for end in (1, 100, 1000, 4000, 4120, log // 2, log - 10, log)]
    for name, lost in cuts:
        with a_copy_of(made[kind]) as folder:
            path = folder / name
            kept = path.read_bytes()[:-lost]
            path.write_bytes(kept)
            if lost == log:
                path.unlink()
            what = f"the last {lost} bytes of {name}"
            values, found, said = states_of(folder)
            assert values == NEWEST_OF_ALL and read_standing(folder).tokens == 77, what
            if not said:
                assert (kind, name) == ("crashed", "tape.sqlite"), f"{what}: only the log can make up for it"
                continue
            assert found == [VERSION_STRIDE] * 3 and len(said) == 1 and said[0].startswith("tape.sqlite "), what
            assert lost == log or kept in [path.read_bytes() for path in folder.glob(f"aside/*/{name}")], what
            assert states_of(folder)[2] == [], what


@pytest.mark.parametrize("shared", ["missing", "zeros", "nonsense"])
def test_shared_memory_that_a_crash_left_or_did_not_leave_means_nothing(made: dict[str, Path], shared: str) -> None:
    with a_copy_of(made["crashed"]) as folder:
        assert (folder / "tape.sqlite-wal").stat().st_size and not (folder / "tape.sqlite-shm").exists()
        if shared != "missing":
            (folder / "tape.sqlite-shm").write_bytes(b"\0" * 32768 if shared == "zeros" else b"nonsense" * 4096)
        assert states_of(folder) == (NEWEST_OF_ALL, [NEWEST] * 3, [])


def test_a_new_tape_that_is_not_whole_is_not_used(folder: Path) -> None:
    (folder / NEW_TAPE).write_bytes((folder / "tape.sqlite").read_bytes()[:-3000])
    left = file_checksum(folder / NEW_TAPE)
    assert states_of(folder) == (NEWEST_OF_ALL, [NEWEST] * 3, [])
    assert left in contents(folder / "aside").values()


# ---------------------------------------------------------------- two at once

PARTS: dict[str, Callable[[Path], Path]] = {
    "tape": lambda folder: folder / "tape.sqlite",
    "log": lambda folder: folder / "tape.sqlite-wal",
    "version of 0": lambda folder: file_of(folder, 0),
    "version of 1": lambda folder: file_of(folder, 1),
    "run.json": lambda folder: folder / "run.json",
    "standing.json": lambda folder: folder / "standing.json",
}


@pytest.mark.parametrize("how", ["deleted", "flipped", "cut in half"])
def test_any_two_files_may_be_damaged_at_once(made: dict[str, Path], how: str) -> None:
    """The run opens and nothing is removed; a second opening has nothing to say."""
    for one, other in itertools.combinations(PARTS, 2):
        with a_copy_of(made["crashed"]) as folder:
            for part in (one, other):
                spoil(PARTS[part](folder), how)
            what = f"{one} and {other} {how}"
            before, tapes = written_over(folder), {contents(folder).get(name, 0) for name in SQLITE[:2]} - {0}
            values, _, said = states_of(folder)
            lost = [part in (one, other) for part in ("version of 0", "version of 1")]
            assert values == [6.0 if lost[0] else 7.0, 6.0 if lost[1] else 7.0, 7.0], f"{what}: {values}"
            assert said or {one, other} == {"tape", "standing.json"}, f"{what}: only the log can make up for it"
            assert set(before.values()) <= set(written_over(folder).values()), what
            if any(line.startswith("tape.sqlite") for line in said):
                assert tapes <= set(contents(folder / "aside").values()), what
            again = states_of(folder)
            assert (again[0], again[2]) == (values, []), what


# ---------------------------------------------------------------- memory


def test_a_snapshot_is_checked_and_the_fixed_tensors_are_linked_a_part_at_a_time(tmp_path: Path) -> None:
    model = small_model()
    model.register_buffer("table", torch.zeros(4 << 20, dtype=torch.int32))
    folder = skerry.create(tmp_path / "run", model, SYNC)
    size = (folder / "fixed.safetensors").stat().st_size
    store = RunStore(folder)
    snapshot = take_snapshot(store, 1)
    tracemalloc.start()
    take_snapshot(store, 2)
    assert check(snapshot)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    store.close()
    assert peak < size / 4, f"{peak} bytes for a file of {size}"
