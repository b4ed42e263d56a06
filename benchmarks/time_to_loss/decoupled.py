"""Decoupled training under a trace of failures: like `skerry train --chaos`, with each island pinned to its own core.

Uses Skerry's supervisor and chaos driver. There is no validator, because it would take time from the islands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from skerry.chaos.driver import Driver
from skerry.chaos.parse import parse_faults
from skerry.chaos.plan import Fault
from skerry.chaos.recorder import Recorder
from skerry.config import Config
from skerry.launch.local import create_job
from skerry.launch.processes import Child, free_port, skerry_command
from skerry.launch.supervisor import Supervisor, Worker
from skerry.metrics import MetricsTail
from time_to_loss.curves import Arm
from time_to_loss.samples import Sample, Sampler, read_span


def run_decoupled(
    arm: Arm, config: Config, folder: Path, faults: Sequence[Fault], cores: Sequence[int], sample_every_s: float
) -> list[Sample]:
    create_job(config, folder)
    supervisor = Supervisor(config, folder)
    address = f"127.0.0.1:{free_port()}"
    recorder = Recorder(address, None, supervisor.metrics)
    supervisor.driver = Driver(faults, config.islands.count, folder, supervisor, supervisor.metrics, recorder, None)

    def part(name: str, command: list[str]) -> Worker:
        child = Child(name, command, folder / "logs" / f"{name}.log", {"OMP_NUM_THREADS": "1"})
        return Worker(child, config.islands.restarts)

    def island(index: int) -> Worker:
        name = f"island-{index}"
        learner = skerry_command("learner", address, "--name", name, "--keep", str(folder / "islands"))
        return part(name, ["taskset", "-c", str(cores[index % len(cores)]), *learner])

    syncer = part("syncer", skerry_command("syncer", str(folder), "--address", address))
    supervisor.workers = [syncer, *map(island, range(config.islands.count))]
    launched_at = time.time()
    with Sampler(folder, sample_every_s) as sampler:
        supervisor.run()
    samples = sampler.finished()
    began_at, ended_at = read_span(folder)
    arm.start_up_s = began_at - launched_at
    for record in MetricsTail(folder / "metrics.jsonl").read():
        if record.get("what") == "fault" and record["at"] < ended_at:
            worker = int(record["island"].removeprefix("island-"))
            arm.kills.append((record["at"] - began_at, worker, parse_faults(record["words"])[0].for_s))
    return samples
