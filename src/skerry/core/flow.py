"""How many rounds are open at a time, where exchanges take longer than they may.

With `overwrite`, what islands do to a fragment while its exchange is under way is lost. If exchanges are slow because there are
too many at once, more of them make all of them slower, and the model gets less of the work. So of the fragments whose own
latest exchange was slow an eighth is under way at a time: then each is for about an eighth of the time, whether it is the load
that makes exchanges slow or a long way. They come up less often than every H steps, the one that waits longest first. Fragments
whose exchanges are quick are not held back.
"""

from __future__ import annotations

from collections import deque

SHARE = 8
"""One of so many is under way at a time; and each for one in so much of the time."""


class Flow:
    def __init__(self, fragments: int) -> None:
        self.slow: set[int] = set()
        """Fragments whose latest exchange took longer than it may."""
        self._latest: list[deque[float]] = [deque(maxlen=2) for _ in range(fragments)]
        self._paused_at = 0.0
        self._pause_s = 0.0

    def merged(self, index: int, now: float, taken_s: float, allowed_s: float, longest_s: float) -> None:
        """An exchange of this fragment is over, which took so long, and may take `allowed_s`. It is not reckoned with as longer
        than `longest_s`."""
        latest = self._latest[index]
        latest.append(taken_s)
        if taken_s <= allowed_s:
            self.slow.discard(index)
            return
        self.slow.add(index)
        # One at a time is too many if there are less than eight. What took long once, because of a stall or in memory that was
        # new, says nothing of the next.
        if len(self.slow) < SHARE and len(latest) == 2 and min(latest) > allowed_s:
            self._paused_at, self._pause_s = now, (SHARE / len(self.slow) - 1) * min(*latest, longest_s)

    def may_open(self, index: int, slow_open: int, now: float) -> bool:
        """Whether a round of this fragment may be opened, while so many of slow ones are."""
        if index not in self.slow:
            return True
        return slow_open < max(1, int(len(self.slow) / SHARE + 0.5)) and self.paused_until(now) is None

    def paused_until(self, now: float) -> float | None:
        """No round of a slow fragment is opened before; None if there is nothing to wait for."""
        until = self._paused_at + self._pause_s
        return until if self._paused_at <= now < until else None  # not if the clock was put back
