"""How a run is seen: its state from `metrics.jsonl`, on a terminal, in a log, in a plot."""

from __future__ import annotations

from skerry.observe.plot import plot_run
from skerry.observe.status import Event, IslandStatus, Result, RunStatus, Validation
from skerry.observe.view import LiveView, PlainView, View, open_view
from skerry.observe.words import summary

__all__ = [
    "Event",
    "IslandStatus",
    "LiveView",
    "PlainView",
    "Result",
    "RunStatus",
    "Validation",
    "View",
    "open_view",
    "plot_run",
    "summary",
]
