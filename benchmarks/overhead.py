"""Overhead of Skerry on an island: inner steps per second with it attached, over the same loop without it.

    python benchmarks/overhead.py [--quick]

One process trains one model, joined to a run with a separate syncer process. Blocks of steps alternate: one with the optimizer
hooks through which Skerry sees steps, one without. Short blocks keep drift of the machine's speed out of the ratio. Both kinds
use the same model: two copies of a model differ by several percent in speed, depending on where their tensors lie in memory.
The result is the median over pairs of blocks, with its standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

import skerry
from skerry.config import Config, load
from skerry.train.job import Job, build_job

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.97
WARM_UP = 6
"""Steps at the start of a block that do not count: exchanges of the previous block end in them."""


def block(job: Job, steps: int) -> float:
    """Steps per second of a block, without its warm-up."""
    started = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started = time.perf_counter()
        job.backward(*job.batch(step, 0))
        job.apply()
    return steps / (time.perf_counter() - started)


@contextlib.contextmanager
def without_hooks(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    hooks = [one._optimizer_step_pre_hooks for one in optimizers] + [one._optimizer_step_post_hooks for one in optimizers]
    saved = [dict(found) for found in hooks]
    for found in hooks:
        found.clear()
    try:
        yield
    finally:
        for found, before in zip(hooks, saved, strict=True):
            found.update(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=24, help="inner steps per block")
    options = parser.parse_args()
    pairs = 8 if options.quick else 100
    config: Config = load(ROOT / "configs" / "default.toml").resolved()
    config = dataclasses.replace(config, islands=dataclasses.replace(config.islands, threads=1))
    job = build_job(config)
    torch.set_num_threads(1)
    sync = dataclasses.replace(config.sync, start_with=1, budget_tokens=0, begin=skerry.BeginConfig())
    with tempfile.TemporaryDirectory() as scratch:
        folder = skerry.create(Path(scratch) / "run", job.model, sync)
        with skerry.serve(folder) as address:
            learner = skerry.join(address, job.model, job.optimizers, name="island", tokens_per_step=job.step_tokens)

            def plain() -> float:
                with without_hooks(job.optimizers):
                    return block(job, options.steps)

            def attached() -> float:
                return block(job, options.steps)

            plain(), attached()
            ratios, speeds = [], []
            for pair in range(pairs):
                # The order alternates, so that drift of the machine's speed cancels out.
                order: tuple[Callable[[], float], ...] = (plain, attached) if pair % 2 else (attached, plain)
                speed = {arm: arm() for arm in order}
                ratios.append(speed[attached] / speed[plain])
                speeds.append(speed[plain])
                print(f"{speed[plain]:.2f} steps/s plain, {speed[attached]:.2f} attached: {ratios[-1]:.4f}", flush=True)
            learner.leave()
        merges = sum('"merge"' in line for line in (folder / "metrics.jsonl").read_text().splitlines())
    ratio = statistics.median(ratios)
    noise = statistics.stdev(speeds) / statistics.mean(speeds)
    quarters = statistics.quantiles(ratios, n=4)
    error = 1.25 * (quarters[2] - quarters[0]) / 1.35 / len(ratios) ** 0.5
    print(f"{merges} merges; the ratio has a standard error of {error:.4f}; single plain blocks vary by {noise:.1%}")
    bar = "inner steps/s with Skerry over without (CPU default)"
    print(json.dumps({"bar": bar, "value": round(ratio, 4), "target": TARGET, "ok": ratio >= TARGET}))


if __name__ == "__main__":
    main()
