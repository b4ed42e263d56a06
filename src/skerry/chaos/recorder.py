"""Write faults and restarts to the run's tape. The syncer may be down, so a background thread retries until it accepts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from skerry.admin import tell
from skerry.core.schema import TapeRecord
from skerry.errors import SkerryError
from skerry.metrics import MetricsWriter
from skerry.wire.channel import TLS

MOST_WAITING = 1000
TRY_S = 5.0
PAUSE_S = 0.5
LAST_S = 2.0


class Recorder:
    def __init__(self, address: str, tls: TLS | None, metrics: MetricsWriter, say: Callable[..., None] = tell) -> None:
        self._address = address
        self._tls = tls
        self._metrics = metrics
        self._say = say
        self._waiting: queue.Queue[TapeRecord] = queue.Queue(MOST_WAITING)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = 0

    def write(self, record: TapeRecord) -> None:
        """Queue a record without blocking. Records that do not fit are dropped; `close` reports how many."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._lost += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="skerry-recorder", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(LAST_S)
        lost = self._lost + self._waiting.qsize()
        if lost:
            self._metrics.write("event", what="not on the tape", detail=f"{lost} records lost: the syncer could not be reached")

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                record = self._waiting.get(timeout=PAUSE_S)
            except queue.Empty:
                continue
            while True:
                try:
                    self._say(self._address, self._tls, record, TRY_S)
                    break
                except SkerryError:
                    if self._closing.wait(PAUSE_S):
                        self._lost += 1
                        return
