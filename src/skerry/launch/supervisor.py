"""Supervise the processes of a run: restart those that die, show progress, and drive chaos."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from skerry.chaos.driver import Driver
from skerry.config import Config
from skerry.errors import RunFailed
from skerry.launch.processes import STOP_S, Child
from skerry.metrics import MetricsTail, MetricsWriter
from skerry.observe import (
    Accountant,
    RunStatus,
    account_lines,
    audit_run,
    ledger_summary,
    link_lines,
    open_view,
    plot_run,
    summary,
)
from skerry.syncer.storage.run_folder import read_identity

POLL_S = 0.2
RESTART_PAUSE_S = 0.5
DISMISS_S = 5.0
HEALTHY_S = 60.0
"""A part that ran at least this long before it died gets its full number of restarts back."""


@dataclass
class Worker:
    child: Child
    restarts: int
    used: int = 0
    starts: int = 0
    started_at: float = 0.0
    start_again_at: float | None = None
    down_s: float | None = None
    """Set when chaos kills the part: how long it stays down. Such deaths do not use up restarts."""
    done: bool = False


class Supervisor:
    def __init__(self, config: Config, folder: Path) -> None:
        self.workers: list[Worker] = []
        self.driver: Driver | None = None
        self._config = config
        self._folder = folder
        self.metrics = MetricsWriter(folder / "metrics.jsonl")
        self._interrupted = 0
        self._ended_at: float | None = None

    def run(self) -> None:
        status = RunStatus(self._folder.name)
        status.algorithm = self._config.algorithm
        tail = MetricsTail(self._folder / "metrics.jsonl")
        accountant = Accountant()
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        view = open_view(sys.stdout)
        try:
            for worker in self.workers:
                self._start(worker)
            while not all(worker.done for worker in self.workers) and not self._interrupted:
                time.sleep(POLL_S)
                self._check_workers()
                for record in tail.read():
                    status.apply(record)
                    accountant.apply(record)
                if self.driver is not None:
                    self.driver.poll(time.monotonic(), status.phase == "running", status.step)
                view.update(status)
        finally:
            self._stop_all()
            if self.driver is not None:
                self.driver.close()
            for record in tail.read():
                status.apply(record)
                accountant.apply(record)
            view.update(status)
            view.close()
            self.metrics.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._interrupted:
            again = "" if self._config.algorithm == "dp" else "; the same command resumes it"
            print(f"stopped{again}: {self._folder}", flush=True)
            raise SystemExit(130)
        if plot_run(self._folder / "metrics.jsonl", self._folder / "loss.png"):
            print(f"loss curves: {self._folder / 'loss.png'}")
        view.say(summary(status))
        account = accountant.account()
        if account.islands:
            (self._folder / "account.json").write_text(json.dumps(account.to_json(), indent=1) + "\n")
            view.say(account_lines(account))
        if links := link_lines(status):
            view.say(links)
        if (self._folder / "tape.sqlite").exists():
            sizes = [fragment.numel for fragment in read_identity(self._folder).layout.fragments]
            view.say(ledger_summary(audit_run(self._folder), sizes))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupted += 1
        if self._interrupted > 1:
            for worker in self.workers:
                worker.child.signal(signal.SIGKILL)

    def _start(self, worker: Worker) -> None:
        worker.child.start()
        worker.started_at = time.monotonic()
        worker.start_again_at = worker.down_s = None
        worker.starts += 1
        if worker.starts > 1:
            self.metrics.write("event", what=f"{'syncer ' if worker.child.name == 'syncer' else ''}restarted",
                                island=worker.child.name, detail=f"pid {worker.child.pid}")  # fmt: skip
            if self.driver is not None:
                self.driver.restarted(worker.child.name, worker.child.pid)

    # ------------------------------------------------------------ called by chaos

    def runs(self, part: str) -> bool:
        worker = self._worker(part)
        return worker is not None and worker.start_again_at is None

    def kill(self, part: str, down_s: float) -> None:
        """Kill a part and restart it after `down_s` at the earliest."""
        worker = self._worker(part)
        if worker is not None and worker.start_again_at is not None:
            worker.start_again_at = max(worker.start_again_at, time.monotonic() + down_s)
        elif worker is not None:
            worker.down_s = down_s
            worker.child.signal(signal.SIGKILL)

    def signal(self, part: str, number: int) -> None:
        worker = self._worker(part)
        if worker is not None:
            worker.child.signal(number)

    def pid(self, part: str) -> int | None:
        worker = self._worker(part)
        return worker.child.pid if worker is not None and worker.start_again_at is None else None

    def _worker(self, part: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.child.name == part and not worker.done), None)

    # ------------------------------------------------------------ restarts

    def _check_workers(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if worker.done:
                continue
            if worker.start_again_at is not None:
                if now >= worker.start_again_at:
                    self._start(worker)
                continue
            exit_status = worker.child.poll()
            if exit_status == 0:
                worker.done = True
            elif exit_status is not None:
                self._died(worker, exit_status, now)
        self._dismiss_islands(now)

    def _dismiss_islands(self, now: float) -> None:
        """Once the syncer has ended, stop islands and shards that are restarting or linger: there is nothing to join."""
        if self._ended_at is None:
            if not any(worker.done and worker.child.name == "syncer" for worker in self.workers):
                return
            self._ended_at = now
        for worker in self.workers:
            if worker.done or not worker.child.name.startswith(("island-", "shard-")):
                continue
            if worker.start_again_at is not None or now - self._ended_at > DISMISS_S:
                worker.child.stop(timeout_s=1.0)
                worker.done = True

    def _died(self, worker: Worker, exit_status: int, now: float) -> None:
        how = f"signal {-exit_status} ({_meaning(-exit_status)})" if exit_status < 0 else f"exit status {exit_status}"
        killed = "syncer killed" if worker.child.name == "syncer" else "killed"
        self.metrics.write("event", what=killed, island=worker.child.name, detail=how)
        if worker.down_s is not None:
            worker.start_again_at = now + max(RESTART_PAUSE_S, worker.down_s)
            return
        if now - worker.started_at > HEALTHY_S:
            worker.used = 0
        if worker.used >= worker.restarts:
            raise RunFailed(
                f"{worker.child.name} ended with {how}"
                + (f" after {worker.used} restarts" if worker.used else "")
                + f"; last lines of its log:\n{worker.child.last_lines()}"
            )
        worker.used += 1
        worker.start_again_at = now + RESTART_PAUSE_S

    def _stop_all(self) -> None:
        """Stop islands first, because they say goodbye to the syncer."""
        for last in (False, True):
            group = [worker for worker in self.workers if worker.child.name.startswith(("syncer", "shard-")) == last]
            for worker in group:
                worker.child.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
            for worker in group:
                worker.child.stop(max(0.1, deadline - time.monotonic()))


def _meaning(number: int) -> str:
    """The signal's name, with a hint where the user can do something."""
    meaning = signal.strsignal(number) or "unknown"
    if number == signal.SIGILL:
        # Some virtual machines advertise CPU features that they do not support.
        meaning += "; if it trains in bf16 on a CPU, try ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    return meaning
