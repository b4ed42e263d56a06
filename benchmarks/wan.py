"""Training over links with realistic bandwidth and delay between sites: Skerry and data-parallel training.

    python benchmarks/wan.py [--quick] [--turns N] [--out FILE] [--plot FILE] [--saved FILE ...]

Islands (two by default) and a syncer run in separate network namespaces, joined by links with a given bandwidth and delay
(benchmarks/wan/switch.py; needs root). All islands train the same model on the same data with one thread each. Islands use one
half of the machine's cores, the syncer and the switch the other half, because in practice they are on other machines.

Utilisation is inner steps per second over those of as many islands without any network. The speed of a machine drifts by more
than the effect to measure, so both groups train at the same time, each with half of the islands' cores
(benchmarks/wan/halves.py). If there are no more cores than islands, Skerry's background work must fit into its half, and time
spent waiting is lost. A window of decoupled training covers whole rounds of H steps. With --turns, everything is repeated and
shares are means over the turns, with their standard error. Bytes are counted by the switch, including all headers and TLS.
The data-parallel arm is DistributedDataParallel over gloo, with gradients sent as fp16 (gloo has no bf16, which is as large).
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "wan"))

import torch
import trustme
from halves import Half, halves
from switch import Switch, switched

import skerry
from skerry.config import Config, IslandsConfig, ModelConfig, SyncConfig, TrainConfig, to_json
from skerry.train.job import build_job

CORES = sorted(os.sched_getaffinity(0))
ISLAND_CORES, OTHER_CORES = CORES[: max(1, len(CORES) // 2)], CORES[len(CORES) // 2 :]
DELAY_S = 0.02
"""One-way delay of each link. A round trip between two sites takes four of them."""
DECOUPLED = SyncConfig(fragments=24, every=24, overlap=2, send="bf16", publish="bf16", silence_s=60.0)
SPARSE = dataclasses.replace(DECOUPLED, every=96, send="topk1", publish="topk3", outer_momentum=0.0)
ARMS: dict[str, SyncConfig | None] = {
    "dp": None,
    "diloco": DECOUPLED.for_algorithm("diloco"),
    "streaming": DECOUPLED.for_algorithm("streaming"),
    "decoupled bf16": DECOUPLED,
    "decoupled int4": dataclasses.replace(DECOUPLED, send="int4", publish="int4"),
    "decoupled topk, H = 96": SPARSE,
}


STEPS_TO_SETTLE = {"dp": 1}
"""Steps after a change of conditions that are not measured. By default H, so that every fragment is exchanged once."""
WHOLE_STEPS = {"dp": 4, "diloco": 2 * DECOUPLED.every, "streaming": 2 * DECOUPLED.every}
"""Arms that wait for the network are measured over this many steps, which are whole rounds, however long they take."""
LONGEST_WINDOW_S = 400


@dataclass
class Measured:
    """Measurements of one window, or means over several."""

    arm: str
    mbit: float
    steps_per_s: float
    up_bytes: float
    """Bytes sent by an island per step."""
    down_bytes: float
    steps: int
    alone_steps_per_s: float = math.nan
    """Speed of the islands without a network, measured at the same time."""
    cut_short: bool = False
    """The window ended before whole rounds were done, because it took too long."""
    merged_every: float = math.nan
    """Steps between two versions of a fragment."""

    @property
    def share(self) -> float:
        return self.steps_per_s / self.alone_steps_per_s


class Bench:
    def __init__(self, switch: Switch, shares: tuple[Half, Half], place: Path, islands: int, size: str, batch: int) -> None:
        self._switch, self._place = switch, place
        self._mine, self._others = shares
        self._islands = [f"island{index}" for index in range(islands)]
        config = Config(
            model=ModelConfig(size=size, context=128),
            train=TrainConfig(batch=batch, tokens=10**12),
            islands=IslandsConfig(count=islands),
        )
        self._config = config.resolved()
        (place / "job.json").write_text(to_json(self._config))
        self._model = build_job(self._config).model
        self.parameters = sum(p.numel() for p in self._model.parameters())
        authority = trustme.CA()
        leaf = authority.issue_cert(switch.address("syncer"))
        authority.cert_pem.write_to_path(place / "ca.pem")
        (place / "syncer.key").write_bytes(leaf.private_key_pem.bytes())
        (place / "syncer.pem").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        self._runs = 0

    @contextlib.contextmanager
    def running(self, arm: str) -> Iterator[list[Path]]:
        """Start the islands and yield their step logs. The run folder, if any, is in the same folder."""
        self._runs += 1
        folder = self._place / f"run{self._runs}"
        folder.mkdir()
        processes: list[subprocess.Popen[bytes]] = []
        environment = {**os.environ, "PYTHONPATH": str(Path(skerry.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
        way, address = ("alone", "-") if arm == "alone" else ("dp", f"{self._switch.address('island0')}:29500")

        def start(host: str, *words: str, **more: str) -> None:
            with (folder / f"{host}.out").open("w") as output:
                mine = OTHER_CORES if host == "syncer" else ISLAND_CORES
                command = ["taskset", "-c", ",".join(map(str, mine)), *self._switch.command(host, sys.executable, *words)]
                if host != "syncer":
                    command = (self._others if arm == "alone" else self._mine).command(command)
                processes.append(subprocess.Popen(command, stdout=output, stderr=output, env={**environment, **more}))

        for host in self._islands:
            self._switch.set(host, 0.0, DELAY_S)  # exchanges before training are not measured
        logs: list[Path] = []
        sync = ARMS.get(arm)
        try:
            if sync is not None:
                way, address = "skerry", f"{self._switch.address('syncer')}:7070"
                skerry.create(folder / "run", self._model, dataclasses.replace(sync, start_with=len(self._islands)))
                keys = ("--cert", str(self._place / "syncer.pem"), "--key", str(self._place / "syncer.key"))
                start("syncer", "-m", "skerry", "syncer", str(folder / "run"), "--address", address, *keys)
            for index, host in enumerate(self._islands):
                logs.append(folder / f"{host}.steps")
                words = (way, str(index), str(len(self._islands)), address, str(logs[-1]), str(self._place / "job.json"))
                start(host, str(Path(__file__).parent / "wan" / "loop.py"), *words, SKERRY_TLS_CA=str(self._place / "ca.pem"))
            deadline = time.monotonic() + 240
            while not all(log.exists() and len(steps_in(log)) >= 2 for log in logs):
                ended = [process.args for process in processes if process.poll() is not None]
                if ended or time.monotonic() > deadline:
                    said = "\n".join(path.read_text()[-1500:] for path in folder.glob("*.out"))
                    raise SystemExit(f"{arm} did not start training:\n{said}")
                time.sleep(0.2)
            yield logs
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    def measure(self, arm: str, logs: list[Path], alone: list[Path], mbit: float, seconds: float) -> Measured:
        for host in self._islands:
            self._switch.set(host, mbit, DELAY_S)
        sync = ARMS[arm]
        settle(logs, STEPS_TO_SETTLE.get(arm) or (sync.every if sync is not None else 1))
        before = [dict(self._switch.ports[host].bytes) for host in self._islands]
        started, started_at = time.monotonic(), time.time()
        first = last = done_by_all(logs)
        wanted, longest_s = WHOLE_STEPS.get(arm, 0), LONGEST_WINDOW_S + (seconds if arm not in WHOLE_STEPS else 0.0)
        while time.monotonic() - started < longest_s:
            last = done_by_all(logs)
            if wanted and last >= first + wanted:
                break
            if not wanted and sync is not None and time.monotonic() - started >= seconds:
                wanted = -(-(last + 1 - first) // sync.every) * sync.every
            time.sleep(0.05)
        ended = time.monotonic()
        after = [dict(self._switch.ports[host].bytes) for host in self._islands]
        rate, alone_rate = (statistics.mean(rate_in(log, started, ended) for log in of) for of in (logs, alone))
        steps = rate * (ended - started)
        up, down = (
            statistics.mean(b[way] - a[way] for a, b in zip(before, after, strict=True)) / max(steps, 1.0)
            for way in ("up", "down")
        )
        window = Measured(arm, mbit, rate, up, down, round(steps), alone_rate, last < first + wanted)
        if sync is not None:
            records = map(json.loads, (logs[0].parent / "run" / "metrics.jsonl").read_text().splitlines())
            merges = sum(one["kind"] == "merge" and one["at"] >= started_at for one in records)
            window.merged_every = steps * sync.fragments / max(merges, 1)
        return window


def done_by_all(logs: list[Path]) -> int:
    return min(steps_in(log)[-1][1] for log in logs)


def rate_in(log: Path, started: float, ended: float) -> float:
    """Steps per second, including fractions of steps at both ends. The unfinished step at the end counts as one at most."""
    ends = [at for at, _ in steps_in(log)]
    longest_s = max(b - a for a, b in itertools.pairwise(ends[-10:]))

    def done(moment: float) -> float:
        number = bisect.bisect(ends, moment)
        until = ends[number] if number < len(ends) else max(moment, ends[-1] + longest_s)
        since = ends[number - 1] if number else moment
        return number + (moment - since) / max(until - since, 1e-9)

    return (done(ended) - done(started)) / (ended - started)


def steps_in(log: Path) -> list[tuple[float, int]]:
    lines = log.read_text().splitlines()
    return [(float(at), int(step)) for at, step in (line.split() for line in lines if line.count(" ") == 1)]


def settle(logs: list[Path], steps: int) -> None:
    """Wait for this many steps under the new conditions."""
    before = [len(steps_in(log)) for log in logs]
    deadline = time.monotonic() + 200
    while any(len(steps_in(log)) < n + steps for log, n in zip(logs, before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mbit", type=float, nargs="*", help="bandwidths to measure")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a window")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--arms", nargs="*", help=f"arms to run, of {', '.join(ARMS)}")
    parser.add_argument("--size", default="1m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--saved", type=Path, nargs="+", help="run nothing; show all windows of these files together")
    options = parser.parse_args()
    facts, found = read(options.saved) if options.saved else measured(options)
    if options.saved and options.out:
        write(options.out, facts, found)
    print("\n".join(described(mean_of(windows)) for windows in in_groups(found)))
    if options.plot:
        draw(in_groups(found), options.plot)
    for line in bars(found):
        print(json.dumps(line))


def measured(options: argparse.Namespace) -> tuple[dict[str, Any], list[Measured]]:
    bandwidths = options.mbit or ([10.0] if options.quick else [2.0, 5.0, 15.0, 50.0, 200.0, 1000.0])
    arms = options.arms or (["dp", "decoupled bf16", "decoupled int4"] if options.quick else list(ARMS))
    hosts = [f"island{number}" for number in range(options.islands)]
    torch.set_num_threads(1)
    os.sched_setaffinity(0, OTHER_CORES)
    found: list[Measured] = []
    with contextlib.ExitStack() as opened:
        place = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        switch = opened.enter_context(switched([*hosts, "syncer"]))
        shares = opened.enter_context(halves(len(ISLAND_CORES)))
        bench = Bench(switch, shares, place, options.islands, options.size, options.batch)
        facts = {"parameters": bench.parameters, "delay_s": DELAY_S, "islands": options.islands, "beside": True}
        alone = opened.enter_context(bench.running("alone"))
        print(f"{bench.parameters:,} parameters", flush=True)
        for turn in range(options.turns):
            for arm in arms:
                for mbit in sorted(bandwidths, reverse=True):
                    with bench.running(arm) as logs:
                        found.append(bench.measure(arm, logs, alone, mbit, options.seconds))
                    print(f"{turn + 1} of {options.turns}: {described(found[-1])}", flush=True)
                    if options.out:
                        write(options.out, facts, found)
    return facts, found


def write(path: Path, facts: dict[str, Any], found: list[Measured]) -> None:
    path.write_text(json.dumps({**facts, "found": [dataclasses.asdict(window) for window in found]}, indent=1) + "\n")


def read(paths: list[Path]) -> tuple[dict[str, Any], list[Measured]]:
    facts: dict[str, Any] = {}
    found: list[Measured] = []
    for path in paths:
        saved = json.loads(path.read_text())
        # Files of older versions may have more fields.
        names = {field.name for field in dataclasses.fields(Measured)}
        found += [Measured(**{k: v for k, v in window.items() if k in names}) for window in saved.pop("found")]
        facts = facts or saved
        if saved != facts:
            raise SystemExit(f"{path} has other islands than {paths[0]}")
    return facts, found


def described(window: Measured) -> str:
    sizes = f"{window.up_bytes / 1e3:9.1f} kB up, {window.down_bytes / 1e3:9.1f} kB down per step"
    speed = f"{window.steps_per_s:7.2f} of {window.alone_steps_per_s:6.2f} steps/s"
    more = "  cut short" if window.cut_short else ""
    more += f"  merged every {window.merged_every:.1f}" if window.merged_every == window.merged_every else ""
    return f"{window.arm:24s} {window.mbit:6g} Mbit/s  {speed}  {100 * window.share:5.1f}%  {sizes}{more}"


def in_groups(found: list[Measured]) -> list[list[Measured]]:
    """Windows grouped by arm and bandwidth."""
    groups: dict[tuple[str, float], list[Measured]] = {}
    for window in found:
        groups.setdefault((window.arm, window.mbit), []).append(window)
    return list(groups.values())


def mean_of(windows: list[Measured]) -> Measured:
    def mean(name: str) -> float:
        return statistics.mean(getattr(window, name) for window in windows)

    alone = mean("alone_steps_per_s")
    # The mean of the shares, not of the speeds: each share is relative to the machine's speed at that time.
    speed = alone * mean("share")
    steps = sum(window.steps for window in windows)
    cut_short = any(window.cut_short for window in windows)
    moved = mean("up_bytes"), mean("down_bytes")
    return Measured(windows[0].arm, windows[0].mbit, speed, *moved, steps, alone, cut_short, mean("merged_every"))


def error_of(windows: list[Measured]) -> float | None:
    """Standard error of the mean share; None for a single window."""
    if len(windows) < 2:
        return None
    return statistics.stdev(window.share for window in windows) / math.sqrt(len(windows))


def bars(found: list[Measured]) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    groups = in_groups(found)
    by = {(windows[0].arm, windows[0].mbit): windows for windows in groups}
    means = [mean_of(windows) for windows in groups]
    dp_means = [mean for mean in means if mean.arm == "dp"]
    if thin := [mean for mean in dp_means if 0 < mean.share <= 0.04]:
        dp = max(thin, key=lambda mean: mean.mbit)
        at = {"mbit": dp.mbit, "dp_utilisation": round(dp.share, 4)}
        for arm in ("decoupled bf16", "decoupled int4"):
            if windows := by.get((arm, dp.mbit)):
                mine, error = mean_of(windows), error_of(windows)
                more = {"standard_error": None if error is None else round(error, 4), "turns": len(windows), **at}
                more["merged_every"] = round(mine.merged_every, 1)  # a saturated link stretches H
                ok = mine.share >= 0.95
                lines.append({"bar": f"utilisation, {arm}", "value": round(mine.share, 4), "target": 0.95, "ok": ok, **more})
                times = mine.share / dp.share
                bar = f"times as fast as dp, {arm}"
                lines.append({"bar": bar, "value": round(times, 1), "target": 20, "ok": times > 20, **at})
    for arm, target in (("decoupled bf16", 24), ("decoupled int4", 90), ("decoupled topk, H = 96", 1000)):
        mine_means = [mean for mean in means if mean.arm == arm]
        if mine_means and dp_means:
            mine, dp = (max(of, key=lambda mean: mean.mbit) for of in (mine_means, dp_means))
            times = (dp.up_bytes + dp.down_bytes) / (mine.up_bytes + mine.down_bytes)
            bar = f"fewer bytes a step than dp, {arm}"
            lines.append({"bar": bar, "value": round(times, 1), "target": target, "ok": times >= target})
    return lines


def draw(groups: list[list[Measured]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for arm in dict.fromkeys(windows[0].arm for windows in groups):
        mine = sorted((windows for windows in groups if windows[0].arm == arm), key=lambda windows: windows[0].mbit)
        shares = [100 * mean_of(windows).share for windows in mine]
        errors = [100 * (error_of(windows) or 0.0) for windows in mine]
        axes.errorbar([windows[0].mbit for windows in mine], shares, yerr=errors, marker="o", capsize=2, label=arm)
    axes.set(xscale="log", xlabel="bandwidth of an island's link, Mbit/s", ylabel="utilisation, %", ylim=(0, 115))
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
