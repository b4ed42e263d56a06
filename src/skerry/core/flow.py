"""How many rounds are open at a time, where exchanges take longer than they may.

With `overwrite`, what islands do to a fragment while its exchange is under way is lost. If exchanges are slow because there are
too many at once, more of them make all of them slower, and the model gets less of the work. So while they are slow an eighth
of the fragments is under way at a time: then each is for about an eighth of the time, whether it is the load that makes
exchanges slow or a long way. Fragments come up less often than every H steps, the one that waits longest first. As
exchanges become quick again, one more may be open after each of them. Fragments of different shards do not wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from skerry.core.quorum import MovingAverage

SHARE = 8
"""One of so many fragments is under way at a time; and each for one in so much of the time."""
PATIENCE = 4
"""Times what exchanges take: no longer than this do fragments wait for the round of another one."""


class Flow:
    """Of the fragments whose data is in one place."""

    def __init__(self, fragments: Iterable[int]) -> None:
        self._latest: dict[int, deque[float]] = {index: deque(maxlen=2) for index in fragments}
        self._few = max(1, int(len(self._latest) / SHARE + 0.5))
        self.at_once = len(self._latest)
        """Rounds that may be open."""
        self._average = MovingAverage()
        self._paused_at = 0.0
        self._pause_s = 0.0

    @property
    def fragments(self) -> Iterable[int]:
        return self._latest.keys()

    @property
    def holds_back(self) -> bool:
        return self.at_once < len(self._latest)

    @property
    def patience_s(self) -> float:
        """A round that is open for longer than this does not count any more."""
        return PATIENCE * self._average.get()

    def merged(self, index: int, now: float, taken_s: float, allowed_s: float, longest_s: float) -> None:
        """An exchange of this fragment is over, which took so long, and may take `allowed_s`. It is not reckoned with as longer
        than `longest_s`."""
        self._average.add(min(taken_s, longest_s))
        average_s = self._average.get()
        self.at_once = self._few if average_s > allowed_s else min(self.at_once + 1, len(self._latest))
        # Whole rounds at a time may be a little too many. What took long once, because of a stall or in memory that was new,
        # says nothing of the next.
        latest = self._latest[index]
        latest.append(taken_s)
        typical_s = min(average_s, *latest) if len(latest) == 2 else 0.0
        times = max(0.0, SHARE * self._few / len(self._latest) - 1.0)
        self._paused_at, self._pause_s = now, times * typical_s if typical_s > allowed_s else 0.0

    def paused_until(self, now: float) -> float | None:
        """No round is opened before; None if there is nothing to wait for."""
        until = self._paused_at + self._pause_s
        return until if self._paused_at <= now < until else None  # not if the clock was put back
