"""How many rounds are open at a time, where exchanges take longer than they may.

With `overwrite`, what islands do to a fragment while its exchange is under way is lost. If exchanges are slow because there are
too many at once, more of them make all of them slower, and the model gets less of the work. So while they are slow an eighth
of the fragments is under way at a time: then each is for about an eighth of the time, whether it is the load that makes
exchanges slow or a long way. Fragments come up less often than every H steps, the one that waits longest first. As
exchanges become quick again, one more may be open after each of them.
"""

from __future__ import annotations

from collections import deque

SHARE = 8
"""One of so many fragments is under way at a time; and each for one in so much of the time."""


class Flow:
    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._few = max(1, fragments // SHARE)
        self.at_once = fragments
        """Rounds that may be open."""
        self._latest: deque[float] = deque(maxlen=2)
        self._paused_at = 0.0
        self._pause_s = 0.0

    def merged(self, now: float, average_s: float, taken_s: float, allowed_s: float) -> None:
        """An exchange is over, which took so long; lately they took `average_s`, and may take `allowed_s`."""
        self._latest.append(taken_s)
        slow = average_s > allowed_s
        self.at_once = self._few if slow else min(self.at_once + 1, self._fragments)
        # With less than eight fragments one at a time is too many. What took long once, because of a stall or in memory that
        # was new, says nothing of the next.
        typical_s = min(average_s, *self._latest) if len(self._latest) == 2 else 0.0
        times = max(0.0, SHARE * self._few / self._fragments - 1.0)
        self._paused_at, self._pause_s = now, times * typical_s if typical_s > allowed_s else 0.0

    def paused_until(self, now: float) -> float | None:
        """No round is opened before; None if there is nothing to wait for."""
        until = self._paused_at + self._pause_s
        return until if self._paused_at <= now < until else None  # not if the clock was put back
