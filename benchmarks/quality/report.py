"""Tables, a fit and a plot of all results of the quality harness, from its data.

    python benchmarks/quality/report.py [--check]

Writes results/QUALITY.md from results/quality/*.jsonl, and docs/images/quality.svg from curves_11m.jsonl. With --check it only
says whether the tables are as the data has them.

The gap of a run is its loss over that of data-parallel training, minus one: of the data-parallel runs with the same model,
data, tokens, global batch, optimizer and seed the one with the lowest loss, whatever its learning rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "results" / "quality"
TABLES = ROOT / "results" / "QUALITY.md"
PLOT = ROOT / "docs" / "images" / "quality.svg"
NOT_OF_THE_HARNESS = {"gpu_smoke"}
"""Runs of real processes, described in results/LOG.md."""

Row = dict[str, Any]


def read() -> dict[str, list[Row]]:
    found = {}
    for path in sorted(DATA.glob("*.jsonl")):
        if path.stem not in NOT_OF_THE_HARNESS:
            found[path.stem] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def compared_with(row: Row) -> tuple[Any, ...]:
    """What a run and its baseline have in common."""
    config = row["config"]
    train, data = config["train"], config["data"]
    return (
        row.get("subject", "text"), json.dumps(config["model"], sort_keys=True), data["corpus"], data["path"],
        train["tokens"], train["batch"] * config["islands"]["count"], train["optimizer"], train["seed"],
    )  # fmt: skip


def baselines(rows: list[Row]) -> dict[tuple[Any, ...], float]:
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["algorithm"] == "dp":
            key = compared_with(row)
            best[key] = min(row["loss"], best.get(key, math.inf))
    return best


def by_setting(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs that differ in their seed alone, in the order they were first run."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["name"].rsplit("/seed=", 1)[0], []).append(row)
    return {name: sorted(same, key=lambda row: row["config"]["train"]["seed"]) for name, same in found.items()}


def gap_of(row: Row, best: dict[tuple[Any, ...], float]) -> float | None:
    baseline = best.get(compared_with(row))
    return None if baseline is None else row["loss"] / baseline - 1


def table(rows: list[Row], best: dict[tuple[Any, ...], float]) -> list[str]:
    lines = [
        "| run | islands | loss by seed | standard error | gap by seed | mean gap | bytes sent a step and island: mean, peak |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, same in by_setting(rows).items():
        gaps = [gap_of(row, best) for row in same]
        known = [gap for gap in gaps if gap is not None]
        losses = " / ".join(f"{row['loss']:.4f}" for row in same)
        shown = " / ".join("–" if gap is None else f"{gap:+.2%}" for gap in gaps)
        mean = f"{sum(known) / len(known):+.2%}" if known else "–"
        islands = "data-parallel" if same[0]["algorithm"] == "dp" else str(same[0]["islands"])
        sent = [row["sent_bytes_per_step"] for row in same if "sent_bytes_per_step" in row]
        peak = [row["peak_bytes_per_step"] for row in same if "peak_bytes_per_step" in row]
        traffic = ", ".join(f"{max(of) / 1e6:.2f} MB" for of in (sent, peak) if of)
        error = max(row["standard_error"] for row in same)
        lines.append(f"| `{name}` | {islands} | {losses} | {error:.4f} | {shown} | {mean} | {traffic} |")
    return lines


def same_settings(rows: list[Row]) -> list[Row]:
    """Four islands of text with the settings the defaults were made of, at whatever size and length."""
    wanted = {"every": 24, "fragments": 24, "overlap": 2, "merge": "radial", "outer_lr": 0.5, "outer_momentum": 0.8,
              "send": "bf16", "publish": "fp32", "adopt": "overwrite"}  # fmt: skip
    return [
        row
        for row in rows
        if row["algorithm"] == "decoupled"
        and row.get("subject", "text") == "text"
        and row["islands"] == 4
        and row["config"]["begin_share"] == 0.1
        and row["config"]["train"]["optimizer"] == "adamw"
        and row["config"]["data"]["corpus"] == "folder"
        and not row["config"]["model"].get("experts")
        and all(row["config"]["sync"][key] == value for key, value in wanted.items())
        and row["config"]["sync"]["begin"]["every"] == 4
        and row["conditions"]["lost_share"] == 0
        and not row["conditions"]["step_times"]
    ]


def fit(points: list[tuple[float, float, float]]) -> tuple[float, float, float, float]:
    """gap = a · (parameters / 11M)^-size · (tokens / 131M)^-length, by least squares in the gap itself, since some are below
    zero. Returns a, size, length and the root of the mean square of what is left."""
    parameters, tokens, gaps = (np.array(column) for column in zip(*points, strict=True))
    best = (0.0, 0.0, 0.0, math.inf)
    for size, length in itertools.product(np.arange(0, 3.01, 0.05), np.arange(0, 3.01, 0.05)):
        shape = (parameters / 11e6) ** -size * (tokens / 131e6) ** -length
        scale = float(shape @ gaps / (shape @ shape))
        left = float(np.sqrt(np.mean((gaps - scale * shape) ** 2)))
        if left < best[3]:
            best = (scale, float(size), float(length), left)
    return best


def trend(rows: list[Row], best: dict[tuple[Any, ...], float]) -> list[str]:
    lines = ["| parameters | tokens | seeds | mean gap | fit |", "| --- | --- | --- | --- | --- |"]
    places: dict[tuple[float, float], list[float]] = {}
    for row in same_settings(rows):
        gap = gap_of(row, best)
        if gap is not None:
            places.setdefault((row["parameters"], row["tokens"]), []).append(gap)
    if len(places) < 4:
        return ["Too few sizes and lengths so far for a fit of three numbers."]
    scale, size, length, left = fit([(*place, sum(gaps) / len(gaps)) for place, gaps in places.items()])
    for (parameters, tokens), gaps in sorted(places.items()):
        fitted = scale * (parameters / 11e6) ** -size * (tokens / 131e6) ** -length
        mean = sum(gaps) / len(gaps)
        lines.append(f"| {parameters / 1e6:.1f}M | {tokens / 1e6:.0f}M | {len(gaps)} | {mean:+.2%} | {fitted:+.2%} |")
    lines.append("")
    lines.append(
        f"gap ≈ {scale:.2%} · (parameters / 11M)^-{size:.2f} · (tokens / 131M)^-{length:.2f}; "
        f"what the fit leaves has a root mean square of {left:.2%}."
    )
    return lines


def write() -> str:
    found = read()
    everything = [row for rows in found.values() for row in rows]
    best = baselines(everything)
    lines = [
        "# Quality: every run of the harness",
        "",
        "Made by `python benchmarks/quality/report.py` from `results/quality/`. Each heading is a matrix of",
        "`benchmarks/quality/` and its data. Runs of one line differ in their seed. The gap is that to the best",
        "data-parallel run with the same model, data, tokens, global batch, optimizer and seed.",
        "What was learnt from which table, and what is wrong with some, is in [LOG.md](LOG.md).",
        "",
        "## The gap of four islands as the model and the run grow",
        "",
        *trend(everything, best),
    ]
    for name, rows in found.items():
        lines += ["", f"## {name}", "", *table(rows, best)]
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "skerry"  # the same data gives the same file
    import matplotlib.pyplot as plt

    figure, (whole, end) = plt.subplots(1, 2, figsize=(9, 3.8), width_ratios=(3, 2))
    for row in rows:
        label = row["name"].split("/")[0].replace("_", " ")
        tokens, losses = zip(*row["curve"], strict=True)
        for axes in (whole, end):
            axes.plot(np.array(tokens) / 1e6, losses, label=label, linewidth=1.3)
    last = max(row["tokens"] for row in rows) / 1e6
    whole.set_ylim(top=min(row["curve"][0][1] for row in rows) * 1.02)
    ending = [loss for row in rows for tokens, loss in row["curve"] if tokens > 0.7e6 * last]
    end.set_xlim(0.7 * last, last)
    end.set_ylim(min(ending) * 0.995, max(ending) * 1.005)
    end.set_title("the last three tenths", fontsize=9)
    for axes in (whole, end):
        axes.set_xlabel("tokens [M]")
        axes.grid(color="#E4E4E4", linewidth=0.6)
    whole.set_ylabel("validation loss of the global model")
    whole.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = write()
    if options.check:
        if not TABLES.exists() or TABLES.read_text() != text:
            raise SystemExit(f"{TABLES.relative_to(ROOT)} is not what the data says: python benchmarks/quality/report.py")
        return
    TABLES.write_text(text)
    curves = DATA / "curves_11m.jsonl"
    if curves.exists():
        draw([json.loads(line) for line in curves.read_text().splitlines()], PLOT)
    print(text)


if __name__ == "__main__":
    main()
