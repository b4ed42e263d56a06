"""Cost of failures: a default run, and the same run with islands that are killed and restarted all the time.

    python benchmarks/failures.py [--quick] [--plan PLAN.toml] [--tokens 4000000]

The runs are twice as long as the default, to have enough deaths. Both end at the same number of tokens. The numbers of the run
with failures come from its account (docs/operate.md).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METRICS_EVERY_S = 1.05
"""Interval of the metrics. A pause shorter than two intervals cannot be detected."""


def train(folder: Path, *extra: str) -> tuple[dict[str, Any], dict[str, Any]]:
    command = [sys.executable, "-m", "skerry", "train", str(ROOT / "configs" / "default.toml"), "--run", str(folder), *extra]
    print("==", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)
    result = json.loads((folder / "result.json").read_text())
    account = json.loads((folder / "account.json").read_text())
    return result, account


def say(bar: str, value: float, target: float, ok: bool) -> None:
    print(json.dumps({"bar": bar, "value": round(value, 5), "target": target, "ok": ok}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the tokens: a smoke test")
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--plan", default=str(ROOT / "configs" / "chaos" / "failures.toml"))
    options = parser.parse_args()
    extra = ["--train.tokens", str(options.tokens // 10 if options.quick else options.tokens)]
    with tempfile.TemporaryDirectory() as scratch:
        calm, _ = train(Path(scratch) / "calm", *extra)
        hurt, account = train(Path(scratch) / "hurt", *extra, "--chaos", options.plan)
    gap = hurt["validation_loss"] / calm["validation_loss"] - 1
    deaths = sum(island["deaths"] for island in account["islands"].values())
    killed = [r for r in account["recoveries"] if r["what"] == "killed" and r["seconds"] and r["joined_after_s"]]
    rejoined = [recovery["seconds"] - recovery["joined_after_s"] for recovery in killed]
    pause = max(0.0, account["longest_pause_s"] - 2 * METRICS_EVERY_S)
    print(
        f"{deaths} deaths; islands were down {1 - account['uptime']:.1%} of their time; "
        f"validation loss {calm['validation_loss']:.4f} without failures, {hurt['validation_loss']:.4f} with; "
        f"{calm['seconds']:.0f} s and {hurt['seconds']:.0f} s"
    )
    say("goodput of islands while alive", account["goodput_alive"], 0.98, account["goodput_alive"] >= 0.98)
    say("share of island time taken by failures", 1 - account["uptime"], 0.3, 1 - account["uptime"] >= 0.25)
    say("validation loss above the run without failures", gap, 0.01, gap <= 0.01)
    say("seconds in which no island stepped, beyond what can be seen", pause, 0.0, pause == 0)
    if rejoined:
        say("seconds from joining again to the next merge, longest", max(rejoined), 5.0, max(rejoined) <= 5.0)


if __name__ == "__main__":
    main()
