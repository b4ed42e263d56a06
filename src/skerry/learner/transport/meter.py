"""How fast bytes go one way, and how fast they may go."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

HALF_LIFE_S = 10.0
"""Of what the measured rate is made of, in seconds in which something was under way."""
LEAST_S = 0.05
"""A rate measured over less time than this says nothing."""
LOOK_S = 0.5
"""How often one who waits for its turn looks whether it is still wanted."""
BURST_S = 0.1
"""A cap holds over this time; within it bytes go as they come."""


class Meter:
    def __init__(self, cap_mbit: float = 0.0) -> None:
        self._cap = cap_mbit * 1e6 / 8
        self._free_at = 0.0
        self._under_way = 0
        self._since = 0.0
        self._turn = asyncio.Lock()
        self._bytes = 0.0
        self._busy_s = 0.0
        self.bytes_per_s = 0.0
        """Of late, while something was under way, as of the last byte; 0 if that is not known yet."""
        self.total_bytes = 0
        self.by_kind: Counter[str] = Counter()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Something is on its way: this time counts."""
        self._count_time()
        self._under_way += 1
        try:
            yield
        finally:
            self._count_time()
            self._under_way -= 1

    def moved(self, count: int, kind: str) -> None:
        self._count_time()
        self.total_bytes += count
        self.by_kind[kind] += count
        self._bytes += count
        if self._busy_s > LEAST_S:
            self.bytes_per_s = self._bytes / self._busy_s

    def _count_time(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._under_way:
            passed = now - self._since
            fade = 0.5 ** (passed / HALF_LIFE_S)
            self._busy_s = self._busy_s * fade + passed
            self._bytes *= fade
        self._since = now

    async def allow(self, count: int, given_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until so many bytes more may go, behind those who came before. Who gives up has used nothing."""
        if not self._cap:
            return
        async with self._turn:
            while not given_up() and (wait_s := self._free_at - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(min(wait_s, LOOK_S))
            if not given_up():
                self.charge(count)

    def charge(self, count: int) -> None:
        """So many bytes went that nobody waited for."""
        if self._cap:
            earliest = asyncio.get_running_loop().time() - BURST_S
            self._free_at = max(self._free_at, earliest) + count / self._cap
