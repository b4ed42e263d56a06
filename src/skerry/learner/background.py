"""Work beside the training thread: tasks on the shared event loop, and a few threads that copy, encode and decode.

An unexpected exception there must not end the training loop, but must reach it: it is passed to `on_bug`.
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
"""Threads that copy, encode and decode. With a GPU they mostly wait for it."""

T = TypeVar("T")


class DaemonWorkers(Executor):
    """An executor with daemon threads: unlike those of ThreadPoolExecutor, they never keep the interpreter from exiting."""

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
            del job  # its arguments and result may hold device memory


class Background:
    """The event loop, tasks and threads of one learner."""

    def __init__(self, on_bug: Callable[[BaseException], None]) -> None:
        self.loop = shared_loop()
        self._on_bug = on_bug
        self._pool = DaemonWorkers(WORKERS, "skerry-exchange")
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def call(self, act: Callable[[], None]) -> None:
        """Run `act` on the event loop soon. Safe to call from any thread."""
        self.loop.call_soon_threadsafe(self._guarded, act)

    def call_later(self, seconds: float, act: Callable[[], None]) -> None:
        """Run `act` after a delay. Call it on the event loop."""
        self.loop.call_later(seconds, self._guarded, act)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Run a callback. asyncio would only log its exceptions."""
        if self._closed:
            return
        try:
            act()
        except Exception as error:
            self._on_bug(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task. Call it on the event loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self.loop.run_in_executor(self._pool, work, *arguments)

    async def cancel_all(self) -> None:
        """Cancel every task and ignore later callbacks. Call it on the event loop."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def shut_down(self) -> None:
        """Stop the threads. The training thread calls this last."""
        self._pool.shutdown()
