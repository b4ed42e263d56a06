"""What Skerry costs an island: inner steps per second with it attached, over the same loop without it.

    python benchmarks/overhead.py [--quick]

One process trains one model: a block of steps by itself, a block joined to a run whose syncer is a process of its own, and so
on in turns. Turns keep the machine's drift out of the ratio, and it must be the same model in both: two copies of one model
differ by several percent from each other, by where their tensors happen to lie in memory. The median over pairs of blocks
counts; plain blocks compared with each other say how far it can be trusted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import skerry
from skerry.config import Config, load
from skerry.train.job import Job, build_job

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.97
WARM_UP = 8


def block(job: Job, steps: int) -> float:
    """Steps per second, after a few that do not count."""
    started = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started = time.perf_counter()
        job.backward(*job.batch(step, 0))
        job.apply()
    return steps / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=48, help="inner steps of one block")
    options = parser.parse_args()
    pairs = 4 if options.quick else 30
    config: Config = load(ROOT / "configs" / "default.toml").resolved()
    config = dataclasses.replace(config, islands=dataclasses.replace(config.islands, threads=1))
    job = build_job(config)
    torch.set_num_threads(1)
    sync = dataclasses.replace(config.sync, start_with=1, budget_tokens=0, begin=skerry.BeginConfig())
    with tempfile.TemporaryDirectory() as scratch:
        folder = skerry.create(Path(scratch) / "run", job.model, sync)
        with skerry.serve(folder) as address:

            def plain() -> float:
                return block(job, options.steps)

            def attached() -> float:
                learner = skerry.join(address, job.model, job.optimizers, name="island", tokens_per_step=job.step_tokens)
                try:
                    return block(job, options.steps)
                finally:
                    learner.leave()

            plain(), attached()
            ratios, speeds = [], []
            for pair in range(pairs):
                # Which one goes first alternates, so that a drift of the machine's speed cancels out.
                order: tuple[Callable[[], float], ...] = (plain, attached) if pair % 2 else (attached, plain)
                speed = {arm: arm() for arm in order}
                ratios.append(speed[attached] / speed[plain])
                speeds.append(speed[plain])
                print(f"{speed[plain]:.2f} steps/s plain, {speed[attached]:.2f} attached: {ratios[-1]:.4f}", flush=True)
        merges = sum('"merge"' in line for line in (folder / "metrics.jsonl").read_text().splitlines())
    ratio = statistics.median(ratios)
    noise = statistics.stdev(speeds) / statistics.mean(speeds)
    print(f"{merges} merges; single blocks of the plain loop vary by {noise:.1%} (one standard deviation)")
    bar = "inner steps/s with Skerry over without (CPU default)"
    print(json.dumps({"bar": bar, "value": round(ratio, 4), "target": TARGET, "ok": ratio >= TARGET}))


if __name__ == "__main__":
    main()
