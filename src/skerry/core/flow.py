"""How many rounds are open at a time, where exchanges take longer than they may.

With `overwrite`, what islands do to a fragment while its exchange is under way is lost. If exchanges are slow because there are
too many at once, more of them make all of them slower, and the model gets less of the work. So while they are slow an eighth
of the fragments is under way at a time: then each is for about an eighth of the time, whether it is the load that makes
exchanges slow or a long way. Fragments come up less often than every H steps, the one that waits longest first. As
exchanges become quick again, one more may be open after each of them. Fragments of different shards do not wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from skerry.core.quorum import MovingAverage
from skerry.core.state import FragmentProgress, Round

SHARE = 8
"""One of so many fragments is under way at a time; and each for one in so much of the time."""
PATIENCE = 4
"""Times what exchanges take: no longer than this do fragments wait for the round of another one."""


class Flow:
    """Of the fragments whose data is in one place. None waits for longer than `silence_s` for another one."""

    def __init__(self, fragments: Iterable[int], silence_s: float) -> None:
        self._silence_s = silence_s
        self._latest: dict[int, deque[float]] = {index: deque(maxlen=2) for index in fragments}
        self._few = max(1, int(len(self._latest) / SHARE + 0.5))
        self.at_once = len(self._latest)
        """Rounds that may be open."""
        self._average = MovingAverage()
        self._paused_at = 0.0
        self._pause_s = 0.0

    @property
    def holds_back(self) -> bool:
        return self.at_once < len(self._latest)

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

    def room(self, fragments: Sequence[FragmentProgress], now: float) -> int:
        """How many more rounds may be open."""
        if self.paused_until(now) is not None:
            return 0
        return self.at_once - (len(self._waited_for(fragments, now)) if self.holds_back else 0)

    def wakes(self, fragments: Sequence[FragmentProgress], now: float) -> list[float]:
        """When there will be room though nothing happens."""
        waited_for = self._waited_for(fragments, now) if self.holds_back else []
        paused_until = self.paused_until(now)
        pause = [] if paused_until is None else [paused_until]
        return pause + [gathering.opened_at + self._patience_s for gathering in waited_for]

    def paused_until(self, now: float) -> float | None:
        """No round is opened before; None if there is nothing to wait for."""
        until = self._paused_at + self._pause_s
        return until if self._paused_at <= now < until else None  # not if the clock was put back

    def _waited_for(self, fragments: Sequence[FragmentProgress], now: float) -> list[Round]:
        """Rounds for which others wait, but not for ever. One that nothing is done for, or that nobody answers (an island may
        not reach a shard, one that leaves may take its time), does not hold up the others."""
        rounds = [fragments[index].round for index in self._latest if fragments[index].away_since is None]
        return [r for r in rounds if r and r.not_before <= now and r.opened_at <= now < r.opened_at + self._patience_s]

    @property
    def _patience_s(self) -> float:
        return min(PATIENCE * self._average.get(), self._silence_s)
