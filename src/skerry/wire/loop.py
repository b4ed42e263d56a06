"""One event loop for all that a process has to say to syncers, in a thread that goes on to the end.

gRPC's asyncio side is one per process and keeps calling into loops it has seen: a loop that is closed while the process lives
on makes it print tracebacks and leave events of other loops unhandled for a while.
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


class CalmSelector(selectors.DefaultSelector):
    """Does not look for news while there are callbacks to run, unless they go on for long.

    To look, even without waiting, lets go of the interpreter, and the training thread takes it. A message is handled by a
    chain of callbacks; at each link of the chain both threads would have to wake up once more.
    """

    _skipped = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0 and self._skipped < POLLS_SKIPPED:
            self._skipped += 1
            return []
        self._skipped = 0
        found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        return found


_lock = threading.Lock()
_loop: tuple[int, asyncio.AbstractEventLoop] | None = None


def shared_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():  # a forked process has none of our threads
            loop = asyncio.SelectorEventLoop(CalmSelector())
            loop.call_soon(asyncio.set_event_loop, loop)
            threading.Thread(target=loop.run_forever, name="skerry-loop", daemon=True).start()
            _loop = (os.getpid(), loop)
        return _loop[1]


def run_here(work: Coroutine[Any, Any, T]) -> T:
    """From a thread without an event loop: do this on the shared one and wait for it."""
    return asyncio.run_coroutine_threadsafe(work, shared_loop()).result()
