"""Metrics sinks: where records go besides `metrics.jsonl`, which every process of a run appends to and all views read.

The syncer follows that file, so a sink sees the records of all processes beside it, in one place, and nothing that writes
metrics can be held up by a sink. Records of a run's last moments, written after the syncer has ended, are in the file only.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from skerry.config import SyncConfig
from skerry.errors import StoreError
from skerry.metrics import MetricsTail, MetricsWriter
from skerry.registry import Registry

log = logging.getLogger("skerry.sinks")

POLL_S = 0.5
MOST_BYTES = 8 << 20
"""Most to read at a time. What a slow sink has not taken yet stays on disk."""
CLOSE_S = 5.0


class MetricsSink(Protocol):
    """Takes the records of one run.

    Made and called in the syncer's process, on a thread that only sinks use, so it may block. It gets the run folder and the
    run's settings. If it raises, that is reported once and the sink is dropped; the run goes on.
    """

    def write(self, record: dict[str, Any]) -> None:
        """One record, with "at" (unix seconds) and "kind" (run, island, merge, event, validation, ...)."""
        ...

    def close(self) -> None:
        """The syncer ends. It waits at most CLOSE_S."""
        ...


SINKS: Registry[Callable[[Path, SyncConfig], MetricsSink]] = Registry("metrics sink")


class SinkFeeder:
    """Passes every record that is written from now on to a run's sinks, on a thread of its own."""

    def __init__(self, folder: Path, sync: SyncConfig) -> None:
        path = folder / "metrics.jsonl"
        self._tail = MetricsTail(path, from_end=True)
        self._reports = MetricsWriter(path)
        self._make = {name: partial(SINKS.get(name, "sync.sinks"), folder, sync) for name in sync.sinks}
        self._sinks: dict[str, MetricsSink] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="skerry-sinks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("metrics sinks are not waited for any longer: %s", ", ".join(self._sinks or self._make))

    def _work(self) -> None:
        for name, make in self._make.items():
            self._attempt(name, self._open, name, make)
        closing = False
        while self._sinks and not closing:
            closing = self._closing.wait(POLL_S)
            while records := self._read():
                for record in records:
                    for name, sink in list(self._sinks.items()):
                        self._attempt(name, sink.write, dict(record))
        for name, sink in list(self._sinks.items()):
            self._attempt(name, sink.close)
        self._reports.close()

    def _open(self, name: str, make: Callable[[], MetricsSink]) -> None:
        self._sinks[name] = make()

    def _read(self) -> list[dict[str, Any]]:
        with contextlib.suppress(StoreError):  # a disk that fails is reported by those who need it
            return self._tail.read(MOST_BYTES)
        return []

    def _attempt(self, name: str, work: Callable[..., object], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception as error:  # code from outside: no failure of it may cost the run anything
            self._sinks.pop(name, None)
            log.warning("metrics sink %s failed and is not used any more", name, exc_info=error)
            detail = f"{name}: {type(error).__name__}: {error}"
            self._reports.write("event", what="metrics sink dropped", island=None, detail=detail)
