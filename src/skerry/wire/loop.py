"""One event loop per process for all connections to syncers, in a daemon thread that is never stopped.

gRPC's asyncio poller is global and keeps calling into every loop it has seen. If one of them is closed, the poller prints
tracebacks and delays the events of other loops.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

POLLS_SKIPPED = 16
"""Most polls skipped in a row."""


class CalmSelector(selectors.DefaultSelector):
    """A selector that skips polling while callbacks are ready to run.

    Even a poll without waiting releases the GIL, and the training thread takes it. Handling one message takes a chain of
    callbacks, and each of them would cost two thread switches.
    """

    _skipped = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0 and self._skipped < POLLS_SKIPPED:
            self._skipped += 1
            return []
        self._skipped = 0
        events: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        return events


_lock = threading.Lock()
_loop: tuple[int, asyncio.AbstractEventLoop] | None = None


def shared_loop() -> asyncio.AbstractEventLoop:
    """The process's event loop, started on first use."""
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():  # threads do not survive a fork
            loop = asyncio.SelectorEventLoop(CalmSelector())
            loop.call_soon(asyncio.set_event_loop, loop)
            threading.Thread(target=loop.run_forever, name="skerry-loop", daemon=True).start()
            _loop = (os.getpid(), loop)
        return _loop[1]


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared loop and wait for it. Call it from another thread."""
    return asyncio.run_coroutine_threadsafe(work, shared_loop()).result()
