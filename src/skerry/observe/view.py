"""Show a running job: a table redrawn in place in a terminal, log lines everywhere else.

A view only shows a `RunStatus`; it reads no files and no clock. A lost terminal must not end the run, so after a failed write a
view stops writing.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live

from skerry.observe import text as words
from skerry.observe.frame import Frame
from skerry.observe.status import RunStatus

PLAIN_INTERVAL_S = 5.0
"""Run time between two progress lines."""


class View(ABC):
    """Shows a run. `update` is called a few times per second with the same, growing status."""

    @abstractmethod
    def update(self, status: RunStatus) -> None: ...

    @abstractmethod
    def say(self, line: str) -> None:
        """Print text that stays above the redrawn part. Also works after `close`."""

    @abstractmethod
    def close(self) -> None:
        """Stop redrawing and leave the last state on the screen. Idempotent."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_view(stream: TextIO) -> View:
    """A live table if the stream is a capable terminal, otherwise log lines."""
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    capable = stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb") and encoding.startswith("utf")
    return LiveView(stream) if capable else PlainView(stream)


class PlainView(View):
    """Log lines without control characters: progress at intervals, each event and validation once."""

    def __init__(self, stream: TextIO, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._stream: TextIO | None = stream
        self._interval_s = interval_s
        self._printed_s: float | None = None
        self._phase = ""
        self._events = 0
        self._validations = 0

    def update(self, status: RunStatus) -> None:
        news = [(event.elapsed_s, words.describe(event)) for event in status.events[self._events :]]
        news += [(p.elapsed_s, words.describe_validation(p)) for p in status.validations[self._validations :]]
        self._events, self._validations = len(status.events), len(status.validations)
        for elapsed_s, line in sorted(news, key=lambda item: item[0]):
            self.say(f"{words.stamp(elapsed_s)} {line}")
        if not status.phase:
            return
        due = self._printed_s is None or status.elapsed_s - self._printed_s >= self._interval_s
        if due or status.phase != self._phase:
            self._printed_s, self._phase = status.elapsed_s, status.phase
            self.say(words.progress_line(status))

    def say(self, line: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the pipe's reader is gone, or the stream is closed
            self._stream = None

    def close(self) -> None:
        pass  # every line is already flushed


class LiveView(View):
    """A table of islands that is redrawn in place."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live: Live | None = None
        self._lost = False

    def update(self, status: RunStatus) -> None:
        if self._lost:
            return
        try:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(Frame(status), refresh=True)
        except (OSError, ValueError):  # the terminal is gone
            self._lost = True

    def say(self, line: str) -> None:
        if not self._lost:
            try:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            except (OSError, ValueError):
                self._lost = True

    def close(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.stop()
        except (OSError, ValueError):
            self._lost = True
