"""Every kind of fault, done to real processes: what it does to the run, and that the run recovers.

One run with three islands and a proxy in their links serves all tests but the first; each leaves it whole.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from jobs import tiny_job

from skerry.admin import close_run
from skerry.chaos.inflicted import Inflicted
from skerry.chaos.mailbox import ask
from skerry.errors import ConfigError
from skerry.learner.replica import Snapshot
from skerry.metrics import MetricsTail
from skerry.observe.ledger import audit_run

pytestmark = pytest.mark.slow

ISLANDS = ("island-0", "island-1", "island-2")


class Run:
    """`skerry train` as a process, its metrics and its tape."""

    def __init__(self, folder: Path, tokens: int, *arguments: str) -> None:
        self.folder = folder / "run"
        (folder / "job.toml").write_text(tiny_job(tokens, sync={"silence_s": 3.0}))
        command = [sys.executable, "-m", "skerry", "train", str(folder / "job.toml"), "--run", str(self.folder), *arguments]
        self.output = folder / "output.txt"
        with self.output.open("wb") as output:
            self.process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._tail = MetricsTail(self.folder / "metrics.jsonl")
        self.records: list[dict] = []

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 90
        while True:
            self.records += self._tail.read()
            if condition():
                return
            assert self.process.poll() is None, f"the run ended while waiting for {what}:\n{self.output.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"waited too long for {what}:\n{self.output.read_text()[-3000:]}"
            time.sleep(0.02)

    def suffer(self, words: str) -> int:
        """Do it, and give the number of the record that says so."""
        start = len(self.records)
        ask(self.folder, words)
        self.until(lambda: self.find(start, "event", what="fault", words=words), f"{words} to be written down")
        return self.find(start, "event", what="fault", words=words)[0]

    def find(self, start: int, kind: str, **wanted: object) -> list[int]:
        """Numbers of the records since `start` that have these fields."""
        numbers = range(start, len(self.records))
        fits = [n for n in numbers if self.records[n]["kind"] == kind]
        return [n for n in fits if all(self.records[n].get(key) == value for key, value in wanted.items())]

    def event(self, start: int, what: str, part: str | None, words: str | None = None) -> int:
        """Wait for an event after `start`; gives its number."""
        wanted = {"what": what, "island": part, **({"words": words} if words else {})}
        self.until(lambda: self.find(start + 1, "event", **wanted), f"{part} {what}")
        return self.find(start + 1, "event", **wanted)[0]

    def merges_of(self, island: str, start: int, stop: int | None = None) -> int:
        found = [n for n in self.find(start, "merge") if stop is None or n < stop]
        return sum(island in self.records[n]["contributors"] for n in found)

    def merged_again(self, island: str, start: int) -> None:
        self.until(lambda: self.merges_of(island, start) >= 3, f"merges with {island}")

    def healthy(self) -> None:
        start = len(self.records)
        for island in ISLANDS:
            self.merged_again(island, start)

    def island_tokens(self, island: str, start: int, stop: int) -> int:
        """How many tokens an island trained on between two records."""
        found = [self.records[n]["tokens"] for n in self.find(start, "island", island=island) if n < stop]
        return found[-1] - found[0]

    def log(self, part: str) -> str:
        return (self.folder / "logs" / f"{part}.log").read_text()

    def part(self, name: str) -> psutil.Process:
        return next(child for child in self.process.children() if name in child.cmdline())

    def tape(self, *kinds: str) -> list[tuple[str, dict]]:
        database = sqlite3.connect(f"file:{self.folder / 'tape.sqlite'}?mode=ro", uri=True)
        try:
            rows = database.execute("SELECT kind, data FROM tape ORDER BY seq").fetchall()
        finally:
            database.close()
        return [(kind, json.loads(data)) for kind, data in rows if kind in kinds]

    def told(self, kind: str, words: str) -> None:
        """Wait until it is on the tape."""
        self.until(lambda: any(data.get("words") == words for _, data in self.tape(kind)), f"{kind} {words} on the tape")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("chaos"), 10**12, "--proxy")
    yield run
    stop(run)


@pytest.fixture
def run(shared: Run) -> Iterator[Run]:
    shared.healthy()
    yield shared
    check_ledger(shared.folder)


def check_ledger(folder: Path) -> None:
    """Whatever happened, every sample and every token is accounted for."""
    ledger = audit_run(folder)
    assert ledger.adds_up and ledger.applied, ledger.discrepancies
    for account in ledger.tokens:
        assert account.applied + account.replaced + account.lost + account.open == ledger.trained


def stop(run: Run) -> None:
    parts = run.process.children(recursive=True) if run.process.is_running() else []
    for process in [run.process, *parts]:
        if process.is_running():
            process.kill()
    psutil.wait_procs(parts, timeout=30)


def skerry(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "skerry", *arguments], capture_output=True, text=True, timeout=60)


def test_planned_run_suffers_its_plan_once_and_ends_well(tmp_path: Path) -> None:
    planned = ("kill island-1 @ step 40", "freeze island-0 @ 1s for 0.5s")
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[[fault]]\nkind = "kill"\nisland = 1\nat_step = 40\n'
        '[[fault]]\nkind = "freeze"\nisland = 0\nat_s = 1\nfor_s = 0.5\n'
        '[[fault]]\nkind = "kill"\nisland = 0\nat_s = 3600\n'
        '[random]\nmtbf_s = 5\nkinds = ["slow"]\nreturn_s = 1\nuntil_step = 100\n'
    )
    run = Run(tmp_path, 10**12, "--chaos", str(plan))
    try:
        run.until(lambda: run.find(0, "event", what="fault"), "the first fault")
        with pytest.raises(
            ConfigError, match="cut needs a proxy in the links, which this run does not have; start it with: .*--proxy"
        ):
            ask(run.folder, "cut island-0")
        for words in planned:
            run.until(lambda words=words: run.find(0, "event", what="fault", words=words), words)
        run.event(0, "restarted", "island-1")
        run.healthy()
        close_run(run.log("syncer").split(" on ")[1].split()[0], None)
        assert run.process.wait(60) == 0, run.output.read_text()
    finally:
        stop(run)
    run.records += run._tail.read()
    faults = [run.records[n] for n in run.find(0, "event", what="fault") if run.records[n].get("words")]
    for words in planned:
        assert [fault["words"] for fault in faults].count(words) == 1
    [left] = run.find(0, "event", what="faults not reached")
    assert "kill island-0 @ 3600s" in run.records[left]["detail"] and "1 planned" in run.records[left]["detail"]
    assert json.loads((run.folder / "result.json").read_text())["tokens"] > 0
    assert [data.get("words") for _, data in run.tape("fault_injected")].count("kill island-1 @ step 40") == 1
    assert [path.name for path in (run.folder / "chaos" / "requests").iterdir()] == []
    check_ledger(run.folder)


# ------------------------------------------------------------ processes


def test_killed_island_stays_away_as_long_as_said_and_comes_back(run: Run) -> None:
    words = "kill island-0 for 1s"
    fault = run.suffer(words)
    dead = run.event(fault, "killed", "island-0")
    back = run.event(dead, "restarted", "island-0")
    assert run.records[back]["at"] - run.records[dead]["at"] >= 1
    run.merged_again("island-0", run.event(back, "joined", "island-0"))
    run.told("fault_injected", words)
    assert any(data.get("part") == "island-0" for _, data in run.tape("part_restarted"))


def test_frozen_island_is_given_up_and_taken_back_when_it_thaws(run: Run) -> None:
    words = "freeze island-1 for 5s"
    island = run.part("island-1")
    fault = run.suffer(words)
    run.until(lambda: island.status() == psutil.STATUS_STOPPED, "the process to stand still")
    lost = run.event(fault, "lost", "island-1")
    healed = run.event(lost, "healed", "island-1", words)
    run.merged_again("island-1", run.event(healed, "joined", "island-1"))
    assert island.is_running(), "it is the same process"
    assert all(run.merges_of(other, fault, healed) > 0 for other in ("island-0", "island-2"))


def test_slow_island_does_less_and_the_others_do_not_wait_for_it(run: Run) -> None:
    words = "slow island-2 30x for 4s"
    fault = run.suffer(words)
    healed = run.event(fault, "healed", "island-2", words)
    run.until(lambda: len(run.find(healed, "island", island="island-2")) >= 2, "a summary after it")
    done = {island: run.island_tokens(island, fault, healed) for island in ISLANDS}
    assert 4 * done["island-2"] < min(done["island-0"], done["island-1"])
    run.merged_again("island-2", healed)


def test_killed_syncer_stays_away_as_long_as_said_while_islands_go_on(run: Run) -> None:
    words = "kill_syncer syncer for 2s"
    fault = run.suffer(words)
    dead = run.event(fault, "syncer killed", "syncer")
    back = run.event(dead, "syncer restarted", "syncer")
    assert run.records[back]["at"] - run.records[dead]["at"] >= 2
    for island in ISLANDS:
        run.merged_again(island, run.event(back, "joined", island))
        assert _steps_alone(run, island)[-1] > 0
    run.told("fault_injected", words)


def _steps_alone(run: Run, island: str) -> list[int]:
    lines = [line for line in run.log(island).splitlines() if "is back with the syncer" in line]
    return [int(line.split(" after ")[1].split()[0]) for line in lines]


# ------------------------------------------------------------ links


def test_island_whose_link_is_cut_trains_on_alone_and_comes_back(run: Run) -> None:
    words = "cut island-0 for 1s"
    fault = run.suffer(words)
    run.event(fault, "disconnected", "island-0")
    healed = run.event(fault, "healed", "island-0", words)
    run.merged_again("island-0", run.event(healed, "joined", "island-0"))
    assert _steps_alone(run, "island-0")[-1] > 0
    run.told("fault_healed", words)


@pytest.mark.parametrize("words", ["throttle island-1 0.05mbps up for 4s", "delay island-2 700ms for 4s"])
def test_island_with_a_bad_link_is_in_fewer_merges_and_holds_up_nobody(run: Run, words: str) -> None:
    slow = words.split()[1]
    merges = dict.fromkeys(ISLANDS, 0)
    while min(merges[other] for other in set(ISLANDS) - {slow}) < 10:  # on a busy machine once is not enough to compare
        fault = run.suffer(words)
        healed = run.event(fault, "healed", slow, words)
        for island in ISLANDS:
            merges[island] += run.merges_of(island, fault, healed)
    assert all(2 * merges[slow] < merges[other] for other in set(ISLANDS) - {slow}), merges
    run.merged_again(slow, healed)


def test_island_whose_bytes_vanish_is_given_up_and_comes_back_on_a_new_connection(run: Run) -> None:
    words = "drop island-2 for 5s"
    fault = run.suffer(words)
    lost = run.event(fault, "lost", "island-2")
    healed = run.event(lost, "healed", "island-2", words)
    run.merged_again("island-2", run.event(healed, "joined", "island-2"))


# ------------------------------------------------------------ inside


@pytest.mark.parametrize("what", ["nan", "inf", "explode 1000000x"])
def test_unhealthy_contributions_are_left_out_and_named(run: Run, what: str) -> None:
    kind, *amount = what.split()
    words = " ".join([kind, "island-1", *amount, "for 2s"])
    before = len(run.tape("unhealthy", "refused"))

    def named() -> bool:
        found = run.tape("unhealthy", "refused")[before:]
        assert all(data.get("learner") == "island-1" for entry, data in found if entry == "unhealthy")
        return any("outlier" in data["reason"] or "not finite" in data["reason"] for _, data in found)

    run.merged_again("island-1", _suffer_until(run, words, named))


def _suffer_until(run: Run, words: str, named: Callable[[], bool]) -> int:
    """Until the tape names it: on a busy machine an island may not be asked often enough in so short a time. Gives when it was
    healed."""
    while True:
        fault = run.suffer(words)
        healed = run.event(fault, "healed", words.split()[1], words)
        run.until(lambda since=healed: named() or len(run.find(since, "run")) > 2, "the tape to be written")
        if named():
            return healed


def test_stale_contributions_are_those_of_before(run: Run, tmp_path: Path) -> None:
    words = "stale island-0 for 3s"

    def named() -> bool:
        return any("identical" in data["reason"] for _, data in run.tape("unhealthy"))

    healed = _suffer_until(run, words, named)
    assert "island-0 has injected faults: stale" in run.log("island-0")
    run.merged_again("island-0", healed)
    (tmp_path / "island-0.json").write_text('{"stale": 1.0}')
    inflicted = Inflicted(tmp_path, "island-0")
    made = [torch.full((2,), float(number)) for number in range(3)]
    snapshots = [Snapshot(0, number, None, lambda progress=progress: progress) for number, progress in enumerate(made)]
    assert all(inflicted.spoiled(snapshot).progress() is made[0] for snapshot in snapshots)
    (tmp_path / "island-0.json").unlink()
    assert inflicted.spoiled(snapshots[2]).progress() is made[2]


def test_full_disk_pauses_merging_and_loses_nothing(run: Run) -> None:
    words = "fill_disk syncer for 3s"
    fault = run.suffer(words)
    failed = run.event(fault, "merge failed", None)
    assert "No space left" in run.records[failed]["detail"] or "disk is full" in run.records[failed]["detail"]
    healed = run.event(failed, "healed", "syncer", words)
    for island in ISLANDS:
        run.merged_again(island, healed)
    run.told("fault_injected", words)
    versions = [data["version"] for _, data in run.tape("merged") if data["fragment"] == 0]
    assert versions == list(range(1, len(versions) + 1)), "no version is missing"
    log = run.log("syncer")
    assert log.count("merging pauses, islands train on") == 1 and "merging has resumed" in log, "said once, and when it is over"


def test_an_island_is_given_up_too_early_when_the_syncers_clock_jumps_and_comes_back(run: Run) -> None:
    frozen, words = "freeze island-2 for 2s", "clock syncer 10s for 1s"  # two seconds of silence are less than it tolerates
    run.suffer(frozen)
    fault = run.suffer(words)
    lost = run.event(fault, "lost", "island-2")
    assert "silent_s 1" in run.records[lost]["detail"], "more than ten seconds, by that clock"
    healed = run.event(fault, "healed", "syncer", words)
    run.event(lost, "joined", "island-2")
    for island in ISLANDS:
        run.merged_again(island, healed)


def test_island_whose_clock_jumps_stays_in_the_run(run: Run) -> None:
    words = "clock island-1 5s for 1s"
    fault = run.suffer(words)
    run.until(lambda: "island-1 has injected faults: clock 5" in run.log("island-1"), "the island to hear of it")
    healed = run.event(fault, "healed", "island-1", words)
    run.merged_again("island-1", healed)
    assert not run.find(fault, "event", what="lost", island="island-1")


# ------------------------------------------------------------ asking for faults


def test_faults_can_be_asked_for_on_the_command_line_while_a_run_goes_on(run: Run) -> None:
    start = len(run.records) - 1
    found = skerry("chaos", str(run.folder), "slow island-0 2x for 0.5s")
    assert found.returncode == 0 and "slow island-0 2x for 0.5s" in found.stdout, found.stderr
    run.event(run.event(start, "fault", "island-0"), "healed", "island-0")
    for words, message in (("kill island-7", "there are 3 islands"), ("tickle island-0", "kind must be one of")):
        found = skerry("chaos", str(run.folder), words)
        assert found.returncode == 2 and message in found.stderr and found.stderr.count("\n") == 1


@pytest.mark.parametrize("way", ["up", "down"])
def test_corrupted_bytes_break_connections_and_nothing_else(run: Run, way: str) -> None:
    words = f"corrupt island-2 300bytes {way} for 2s"
    fault = run.suffer(words)
    ends = ("disconnected", "lost")  # a stream can break, or fall silent
    run.until(lambda: any(run.find(fault, "event", what=end, island="island-2") for end in ends), "island-2 to be cut off")
    healed = run.event(fault, "healed", "island-2", words)
    run.merged_again("island-2", healed)
    for other in ("island-0", "island-1"):
        run.merged_again(other, fault)
        assert not run.find(fault, "event", what="disconnected", island=other)


def test_asking_where_no_run_is_supervised_gets_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run of skerry train"):
        ask(tmp_path, "kill island-0")
    (tmp_path / "config.json").write_text("{}")
    for _ in range(2):  # never supervised; and once, but no longer
        with pytest.raises(ConfigError, match="no skerry train supervises .*; start it, then inject faults"):
            ask(tmp_path, "kill island-0")
        (tmp_path / "chaos").mkdir(exist_ok=True)
