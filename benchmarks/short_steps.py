"""Steps shorter than an exchange: how much of the islands' work reaches the model, and how often fragments merge.

    python benchmarks/short_steps.py [--quick] [--step 0.022] [--islands 4] [--size 11m] [--shards 0]

A syncer and islands, each a process. Steps only sleep, so the machine does little besides exchanges. With 11M parameters,
H = P = 24 and steps of 22 ms, like four islands on one GPU, an island makes 45 exchanges per second. The share that
reaches the model comes from the run's ledger. The run begins with frequent merges, as `skerry train` does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch

import skerry
from skerry.config import ModelConfig
from skerry.core.records import Merged
from skerry.core.schema import TapeRecord
from skerry.models.gpt import GPT, build_gpt
from skerry.observe.ledger import audit_run
from skerry.syncer.storage.run_folder import read_tape

TARGET = 0.7
"""Share of the trained tokens, on two cores that the islands keep busy."""


def build_model(size: str) -> GPT:
    return build_gpt(ModelConfig(size=size, context=256), 256, 0)


def island(address: str, name: str, size: str, step_s: float, seconds: float) -> None:
    torch.set_num_threads(1)
    model = build_model(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    learner = skerry.join(address, model, optimizer, name=name, tokens_per_step=1000)
    first = next(model.parameters())
    now = due = time.perf_counter()
    end = now + seconds
    while now < end:
        due = max(due + step_s, now)
        time.sleep(max(0.0, due - now))
        first.grad = torch.ones_like(first)
        optimizer.step()
        now = time.perf_counter()
    learner.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--step", type=float, default=0.022, help="seconds")
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--size", default="11m")
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--publish", default="fp32", help="codec of merged fragments")
    options = parser.parse_args()
    seconds = 15.0 if options.quick else 45.0
    begin = skerry.BeginConfig(steps=round(0.1 * seconds / options.step))
    sync = skerry.SyncConfig(fragments=24, every=24, begin=begin, publish=options.publish, start_with=options.islands)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        folder = skerry.create(Path(scratch) / "run", build_model(options.size), sync)
        with skerry.serve(folder, shards=options.shards) as address:
            arguments = [(address, f"island-{n}", options.size, options.step, seconds) for n in range(options.islands)]
            islands = [spawn.Process(target=island, args=each) for each in arguments]
            for process in islands:
                process.start()
            for process in islands:
                process.join()
            assert all(process.exitcode == 0 for process in islands)
        merges: dict[int, list[tuple[int, int]]] = {}

        def merged(record: TapeRecord) -> None:
            assert isinstance(record, Merged)
            merges.setdefault(record.fragment, []).append((record.round, len(record.shares)))

        read_tape(folder, (Merged,), merged)
        ledger = audit_run(folder)
    assert ledger.adds_up, ledger.discrepancies
    in_model = statistics.mean(account.applied for account in ledger.tokens) / ledger.trained
    intervals = [
        later - sooner
        for rounds in merges.values()
        for (sooner, _), (later, _) in itertools.pairwise(rounds)
        if sooner >= begin.steps
    ]
    early = sum(step < begin.steps for rounds in merges.values() for step, _ in rounds)
    members = statistics.mean(count for rounds in merges.values() for _, count in rounds)
    steps = ledger.trained / 1000 / options.islands
    print(f"{options.islands} islands, {steps:.0f} steps each, {1e3 * seconds / steps:.1f} ms per step")
    print(f"{early} merges in the first {begin.steps} steps, then each fragment every {statistics.mean(intervals):.1f} steps")
    print(f"{members:.2f} islands per merge; {in_model:.1%} of the trained tokens are in the model")
    bar = {"bar": "share of the trained tokens that is in the model", "value": round(in_model, 3), "target": TARGET}
    print(json.dumps({**bar, "ok": in_model >= TARGET}))


if __name__ == "__main__":
    main()
