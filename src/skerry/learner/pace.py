"""How fast an island steps, as it tells the syncer: the usual time of a step, and what went beyond it."""

from __future__ import annotations

import statistics
from collections import deque

STALL = 3.0
"""A step that takes this many times as long as usual stalls for the rest of its time."""
REMEMBERED = 15


class Pace:
    """Written by the training thread, read by the link."""

    def __init__(self) -> None:
        self.step_time_s = 0.0
        """The median, so that one pause does not look like slowness for a while."""
        self.longest_s = 0.0
        """The longest time between two steps since the last report."""
        self.stalled_s = 0.0
        """Of all time between steps, what went beyond three times the usual."""
        self.waited_s = 0.0
        """Of all time, what the training thread spent waiting for the exchange."""
        self._last_at: float | None = None
        self._times: deque[float] = deque(maxlen=REMEMBERED)

    def stepped(self, now: float) -> None:
        if self._last_at is not None:
            took = now - self._last_at
            self.longest_s = max(self.longest_s, took)
            if self.step_time_s:
                self.stalled_s += max(0.0, took - STALL * self.step_time_s)
            self._times.append(took)
            self.step_time_s = statistics.median(self._times)
        self._last_at = now

    def waited(self, now: float) -> None:
        """Until now it waited for others, as lock-step asks for: that is no slowness of its own."""
        self._last_at = now
