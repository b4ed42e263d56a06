"""Observe a run: read `metrics.jsonl` and the tape, and show them in a terminal, a log or a plot."""

from __future__ import annotations

from skerry.observe.accounting import Accountant, RunAccount, account_of
from skerry.observe.ledger import Ledger, audit_run, ledger_lines, ledger_summary
from skerry.observe.plot import plot_run
from skerry.observe.status import Event, IslandStatus, Result, RunStatus, ValidationPoint
from skerry.observe.text import account_lines, link_lines, summary
from skerry.observe.view import LiveView, PlainView, View, open_view

__all__ = [
    "Accountant",
    "Event",
    "IslandStatus",
    "Ledger",
    "LiveView",
    "PlainView",
    "Result",
    "RunAccount",
    "RunStatus",
    "ValidationPoint",
    "View",
    "account_lines",
    "account_of",
    "audit_run",
    "ledger_lines",
    "ledger_summary",
    "link_lines",
    "open_view",
    "plot_run",
    "summary",
]
