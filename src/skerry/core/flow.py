"""How many rounds are open at a time, where exchanges take longer than they may.

With `overwrite`, what islands do to a fragment while its exchange is under way is lost. If exchanges are slow because there are
too many at once, more of them make all of them slower, and the model gets less of the work. So of the fragments whose
exchanges are slow an eighth is under way at a time: then each is for about an eighth of the time, whether it is the load
that makes exchanges slow or a long way. They come up less often than every H steps, the one that waits longest first. If no
more than half of the fragments are slow, those of one shard perhaps, the others are not held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

SHARE = 8
"""One of so many is under way at a time; and each for one in so much of the time."""


class Flow:
    def __init__(self, fragments: int) -> None:
        self._slow: set[int] = set()
        """Fragments of which one of the two latest exchanges took longer than it may."""
        self._all = frozenset(range(fragments))
        self._latest: list[deque[float]] = [deque(maxlen=2) for _ in range(fragments)]
        self._paused_at = 0.0
        self._pause_s = 0.0

    @property
    def held_back(self) -> Set[int]:
        """Fragments of which only some may be under way."""
        return self._all if 2 * len(self._slow) > len(self._all) else self._slow

    def merged(self, index: int, now: float, taken_s: float, allowed_s: float, longest_s: float) -> None:
        """An exchange of this fragment is over, which took so long, and may take `allowed_s`. It is not reckoned with as longer
        than `longest_s`."""
        latest = self._latest[index]
        latest.append(taken_s)
        if max(latest) <= allowed_s:
            self._slow.discard(index)
        else:
            self._slow.add(index)
        # One at a time is too many if there are less than eight. What took long once, because of a stall or in memory that was
        # new, says nothing of the next.
        if len(self.held_back) < SHARE and len(latest) == 2 and min(latest) > allowed_s:
            self._paused_at, self._pause_s = now, (SHARE / len(self.held_back) - 1) * min(*latest, longest_s)

    def may_open(self, index: int, others: int, now: float) -> bool:
        """Whether a round of this fragment may be opened, while there are rounds of so many that are held back."""
        if index not in self.held_back:
            return True
        return others < max(1, int(len(self.held_back) / SHARE + 0.5)) and self.paused_until(now) is None

    def paused_until(self, now: float) -> float | None:
        """No round of those that are held back is opened before; None if there is nothing to wait for."""
        until = self._paused_at + self._pause_s
        return until if self._paused_at <= now < until else None  # not if the clock was put back
