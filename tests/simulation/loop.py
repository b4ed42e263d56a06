"""An event loop in virtual time. When nothing is ready, it jumps to the next timer. Executor jobs run in the loop itself."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable
from typing import Any

from skerry.clock import VirtualClock

MAX_ROUNDS = 2_000_000
"""Loop iterations after which a run counts as a livelock."""


class Stuck(AssertionError):
    """The run is deadlocked or livelocked."""


class _TimeJumpingSelector(selectors.DefaultSelector):
    """Advances the virtual clock instead of waiting for I/O."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._rounds += 1
        if timeout is None or self._rounds > MAX_ROUNDS:
            raise Stuck(f"at {self._clock.now():.3f} s, after {self._rounds} loop iterations")
        if timeout > 0:
            self._clock.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: VirtualClock, chance: random.Random) -> None:
        self._virtual = clock
        self._chance = chance
        super().__init__(_TimeJumpingSelector(clock))

    def time(self) -> float:
        return self._virtual.now()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._chance.choice([0.0, 0.0005, 0.003, 0.03]), work)
        return future
