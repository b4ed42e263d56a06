"""A long run of eight islands with mixed random faults, to find leaks.

    python benchmarks/soak.py [--minutes 20] [--quick]

Samples memory, open files including sockets, and threads of every process every five seconds. A leak is growth from the second
quarter of the run to the last. At the end no process of the run may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
LOOK_EVERY_S = 5.0
GROWTH = 1.25
SLACK = {"MB": 30.0, "files": 8.0, "threads": 4.0}


def part_of(process: psutil.Process) -> str:
    """The part of the run this process is. Islands count as one part, because their processes are replaced all the time."""
    words = process.cmdline()
    for name in ("syncer", "validator", "learner"):
        if name in words:
            return name
    return "launcher"


def look(process: psutil.Process) -> dict[str, float]:
    return {"MB": process.memory_info().rss / 2**20, "files": process.num_fds(), "threads": process.num_threads()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true", help="three minutes")
    options = parser.parse_args()
    minutes = 3.0 if options.quick else options.minutes
    seen: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "soak"
        command = [sys.executable, "-m", "skerry", "train", str(ROOT / "configs" / "soak.toml"), "--run", str(folder)]
        command += ["--chaos", str(ROOT / "configs" / "chaos" / "soak.toml")]
        launcher = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        started = time.monotonic()
        everyone: set[int] = set()
        while time.monotonic() - started < 60 * minutes and launcher.poll() is None:
            time.sleep(LOOK_EVERY_S)
            family = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
            for process in family:
                everyone.add(process.pid)
                try:
                    part, found = part_of(process), look(process)
                except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    continue
                for what, value in found.items():
                    seen[part, what].append((time.monotonic() - started, value))
        survived = launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
        left = [pid for pid in everyone if psutil.pid_exists(pid)]
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if line]
        subprocess.run([sys.executable, "-m", "skerry", "account", str(folder)], cwd=ROOT, check=False)
    faults = sum(record.get("what") == "fault" for record in records)
    merges = sum(record["kind"] == "merge" for record in records)
    print(f"{minutes:.0f} minutes, {faults} faults, {merges} merges")
    leaks = []
    for (part, what), values in sorted(seen.items()):
        end = values[-1][0]
        before = [value for at, value in values if end / 4 <= at < end / 2]
        after = [value for at, value in values if at >= 3 * end / 4]
        if not before or not after:
            continue
        first, last = statistics.median(before), statistics.median(after)
        leaks.append(last / max(first + SLACK[what], 1e-9) if last > first + SLACK[what] else 1.0)
        print(f"{part:10s} {what:8s} {first:8.1f} in the second quarter, {last:8.1f} in the last")
    growth = max(leaks, default=1.0)
    print(json.dumps({"bar": "the run survived the soak", "value": int(survived), "target": 1, "ok": survived}))
    print(json.dumps({"bar": "largest growth of memory, files or threads", "value": round(growth, 3), "target": GROWTH,
                      "ok": growth <= GROWTH}))  # fmt: skip
    print(json.dumps({"bar": "processes left behind", "value": len(left), "target": 0, "ok": not left}))


if __name__ == "__main__":
    main()
