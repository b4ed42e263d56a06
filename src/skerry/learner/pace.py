"""How fast an island steps, for its reports to the syncer: the usual step time, and time lost to stalls and waiting."""

from __future__ import annotations

import statistics
from collections import deque

STALL = 3.0
"""Time beyond this many usual step times counts as a stall."""
REMEMBERED = 15
"""Steps in the moving median."""


class Pace:
    """Step timing. Written by the training thread, read by the reporter."""

    def __init__(self) -> None:
        self.step_time_s = 0.0
        """Median of the last steps, so that a single pause does not distort it."""
        self.longest_s = 0.0
        """Longest time between two steps since the last report."""
        self.stalled_s = 0.0
        """Total time lost to stalls."""
        self.waited_s = 0.0
        """Total time the training thread has waited for the exchange."""
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
        """Restart the step timer after a wait in lock-step, which must not count as slowness of this island."""
        self._last_at = now
