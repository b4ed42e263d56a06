"""One event loop for all links of a process, in a thread that goes on to the end.

gRPC's asyncio side is one per process and keeps calling into loops it has seen: a loop that is closed while the process lives
on makes it print tracebacks.
"""

from __future__ import annotations

import asyncio
import os
import threading

_lock = threading.Lock()
_loop: tuple[int, asyncio.AbstractEventLoop] | None = None


def shared_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None or _loop[0] != os.getpid():  # a forked process has none of our threads
            loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(loop,), name="skerry-loop", daemon=True).start()
            _loop = (os.getpid(), loop)
        return _loop[1]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
