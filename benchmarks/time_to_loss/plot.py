"""Plot the curves: validation loss over time, with every death marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from time_to_loss.curves import Arm, time_to

COLOURS = {"data-parallel, restarts": "#E69F00", "data-parallel, elastic": "#009E73", "decoupled": "#0072B2"}
"""Colour-blind safe palette of Okabe and Ito. Arms without failures are dashed, in the colour of the arm with failures."""


def draw(arms: Sequence[Arm], loss: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "skerry"  # makes the file reproducible
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    for arm in arms:
        calm = arm.name.endswith("no failures")
        colour = (
            COLOURS.get(arm.name) or COLOURS["decoupled" if arm.name.startswith("decoupled") else "data-parallel, restarts"]
        )
        seconds, losses = zip(*arm.points, strict=True)
        axes.plot(
            seconds, losses, label=arm.name, color=colour, linewidth=1.1 if calm else 1.8, linestyle="--" if calm else "-"
        )
        if (reached := time_to(loss, arm.points)) is not None:
            axes.plot([reached], [loss], marker="o", color=colour, markersize=4 if calm else 6)
    longest = max(arm.seconds for arm in arms)
    kills = max((arm.kills for arm in arms), key=len)
    for number, (at_s, _, away_s) in enumerate(kills):
        # From death to restart. Overlapping spans are darker.
        end = min(at_s + away_s, longest)
        axes.axvspan(at_s, end, color="#D1341F", alpha=0.09, linewidth=0, label=None if number else "a worker is down")
    axes.axhline(loss, color="#666666", linewidth=0.8, linestyle=":")
    lowest = min(value for arm in arms for _, value in arm.points)
    axes.set(xlabel="seconds since training began", ylabel="validation loss", xlim=(0, longest * 1.02))
    axes.set_ylim(lowest - 0.05, lowest + 0.4 * (min(arm.points[0][1] for arm in arms) - lowest))
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
