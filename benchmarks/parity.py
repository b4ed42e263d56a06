"""Model quality of the default run compared with data-parallel training on the same number of tokens.

    python benchmarks/parity.py [--quick] [CONFIG.toml]

Runs `skerry train` twice, with DDP and decoupled, and prints the gap in validation loss as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.03


def train(config: Path, algorithm: str, folder: Path, extra: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "skerry", "train", str(config), "--algorithm", algorithm, "--run", str(folder), *extra]
    print("==", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)
    found: dict[str, float] = json.loads((folder / "result.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "default.toml")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the tokens: a smoke test that says little about quality"
    )
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    gaps = []
    for seed in range(options.seeds):
        extra = ["--train.seed", str(seed)] + (["--train.tokens", "250000"] if options.quick else [])
        with tempfile.TemporaryDirectory() as scratch:
            parallel = train(options.config, "dp", Path(scratch) / "dp", extra)
            decoupled = train(options.config, "decoupled", Path(scratch) / "decoupled", extra)
        gaps.append(decoupled["validation_loss"] / parallel["validation_loss"] - 1)
        for name, found in (("data-parallel", parallel), ("decoupled", decoupled)):
            loss, error = found["validation_loss"], found["standard_error"]
            print(f"{name:14s} loss {loss:.4f} ± {error:.4f}  {found['tokens']:,.0f} tokens  {found['seconds']:.0f} s")
    gap = sum(gaps) / len(gaps)
    bar = "validation loss of 4 islands above data-parallel"
    print(
        json.dumps(
            {"bar": bar, "value": round(gap, 5), "target": TARGET, "ok": gap <= TARGET, "gaps": [round(g, 5) for g in gaps]}
        )
    )


if __name__ == "__main__":
    main()
