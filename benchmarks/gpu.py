"""Overhead of Skerry on a GPU: step time with a learner attached over step time without, in turns. Also the speed of codecs on
the GPU, that they produce the same bytes as on the CPU, and that sending and adopting while kernels run is correct to the bit.

    python benchmarks/gpu.py [--quick] [--sizes 135m 1b] [--codecs bf16 int4] [--turns 4] [--folder FOLDER]

The syncer runs on this machine's CPU, with its run folder in /dev/shm if there is one: with a slow disk it would merge less
often than every H steps, and the exchange would look cheaper than it is. The output says how often fragments merged. A time
counts only if that was about every H steps. Training is real: a compiled byte-level GPT in bf16 with AdamW, which keeps its
optimizer state as `skerry train` does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

import skerry
from skerry.config import Config, ModelConfig, SyncConfig, TrainConfig
from skerry.learner.replica import Replica
from skerry.tensors.codecs.codec import _CODECS, codec
from skerry.tensors.codecs.fused import trial
from skerry.tensors.fragments import split
from skerry.tensors.model import model_tensors
from skerry.train.job import build_job

SHAPES = {
    "25m": ModelConfig(size="1m", layers=8, width=512, heads=8, context=512),
    "135m": ModelConfig(size="1m", layers=12, width=960, heads=15, context=1024),
    "1b": ModelConfig(size="1m", layers=20, width=2048, heads=16, context=1024),
}
BATCH = {"25m": 64, "135m": 64, "1b": 32}
"""Samples per step, realistic for one large GPU. With --batch 16 steps are so short (34 ms at 135M) that several Gbit/s go each
way, and Python hardly keeps up with launching kernels."""
EVERY = FRAGMENTS = 24


def seconds_of(work, times: int = 20) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


def measure_codecs(numel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(1_000_003, generator=generator) * 10 ** torch.randn(1_000_003, generator=generator)
    plain, small = small, torch.cat([small, trial(small.device)])
    same = {}
    for name, one in _CODECS.items():
        data, count = one.encode(small), small.numel()
        back, there = one.decode(data, count).float(), one.decode(data.cuda(), count).float().cpu()
        same[name] = torch.equal(data, one.encode(small.cuda()).cpu()) and torch.equal(back, there)
        # Without zeros and infinities the CPU takes a shortcut.
        same[name] &= torch.equal(one.encode(plain), one.encode(plain.cuda()).cpu())
    bar = {"bar": "codecs that give the same bytes and values on CPU and GPU", "value": sum(same.values()), "target": len(same)}
    print(json.dumps({**bar, "ok": all(same.values()), "each": same}))
    vector, target = torch.randn(numel, device="cuda"), torch.empty(numel, device="cuda")
    copy = 8 * numel / seconds_of(lambda: target.copy_(vector))
    print(f"copy on the device, {numel:,} elements: {copy / 1e9:.0f} GB/s, reads plus writes")
    shares = {}
    for name, one in _CODECS.items():
        moved = 4 * numel + one.size_bytes(numel)
        rate = moved / seconds_of(lambda one=one: one.encode(vector))
        shares[name] = rate / copy
        data = one.encode(vector)
        back = moved / seconds_of(lambda one=one, data=data: one.decode(data, numel))
        rates = f"{rate / 1e9:8.1f} GB/s, {shares[name]:.3f} of a copy; decoded at {back / 1e9:.1f} GB/s"
        print(f"encode {name:6s} {rates}", flush=True)
    bar = {"bar": "encode int4, bytes read and written a second, over those of a copy", "value": round(shares["int4"], 3)}
    print(json.dumps({**bar, "target": 0.5, "ok": shares["int4"] >= 0.5, "elements": numel}))


def check_fragments(rounds: int) -> None:
    """Adopt versions, change them as an optimizer would, and encode the progress, without synchronizing in between. Pinned
    memory is reused all the time."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1000, 1000, bias=False) for _ in range(6))).cuda()
    layout = split([spec for spec, _ in model_tensors(model)], 6)
    replica = Replica(model, layout, SyncConfig(fragments=6, send="fp32"))
    busy = torch.randn(4096, 4096, device="cuda")
    wanted, sent = [], []
    for round_ in range(rounds):
        snapshots = []
        for index, fragment in enumerate(layout.fragments):
            values = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(round_ * 6 + index))
            with torch.cuda.stream(replica.model_device._copies):
                busy @ busy  # keeps the next copy pending while its memory could be reused
            prepared = replica.prepare(index, values.clone(), 0)
            with replica.gate:
                replica.model_device.before_write()
                replica.adopt(index, prepared, 0, 0)
                busy @ busy  # keeps the following kernels pending
                with torch.no_grad():
                    model[index].weight.mul_(0.5)
                replica.model_device.after_write()
                snapshots.append(replica.snapshot(index, round_))
                replica.model_device.before_write()
                with torch.no_grad():
                    model[index].weight.fill_(7.0)  # the snapshot must have read the old values
                replica.model_device.after_write()
            del prepared
            wanted.append(values - values * 0.5)
        for snapshot, fragment in zip(snapshots, layout.fragments, strict=True):
            sent.append(codec("fp32").decode(replica.encode(snapshot), fragment.numel).clone())
    right = sum(map(torch.equal, wanted, sent))
    bar = {"bar": "fragments right to the bit through the GPU", "value": right, "target": len(wanted)}
    print(json.dumps({**bar, "ok": right == len(wanted)}), flush=True)


class Island:
    """A training job on the GPU with timed steps."""

    def __init__(self, size: str, batch: int) -> None:
        train = TrainConfig(batch=batch, tokens=10**12, precision="bf16", compile=True, lr=1e-4)
        self.size = size
        self.job = build_job(Config(model=SHAPES[size], train=train).resolved())
        self.job.set_lr(1.0)
        self.step = 0
        self.median = 0.0
        """Median of the last steps, by the GPU's clock. The difference to the mean comes from single delayed steps."""

    def launch_share(self) -> float:
        """Share of a step that Python needs to launch its kernels. Near 1 there is no time for anything else."""
        whole = self.steps(0.0)
        started = time.perf_counter()
        for _ in range(2):  # fewer kernels than the launch queue holds
            self._one()
        share = (time.perf_counter() - started) / 2 / whole
        torch.cuda.synchronize()
        return share

    def _one(self) -> None:
        self.job.backward(*self.job.batch(self.step, 0))
        self.job.apply()
        self.step += 1

    def steps(self, for_s: float) -> float:
        """Mean step time by the GPU's clock, over `for_s` and at least H steps. Loops read their loss now and then, which
        drains the GPU; the step after that does not count."""
        started, before = time.perf_counter(), self.step
        ends: list[list[torch.cuda.Event]] = []
        while time.perf_counter() - started < for_s or self.step - before < EVERY:
            torch.cuda.synchronize()
            ends.append([])
            for _ in range(32):
                self._one()
                ends[-1].append(self._now())
        torch.cuda.synchronize()
        took = [1e-3 * first.elapsed_time(second) for block in ends for first, second in itertools.pairwise(block)]
        self.median = statistics.median(took)
        return statistics.mean(took)

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Stages:
    """Times the stages of a learner's exchanges."""

    ORDER = ("asked", "given", "encoded", "delivered", "announced", "fetched", "adopted")

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {stage: [] for stage in self.ORDER[1:]}
        self._last: dict[int, tuple[str, float]] = {}

    def watch(self, learner: skerry.Learner) -> None:
        exchange = learner._exchange
        for stage in self.ORDER:
            setattr(exchange, stage, self._watched(stage, getattr(exchange, stage)))

    def _watched(self, stage, method):
        def called(what, *more):
            fragment = what.question.fragment if stage in ("given", "encoded") else what.fragment
            now, (before, since) = time.perf_counter(), self._last.get(fragment, ("", 0.0))
            if stage == "asked" or before == self.ORDER[self.ORDER.index(stage) - 1]:
                if stage != "asked":
                    self.took[stage].append(now - since)
                self._last[fragment] = (stage, now)
            return method(what, *more)

        return called

    def __str__(self) -> str:
        parts = []
        for stage, times in self.took.items():
            ms = [1e3 * taken for taken in sorted(times)] or [math.nan]
            parts.append(f"{stage} {ms[len(ms) // 2]:.1f} (90% {ms[9 * len(ms) // 10]:.1f})")
        return f"ms between stages of an exchange: {', '.join(parts)}"


def settle(island: Island, folder: Path, within_s: float = 30.0) -> None:
    """Train until every fragment merges about every H steps: at first both sides allocate memory, which costs time."""
    started, settled = time.perf_counter(), False
    while not settled and time.perf_counter() - started < within_s:
        first_step, first_merge = island.step, len(merges_in(folder))
        island.steps(0.0)
        settled = FRAGMENTS * (island.step - first_step) <= 1.1 * EVERY * (len(merges_in(folder)) - first_merge)
    print(f"{'settled' if settled else 'not settled'} after {time.perf_counter() - started:.1f} s", flush=True)


def attached(island: Island, send: str, turns: int, seconds: float, where: str | None, shards: int) -> None:
    job, size = island.job, island.size
    parameters = sum(p.numel() for p in job.model.parameters())
    without: list[float] = []
    attached_to: list[float] = []
    steps, merges = 0, []

    def alone() -> str:
        island.steps(0.0)  # an idle GPU is faster at first
        without.append(island.steps(seconds))
        return f"{1e3 * without[-1]:.2f} ms (median {1e3 * island.median:.2f})"

    with tempfile.TemporaryDirectory(dir=where or place_for_runs(parameters)) as scratch:
        sync = SyncConfig(fragments=FRAGMENTS, every=EVERY, overlap=2, send=send, publish=send)
        folder = skerry.create(Path(scratch) / "run", job.model, sync)
        with skerry.serve(folder, shards=shards) as address:
            print(f"{size}: a step without Skerry, not counted, {alone()}", flush=True)
            without.clear()  # the first window is always the slowest
            print(f"{size}: a step without Skerry {alone()}", flush=True)
            for turn in range(turns):
                known = {"name": "island", "tokens_per_step": job.step_tokens, "keep": Path(scratch) / "kept"}
                learner = skerry.join(address, job.model, job.optimizers, **known)
                settle(island, folder)
                stages = Stages()
                stages.watch(learner)
                first_step, first_merge = island.step, len(merges_in(folder))
                attached_to.append(island.steps(seconds))
                account = f"{1e3 * attached_to[-1]:.2f} ms (median {1e3 * island.median:.2f})"
                steps += island.step - first_step
                merges += merges_in(folder)[first_merge:]
                learner.leave()
                print(
                    f"{size} {send} turn {turn + 1}: a step with Skerry {account}, then without {alone()}\n  {stages}",
                    flush=True,
                )
    # Each window with Skerry is compared with its neighbours, because the GPU's speed drifts.
    ratios = [2 * mine / (before + after) for mine, before, after in zip(attached_to, without, without[1:], strict=False)]
    mean = statistics.mean(ratios)
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    bar = {"bar": f"step time with Skerry over without, {size}, {send}", "value": round(mean, 4), "target": 1.01}
    every = FRAGMENTS * steps / len(merges) if merges else math.inf
    more = {
        "standard_error": None if error is None else round(error, 4),
        "windows": [round(ratio, 4) for ratio in ratios],
        "parameters": parameters,
        "tokens_per_step": job.step_tokens,
        "merged_every_steps": round(every, 1) if merges else None,
        "merge_ms": round(1e3 * statistics.median(merges), 1) if merges else None,
    }
    print(json.dumps({**bar, "ok": mean <= 1.01 and every <= 1.05 * EVERY, **more}), flush=True)


def merges_in(folder: Path) -> list[float]:
    """Duration of each merge, from the decision to the committed version."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["seconds"] for record in records if record["kind"] == "merge"]


def place_for_runs(parameters: int) -> str | None:
    """/dev/shm, if it has room for two versions of the model and of the optimizer state."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 44 * parameters else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sizes", nargs="*", default=["135m", "1b"])
    parser.add_argument("--codecs", nargs="*", default=["bf16", "int4"])
    parser.add_argument("--turns", type=int)
    parser.add_argument("--batch", type=int, help="samples per step, for all sizes")
    parser.add_argument("--shards", type=int, default=2, help="number of shards")
    parser.add_argument("--folder", help="folder for run folders (default: /dev/shm)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.set_float32_matmul_precision("high")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores")
    measure_codecs(40 << 20)  # a fragment of a billion parameters
    check_fragments(10 if options.quick else 50)
    turns = options.turns or (2 if options.quick else 4)
    for size in options.sizes:
        island = Island(size, options.batch or BATCH[size])
        island.steps(10.0)
        print(f"{size}: launching kernels takes {island.launch_share():.2f} of a step", flush=True)
        for send in options.codecs:
            attached(island, send, turns, 3.0 if options.quick else 8.0, options.folder, options.shards)
        del island
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
