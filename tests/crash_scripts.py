"""Processes that crash, for tests/test_crash.py. `main` forks them after all imports, so that crashing hundreds is cheap.

python crash_scripts.py SCRIPT SEED FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faulty_disk import CUTS, DIED, Cut, FaultyDisk, Folder, from_json, to_json
from islands import small_model

import skerry
from skerry.checksum import file_checksum
from skerry.config import SyncConfig
from skerry.core import records
from skerry.core.messages import Merge
from skerry.core.share import Share
from skerry.core.standing import Standing
from skerry.errors import StoreError
from skerry.syncer.process import run_syncer
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.run_folder import read_identity, read_model
from skerry.syncer.storage.sources import KEPT_VERSIONS
from skerry.syncer.storage.store import RunStore
from skerry.tensors.merge import FragmentState

SYNC = SyncConfig(fragments=3, every=1, overlap=0, quorum=1)
TRIES = 60


# ---------------------------------------------------------------- a run whose contents can be checked


def content(fragment: int, number: int, numel: int) -> FragmentState:
    """The state of a fragment after the merge with this number. Merge 0 is the initial model."""
    generator = torch.Generator().manual_seed(1000 * number + fragment)
    values, momentum = (torch.randn(numel, generator=generator) for _ in range(2))
    return FragmentState(values, {"momentum": momentum})


class Witness:
    """A log of states that were announced or attempted, in a file outside the faulty disk.

    A state has the number of the last commit, the commits before it, and for each fragment its version and the number of the
    merge that made it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a")

    def write(self, what: str, state: dict[str, Any]) -> None:
        self._file.write(json.dumps([what, state]) + "\n")
        self._file.flush()

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def possible(self) -> list[dict[str, Any]]:
        """The last state announced, and those attempted since."""
        entries = self.read()
        last = max(index for index, (what, _) in enumerate(entries) if what == "announced")
        return [state for _, state in entries[last:]]


def check_state(store: RunStore, witness: Witness) -> dict[str, Any]:
    """The state of a run folder, after checking that it is a possible one in every detail."""
    states, progress, standing = store.load()
    possible = [state for state in witness.possible() if state["number"] == standing.banked_tokens]
    assert possible, f"stands at commit {standing.banked_tokens}, not at any of {witness.possible()}"
    state = possible[0]
    for fragment, (version, number) in enumerate(state["fragments"]):
        assert progress[fragment].version == version, f"fragment {fragment}: {progress[fragment].version}, not {version}"
        if number:
            expected = content(fragment, number, len(states[fragment].values))
            assert torch.equal(states[fragment].values, expected.values), f"values of fragment {fragment}"
            assert torch.equal(states[fragment].momentum, expected.momentum), f"momentum of fragment {fragment}"
            assert progress[fragment].counted_step("island") == number, f"what counts in fragment {fragment}"
        else:
            assert not bool(states[fragment].momentum.any())
    numbers = [int(e.record.what) for e in store.tape() if isinstance(e.record, records.Repaired)]
    assert numbers == [*state["before"], state["number"]][1:], f"the tape has {numbers}"
    return state


def after(state: dict[str, Any], number: int, fragments: list[int]) -> dict[str, Any]:
    moved = [
        [version + 1, number] if f in fragments else [version, made] for f, (version, made) in enumerate(state["fragments"])
    ]
    return {"number": number, "fragments": moved, "before": [*state["before"], state["number"]]}


def put(store: RunStore, state: dict[str, Any], witness: Witness) -> None:
    """Write the merges that lead to this state, in one commit."""
    number = state["number"]
    written = []
    for fragment, (version, made) in enumerate(state["fragments"]):
        if made == number:
            share = Share("island", "s", version - 1, 1, 10, 100.0, at_step=number)
            order = Merge(fragment, version, number, (share,), 0.5, 0.5, 1.0)
            numel = store.identity.layout.fragments[fragment].numel
            written.append(store.write(order, content(fragment, number, numel)))
    witness.write("tried", state)
    standing = Standing(number, number, "running", {"island": ("s", 0, number, 0)})
    store.commit(written, standing, [TapeEntry(float(number), records.Repaired(str(number)))])
    witness.write("announced", state)


def until_it_works(work: Callable[..., Any], *arguments: Any) -> Any:
    for _ in range(TRIES):
        with contextlib.suppress(StoreError):
            return work(*arguments)
    raise AssertionError(f"{TRIES} attempts failed")


def merge_for_a_while(folder: Path, seed: int, witness: Witness) -> None:
    """Open the store twice, as two processes in a row would, and merge. A failed merge is retried with another result."""
    chance = random.Random(seed)
    number = 0

    def merge(store: RunStore, state: dict[str, Any], fragments: list[int]) -> dict[str, Any]:
        nonlocal number
        number += 1
        new = after(state, number, fragments)
        put(store, new, witness)
        return new

    for _ in range(2):
        store = until_it_works(RunStore, folder)
        state = check_state(store, witness)
        witness.write("announced", state)
        for _ in range(chance.randint(2, 4)):
            fragments = chance.sample(range(SYNC.fragments), chance.randint(0, SYNC.fragments))
            state = until_it_works(merge, store, state, fragments)
        store.close()


def goes_on(folder: Path, witness: Witness) -> None:
    """Check that the folder opens in a possible state, takes more merges, and holds no unneeded files."""
    store = RunStore(folder)
    state = check_state(store, witness)
    number = max(state["number"] for _, state in witness.read())
    for _ in range(2):
        number += 1
        state = after(state, number, list(range(SYNC.fragments)))
        put(store, state, witness)
    store.close()
    store = RunStore(folder)
    assert check_state(store, witness) == state
    store.close()
    files = sorted(path.name for path in (folder / "fragments").iterdir())
    assert len(files) == KEPT_VERSIONS * SYNC.fragments and not any("partial" in name for name in files), files
    read_model(folder)


# ---------------------------------------------------------------- processes that crash


class Stage:
    """A folder in which processes crash, and counters of crash points, outcomes and failures."""

    def __init__(self, place: Path, template: Path) -> None:
        self.place = place
        self.template = template
        self.points = self.outcomes = 0
        self.failures: list[str] = []

    def set_up(self) -> None:
        for path in self.place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.template, self.place / "disk")
        self.witness = Witness(self.place / "witness")
        self.witness.write("announced", {"number": 0, "fragments": [[0, 0]] * SYNC.fragments, "before": []})

    def fork(
        self, work: Callable[[FaultyDisk], None], call: int = 0, state: Folder | None = None
    ) -> tuple[bool, Folder | None]:
        """Run `work` in a child process that dies at this call. Returns whether it died, and the state of the disk then."""
        left = self.place / "left"
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                disk = FaultyDisk(self.place / "disk", state)
                last_words = disk.state
                disk.die_at(call, lambda: left.write_text(json.dumps(to_json(last_words))) and None)
                with disk.installed():
                    work(disk)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, DIED), f"the process ended with {status}"
        return status == DIED, from_json(json.loads(left.read_text())) if status == DIED else None

    def check(self, what: str, check: Callable[[Path], None], folder: Path) -> None:
        self.outcomes += 1
        before = self.witness.path.read_text()
        try:
            check(folder)
        except BaseException as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
        self.witness.path.write_text(before)

    def cut(self, what: str, check: Callable[[Path], None], state: Folder, seed: int, ways: tuple[Cut, ...] = CUTS) -> None:
        """Check the states that a power cut can leave, by default of every kind."""
        for how in ways:
            shutil.rmtree(self.place / "cut", ignore_errors=True)
            state.write_out(self.place / "cut", how, random.Random(seed))
            self.check(f"{what}, power cut: {how}", check, self.place / "cut")


def die_everywhere(stage: Stage, seed: int) -> None:
    """Kill the process at every disk call in turn, with and without a power cut."""
    call, died = 0, True
    while died:
        call += 1
        stage.set_up()
        died, left = stage.fork(lambda _: merge_for_a_while(stage.place / "disk" / "run", seed, stage.witness), call)
        stage.points += died
        what = f"seed {seed}, died at call {call}"
        if left is not None:
            stage.cut(what, lambda folder: goes_on(folder / "run", stage.witness), left, 1000 * seed + call)
        stage.check(what, lambda folder: goes_on(folder / "run", stage.witness), stage.place / "disk")


def die_everywhere_then_cut(stage: Stage, seed: int) -> None:
    """Kill the process at every disk call in turn; another process takes over and announces its state; then cut the power."""
    call, died = 0, True

    def take_over(disk: FaultyDisk) -> None:
        store = RunStore(stage.place / "disk" / "run")
        stage.witness.write("announced", check_state(store, stage.witness))
        disk.die_at(disk.calls + 1, disk.last_words or (lambda: None))
        store.commit([], Standing(), [TapeEntry(0.0, records.Repaired("never"))])

    while died:
        call += 1
        stage.set_up()
        died, left = stage.fork(lambda _: merge_for_a_while(stage.place / "disk" / "run", seed, stage.witness), call)
        if left is not None:
            stage.points += 1
            _, then = stage.fork(take_over, 0, left)
            assert then is not None
            what = f"seed {seed}, died at call {call}, taken over"
            stage.cut(what, lambda folder: goes_on(folder / "run", stage.witness), then, 1000 * seed + call)


def die_creating(stage: Stage, seed: int) -> None:
    """Kill the creation of a run at every disk call: the run is either complete or can be created again. Once created, it stays
    even if the power is cut."""
    model = small_model()
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = stage.place / "made"
    where = Path("deep", "down", "run")

    def create(_: FaultyDisk) -> None:
        skerry.create(stage.place / "disk" / where, small_model(), SYNC)
        made.touch()

    def check(folder: Path) -> None:
        if made.exists() or (folder / where / "run.json").exists():
            read_identity(folder / where)
        else:
            skerry.create(folder / where, small_model(), SYNC)
        read = read_model(folder / where)
        assert all(torch.equal(read[name], tensor) for name, tensor in initial.items())
        goes_on(folder / where, stage.witness)

    call, died = 0, True
    while died:
        call += 1
        stage.set_up()
        (stage.place / "disk" / "deep").mkdir()
        died, left = stage.fork(create, call)
        stage.points += died
        what = f"died creating, at call {call}"
        if left is not None:
            stage.cut(what, check, left, 1000 * seed + call)
        stage.check(what, check, stage.place / "disk")

    stage.set_up()  # once more, to cut the power right after creation
    (stage.place / "disk" / "deep").mkdir()

    def create_and_die(disk: FaultyDisk) -> None:
        create(disk)
        disk.die_at(disk.calls + 1, disk.last_words or (lambda: None))
        os.mkdir(stage.place / "disk" / "end")

    _, left = stage.fork(create_and_die)
    assert left is not None
    stage.cut("died after creating", check, left, seed)


def fail_everywhere(stage: Stage, seed: int) -> None:
    """Fail every disk call in turn, alone or with the calls after it; later kill the process or let it live."""
    calls = 0

    def count(disk: FaultyDisk) -> None:
        nonlocal calls
        merge_for_a_while(stage.place / "disk" / "run", seed, stage.witness)
        (stage.place / "calls").write_text(str(disk.calls))

    stage.set_up()
    stage.fork(count)
    calls = int((stage.place / "calls").read_text())
    chance = random.Random(seed)
    for call in range(1, calls + 1):
        length = chance.choice([0, 0, 3, 30])
        dies = chance.choice([0, call + length + chance.randint(1, 12)])

        def fail(disk: FaultyDisk, call: int = call, length: int = length, dies: int = dies) -> None:
            last_words = disk.last_words
            disk.fail_at(call, call + length)

            def full(what: str, path: str) -> bool:
                if disk.calls == dies:
                    disk.last_words = last_words
                return disk.calls == dies

            disk.full = full
            merge_for_a_while(stage.place / "disk" / "run", seed, stage.witness)

        stage.set_up()
        died, left = stage.fork(fail)
        stage.points += 1
        what = f"seed {seed}, calls {call} to {call + length} failed" + (f", died at call {dies}" if died else "")
        if left is not None:
            stage.cut(what, lambda folder: goes_on(folder / "run", stage.witness), left, 1000 * seed + call)
        stage.check(what, lambda folder: goes_on(folder / "run", stage.witness), stage.place / "disk")


def die_repairing(stage: Stage, seed: int) -> None:
    """Kill the process at every disk call while it replaces a damaged tape and a damaged version, sometimes twice in a row."""
    template = stage.template / "run"
    store = RunStore(template)
    for number in range(1, 4):
        for fragment, spec in enumerate(store.identity.layout.fragments):
            state = content(fragment, number, spec.numel)
            order, note = Merge(fragment, number, number, (), 0.5, 0.5, 1.0), records.Repaired(f"{number} of {fragment}")
            store.commit([store.write(order, state)], Standing(number, number), [TapeEntry(0.0, note)])
    numels = [spec.numel for spec in store.identity.layout.fragments]
    store.close()
    with contextlib.closing(sqlite3.connect(template / "tape.sqlite")) as database, database:
        database.execute("UPDATE tape SET seal = 0 WHERE kind = 'created'")
    damaged = template / "fragments" / "0001-00000003.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = _checksums(template)

    def open_and_close(_: FaultyDisk) -> None:
        store = RunStore(stage.place / "disk" / "run")
        store.load()
        store.close()

    def check(folder: Path, killed_only: bool) -> None:
        for opening in range(2):
            store = RunStore(folder / "run")
            states, _, standing = store.load()
            notes = [entry.record.what for entry in store.tape() if isinstance(entry.record, records.Repaired)]
            store.close()
            assert len(notes) == len(set(notes)) == 3 * len(states), f"intact rows of the tape are lost: {notes}"
            for fragment, state in enumerate(states):
                expected = content(fragment, 2 if fragment == 1 else 3, numels[fragment])
                assert torch.equal(state.values, expected.values), f"fragment {fragment}, opening {opening}"
                assert torch.equal(state.momentum, expected.momentum), f"fragment {fragment}, opening {opening}"
            assert standing.step == 3 and (not opening or not store.problems), f"{standing}, {store.problems}"
        assert not killed_only or before <= _checksums(folder / "run"), "a file is gone"

    call, died = 0, True
    while died:
        call += 1
        stage.set_up()
        died, left = stage.fork(open_and_close, call)
        what = f"died repairing, at call {call}"
        if died and call % 5 == 0:
            again, _ = stage.fork(open_and_close, call // 2)
            what += f", and again at call {call // 2}" if again else ""
        stage.points += died
        if left is not None:
            how = (CUTS[call % len(CUTS)],)
            stage.cut(what, lambda folder: check(folder, False), left, 1000 * seed + call, how)
        stage.check(what, lambda folder: check(folder, True), stage.place / "disk")


def _checksums(folder: Path) -> set[int]:
    """Checksums of all files, except those that every process writes."""
    names = ("tape.sqlite", "tape.sqlite-wal", "tape.sqlite-shm", "standing.json", "lock")
    return {file_checksum(path) for path in folder.rglob("*") if path.is_file() and path.name not in names}


SCRIPTS = {
    script.__name__: script
    for script in (die_everywhere, die_everywhere_then_cut, die_creating, fail_everywhere, die_repairing)
}


def play(script: str, seed: int, place: Path) -> None:
    (place / "template").mkdir()
    (place / "stage").mkdir()
    if script != "die_creating":
        skerry.create(place / "template" / "run", small_model(), SYNC)
    stage = Stage(place / "stage", place / "template")
    SCRIPTS[script](stage, seed)
    print(json.dumps({"points": stage.points, "outcomes": stage.outcomes, "failures": stage.failures}))


def syncers(folder: Path) -> None:
    """Run one syncer for each number on stdin. It kills itself at the disk call with that number."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                disk = FaultyDisk(folder)
                disk.die_at(int(line), _hang_and_die)
                with disk.installed():
                    asyncio.run(run_syncer(RunStore(folder), "127.0.0.1:0", None, on_listening=_say_port))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps(status), flush=True)


def _hang_and_die() -> None:
    # A failing disk hangs first. If another thread announces something too early, the pause lets it out.
    threading.Event().wait(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def _say_port(port: int) -> None:
    print(json.dumps([os.getpid(), port]), flush=True)


def main(script: str, seed: int, place: Path) -> None:
    torch.set_num_threads(1)
    if script == "syncers":
        syncers(place)
    else:
        play(script, seed, place)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
