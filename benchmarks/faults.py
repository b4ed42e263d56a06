"""Cost of faults for Skerry, torchft's DiLoCo and DDP with restarts: same model, data and faults, in one table.

    python benchmarks/faults.py [--quick] [--full] [--systems skerry,torchft,torchft-retries,ddp] [--torchft PYTHON]

Two replicas, processes with one thread each, train the default job on this machine.
 (a) One replica is a straggler, five times as slow. Measured: the speed of the other, over its speed with an equally fast peer.
 (b) The coordinator (syncer, lighthouse, rank 0) is killed and restarted after 5 s; with --full also after 60 s. Measured: the
     longest time between two inner steps of a surviving replica, and which processes exit.
 (c) One replica's parameters become NaN once. Measured: whether the other's losses stay finite, and which replica is blamed.
 (d) One replica is killed and restarted after 3 s. Measured: what the other loses, and when the killed one takes part again.
faults/scenarios.py defines every number. --quick runs only Skerry, all faults in one run of about a minute. torchft is an
optional dependency (`pip install skerry[bench]`); --torchft names an interpreter in another environment that has it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import scenarios
from faults.drivers import FAULTS, DataParallel, Driver, Skerry, Torchft, TorchftRetries

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS: dict[str, type[Driver]] = {
    "skerry": Skerry,
    "torchft": Torchft,
    "torchft-retries": TorchftRetries,
    "ddp": DataParallel,
}
TARGETS = {"speed": 0.97, "stall": 1.0, "finite": 1.0, "rejoin": 5.0}
SHORT_S, LONG_S = 5.0, 60.0

Results = dict[str, Any]


def measure_quick(driver: Driver, options: argparse.Namespace) -> Results:
    """All faults in one run. The NaN comes last, because not every system recovers from it."""
    try:
        driver.start()
        return {
            "straggler": scenarios.straggler(driver, 1, options.straggler),
            "outage": scenarios.outage(driver, SHORT_S, after_s=2.0, rounds=1),
            "kill": scenarios.kill(driver),
            "poison": scenarios.poison(driver),
        }
    finally:
        driver.stop()


def measure(kind: type[Driver], root: Path, python: str, options: argparse.Namespace) -> Results:
    """Each fault in its own run."""
    plans: dict[str, Callable[[Driver], Any]] = {
        "straggler": lambda d: scenarios.straggler(d, 3 if d.waits else options.pairs, options.straggler),
        "outage": lambda d: scenarios.outage(d, SHORT_S, after_s=5.0, rounds=options.rounds),
        "kill": scenarios.kill,
        "poison": scenarios.poison,
    }
    if options.full:
        plans["long outage"] = lambda d: scenarios.outage(d, LONG_S, after_s=10.0, rounds=1)
    found: Results = {}
    for name, plan in plans.items():
        if name not in kind.faults or name not in options.only.split(","):
            continue
        driver = kind(root / kind.__name__ / name.replace(" ", "-"), python)
        try:
            driver.start()
            driver.run_for(2.0)
            found[name] = plan(driver)
        except Exception as error:  # keep the results of the other systems
            print(f"{driver.name}, {name}: {error!r}", flush=True)
        finally:
            driver.stop()
        print(f"{time.strftime('%H:%M:%S')} {driver.name}: {found.get(name)}", flush=True)
    return found


def busy() -> float:
    """Share of the machine's cores that other processes use, over one second. Linux only; 0 elsewhere."""

    def ticks() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]

    if not Path("/proc/stat").exists():
        return 0.0
    total, idle = ticks()
    time.sleep(1.0)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / max(1, total_after - total)


def with_torchft(wanted: str) -> str | None:
    """An interpreter that can import torchft, or None."""
    for python in [wanted] if wanted else [sys.executable, str(ROOT / "build" / "torchft" / "bin" / "python")]:
        if Path(python).exists() and subprocess.run([python, "-c", "import torchft"], capture_output=True).returncode == 0:
            return python
    return None


def rows(found: Results) -> list[tuple[str, str]]:
    """The rows of the table for one system, as (label, value)."""
    lines: list[tuple[str, str]] = []

    def add(name: str, *texts: tuple[str, Callable[[Any], str]]) -> None:
        value = found.get(name)
        lines.extend((what, text(value) if value is not None else "-") for what, text in texts)

    add(
        "straggler",
        ("(a) speed with a 5x straggler, of its own", lambda v: f"{v.ratio:.1%} ({v.lowest:.0%} to {v.highest:.0%})"),
    )
    for name, away in (("outage", SHORT_S), ("long outage", LONG_S)):
        if name == "outage" or name in found:
            add(
                name,
                (f"(b) coordinator away {away:.0f} s: longest gap", lambda v: f"{v.gap:.1f} steps ({v.gap_s:.2f} s)"),
                ("    longest gap without a fault", lambda v: f"{v.quiet_gap:.1f} steps"),
                ("    restart until all replicas exchange", lambda v: f"{v.back_s:.1f} s"),
                ("    steps of that time that are kept", lambda v: f"{v.kept:.0%}"),
                ("    exits", lambda v: v.exits or "none"),
            )
    add(
        "poison",
        ("(c) one NaN replica: others' finite losses", lambda v: f"{v.finite:.0%}"),
        ("    its own finite losses", lambda v: f"{v.faulty_finite:.0%}"),
        ("    who is blamed", lambda v: v.accused or "none"),
    )
    add(
        "kill",
        ("(d) kill -9: steps lost by the other", lambda v: f"{v.lost_steps:.0f}"),
        ("    the other's longest gap", lambda v: f"{v.stall:.1f} steps ({v.quiet_stall:.1f} before)"),
        ("    restart until it takes part, less start-up", lambda v: f"{v.rejoin_s:.2f} s (start-up {v.start_up_s:.1f} s)"),
        ("    others that exit", lambda v: v.exits or "none"),
    )
    return lines


def print_table(results: dict[str, Results]) -> None:
    columns = {name: rows(found) for name, found in results.items()}
    labels = [what for what, _ in max(columns.values(), key=len)]
    width = max(map(len, labels))
    widths = {name: max(len(name), *(len(text) for _, text in lines)) for name, lines in columns.items()}
    print(" " * width, *(name.ljust(widths[name]) for name in columns), sep="  ")
    for place, label in enumerate(labels):
        texts = ((lines[place][1] if place < len(lines) else "-").ljust(widths[name]) for name, lines in columns.items())
        print(label.ljust(width), *texts, sep="  ")


def print_bars(found: Results) -> None:
    def bar(what: str, value: float, target: float, ok: bool, **more: float) -> None:
        numbers = {key: round(number, 3) for key, number in more.items()}
        print(json.dumps({"bar": what, "value": round(value, 4), "target": target, "ok": ok, **numbers}))

    if v := found.get("straggler"):
        what = "fast island's speed beside a 5x straggler (Skerry)"
        bar(what, v.ratio, TARGETS["speed"], v.ratio >= TARGETS["speed"], lowest=v.lowest, highest=v.highest)
    for name, away in (("outage", SHORT_S), ("long outage", LONG_S)):
        if v := found.get(name):
            what = f"longest stall while the syncer is gone {away:.0f} s, in steps"
            ok = v.stall <= TARGETS["stall"] and not v.exits
            bar(what, v.stall, TARGETS["stall"], ok, longest_gap=v.gap, quiet_longest_gap=v.quiet_gap)
    if v := found.get("poison"):
        ok = v.finite >= TARGETS["finite"]
        bar("other islands' loss finite after a NaN island (Skerry)", v.finite, TARGETS["finite"], ok)
    if v := found.get("kill"):
        what = "seconds from restart to next merge minus start-up"
        bar(what, v.rejoin_s, TARGETS["rejoin"], v.rejoin_s <= TARGETS["rejoin"], start_up_s=v.start_up_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only Skerry, short, in one run")
    parser.add_argument("--full", action="store_true", help="also kill the coordinator for a minute")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="default: %(default)s")
    parser.add_argument("--only", default=",".join(FAULTS), help="faults to inject (default: %(default)s)")
    parser.add_argument("--straggler", choices=("busy", "sleep"), default="busy", help="what a straggler does with its time")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks with and without a straggler (Skerry only)")
    parser.add_argument("--rounds", type=int, default=3, help="outages to take the median of (Skerry only)")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="an interpreter that has torchft")
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that drivers stop their processes
    results: dict[str, Results] = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = options.keep or Path(scratch)
        for system in ["skerry"] if options.quick else options.systems.split(","):
            python = with_torchft(options.torchft) if issubclass(SYSTEMS[system], Torchft) else sys.executable
            if python is None:
                print(f"skipping {system}: no interpreter can import torchft (pip install skerry[bench], or --torchft PYTHON)")
                continue
            kind = SYSTEMS[system]
            if (share := busy()) > 0.1:
                print(
                    f"other processes use {share:.0%} of this machine as {kind.name} starts: do not trust the numbers",
                    flush=True,
                )
            if options.quick:
                results[kind.name] = measure_quick(kind(root / system, python), options)
            else:
                results[kind.name] = measure(kind, root, python, options)
    print()
    print_table(results)
    if "Skerry" in results:
        print_bars(results["Skerry"])


if __name__ == "__main__":
    main()
