"""Data-parallel training under a trace of failures: a launcher that kills workers by the trace and restarts the job.

A death stops the job, because collectives need all members. The job restarts from its last checkpoint as soon as all workers
are up. An elastic job restarts at once with those that are up. When a worker is back, it writes a checkpoint and restarts with
that worker. The launcher notices a death within 0.1 s, faster than timeouts in practice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from faults.checkpoint import save, weights_in

from skerry.chaos.plan import Fault
from skerry.config import Config, to_json
from skerry.launch.processes import Child, free_port
from skerry.metrics import MetricsTail
from time_to_loss.curves import Arm
from time_to_loss.samples import Sample
from time_to_loss.worker import Orders

POLL_S = 0.1
SHORTEST_AWAY_S = 0.5
"""The same minimum as in the supervisor of islands."""
SAY_EVERY_S = 10.0
STOP_S = 30.0
BENCHMARKS = Path(__file__).resolve().parents[1]


class Launcher:
    def __init__(
        self, arm: Arm, config: Config, folder: Path, faults: Sequence[Fault], cores: Sequence[int], *,
        mtbf_s: float, sample_every_s: float, limit_s: float, elastic: bool = False,
    ) -> None:  # fmt: skip
        (folder / "samples").mkdir(parents=True)
        self._arm, self._config, self._folder, self._cores, self._elastic = arm, config, folder, cores, elastic
        self._mtbf_s, self._sample_every_s, self._limit_s = mtbf_s, sample_every_s, limit_s
        self._faults = deque(faults)
        self._log = MetricsTail(folder / "log.jsonl")
        self._count = config.islands.count
        self._back_at = [0.0] * self._count
        self._members: dict[int, Child] = {}
        """Running processes of the job by worker, rank 0 first. Empty while the job is stopped."""
        self._killed_since_start = self._trains = False
        self._began_at: float | None = None
        self._ended = False
        self._said_at = 0.0
        self._samples: list[Sample] = []

    def run(self) -> list[Sample]:
        launched_at = time.time()
        try:
            while not self._ended:
                if time.time() - (self._began_at or launched_at) > self._limit_s:
                    if self._began_at is None:
                        raise SystemExit(f"{self._arm.name} has not started training after {self._limit_s:.0f} s; see --limit")
                    self._arm.stopped_s = time.time() - self._began_at
                    self._say("stopped before its budget was spent; see --limit")
                    break
                self._restart_if_possible()
                time.sleep(POLL_S)
                self._read_log()
                self._inject_failures()
                self._check_workers()
        finally:
            self._stop()
        assert self._began_at is not None
        self._arm.start_up_s = self._began_at - launched_at
        return [Sample(s.at_s - self._began_at, s.path, s.tokens) for s in self._samples]

    # ------------------------------------------------------------ failures

    def _inject_failures(self) -> None:
        now = time.time()
        while self._began_at is not None and self._faults and now - self._began_at >= (self._faults[0].at_s or 0.0):
            fault = self._faults.popleft()
            worker = int(fault.part.removeprefix("island-"))
            self._back_at[worker] = max(self._back_at[worker], now + max(SHORTEST_AWAY_S, fault.for_s))
            self._arm.kills.append((now - self._began_at, worker, fault.for_s))
            running = worker in self._members
            self._say(f"worker {worker} is killed for {fault.for_s:.1f} s" + ("" if running else " while the job is stopped"))
            if running:
                self._members[worker].signal(signal.SIGKILL)
                self._killed_since_start = True

    def _check_workers(self) -> None:
        exits = [child.poll() for child in self._members.values()]
        if any(status not in (None, 0) for status in exits):
            if not self._killed_since_start:
                logs = "\n".join(child.last_lines() for child in self._members.values())
                raise SystemExit(f"{self._arm.name}: a worker ended by itself:\n{logs}")
            self._stop()
        elif self._elastic and self._members and len(self._up()) > len(self._members):
            self._say("a worker is back: restarting with all that are up")
            if self._trains:  # otherwise there is nothing to save, and waiting for the start costs time
                first = next(iter(self._members.values()))
                first.signal(signal.SIGUSR1)
                first.wait(STOP_S)
                self._read_log()
            self._stop()

    def _up(self) -> list[int]:
        return [worker for worker in range(self._count) if self._back_at[worker] <= time.time()]

    # ------------------------------------------------------------ processes

    def _restart_if_possible(self) -> None:
        up = self._up()
        if self._members or not up or (len(up) < self._count and not self._elastic):
            return
        self._killed_since_start = False
        orders = Orders(
            str(self._folder), to_json(self._config), free_port(), len(up), self._mtbf_s, self._sample_every_s
        )  # fmt: skip
        path = self._folder / "orders.json"
        path.write_text(to_json(orders))
        paths = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent / "src")])
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        for rank, worker in enumerate(up):
            pinned = ["taskset", "-c", str(self._cores[worker % len(self._cores)])]
            command = [*pinned, sys.executable, "-m", "time_to_loss.worker", str(path), str(rank)]
            child = Child(f"worker-{worker}", command, self._folder / f"worker-{worker}.log", environment)
            child.start()
            self._members[worker] = child

    def _stop(self) -> None:
        for child in self._members.values():
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # each child leads its own process group
        for child in self._members.values():
            child.wait(STOP_S)
        if self._trains and not self._ended:
            self._copy_checkpoint()
        self._members, self._trains = {}, False

    def _copy_checkpoint(self) -> None:
        """Add the checkpoint of a restart to the samples. Otherwise the curve would fall linearly while the job is down, and a
        loss reached just before would seem to be reached much later."""
        checkpoint = self._folder / "checkpoint.safetensors"
        if checkpoint.exists():
            at = checkpoint.stat().st_mtime
            path = self._folder / "samples" / f"checkpoint-{at:.3f}.safetensors"
            if path.exists():
                return  # the job died again before it wrote another one
            weights, step = weights_in(checkpoint)
            save(path, weights, step)
            train = self._config.train
            self._samples.append(Sample(at, path, step * train.batch * self._config.model.context * self._count))

    # ------------------------------------------------------------ log

    def _read_log(self) -> None:
        for record in self._log.read():
            if record["kind"] == "started":
                self._began_at, self._trains = self._began_at or record["at"], True
                self._say(f"{record['world']} workers continue from step {record['step']}")
            elif record["kind"] == "sample":
                self._samples.append(Sample(record["at"], self._folder / "samples" / record["file"], record["tokens"]))
            elif record["kind"] == "checkpoints" and self._arm.checkpoint_every_s is None:
                self._arm.checkpoint_every_s = record["every_s"]
                self._say(f"a checkpoint takes {record['cost_s']:.3f} s, so one every {record['every_s']:.1f} s")
            elif record["kind"] == "progress" and record["at"] - self._said_at > SAY_EVERY_S:
                self._said_at = record["at"]
                self._say(f"{record['tokens']:,} of {self._config.train.tokens:,} tokens, loss {record['loss']:.3f}")
            elif record["kind"] == "ended":
                self._ended = True

    def _say(self, text: str) -> None:
        seconds = time.time() - self._began_at if self._began_at is not None else 0.0
        print(f"{seconds:6.1f} s  {self._arm.name}: {text}", flush=True)
