"""Lay out a run for the terminal, within its width and height.

Columns that do not fit are left out, least important first. Islands that do not fit are counted in one line. Lines never wrap,
because a wrapped line breaks redrawing in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skerry.observe import text as words
from skerry.observe.status import IslandStatus, RunStatus

EVENTS_SHOWN = 5
EVENTS_KEPT = 2
"""Events still shown when the terminal is too short for all islands."""
NAME_WIDTH = 20
BAR_WIDTH = 10
"""Minimum width of the progress bar; the run's name is dropped to make room for it."""
_FIXED_LINES = 6  # two header lines, a blank, the column titles, the merge line, and one for the cursor
_GAP = 2
_STATE_STYLES = {"training": "green", "waiting": "yellow", "away": "bold red", "left": "dim"}
_PHASE_STYLES = {"gathering": "yellow", "running": "green", "closing": "cyan", "ended": "bold"}


class _Column(NamedTuple):
    title: str
    cell: Callable[[IslandStatus], str]
    width: int
    """Minimum width, so that the table does not jump as numbers grow."""
    need: int
    """Columns with the smallest value are left out first."""


_COLUMNS = (
    _Column("island", lambda i: words.one_line(i.name), 8, 9),
    _Column("state", lambda i: words.one_line(i.state), 8, 8),
    _Column("step", lambda i: str(i.step), 6, 5),
    _Column("tok/s", lambda i: words.rate(i.tokens_per_s if i.working else None), 6, 6),
    _Column("loss", lambda i: words.loss(i.loss, 3), 6, 7),
    _Column("weight", lambda i: words.loss(i.weight, 3), 6, 4),
    _Column("merges", lambda i: str(i.merges), 6, 1),
    _Column("sent", lambda i: words.size(i.sent.total), 8, 3),
    _Column("received", lambda i: words.size(i.received.total), 8, 2),
    _Column("round trip", lambda i: words.milliseconds(i.link.round_trip_s), 10, 0),
    _Column("waited", lambda i: "-" if i.link.waited_share is None else words.percent(i.link.waited_share), 6, 0),
    _Column("restarts", lambda i: str(i.restarts or "-"), 8, 0),
)


class Frame:
    """A rich renderable of one state of a run."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, width = self._status, options.max_width
        islands = status.sorted_islands()
        rows, events = _share_out((options.height or console.height) - _FIXED_LINES, len(islands), len(status.events))
        yield _progress(status, width)
        yield _line(_numbers(status))
        yield _line([])
        if islands:
            yield _table(islands[:rows], width)
        if islands[rows:]:
            yield _line([(_and_more(islands[rows:]), "dim")])
        yield _line(_merging(status))
        if events:
            yield _line([])
        for event in status.events[len(status.events) - events :]:
            yield _line([(f"{words.stamp(event.elapsed_s)} ", "dim"), (words.describe(event), "")])


def _share_out(room: int, islands: int, events: int) -> tuple[int, int]:
    """How many islands and events fit into `room` lines. Events need a blank line, hidden islands a line of their own."""
    spare = room - islands - 1
    shown_events = min(events, EVENTS_SHOWN, max(spare, EVENTS_KEPT if room >= 3 * EVENTS_KEPT else 0))
    room -= shown_events + 1 if shown_events else 0
    return (islands if islands <= room else max(1, room - 1)), shown_events


def _line(parts: Sequence[tuple[str, str]]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _progress(status: RunStatus, width: int) -> RenderableType:
    phase = words.one_line(status.phase) or "starting"
    left = _line([(f"{words.one_line(status.algorithm)}  ".lstrip(), ""), (phase, _PHASE_STYLES.get(phase, ""))])
    named = Text.assemble((words.one_line(status.name) or "skerry", "bold"), " " * _GAP, left)
    right = words.tokens_of(status.tokens, status.budget_tokens) + " tokens"
    if status.progress is None:
        return Text.assemble(named, " " * _GAP, right, no_wrap=True, overflow="ellipsis")
    right = f"{words.percent(status.progress):>4}  {right}"
    room = width - len(right) - 2 * _GAP
    if room - named.cell_len >= BAR_WIDTH:
        left = named
    room -= left.cell_len
    if room < BAR_WIDTH:
        return Text.assemble(left, " " * _GAP, right, no_wrap=True, overflow="ellipsis")
    line = Table.grid(padding=(0, _GAP, 0, 0))
    line.add_row(left, ProgressBar(1.0, status.progress, width=room, finished_style="bar.complete"), right)
    return line


def _numbers(status: RunStatus) -> list[tuple[str, str]]:
    """Speed, time and validation loss. A narrow terminal cuts off the end."""
    parts = [] if status.phase == "ended" else [(f"{words.rate(status.tokens_per_s)} tok/s   ", "bold")]
    parts.append((words.duration(status.elapsed_s), ""))
    if status.left_s is not None:
        parts.append((f", {words.duration(status.left_s)} left", ""))
    latest = status.latest_validation
    if latest is not None:
        parts += [("   validation loss ", ""), (words.loss(latest.loss, 3), "bold")]
        if status.best_validation is not None:
            parts.append((f" (best {words.loss(status.best_validation, 3)})", ""))
    return parts


def _merging(status: RunStatus) -> list[tuple[str, str]]:
    parts = [f"{status.merges} merges"]
    if status.recent_participation is not None:
        parts.append(f"{words.percent(status.recent_participation)} took part")
    if status.live is not None:
        parts.append(f"{status.live}/{max(status.live, status.expected or 0)} islands live")
    parts.append(f"{words.size(status.sent_bytes)} sent")
    return [("   ".join(parts), "")]


def _table(islands: Sequence[IslandStatus], width: int) -> Table:
    columns = list(_COLUMNS if any(island.restarts for island in islands) else _COLUMNS[:-1])
    cells = {column.title: [column.cell(island) for island in islands] for column in columns}
    widths = {column.title: max(column.width, *map(cell_len, cells[column.title])) for column in columns}
    widths["island"] = min(widths["island"], NAME_WIDTH)
    while len(columns) > 2 and sum(widths[c.title] + _GAP for c in columns) - _GAP > width:
        columns.remove(min(columns, key=lambda column: column.need))
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(
            column.title,
            justify="left" if column.title in ("island", "state") else "right",
            no_wrap=True,
            overflow="ellipsis",
            width=widths[column.title],
        )
    for row, island in enumerate(islands):
        styles = {"state": _STATE_STYLES.get(island.state, "")}
        table.add_row(*(Text(cells[c.title][row], style=styles.get(c.title, "")) for c in columns))
    return table


def _and_more(islands: Sequence[IslandStatus]) -> str:
    states = Counter(words.one_line(island.state) for island in islands)
    return f"... and {len(islands)} more ({', '.join(f'{n} {state}' for state, n in sorted(states.items()))})"
