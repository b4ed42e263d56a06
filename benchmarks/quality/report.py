"""Write tables, a fit and a plot of all results of the quality harness.

    python benchmarks/quality/report.py [--check]

Writes results/QUALITY.md from results/quality/*.jsonl, and docs/images/quality.svg from curves_11m.jsonl. With --check it only
checks that the tables are up to date.

The gap of a run is its loss over that of its baseline, minus one. The baseline is the data-parallel run with the lowest loss,
at any learning rate, among those with the same model, data, tokens, global batch, optimizer, seed and validation size.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from skerry.config import ModelConfig, from_mapping

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "results" / "quality"
TABLES = ROOT / "results" / "QUALITY.md"
PLOT = ROOT / "docs" / "images" / "quality.svg"
OTHER_FILES = {"gpu_smoke"}
"""Runs with real processes, described in results/LOG.md."""
FIRST_PICTURE_MODELS = {"vision_10m"}
"""Matrices with an older initialization of the picture models; compared only with each other."""

Row = dict[str, Any]


def read() -> dict[str, list[Row]]:
    found = {}
    for path in sorted(DATA.glob("*.jsonl")):
        if path.stem not in OTHER_FILES:
            first = path.stem in FIRST_PICTURE_MODELS
            found[path.stem] = [{**json.loads(line), "first_models": first} for line in path.read_text().splitlines()]
    return found


def compared_with(row: Row) -> tuple[Any, ...]:
    """What a run and its baseline must have in common."""
    config = row["config"]
    train, data = config["train"], config["data"]
    model = from_mapping(ModelConfig, config["model"])  # fills in settings that are newer than the run
    return (
        row.get("subject", "text"), row["first_models"], model, data["corpus"], data["path"],
        train["tokens"], train["batch"] * config["islands"]["count"], train["optimizer"], train["seed"],
        config["eval"]["final_tokens"],
    )  # fmt: skip


def baselines(rows: list[Row]) -> dict[tuple[Any, ...], float]:
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["algorithm"] == "dp":
            key = compared_with(row)
            best[key] = min(row["loss"], best.get(key, math.inf))
    return best


def by_setting(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs that differ only in their seed, in the order they were first run."""
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
        losses = " / ".join(f"{row['loss']:.4f}" + (f" ({row['accuracy']:.1%})" if "accuracy" in row else "") for row in same)
        shown = " / ".join("–" if gap is None else f"{gap:+.2%}" for gap in gaps)
        mean = f"{sum(known) / len(known):+.2%}" if known else "–"
        islands = "data-parallel" if same[0]["algorithm"] == "dp" else str(same[0]["islands"])
        sent = [row["sent_bytes_per_step"] for row in same if "sent_bytes_per_step" in row]
        peak = [row["peak_bytes_per_step"] for row in same if "peak_bytes_per_step" in row]
        traffic = ", ".join(f"{max(of) / 1e6:.2f} MB" for of in (sent, peak) if of)
        error = max(row["standard_error"] for row in same)
        lines.append(f"| `{name}` | {islands} | {losses} | {error:.4f} | {shown} | {mean} | {traffic} |")
    return lines


TREND_RUNS = {
    "conditions_11m": ("m4/",),
    "confirm_25m": ("m4/",),
    "confirm_25m_500m": ("m4/",),
    "questions_11m": ("m4/",),
    "scale": ("m4/", "3m/m4/", "135m/m4/"),
}
"""By matrix: runs of four islands with the default settings, of any size and length."""


Point = tuple[float, float, float]
"""Parameters, tokens and mean gap."""


def fit(places: list[Point]) -> tuple[float, float, float]:
    """Fit a, size and length of gap = a · (parameters / 11M)^-size · (tokens / 131M)^-length by least squares. Not in log
    space, because some gaps are negative."""
    parameters, tokens, gaps = (np.array(column) for column in zip(*places, strict=True))
    best, found = math.inf, (0.0, 0.0, 0.0)
    for size, length in itertools.product(np.arange(-1, 3.01, 0.05), np.arange(-1, 3.01, 0.05)):
        shape = (parameters / 11e6) ** -size * (tokens / 131e6) ** -length
        scale = float(shape @ gaps / (shape @ shape))
        left = float(np.sum((gaps - scale * shape) ** 2))
        if left < best:
            best, found = left, (scale, float(size), float(length))
    return found


def trend(found: dict[str, list[Row]], best: dict[tuple[Any, ...], float]) -> list[str]:
    measured: dict[tuple[float, float], list[float]] = {}
    for matrix, names in TREND_RUNS.items():
        for row in found.get(matrix, []):
            gap = gap_of(row, best) if row["name"].startswith(names) else None
            if gap is not None:
                measured.setdefault((row["parameters"], row["tokens"]), []).append(gap)
    places = [(*place, sum(gaps) / len(gaps)) for place, gaps in sorted(measured.items())]
    if len(places) < 5:
        return ["Too few sizes and lengths so far for a fit of three numbers."]
    scale, size, length = fit(places)
    without = [fit(places[:n] + places[n + 1 :]) for n in range(len(places))]
    lines = ["| parameters | tokens | seeds | mean gap | fit |", "| --- | --- | --- | --- | --- |"]
    for parameters, tokens, gap in places:
        fitted = scale * (parameters / 11e6) ** -size * (tokens / 131e6) ** -length
        seeds = len(measured[parameters, tokens])
        lines.append(f"| {parameters / 1e6:.1f}M | {tokens / 1e6:.0f}M | {seeds} | {gap:+.2%} | {fitted:+.2%} |")

    def spread(column: int) -> str:
        return f"{-max(one[column] for one in without):.2f} to {-min(one[column] for one in without):.2f}"

    return [
        *lines,
        "",
        f"gap ≈ {scale:.2%} · (parameters / 11M)^{-size:.2f} · (tokens / 131M)^{-length:.2f}.",
        f"Without one of the places the first exponent is {spread(1)}, the second {spread(2)}.",
        "Seeds move a gap by about 0.2 points, more than several of them are large.",
    ]


def check_data(rows: list[Row]) -> None:
    """Check that compared runs saw the same data. The oldest runs did not record a fingerprint."""
    seen: dict[Any, str] = {}
    for row in rows:
        if "data" in row:
            config = row["config"]
            key = (row["subject"], config["data"]["corpus"], config["data"]["path"], config["model"]["context"])
            if seen.setdefault(key, row["data"]) != row["data"]:
                raise SystemExit(f"{row['name']} saw other data than the runs it is compared with")


def write() -> str:
    found = read()
    everything = [row for rows in found.values() for row in rows]
    check_data(everything)
    best = baselines(everything)
    lines = [
        "# Quality: every run of the harness",
        "",
        "Made by `python benchmarks/quality/report.py` from `results/quality/`. Each heading is a matrix of",
        "`benchmarks/quality/` and its data. Runs of one line differ in their seed. The gap is that to the best",
        "data-parallel run with the same model, data, tokens, global batch, optimizer and seed, validated on as much.",
        "Percentages beside losses are shares of held-out pictures that were named rightly.",
        "What was learnt from which table, and what is wrong with some, is in [LOG.md](LOG.md).",
        "",
        "## The gap of four islands as the model and the run grow",
        "",
        *trend(found, best),
    ]
    for name, rows in found.items():
        lines += ["", f"## {name}", "", *table(rows, best)]
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "skerry"  # makes the file reproducible
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
            raise SystemExit(f"{TABLES.relative_to(ROOT)} is out of date; run: python benchmarks/quality/report.py")
        return
    TABLES.write_text(text)
    curves = DATA / "curves_11m.jsonl"
    if curves.exists():
        draw([json.loads(line) for line in curves.read_text().splitlines()], PLOT)
    print(text)


if __name__ == "__main__":
    main()
