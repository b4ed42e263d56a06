"""One replica as a process: the job, the inner step, and its faults. Each system has its own loop.

    python -m faults.replica SYSTEM FOLDER INDEX [ADDRESS]

Faults are files in the folder: while `NAME.slow` exists, steps take SLOW_FACTOR times as long; `NAME.nan` sets all parameters
to NaN once.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import torch

from faults.steps import StepLog
from skerry.config import Config, load
from skerry.launch.processes import die_with_parent
from skerry.train.job import Job, build_job

ROOT = Path(__file__).resolve().parents[2]
REPLICAS = 2
SLOW_FACTOR = 5
WARM_UP_STEPS = 40
"""Learning-rate warm-up; constant afterwards, in every system."""


def job_config() -> Config:
    """The default job for two replicas with one thread each, in its steady state: no budget and no initial phase."""
    config = load(ROOT / "configs" / "default.toml")
    islands = dataclasses.replace(config.islands, count=REPLICAS, threads=1, device="cpu")
    sync = dataclasses.replace(config.sync, start_with=REPLICAS)
    return dataclasses.replace(config, islands=islands, sync=sync)


def replica_name(index: int) -> str:
    return f"island-{index}"


class Replica:
    def __init__(self, folder: Path, index: int) -> None:
        self.folder = folder
        self.index = index
        self.name = replica_name(index)
        self.log = StepLog(folder / f"{self.name}.steps.jsonl")
        self.config = job_config()
        self.job: Job = build_job(self.config)
        self._slow = folder / f"{self.name}.slow"
        self._nan = folder / f"{self.name}.nan"
        self._own_steps = 0
        self.log.event("built")

    def inner_step(self, step: int) -> float:
        """One inner step, including optimizer.step(), where the systems hook in. Returns the loss."""
        job = self.job
        job.set_lr(min(1.0, (self._own_steps + 1) / WARM_UP_STEPS))
        started = time.perf_counter()
        inputs, targets = job.batch(step, self.index)
        loss = float(job.backward(inputs, targets))
        if self._slow.exists():
            self._linger(time.perf_counter() - started, inputs, targets)
        job.apply()
        self._own_steps += 1
        if self._nan.exists():
            self._nan.unlink()
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.fill_(float("nan"))
            self.log.event("nan")
        return loss

    def _linger(self, took_s: float, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Take longer. A sleeping straggler would leave its core to the others and make them faster, so it computes unless told
        to sleep."""
        until = time.perf_counter() + (SLOW_FACTOR - 1) * took_s
        if self._slow.read_text() == "sleep":
            time.sleep(max(0.0, until - time.perf_counter()))
        with torch.no_grad():
            while time.perf_counter() < until:
                self.job.model(inputs, targets)


def main() -> None:
    die_with_parent()
    system, folder, index, *rest = sys.argv[1:]
    if system == "skerry":
        from faults.skerry_loop import loop
    elif system == "torchft":
        from faults.torchft_loop import loop
    else:
        from faults.data_parallel_loop import loop
    loop(Replica(Path(folder), int(index)), rest[0])


if __name__ == "__main__":
    main()
