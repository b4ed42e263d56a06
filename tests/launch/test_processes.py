"""Whole runs as a user starts them: real processes, killed at chosen moments."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from jobs import tiny_job
from safetensors.torch import load_file

from skerry.config import Config, from_json
from skerry.metrics import MetricsTail
from skerry.models.gpt import build_gpt
from skerry.observe.ledger import audit_run
from skerry.train.job import load_weights

pytestmark = pytest.mark.slow

EVAL = {"every_tokens": 100_000, "final_tokens": 4096, "sample_tokens": 20}


class Run:
    """`skerry train` as a process, with a look into its folder."""

    def __init__(self, folder: Path, tokens: int, islands: int = 3, *arguments: str) -> None:
        self.folder = folder / "run"
        config = folder / "job.toml"
        config.write_text(tiny_job(tokens, begin_share=0.2, islands={"count": islands}, eval=EVAL))
        self._output = (folder / "output.txt").open("ab")
        command = [sys.executable, "-m", "skerry", "train", str(config), "--run", str(self.folder), *arguments]
        self.process = psutil.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)
        self._tail = MetricsTail(self.folder / "metrics.jsonl")
        self.records: list[dict] = []
        self.seen: set[psutil.Process] = set()

    @property
    def output(self) -> str:
        return Path(self._output.name).read_text()

    def part(self, name: str) -> psutil.Process:
        """The process of a part, once it has been started."""
        marks = set(name.split("-")) if name.startswith("shard-") else {name}

        def find() -> psutil.Process | None:
            for child in self.process.children():
                try:
                    if marks <= set(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                        return child
                except psutil.NoSuchProcess:
                    continue
            return None

        found = self.until(find, f"a process of {name}")
        self.seen.add(found)
        return found

    def until(self, condition: Callable[[], object], what: str) -> object:
        """Wait for a condition; fail if the run ends or two minutes pass before it holds."""
        deadline = time.monotonic() + 120
        while True:
            self.seen.update(self.process.children() if self.process.poll() is None else [])
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"the run ended while waiting for {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited too long for {what}:\n{self.output}"
            time.sleep(0.02)

    def read(self) -> list[dict]:
        self.records += self._tail.read()
        return self.records

    def run_tokens(self) -> int:
        return max((r["tokens"] for r in self.read() if r["kind"] == "run"), default=0)

    def island_steps(self) -> dict[str, int]:
        return {r["island"]: r["step"] for r in self.read() if r["kind"] == "island"}

    def count(self, what: str, island: str) -> int:
        return sum(r["kind"] == "event" and r["what"] == what and r.get("island") == island for r in self.read())

    def finish(self) -> dict:
        status = self.process.wait(120)
        assert status == 0, f"exit status {status}:\n{self.output}"
        if (self.folder / "tape.sqlite").exists():
            ledger = audit_run(self.folder)
            assert ledger.adds_up and ledger.applied, ledger.discrepancies
        return json.loads((self.folder / "result.json").read_text())

    def versions(self) -> dict[int, int]:
        database = sqlite3.connect(f"file:{self.folder / 'tape.sqlite'}?mode=ro", uri=True)
        rows = database.execute("SELECT fragment, max(version), count(*) FROM versions GROUP BY fragment").fetchall()
        database.close()
        assert all(count == newest + 1 for _, newest, count in rows), "a version is missing from the tape"
        return {fragment: newest for fragment, newest, _ in rows}


@pytest.fixture
def start_run(tmp_path: Path):
    runs: list[Run] = []

    def start(tokens: int, islands: int = 3, *arguments: str) -> Run:
        runs.append(Run(tmp_path, tokens, islands, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        children = run.process.children(recursive=True) if run.process.is_running() else []
        for process in [run.process, *children]:
            if process.is_running():
                process.kill()
        run._output.close()


def assert_learned(result: dict, tokens: int, loss: float = 3.6, alone: int = 1) -> None:
    """`alone` islands trained without the syncer for a while. Each stops by itself only when it alone has spent what was
    left of the budget, so that many times the budget is the bound, however long the syncer takes to come back."""
    most = 1.5 * tokens if alone == 1 else alone * tokens
    assert tokens <= result["tokens"] < most, "the budget is kept, but for what islands do until they hear of it"
    assert 1.0 < result["validation_loss"] < loss, "an untrained byte model has a loss of 5.5"


def test_run_goes_on_and_ends_well_when_islands_are_killed_at_any_moment(start_run) -> None:
    tokens = 3_000_000  # enough for the others to be training still when an island has come back on a busy machine
    run = start_run(tokens)
    os.kill(run.part("island-1").pid, signal.SIGKILL)  # before it has joined
    run.until(lambda: run.count("restarted", "island-1"), "island-1 to be started again")
    run.until(lambda: run.run_tokens() > tokens // 30, "the run to get going")
    before = run.island_steps()
    os.kill(run.part("island-2").pid, signal.SIGKILL)  # in the middle of training
    run.until(lambda: run.count("joined", "island-2") >= 2, "island-2 to come back")
    after = run.island_steps()
    for island in ("island-0", "island-1"):
        assert after[island] > before[island], "the others went on stepping"
    for island in range(3):  # all at once
        os.kill(run.part(f"island-{island}").pid, signal.SIGKILL)
    run.until(lambda: run.count("closing", None) or run.run_tokens() > 0.95 * tokens, "the end to come near")
    os.kill(run.part("island-2").pid, signal.SIGKILL)  # about when the run closes
    result = run.finish()
    assert_learned(result, tokens)
    assert len(run.seen) >= 7, "all five parts, and the two that certainly were started again"
    assert not any(process.is_running() for process in run.seen)


def test_islands_step_on_and_nothing_merged_is_lost_when_the_syncer_is_killed(start_run) -> None:
    tokens = 1_000_000
    run = start_run(tokens)
    os.kill(run.part("syncer").pid, signal.SIGKILL)  # before anyone has joined
    run.until(lambda: run.count("syncer restarted", "syncer"), "the syncer to be started again")
    run.until(lambda: run.run_tokens() > 0.05 * tokens, "the run to get going")
    os.kill(run.part("syncer").pid, signal.SIGKILL)  # in the middle of merging
    before = run.versions()
    run.until(lambda: min(newest - before[fragment] for fragment, newest in run.versions().items()) > 0, "merging to go on")
    result = run.finish()
    # On a busy machine a syncer takes seconds to start. Islands of such short steps then do most of the budget without it.
    assert_learned(result, tokens, loss=4.8, alone=3)
    for island in range(3):
        log = (run.folder / "logs" / f"island-{island}.log").read_text()
        alone = [int(line.split(" after ")[1].split()[0]) for line in log.splitlines() if "is back with the syncer" in line]
        # A stream that breaks once training is over comes back after no step; the first one is that of the kill.
        assert alone and alone[0] > 0, "islands trained on while the syncer was away"


def test_a_syncer_that_is_told_to_stop_is_started_again_and_islands_train_on(start_run) -> None:
    """By an operator, or by what looks after a machine's memory. It ends well, but the run has not."""
    tokens = 1_000_000
    run = start_run(tokens)
    run.until(lambda: run.run_tokens() > 0.05 * tokens, "the run to get going")
    before = run.versions()
    os.kill(run.part("syncer").pid, signal.SIGTERM)
    run.until(lambda: run.count("syncer restarted", "syncer"), "the syncer to be started again")
    run.until(lambda: min(newest - before[fragment] for fragment, newest in run.versions().items()) > 0, "merging to go on")
    assert_learned(run.finish(), tokens, loss=4.8, alone=3)
    assert not any(run.count("killed", f"island-{island}") for island in range(3))


@pytest.mark.parametrize("algorithm", ["decoupled", "dp"])
def test_a_run_that_goes_on_is_not_touched_by_the_same_command(start_run, algorithm: str) -> None:
    without_end = 1_000_000_000
    run = start_run(without_end, 2, "--algorithm", algorithm)
    run.until(lambda: run.run_tokens() > 0, "the run to get going")
    again = start_run(without_end, 2, "--algorithm", algorithm)
    assert again.process.wait(60) == 1
    assert "is already run by another skerry train" in again.output
    before = run.run_tokens()
    run.until(lambda: run.run_tokens() > before, "the first to go on")
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130


def test_a_killed_shard_stops_only_its_fragments_and_a_killed_syncer_finds_its_shards_again(start_run) -> None:
    tokens = 1_000_000
    run = start_run(tokens, 3, "--islands.shards", "2")
    run.until(lambda: run.run_tokens() > 0.05 * tokens, "the run to get going")
    before = run.versions()
    os.kill(run.part("shard-1").pid, signal.SIGKILL)
    run.until(lambda: run.count("shard joined", None) >= 3, "the shard to come back")
    run.until(lambda: min(newest - before[fragment] for fragment, newest in run.versions().items()) > 0, "merging to go on")
    os.kill(run.part("syncer").pid, signal.SIGKILL)
    run.until(lambda: run.count("shard joined", None) >= 5, "the shards to find the syncer again")
    result = run.finish()
    assert_learned(result, tokens, loss=4.8, alone=3)
    assert run.count("shard lost", None) >= 1
    assert not any(process.is_running() for process in run.seen)


def test_interrupted_run_leaves_no_process_and_goes_on_with_the_same_command(start_run) -> None:
    tokens = 300_000
    run = start_run(tokens, 2)
    run.until(lambda: run.run_tokens() > tokens // 4, "the run to get going")
    parts = run.process.children(recursive=True)
    assert len(parts) >= 4
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130
    assert not any(part.is_running() for part in parts)
    before = run.versions()
    again = start_run(tokens, 2)
    result = again.finish()
    assert "resuming" in again.output
    assert_learned(result, tokens)
    assert all(newest >= before[fragment] for fragment, newest in again.versions().items())


@pytest.mark.parametrize("algorithm", ["dp", "diloco"])
def test_other_algorithms_train_the_same_job(start_run, algorithm: str) -> None:
    tokens = 150_000
    run = start_run(tokens, 2, "--algorithm", algorithm)
    result = run.finish()
    assert_learned(result, tokens)
    assert result["algorithm"] == algorithm


def test_finished_run_in_lock_step_exports_weights_that_load_back(start_run, tmp_path: Path) -> None:
    run = start_run(150_000, 2, "--algorithm", "streaming")
    result = run.finish()
    assert_learned(result, 150_000)
    assert result["algorithm"] == "streaming"
    exported = tmp_path / "model.safetensors"
    subprocess.run([sys.executable, "-m", "skerry", "export", str(run.folder), str(exported)], check=True)
    config: Config = from_json(Config, (run.folder / "config.json").read_text())
    model = build_gpt(config.model, 256, seed=99)
    load_weights(model, load_file(exported))
    final = load_file(run.folder / "model.safetensors")
    assert all((final[name] == parameter).all() for name, parameter in model.named_parameters())
    for name in ("config.json", "run.json", "tape.sqlite", "metrics.jsonl", "loss.png", "result.json"):
        assert (run.folder / name).stat().st_size > 0
    [result] = [record for record in run.read() if record["kind"] == "result"]
    assert result["sample"].startswith("def ") and len(result["sample"]) > len("def ")
    assert "sample" in run.output, "the run ends with a sample"
