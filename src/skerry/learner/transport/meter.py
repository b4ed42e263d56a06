"""Measures the transfer rate in one direction, and enforces its cap."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

HALF_LIFE_S = 10.0
"""Half-life of the measured rate, in busy seconds."""
LEAST_S = 0.05
"""Least busy time for a measured rate to mean anything."""
LOOK_S = 0.5
"""How often a waiting sender checks whether it has been given up."""
BURST_S = 0.1
"""The cap allows bursts of this length."""


class Meter:
    """Byte counts, rate and cap of one direction."""

    def __init__(self, cap_mbit: float = 0.0) -> None:
        self._cap = cap_mbit * 1e6 / 8
        self._free_at = 0.0
        self._transfers = 0
        self._since = 0.0
        self._turn = asyncio.Lock()
        self._bytes = 0.0
        self._busy_s = 0.0
        self.bytes_per_s = 0.0
        """Moving average of the rate while something is in flight; 0 if not known yet."""
        self.total_bytes = 0
        self.by_kind: Counter[str] = Counter()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Count the time inside as busy: something is in flight."""
        self._count_time()
        self._transfers += 1
        try:
            yield
        finally:
            self._count_time()
            self._transfers -= 1

    def moved(self, count: int, kind: str) -> None:
        """Count transferred bytes."""
        self._count_time()
        self.total_bytes += count
        self.by_kind[kind] += count
        self._bytes += count
        if self._busy_s > LEAST_S:
            self.bytes_per_s = self._bytes / self._busy_s

    def _count_time(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._transfers:
            passed = now - self._since
            fade = 0.5 ** (passed / HALF_LIFE_S)
            self._busy_s = self._busy_s * fade + passed
            self._bytes *= fade
        self._since = now

    async def allow(self, count: int, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait, first come first served, until the cap allows this many more bytes. A caller that gives up uses none of it."""
        if not self._cap:
            return
        async with self._turn:
            while not given_up() and (wait_s := self._free_at - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(min(wait_s, LOOK_S))
            if not given_up():
                self.charge(count)

    def charge(self, count: int) -> None:
        """Charge the cap for bytes that did not wait for their turn."""
        if self._cap:
            earliest = asyncio.get_running_loop().time() - BURST_S
            self._free_at = max(self._free_at, earliest) + count / self._cap
