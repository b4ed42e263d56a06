"""Work beside the training thread: tasks on the process's event loop, and a few threads that copy, encode and decode.

A bug in that work must not end the training loop, but the loop must hear of it: `on_defect` is called once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from skerry.wire.loop import shared_loop

WORKERS = 4
"""Beside a GPU they mostly wait for it."""

T = TypeVar("T")


class DaemonWorkers(Executor):
    """Unlike the threads of ThreadPoolExecutor, these never keep the interpreter from exiting."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join(timeout=2.0)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and with it its arguments and result, which may hold much of the device's memory


class Background:
    def __init__(self, on_defect: Callable[[BaseException], None]) -> None:
        self.loop = shared_loop()
        self._on_defect = on_defect
        self._pool = DaemonWorkers(WORKERS, "skerry-exchange")
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def call(self, act: Callable[[], None]) -> None:
        """From any thread: do this on the event loop, soon."""
        self.loop.call_soon_threadsafe(self._guarded, act)

    def call_later(self, seconds: float, act: Callable[[], None]) -> None:
        """On the event loop."""
        self.loop.call_later(seconds, self._guarded, act)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Exceptions of callbacks would otherwise go unseen."""
        if self._closed:
            return
        try:
            act()
        except Exception as error:
            self._on_defect(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """On the event loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_defect(error)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self.loop.run_in_executor(self._pool, work, *arguments)

    async def cancel_all(self) -> None:
        """On the event loop: nothing is done any more."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def shut_down(self) -> None:
        """From the training thread, last."""
        self._pool.shutdown()
