"""python -m simulation [--seeds 1000] [--first 0] [--storm] [--workers 2]: run many seeds and report failures."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from simulation.faults import simulate
from simulation.world import World

PLACE = "/dev/shm" if Path("/dev/shm").is_dir() else None


def run(seed: int, storm: bool) -> World:
    with tempfile.TemporaryDirectory(dir=PLACE) as root:
        return simulate(seed, Path(root), storm)


def outcome(work: tuple[int, bool]) -> tuple[int, int, int, str]:
    """(seed, faults, merges, error) of one simulation; the error is empty if it passed."""
    try:
        world = run(*work)
    except Exception as error:
        return work[0], 0, 0, f"{type(error).__name__}: {error}"
    return work[0], world.faults, world.checks.merges, ""


def outcomes(work: list[tuple[int, bool]], workers: int) -> Iterator[tuple[int, int, int, str]]:
    if workers == 1:
        yield from map(outcome, work)
        return
    # Each simulation leaks a little memory, so recycle the processes.
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=25) as pool:
        yield from pool.imap(outcome, work, chunksize=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--storm", action="store_true", help="longer runs with many more faults")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--notes", action="store_true", help="run only the seed given by --first and print its events")
    options = parser.parse_args()
    if options.notes:
        print("\n".join(run(options.first, options.storm).notes))
        return
    torch.set_num_threads(1)
    started, failed, faults, merges = time.monotonic(), [], 0, 0
    work = [(seed, options.storm) for seed in range(options.first, options.first + options.seeds)]
    for number, (seed, seed_faults, seed_merges, error) in enumerate(outcomes(work, options.workers), 1):
        faults, merges = faults + seed_faults, merges + seed_merges
        if error:
            failed.append(seed)
            print(f"seed {seed}: {error}", flush=True)
        if number % 100 == 0:
            print(f"{number} seeds, {faults} faults, {merges} merges, {time.monotonic() - started:.0f} s", flush=True)
    print(json.dumps({"bar": "seeds without a broken rule", "value": options.seeds - len(failed), "target": options.seeds,
                      "ok": not failed, "faults": faults, "merges": merges, "failed": failed[:20]}))  # fmt: skip
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
