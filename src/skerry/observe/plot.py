"""Plot a finished or running job: loss and traffic over tokens, with every failure marked.

matplotlib is an optional extra, imported lazily. The Agg canvas needs no display and leaves pyplot's global state alone.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skerry.errors import StoreError
from skerry.metrics import MetricsTail
from skerry.observe import text as words
from skerry.observe.status import Event, RunStatus, natural_key, number, text

ISLANDS_NAMED = 8
"""With more islands than this the legend has one entry for all of them."""
POINTS = 1500
"""Maximum number of points in one line; more cannot be distinguished."""
AWAY_S = 8.0
"""A longer gap between an island's records interrupts its line."""

# The colour-blind safe palette of Okabe and Ito. Black is reserved for the global model, red for failures.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D31", "#7B5EA7", "#A0A000")
_LOST, _BACK, _GLOBAL, _GREY = "#D1341F", "#3A9D5D", "#111111", "#666666"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.linewidth": 0.8,
    "axes.labelcolor": "#222222",
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "text.parse_math": False,  # names may contain dollar signs
    "legend.frameon": True,
    "legend.framealpha": 1.0,  # otherwise the marks show through the text
    "legend.edgecolor": "white",
    "legend.fancybox": False,
    "legend.fontsize": 8,
}


@dataclass
class _PlotData:
    """The data to plot, with times in seconds."""

    run: list[tuple[float, float]] = field(default_factory=list)
    """(at, tokens of the run)"""
    losses: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Per island (at, loss), with NaN where the island was away."""
    validations: list[tuple[float, float]] = field(default_factory=list)
    """(tokens, loss)"""
    result: tuple[float, float, float] | None = None
    """(tokens, loss, standard error)"""
    sent: list[tuple[float, float]] = field(default_factory=list)
    """(at, bytes sent by all islands so far)"""
    marks: list[tuple[float, str]] = field(default_factory=list)
    """(at, what), where what is one of the keys of `_MARKS`"""
    title: str = ""


_MARKS: dict[str, dict[str, Any]] = {
    "island down": {"color": _LOST, "linestyle": (0, (1, 1.6)), "linewidth": 1.1},
    "island restarted": {"color": _BACK, "linestyle": (0, (1, 1.6)), "linewidth": 1.1},
    "syncer down": {"color": _LOST, "linestyle": (0, (5, 2)), "linewidth": 1.4},
    "syncer restarted": {"color": _BACK, "linestyle": (0, (5, 2)), "linewidth": 1.4},
}


def plot_run(metrics_path: Path | str, png_path: Path | str) -> bool:
    """Plot the run. Returns False and writes nothing if matplotlib is missing or there is no data yet."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    data = _read(MetricsTail(metrics_path).read())
    if not data.run or not (data.validations or data.losses or data.result):
        return False
    partial = Path(f"{png_path}.part")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.0, 5.2), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure, data)
        try:  # atomically, for image viewers that reload
            figure.savefig(partial, format="png")
            os.replace(partial, png_path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise StoreError(f"{png_path} cannot be written: {error.strerror}") from error
    return True


def _read(records: Sequence[dict[str, Any]]) -> _PlotData:
    data, status = _PlotData(), RunStatus()
    seen_at: dict[str, float] = {}
    down: set[str] = set()
    for record in sorted(records, key=lambda record: number(record, "at") or 0.0):
        at, kind = number(record, "at"), text(record, "kind")
        if at is None:
            continue
        known_events = len(status.events)
        status.apply(record)
        if kind == "run":
            data.run.append((at, status.tokens))
            data.sent.append((at, status.sent_bytes))
        elif kind == "island" and (name := text(record, "island")):
            island, line = status.islands[name], data.losses.setdefault(name, [])
            gone = at - seen_at.get(name, at) > AWAY_S
            seen_at[name] = at
            training = island.state == "training" and island.loss is not None
            if line and (gone or not training) and not math.isnan(line[-1][1]):
                line.append((at, math.nan))
            if training:
                line.append((at, island.loss or 0.0))
        elif len(status.events) > known_events and (mark := _mark(status.events[-1], down)):
            data.marks.append((at, mark))
    if seen_at:
        data.sent.append((max(seen_at.values()), status.sent_bytes))
    data.losses = {name: line for name, line in data.losses.items() if line}
    data.validations = [(point.tokens, point.loss) for point in status.validations if point.loss is not None]
    result = status.result
    if result is not None and result.validation_loss is not None:
        data.result = (result.tokens, result.validation_loss, result.standard_error or 0.0)
    count = len(status.islands)
    data.title = f"{words.one_line(status.algorithm)}, {count} island{'' if count == 1 else 's'}".lstrip(", ")
    return data


def _mark(event: Event, down: set[str]) -> str:
    """The mark of an event, or "". A failure often has two events, `killed` and later `lost`; the first one is marked."""
    who = "syncer" if event.of_syncer else "island"
    name = who if event.of_syncer else event.island
    if event.what.endswith(("killed", "lost")):
        known = name in down
        down.add(name)
        return "" if known else f"{who} down"
    if event.what.endswith(("restarted", "joined")):
        down.discard(name)
    return f"{who} restarted" if event.what.endswith("restarted") else ""


def _draw(figure: Any, data: _PlotData) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    tokens_at = _interpolator(data.run)
    for at, mark in data.marks:
        for axes in (upper, lower):
            axes.axvline(tokens_at(at), alpha=0.7, zorder=1, **_MARKS[mark])
    _draw_losses(upper, data, tokens_at)
    if data.sent:
        line = _thin(data.sent)
        xs, ys = [tokens_at(at) for at, _ in line], [sent for _, sent in line]
        lower.plot(xs, ys, color=_COLOURS[0], linewidth=1.3)
        lower.fill_between(xs, ys, color=_COLOURS[0], alpha=0.12, linewidth=0)
    lower.set_ylim(bottom=0)
    lower.set_xlim(left=0)
    x_size, x_unit = _unit(lower.get_xlim()[1], ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")))
    y_size, y_unit = _unit(lower.get_ylim()[1], ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")))
    lower.xaxis.set_major_formatter(lambda x, _: f"{x / x_size:g}{x_unit}" if x else "0")
    lower.yaxis.set_major_formatter(lambda y, _: f"{y / y_size:g}")
    lower.locator_params(axis="y", nbins=3)
    lower.set_xlabel("tokens of the run")
    lower.set_ylabel(f"sent [{y_unit or 'B'}]")
    upper.set_title(data.title, loc="left", fontsize=9, color=_GREY)
    figure.align_ylabels()


def _draw_losses(axes: Any, data: _PlotData, tokens_at: Callable[[float], float]) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    axes.set_ylabel("loss")
    names = sorted(data.losses, key=natural_key)
    for index, name in enumerate(names):
        line = _thin(_smooth(data.losses[name]))
        label = name if len(names) <= ISLANDS_NAMED else f"{len(names)} islands" if index == 0 else None
        axes.plot(
            [tokens_at(at) for at, _ in line],
            [loss for _, loss in line],
            color=_COLOURS[index % len(_COLOURS)],
            linewidth=0.9,
            alpha=0.75,
            label=label,
            zorder=2,
        )
    points = {"color": _GLOBAL, "zorder": 4}
    if data.validations:
        xs, ys = [tokens for tokens, _ in data.validations], [loss for _, loss in data.validations]
        axes.plot(xs, ys, "o-", linewidth=1.6, markersize=4.5, label="global model, held-out", **points)
    if data.result is not None:
        tokens, loss, error = data.result
        axes.errorbar([tokens], [loss], yerr=[error], capsize=3, **points)
        label = f"at the end, {loss:.3f}" + (f" ± {error:.3f}" if error else "")
        axes.plot([tokens], [loss], "*", markersize=11, linestyle="none", label=label, **points)
    for mark in [mark for mark in _MARKS if any(mark == seen for _, seen in data.marks)]:
        axes.plot([], [], label=mark, **_MARKS[mark])
    if axes.get_ylim()[0] > 0:  # a log scale keeps the end of a run readable despite the high loss at its start
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("loss (log scale)")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.legend(loc="upper right", ncols=2, borderaxespad=0)


def _unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The unit for all labels of an axis."""
    return next(((size, unit) for size, unit in units if largest >= size), (1.0, ""))


def _thin(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep every n-th point, and all gaps."""
    step = max(1, len(line) // POINTS)
    return [point for i, point in enumerate(line) if i % step == 0 or i == len(line) - 1 or math.isnan(point[1])]


def _interpolator(track: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """A function from time to the run's tokens, by linear interpolation."""
    times = [at for at, _ in track]

    def tokens_at(at: float) -> float:
        right = bisect_right(times, at)
        if right == 0 or right == len(track):
            return track[max(0, right - 1)][1]
        (at0, tokens0), (at1, tokens1) = track[right - 1], track[right]
        return tokens0 + (tokens1 - tokens0) * (at - at0) / (at1 - at0)

    return tokens_at


def _smooth(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A moving average over about 1/50 of the line, never across a gap."""
    reach = min(12, len(line) // 100)
    smooth: list[tuple[float, float]] = []
    start = 0
    for end in [i for i, (_, loss) in enumerate(line) if math.isnan(loss)] + [len(line)]:
        part = line[start:end]
        for i, (at, _) in enumerate(part):
            near = [loss for _, loss in part[max(0, i - reach) : i + reach + 1]]
            smooth.append((at, sum(near) / len(near)))
        smooth += line[end : end + 1]
        start = end + 1
    return smooth
