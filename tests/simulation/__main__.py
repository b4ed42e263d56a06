"""python -m simulation [--seeds 1000] [--first 0]: run seeds, one after the other; say which failed, and how."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from simulation.faults import simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--notes", action="store_true", help="say what happened, also where all was well")
    options = parser.parse_args()
    started, failed, faults, merges = time.monotonic(), [], 0, 0
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for number, seed in enumerate(range(options.first, options.first + options.seeds), 1):
        with tempfile.TemporaryDirectory(dir=place) as root:
            try:
                world = simulate(seed, Path(root))
            except Exception as error:
                failed.append(seed)
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
                if options.seeds == 1:
                    raise
                continue
        faults, merges = faults + world.faults, merges + world.checks.merges
        if options.notes:
            print("\n".join(world.notes))
        if number % 100 == 0:
            print(f"{number} seeds, {faults} faults, {merges} merges, {time.monotonic() - started:.0f} s", flush=True)
    print(json.dumps({"bar": "seeds without a broken rule", "value": options.seeds - len(failed), "target": options.seeds,
                      "ok": not failed, "faults": faults, "merges": merges, "failed": failed[:20]}))  # fmt: skip
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
