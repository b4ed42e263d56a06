"""Recorded runs executed again: the same weights to the bit, after kills, a straggler and a syncer restart."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from islands import poll, tape, tape_kinds
from jobs import tiny_job
from safetensors.torch import load_file

from skerry.admin import close_run
from skerry.core.leases.ranges import Range
from skerry.errors import ReplayError
from skerry.learner.journal import MOST_BYTES, MOST_ENTRIES, Journal
from skerry.syncer.rpc.journals import newer, read_journal
from skerry.syncer.storage.database import seal_of
from skerry.syncer.storage.run_folder import read_model
from skerry.train.recording import first_difference
from skerry.train.replay import Replay

CHAOS = (
    "kill island-0 @ step 60, slow island-1 5x @ step 30 for 3s, kill_syncer syncer @ step 100 for 1s, kill island-2 @ step 160"
)


def skerry(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "skerry", *arguments], capture_output=True, text=True, timeout=170)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that goes on until all has happened to it and there is something to see."""
    folder = tmp_path_factory.mktemp("replay")
    sync = {"fragments": 3, "every": 12, "send": "topk3", "publish": "int4"}
    (folder / "job.toml").write_text(tiny_job(10**9, sync=sync, islands={"threads": 1}))
    run = folder / "run"
    with (folder / "output").open("w") as output:
        command = [sys.executable, "-m", "skerry", "train", str(folder / "job.toml"), "--run", str(run), "--chaos", CHAOS]
        process = subprocess.Popen(command, stdout=output, stderr=output)

    def enough() -> bool:
        assert process.poll() is None, (folder / "output").read_text()
        if not (run / "address").exists():
            return False
        kinds = tape_kinds(run)
        happened = kinds.count("fault_injected") >= CHAOS.count("@") and kinds.count("syncer_started") >= 2
        return happened and kinds[::-1].index("fault_injected") > 100 and kinds.count("merged") > 40

    try:
        poll(enough, "all that was planned for the run", 120)
        close_run((run / "address").read_text().strip(), None)
        assert process.wait(60) == 0, (folder / "output").read_text()
    finally:
        process.kill()
    return run


@pytest.mark.slow
def test_a_run_with_kills_a_straggler_and_a_syncer_restart_comes_out_the_same(recorded: Path) -> None:
    kinds = {entry["words"].split()[0] for entry in tape(recorded, "fault_injected")}
    assert kinds >= {"kill", "slow"} and len(tape(recorded, "syncer_started")) >= 2
    assert len({entry["session"] for entry in tape(recorded, "joined")}) > 3
    replay = Replay(recorded)
    assert sum(1 for _ in replay.run()) == len(tape(recorded, "merged")) > 10
    expected = read_model(recorded)
    for name, tensor in replay.model().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_it_can_stop_anywhere_and_be_looked_at(recorded: Path, tmp_path: Path) -> None:
    found = skerry("replay", str(recorded), "--outer-steps", "10", "--write", str(tmp_path / "early.safetensors"))
    assert found.returncode == 0 and "10 outer steps came out as they were, bit for bit" in found.stdout, found.stderr
    early = load_file(tmp_path / "early.safetensors")
    replay = Replay(recorded)
    assert [made.merge.version for made in replay.run(10)] and replay.done == 10
    for name, tensor in replay.model().items():
        assert torch.equal(tensor, early[name])


def change(folder: Path, kind: str, number: int, edit) -> None:
    database = sqlite3.connect(folder / "tape.sqlite")
    seq, data = database.execute("SELECT seq, data FROM tape WHERE kind = ? ORDER BY seq", (kind,)).fetchall()[number]
    entry = json.loads(data)
    edit(entry)
    at = database.execute("SELECT at FROM tape WHERE seq = ?", (seq,)).fetchone()[0]
    sealed = seal_of((at, kind, json.dumps(entry)))  # as if it had been written so
    database.execute("UPDATE tape SET data = ?, seal = ? WHERE seq = ?", (json.dumps(entry), sealed, seq))
    database.commit()
    database.close()


def copy(recorded: Path, target: Path) -> Path:
    import shutil

    return Path(shutil.copytree(recorded, target))


@pytest.mark.slow
def test_what_was_otherwise_is_found_where_it_was(recorded: Path, tmp_path: Path) -> None:
    assert first_difference(recorded, recorded) is None
    other = copy(recorded, tmp_path / "other")
    change(other, "merged", 12, lambda entry: entry["shares"][0].update(weight=entry["shares"][0]["weight"] * 2, tokens=1))
    found = first_difference(recorded, other)
    assert found is not None and found.startswith("outer step 13, version") and "different contributions of island" in found
    assert "outer step 13" in skerry("replay", str(recorded), "--against", str(other)).stdout


@pytest.mark.slow
def test_a_tape_that_does_not_explain_the_weights_is_refused_at_the_first_difference(recorded: Path, tmp_path: Path) -> None:
    other = copy(recorded, tmp_path / "other")
    change(other, "merged", 6, lambda entry: entry.update(outer_lr=entry["outer_lr"] * 1.0001))
    with pytest.raises(ReplayError, match="outer step 7, version .*, does not match the recording"):
        list(Replay(other).run())
    shorter = copy(recorded, tmp_path / "shorter")
    share = tape(shorter, "merged")[-1]["shares"][0]
    for number, entry in enumerate(tape(shorter, "journaled")):
        if entry["session"] == share["session"] and entry["until"] >= share["at_step"]:
            change(shorter, "journaled", number, lambda entry: entry.update(until=entry["since"]))
    with pytest.raises(ReplayError, match="the journal of island-. has a gap at step"):
        list(Replay(shorter).run())


# ---------------------------------------------------------------- journals


def test_a_journal_is_sent_until_it_is_durable() -> None:
    journal = Journal()
    journal.adopted(0, 0, 5)
    for step in range(1, 7):
        journal.began_step(step, 100 * (step // 2))
        journal.trained_on(step, [Range("", 4 * step, 4)])
    journal.adopted(6, 1, 7)
    whole = json.loads(journal.upto(6))
    assert whole["adopted"] == [[0, 0, 5, False], [6, 1, 7, False]]
    assert whole["tokens"] == [[1, 0], [2, 100], [4, 200], [6, 300]]
    assert whole["data"] == [[1, [["", 4, 4]]]], "what follows on needs no words"
    journal.durable(4)
    rest = json.loads(journal.upto(6))
    assert (rest["since"], rest["tokens"], rest["adopted"]) == (4, [[6, 300]], [[6, 1, 7, False]])
    journal.trained_on(7, [Range("", 99, 1), Range("", 0, 1), Range("", 1, 2)])
    assert json.loads(journal.upto(7))["data"] == [[7, [["", 99, 1], ["", 0, 3]]]], "those that touch are one"


def test_a_journal_says_where_the_optimizers_state_came_from_until_that_is_durable() -> None:
    before, journal = Journal(), Journal()
    before.began_step(1, 5)
    journal.restored("own", [("old", 1)], before.upto(1))
    for step in range(1, 4):
        journal.began_step(step, 0)
        found = read_journal(journal.upto(step), "island", "new")
        assert found is not None and (found[0].source, found[0].origin) == ("own", (("old", 1),))
        assert found[1] is not None and found[1].tokens == ((1, 5),)
    journal.durable(2)
    assert "source" not in json.loads(journal.upto(3))


def test_a_journal_of_too_many_bytes_has_a_gap() -> None:
    journal = Journal()
    for step in range(1, 3000):
        journal.trained_on(step, [Range("a pool with a long name" * 20, 7 * step, 1)])
    found = json.loads(journal.upto(2999))
    assert found["gaps"] == [[0, 2999]] and found["data"] == []


def test_a_long_journal_that_was_inherited_is_left_out_before_anything_else() -> None:
    journal = Journal()
    journal.restored("own", [("old", 5)], json.dumps("x" * (MOST_BYTES - 20)))
    found = json.loads(journal.upto(0))
    assert found["inherited"] is None and found["origin"] == [["old", 5]] and found["gaps"] == []
    journal.adopted(0, 0, 5)
    assert json.loads(journal.upto(1))["adopted"] == [[0, 0, 5, False]]


def test_a_journal_that_nobody_takes_says_where_it_has_a_gap() -> None:
    journal = Journal()
    for step in range(1, MOST_ENTRIES + 10):
        journal.began_step(step, step)
    found = json.loads(journal.upto(MOST_ENTRIES + 9))
    assert len(found["tokens"]) < 20 and found["gaps"] == [[0, MOST_ENTRIES + 1]]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"since": 0, "until": "x"}', '{"since":0,"until":1,"adopted":[1]}', "x" * 2**21]
)
def test_what_is_no_journal_is_not_taken_for_one(text: str) -> None:
    assert read_journal(text, "island", "new") is None


def test_a_journal_inherited_by_a_journal_that_inherited_one_is_read() -> None:
    """An island was killed twice before its first merge."""
    first, second, third = Journal(), Journal(), Journal()
    first.restored("peer", [("other", 9)], "")
    first.began_step(1, 5)
    second.restored("own", [("first", 1)], first.upto(1))
    second.began_step(1, 6)
    third.restored("own", [("second", 1)], second.upto(1))
    third.began_step(1, 7)
    found = read_journal(third.upto(1), "island", "third")
    assert found is not None and found[1] is not None
    assert (found[0].tokens, found[0].origin, found[1].tokens) == (((1, 7),), (("second", 1),), ((1, 6),))


def test_a_malformed_inheritance_does_not_cost_the_journal() -> None:
    journal = Journal()
    journal.restored("own", [("old", 1)], '{"since": "x"}')
    journal.began_step(1, 5)
    found = read_journal(journal.upto(1), "island", "new")
    assert found is not None and found[0].tokens == ((1, 5),) and found[1] is None


def test_only_what_is_new_of_a_journal_is_written() -> None:
    journal = Journal()
    journal.adopted(2, 0, 1)
    for step in range(1, 5):
        journal.began_step(step, step)
    found = read_journal(journal.upto(4), "island", "new")
    assert found is not None
    assert newer(found[0], 2).tokens == ((3, 3), (4, 4)) and newer(found[0], 2).adopted == ((2, 0, 1, False),)
    assert newer(found[0], 3).adopted == ()
