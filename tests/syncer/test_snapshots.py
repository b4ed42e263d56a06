"""Snapshots of running runs: what is in them, what happens to damaged ones, and that a run goes on from one elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from islands import assert_same, batches, loss_of, poll, small_model, tape, train, versions
from jobs import tiny_job

import skerry
from skerry.admin import close_run, take_snapshot
from skerry.config import SyncConfig
from skerry.errors import StoreError
from skerry.observe.ledger import audit_run
from skerry.syncer.storage.restore import newest_complete, restore
from skerry.syncer.storage.run_folder import read_identity, read_model, read_standing
from skerry.train.validate import GlobalModel, validate


class Island:
    """A learner that leases data and trains a little at a time."""

    def __init__(self, address: str, name: str, keep: Path | None = None) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.learner = skerry.join(address, self.model, self.optimizer, name=name, tokens_per_step=4, keep=keep)
        self.batches = iter(self.learner.sampler(100, batch=4))

    def steps(self, count: int) -> None:
        generator = torch.Generator()
        for _, items in zip(range(count), self.batches, strict=False):
            x = torch.stack([torch.randn(6, generator=generator.manual_seed(item)) for item in items])
            self.optimizer.zero_grad()
            loss_of(self.model, (x, x.square().mean(1, keepdim=True))).backward()
            self.optimizer.step()

    def until_merged(self, folder: Path, count: int) -> None:
        poll(lambda: self.steps(1) or min(versions(folder)) >= count, f"{count} versions of every fragment")


@pytest.fixture
def running(tmp_path: Path, start_syncer) -> tuple[Any, Island]:
    sync = SyncConfig(fragments=2, every=4, snapshots_kept=2)
    syncer = start_syncer(skerry.create(tmp_path / "run", small_model(), sync))
    island = Island(syncer.address, "a")
    island.until_merged(syncer.folder, 2)
    return syncer, island


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["exp_avg_sq"] for state in optimizer.state.values()]


def test_a_snapshot_holds_the_model_the_leases_and_the_moments_of_one_moment(running, tmp_path: Path, start_syncer) -> None:
    syncer, island = running
    facts = take_snapshot(syncer.address, None)
    assert facts["number"] == 1 and facts["islands"] == {"a": "kept"}
    held = [moment.clone() for moment in moments(island.optimizer)]
    island.until_merged(syncer.folder, 4)
    island.learner.detach()
    syncer.stop()
    snapshot = syncer.folder / "snapshots" / "000001"
    assert versions(snapshot) < versions(syncer.folder)
    restore(snapshot, tmp_path / "elsewhere")
    restored = tmp_path / "elsewhere"
    assert read_identity(restored).run_id != read_identity(syncer.folder).run_id
    assert_same(read_model(restored), read_model(snapshot))
    standing = read_standing(restored)
    assert (standing.tokens, standing.sessions) == (read_standing(snapshot).tokens, {})
    ledger = audit_run(restored)
    assert ledger.adds_up and ledger.open == 0, "what the island of before held can be leased again"
    again = start_syncer(restored)
    follower = Island(again.address, "a", keep=restored / "islands")
    assert follower.learner.optimizer_state == "own"
    for found, expected in zip(moments(follower.optimizer), held, strict=True):
        assert torch.equal(found, expected)
    follower.until_merged(restored, 6)
    follower.learner.leave()
    again.stop()
    ledger = audit_run(restored)
    assert ledger.adds_up, ledger.discrepancies
    assert tape(restored, "restored_from")[0]["number"] == 1


def test_the_newest_are_kept_and_a_damaged_one_is_passed_over(running, tmp_path: Path) -> None:
    syncer, island = running
    for number in range(1, 5):
        island.steps(8)
        assert take_snapshot(syncer.address, None)["number"] == number
    island.learner.detach()
    syncer.stop()
    folder = syncer.folder / "snapshots"
    assert sorted(path.name for path in folder.glob("0*")) == ["000003", "000004"]
    said: list[str] = []
    assert newest_complete(syncer.folder, said.append).name == "000004" and not said
    victim = next(iter((folder / "000004" / "fragments").iterdir()))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.unlink()  # it has another name in the run folder, which must stay as it is
    victim.write_bytes(data)
    assert newest_complete(syncer.folder, said.append).name == "000003"
    assert said == [f"skipped: {victim} is damaged: the content does not match the manifest"]
    with pytest.raises(StoreError, match="is damaged"):
        restore(folder / "000004", tmp_path / "elsewhere")
    (folder / "000003" / "manifest.json").unlink()
    with pytest.raises(StoreError, match="has no intact snapshot"):
        newest_complete(syncer.folder, said.append)


def test_an_island_that_dies_meanwhile_is_named_and_the_rest_is_kept(running, monkeypatch) -> None:
    syncer, island = running
    monkeypatch.setattr("skerry.syncer.snapshots.STATE_S", 0.3)
    monkeypatch.setattr("skerry.syncer.snapshots.TRIES", 0)
    island.learner._connection.inbox.give_state = lambda asked: None  # it does not answer
    facts = take_snapshot(syncer.address, None)
    assert facts["islands"] == {"a": "a did not send its state within 0 s"}
    assert newest_complete(syncer.folder, print).name == "000001"
    island.learner.detach()


def test_one_that_cannot_be_written_leaves_nothing_behind(running, monkeypatch) -> None:
    syncer, island = running
    from skerry.errors import WireError
    from skerry.syncer import snapshots

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, "_finish", full)
    with pytest.raises(WireError, match="cannot write a snapshot to .*No space left on device"):
        take_snapshot(syncer.address, None)
    left = [path.name for path in (syncer.folder / "snapshots").iterdir()]
    assert [name for name in left if not name.startswith("fixed-")] == [], "but for the spare that all snapshots share"
    poll(lambda: tape(syncer.folder, "snapshot_failed"), "the tape to say so")
    island.until_merged(syncer.folder, 4)
    island.learner.detach()


def test_what_a_dead_syncer_left_half_done_is_removed(tmp_path: Path, start_syncer) -> None:
    folder = skerry.create(tmp_path / "run", small_model(), SyncConfig(fragments=2))
    (folder / "snapshots" / ".000007.partial" / "fragments").mkdir(parents=True)
    start_syncer(folder).stop()
    assert list((folder / "snapshots").iterdir()) == []


def test_snapshots_are_taken_now_and_then(tmp_path: Path, start_syncer) -> None:
    sync = SyncConfig(fragments=1, every=4, snapshot_every_s=0.3)
    syncer = start_syncer(skerry.create(tmp_path / "run", small_model(), sync))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    learner = skerry.join(syncer.address, model, optimizer)
    train(model, optimizer, batches(0, 20))
    poll(lambda: len(tape(syncer.folder, "snapshot_taken")) >= 2, "two snapshots")
    learner.detach()
    syncer.stop()
    entry = tape(syncer.folder, "snapshot_taken")[0]
    assert entry["islands"] == [[learner.name, "the optimizer has no state yet"]], "plain SGD has none"


def skerry_command(*arguments: str) -> str:
    found = subprocess.run([sys.executable, "-m", "skerry", *arguments], capture_output=True, text=True, timeout=170)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def start_skerry(*arguments: str) -> psutil.Popen:
    command = [sys.executable, "-m", "skerry", *arguments]
    return psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def tokens_of(folder: Path) -> int:
    return read_standing(folder).tokens if (folder / "address").exists() else 0


@pytest.mark.slow
def test_a_run_goes_on_from_a_snapshot_in_another_folder_with_other_islands(tmp_path: Path) -> None:
    """As a user would do it: real processes, a snapshot under load, a damaged newer one, fewer islands."""
    job, folder, other = tmp_path / "job.toml", tmp_path / "run", tmp_path / "other"
    job.write_text(tiny_job(10**9, eval={"final_tokens": 16384}))
    process = start_skerry("train", str(job), "--run", str(folder))
    try:
        poll(lambda: tokens_of(folder) > 60_000, "some of the run", 90)
        assert "snapshot 000001 of step" in skerry_command("snapshot", str(folder))
        take_snapshot((folder / "address").read_text().strip(), None)
    finally:
        parts = process.children(recursive=True)
        process.kill()
    _, alive = psutil.wait_procs([process, *parts], timeout=60)
    assert not alive, "no process outlives a killed launcher"
    (folder / "snapshots" / "000002" / "tape.sqlite").write_bytes(b"not a tape")
    made = subprocess.run(
        [sys.executable, "-m", "skerry", "restore", str(folder), str(other), "--islands", "2"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert made.returncode == 0 and "skipped" in made.stderr and "tape.sqlite is damaged" in made.stderr, made.stderr
    assert f"go on with: skerry resume {other}" in made.stdout
    shutil.rmtree(folder)  # nothing of the run that was cut is needed
    before = read_standing(other).tokens
    assert before > 60_000 and json.loads((other / "config.json").read_text())["islands"]["count"] == 2
    cut = GlobalModel(other)
    cut.refresh()
    loss = validate(cut.model, cut.corpus, cut.config.model.context, cut.config.eval.final_tokens, cut.device)
    process = start_skerry("resume", str(other))
    try:
        poll(lambda: tokens_of(other) > before + 40_000, "more of the run", 90)
        close_run((other / "address").read_text().strip(), None)
        assert process.wait(60) == 0
    finally:
        if process.is_running():
            process.kill()
    result = json.loads((other / "result.json").read_text())
    assert 1.0 < result["validation_loss"] < loss.loss + loss.standard_error < 5.5, "the loss goes on from where it was"
    assert {entry["learner"] for entry in tape(other, "joined")[-2:]} == {"island-0", "island-1"}
    assert [entry["source"] for entry in tape(other, "optimizer_restored")][-2:] == ["own", "own"]
    ledger = audit_run(other)
    assert ledger.adds_up, ledger.discrepancies
    assert ledger.trained == result["tokens"]
