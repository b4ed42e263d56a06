"""What Skerry costs an island: inner steps per second with it attached, over the same loop without it.

    python benchmarks/overhead.py [--quick]

One process trains two copies of the default model in turns, a block of steps each: one plain, one joined to a run whose
syncer is a process of its own. Turns keep the machine's noise out of the ratio; the median over pairs of blocks counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import skerry
from skerry.config import Config, load
from skerry.train.job import Job, build_job

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.97


def block(job: Job, steps: int, first: int) -> float:
    started = time.perf_counter()
    for step in range(first, first + steps):
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
    threads = dataclasses.replace(config.islands, threads=1)
    config = dataclasses.replace(config, islands=threads)
    plain, attached = build_job(config), build_job(config)
    torch.set_num_threads(1)
    sync = dataclasses.replace(config.sync, start_with=1, budget_tokens=0, begin=skerry.BeginConfig())
    with tempfile.TemporaryDirectory() as scratch:
        folder = skerry.create(Path(scratch) / "run", attached.model, sync)
        with skerry.serve(folder) as address:
            learner = skerry.join(address, attached.model, attached.optimizers, tokens_per_step=attached.step_tokens)
            block(plain, 10, 0), block(attached, 10, 0)
            ratios = []
            for pair in range(pairs):
                # Which one goes first alternates, so that a drift of the machine's speed cancels out.
                order = (plain, attached) if pair % 2 else (attached, plain)
                speed = {id(job): block(job, options.steps, 10 + pair * options.steps) for job in order}
                ratios.append(speed[id(attached)] / speed[id(plain)])
                print(f"{speed[id(plain)]:.2f} steps/s plain, {speed[id(attached)]:.2f} attached: {ratios[-1]:.4f}", flush=True)
            learner.leave()
        merges = sum(
            1
            for line in (folder / "metrics.jsonl").read_text().splitlines()
            if '"kind": "merge"' in line or '"kind":"merge"' in line
        )
    ratio = statistics.median(ratios)
    bar = "inner steps/s with Skerry over without (CPU default)"
    print(json.dumps({"bar": bar, "value": round(ratio, 4), "target": TARGET, "ok": ratio >= TARGET, "merges": merges}))


if __name__ == "__main__":
    main()
