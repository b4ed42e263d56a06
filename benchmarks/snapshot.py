"""Cost of a snapshot for an island: inner steps in an interval with a snapshot over those in one without, in the same run.

    python benchmarks/snapshot.py [--quick]

One island with the default model and a syncer process. Intervals with and without a snapshot alternate. They are much shorter
than a realistic time between snapshots, so the measured cost is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

import skerry
from skerry.admin import take_snapshot
from skerry.config import Config, ModelConfig
from skerry.train.job import build_job, lr_factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--interval-s", type=float, default=15.0)
    options = parser.parse_args()
    pairs, interval_s = (3, 4.0) if options.quick else (16, options.interval_s)
    torch.set_num_threads(1)
    config = Config(model=ModelConfig(size="1m", context=128)).resolved()
    job = build_job(config)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = skerry.create(Path(scratch) / "run", job.model, skerry.SyncConfig(fragments=8, every=24))
        with skerry.serve(folder) as address:
            learner = skerry.join(address, job.model, job.optimizers, tokens_per_step=job.step_tokens)
            batches = learner.leased(job.pools, config.train.batch)

            def interval(seconds: float) -> float:
                """Inner steps per second."""
                started, steps = time.perf_counter(), 0
                while (spent := time.perf_counter() - started) < seconds:
                    job.set_lr(lr_factor(0.5, config.train))
                    job.backward(*job.read(next(batches)))
                    job.apply()
                    steps += 1
                return steps / spent

            interval(interval_s)
            ratios, seconds, states = [], [], set()
            for pair in range(pairs):
                rates = {}
                for taking in (pair % 2 == 0, pair % 2 == 1):
                    done: list[float] = []

                    def take(done: list[float] = done) -> None:
                        started = time.perf_counter()
                        facts = take_snapshot(address, None)
                        done.append(time.perf_counter() - started)
                        states.update(facts["islands"].values())

                    thread = threading.Thread(target=take)
                    if taking:
                        thread.start()
                    rates[taking] = interval(interval_s)
                    if taking:
                        thread.join()
                        seconds += done
                ratios.append(rates[True] / rates[False])
                print(f"pair {pair + 1} of {pairs}: {rates[False]:.1f} steps/s, with a snapshot {ratios[-1]:.4f}", flush=True)
            learner.leave()
    assert states == {"kept"}, states
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    print(f"a snapshot takes {statistics.median(seconds):.2f} s; intervals of {interval_s:.0f} s")
    bar = {"bar": "steps with a snapshot over steps without", "value": round(mean, 4), "target": 0.99, "ok": mean >= 0.99}
    print(json.dumps({**bar, "standard_error": round(error, 4)}))


if __name__ == "__main__":
    main()
