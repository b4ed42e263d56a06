"""Time to a fixed validation loss under failures: decoupled training and data-parallel training that restarts on failure.

    python benchmarks/time_to_loss.py [--quick] [--elastic] [--plan PLAN.toml] [--out FILE.json] [--plot [FILE.svg]]

Real processes on this machine, killed with SIGKILL as planned in configs/chaos/failures.toml: each worker about every two
minutes, for 42 s on average. Arms: both kinds of training without failures, both with failures, and with --elastic also
data-parallel training that continues with the remaining workers. What makes the comparison fair:

- All arms get the same trace: workers are killed at the same seconds since training began, for the same durations. A worker
  that is killed while its job waits for another one is down all the same.
- All arms have the same model, data, tokens per worker step, budget, learning-rate schedule (over the budget) and validation
  windows.
- Each kind of training has a suitable learning rate. Islands use the configuration's. Data-parallel training uses a lower one:
  the best was 1.5e-3 to 2e-3 for global batches of 32 sequences and 1e-3 to 1.5e-3 for 16 (results/LOG.md); here a global
  batch has 8. `--arms dp-calm --dp-lr 7e-4 --out FILE` tries another.
- Data-parallel training restarts as well as it can. A death is noticed at once, and all workers restart together from a
  checkpoint of weights, optimizer and step as soon as the dead one is back. Checkpoints are written in a thread, at the
  interval of Young and Daly for their measured cost and the failure rate of the whole job, but at most once per second. An
  elastic job restarts at once with the remaining workers, on the same global batch, and again, after a checkpoint, when a
  worker is back; both restarts cost a start-up.
- Start-up counts: every restarted process imports, builds its job and connects before it trains. Only the first start is
  excluded from the times; the table shows it.
- Each worker is pinned to its own core, with one thread, so a death makes no other worker faster. The syncer and the launchers
  have no core of their own: they take time from the workers, or use the core of a dead one.
- Validation takes no time from training: weights are copied every few seconds and validated after the arm has ended. A copy of
  data-parallel training counts even if a restart throws its steps away, and so does the checkpoint it restarts from.
- The target loss is the final loss of the worst arm under failures. Times are first arrivals, interpolated linearly between
  copies. A noisy curve may arrive early by luck, so times of staying below ("for good") and ratios for higher losses are shown
  as well.

One trace is one random draw. A run of minutes has few deaths, so the ratio scatters widely between traces: do not pick one;
--trace draws others. More workers favour decoupled training, because a job that needs all of them is stopped more often. With
two workers it gains least.

Two workers on two idle cores take about 25 minutes, 33 with --elastic. Keep the machine idle otherwise. --quick (about two
minutes) is a smoke test; its numbers mean nothing, because most of its time is start-up.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from time_to_loss.curves import Arm, common_loss, ratio, time_to, time_to_keep
from time_to_loss.data_parallel import Launcher
from time_to_loss.decoupled import run_decoupled
from time_to_loss.plot import draw
from time_to_loss.samples import measure

from skerry.chaos.parse import load_plan
from skerry.chaos.plan import Fault, Plan, RandomFaults
from skerry.config import Config, load
from skerry.errors import SkerryError

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = ROOT / "results" / "failures" / "time_to_loss.json"
TARGET = 0.7
ARMS = {
    "dp-calm": "data-parallel, no failures",
    "decoupled-calm": "decoupled, no failures",
    "dp-restart": "data-parallel, restarts",
    "dp-elastic": "data-parallel, elastic",
    "decoupled": "decoupled",
}
TOKENS, QUICK_TOKENS = 3_000_000, 150_000
QUICK_TRACE_S = 20.0
"""Failures end after this time; otherwise restarts would leave no time to train."""
HIGHER = (1.0, 1.02, 1.05, 1.1)


def job(options: argparse.Namespace, lr: float | None) -> Config:
    config = load(ROOT / "configs" / "default.toml")
    train = dataclasses.replace(config.train, tokens=options.tokens, seed=options.seed, lr=lr or config.train.lr)
    evaluation = dataclasses.replace(config.eval, tokens=4096 if options.quick else config.eval.tokens)
    islands = dataclasses.replace(config.islands, count=options.workers, threads=1, device="cpu")
    return dataclasses.replace(config, train=train, islands=islands, eval=evaluation).resolved()


def failures(options: argparse.Namespace) -> RandomFaults:
    chance = load_plan(options.plan).random
    if chance is None or chance.kinds != ("kill",):
        raise SystemExit(f'{options.plan} must have a [random] table with kinds = ["kill"] alone')
    until_s = QUICK_TRACE_S if options.quick else options.limit
    changes = {"mtbf_s": options.mtbf, "return_s": options.away, "seed": options.trace, "until_s": until_s}
    return dataclasses.replace(chance, **{name: value for name, value in changes.items() if value is not None})


def run_arm(key: str, options: argparse.Namespace, chance: RandomFaults, folder: Path) -> Arm:
    arm = Arm(ARMS[key])
    config = job(options, None if key.startswith("decoupled") else options.dp_lr)
    faults: list[Fault] = [] if key.endswith("calm") else Plan((), chance).timed(options.workers)
    cores = sorted(os.sched_getaffinity(0))
    print(f"== {arm.name}, lr {config.train.lr:g}", flush=True)
    if key.startswith("decoupled"):
        samples = run_decoupled(arm, config, folder, faults, cores, options.sample_every)
    else:
        samples = Launcher(
            arm, config, folder, faults, cores, mtbf_s=chance.mtbf_s / options.workers, sample_every_s=options.sample_every,
            limit_s=options.limit, elastic=key == "dp-elastic",
        ).run()  # fmt: skip
    print(f"validating {len(samples)} checkpoints of {arm.name}", flush=True)
    measure(arm, samples, config, at_once=len(cores))
    return arm


def print_table(arms: dict[str, Arm], loss: float) -> None:
    def seconds(arm: Arm, found: float | None) -> str:
        if found is None:
            return "never" if arm.stopped_s is None else f"> {arm.stopped_s:.1f}"
        return f"{found:.1f}"

    heads = {
        "": 28,
        "deaths": 8,
        f"s to {loss:.4f}": 14,
        "and for good": 14,
        "s total": 10,
        "final loss": 17,
        "start-up, s": 14,
    }
    print("\n" + "".join(f"{head:>{width}s}" for head, width in heads.items()))
    for arm in arms.values():
        reached, kept = seconds(arm, time_to(loss, arm.points)), seconds(arm, time_to_keep(loss, arm.points))
        print(f"{arm.name:28s}{len(arm.kills):8d}{reached:>14s}{kept:>14s}", end="")
        print(f"{arm.seconds:10.1f}{arm.final_loss:17.4f}{arm.start_up_s:14.1f}")


def print_bars(arms: dict[str, Arm], loss: float) -> None:
    for other in ("dp-calm", "dp-restart", "dp-elastic"):
        mine = "decoupled-calm" if other == "dp-calm" else "decoupled"
        levels = [loss * more for more in HIGHER]
        ratios = [ratio(arms, mine, other, level) for level in levels]
        if all(ratios):
            bounds = ["" if time_to(level, arms[other].points) is not None else "at most " for level in levels]
            lines = zip(bounds, ratios, levels, strict=True)
            values = ", ".join(f"{bound}{value:.3f} to {level:.3f}" for bound, value, level in lines)
            print(f"time of {arms[mine].name} over {arms[other].name}: {values}")
    bars = {
        "dp-restart": (f"time to loss {loss:.3f} under failures, decoupled over restart-on-failure data-parallel", TARGET),
        "dp-elastic": (f"time to loss {loss:.3f} under failures, decoupled over elastic data-parallel", None),
    }
    for other, (what, target) in bars.items():
        if (value := ratio(arms, "decoupled", other, loss)) is not None:
            ok = None if target is None else value <= target
            kept = ratio(arms, "decoupled", other, loss, for_good=True)
            more = {"for_good": round(kept, 4)} if kept is not None else {}
            if time_to(loss, arms[other].points) is None:
                what += ", at most"
            print(json.dumps({"bar": what, "value": round(value, 4), "target": target, "ok": ok, **more}))


def show(arms: dict[str, Arm], plot: Path | None) -> None:
    loss = common_loss(arms)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(list(arms.values()), loss, plot)
    print_table(arms, loss)
    print_bars(arms, loss)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tokens and frequent deaths: a smoke test")
    parser.add_argument(
        "--elastic", action="store_true", help="also elastic data-parallel training, which continues with fewer workers"
    )
    parser.add_argument("--arms", help=f"only these arms, of {','.join(ARMS)}")
    parser.add_argument("--tokens", type=int, help="budget of every arm (default: 3,000,000, or 150,000 with --quick)")
    parser.add_argument("--workers", type=int, default=2, help="number of islands or ranks (default: %(default)s)")
    parser.add_argument(
        "--dp-lr", type=float, default=1e-3, help="learning rate of data-parallel training (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the job: initial weights and order of the data")
    parser.add_argument("--plan", type=Path, default=ROOT / "configs" / "chaos" / "failures.toml")
    parser.add_argument("--trace", type=int, help="seed of the failures (default: the plan's)")
    parser.add_argument("--mtbf", type=float, help="mean seconds between failures of a worker (default: the plan's)")
    parser.add_argument("--away", type=float, help="mean seconds a killed worker is down (default: the plan's)")
    parser.add_argument(
        "--sample-every", type=float, default=8.0, help="seconds between copies of the weights (default: %(default)s)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=3600.0,
        help="seconds after which failures end and a data-parallel arm is stopped; its curve until then is kept",
    )
    parser.add_argument(
        "--out", type=Path, help="file for the curves (default: results/failures/time_to_loss.json; none with --quick)"
    )
    parser.add_argument(
        "--plot", type=Path, nargs="?", const=ROOT / "docs" / "images" / "time-to-loss.svg", help="plot the curves"
    )
    parser.add_argument(
        "--saved", type=Path, nargs="+", help="run nothing; show the curves in these files, which must be of one job"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.mtbf, options.away = options.mtbf or 10.0, options.away or 3.0
        options.sample_every = min(options.sample_every, 2.0)
    elif options.out is None:
        options.out = DEFAULT_OUT
    options.tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    wanted = options.arms.split(",") if options.arms else [key for key in ARMS if options.elastic or key != "dp-elastic"]
    if options.arms and options.out == DEFAULT_OUT:
        parser.error("--arms needs --out, to keep the saved curves of all arms")
    if unknown := set(wanted) - set(ARMS):
        parser.error(f"--arms must be among {', '.join(ARMS)}, got {', '.join(sorted(unknown))}")
    options.arms = wanted
    return options


def main() -> None:
    options = parse()
    if options.saved is not None:
        show(saved_arms(options.saved), options.plot)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, which stops all processes
    if shutil.which("taskset") is None:
        raise SystemExit("taskset is not installed; it pins workers to cores")
    if len(os.sched_getaffinity(0)) < options.workers:
        print("workers share cores: a death makes others faster, which flatters decoupled training", flush=True)
    if os.getloadavg()[0] > 0.5:
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f}): do not trust the times", flush=True)
    chance = failures(options)
    arms: dict[str, Arm] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for key in options.arms:
            arms[key] = run_arm(key, options, chance, Path(scratch) / key)
            shutil.rmtree(Path(scratch) / key)
            if options.out is not None:
                keep(arms, options, chance)
    show(arms, options.plot)


def saved_arms(paths: Sequence[Path]) -> dict[str, Arm]:
    """Read arms from several files. They must have the same job and failures."""
    arms: dict[str, Arm] = {}
    first: dict[str, object] = {}
    for path in paths:
        found = json.loads(path.read_text())
        curves = found.pop("arms")
        first = first or found
        if found != first:
            raise SystemExit(f"{path} has another job or other failures than {paths[0]}")
        arms.update((key, Arm(**values)) for key, values in curves.items())
    return arms


def keep(arms: dict[str, Arm], options: argparse.Namespace, chance: RandomFaults) -> None:
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "workers": options.workers,
        "job": dataclasses.asdict(job(options, None)),
        "dp_lr": options.dp_lr,
        "failures": dataclasses.asdict(chance),
        "arms": {key: dataclasses.asdict(arm) for key, arm in arms.items()},
    }
    options.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    try:
        main()
    except SkerryError as error:
        raise SystemExit(f"time_to_loss: {error}") from None
