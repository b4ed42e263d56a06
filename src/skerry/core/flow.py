"""Flow control: limits the open rounds while exchanges take longer than allowed.

With `overwrite`, an island loses the work it does on a fragment while that fragment's exchange is in flight. If exchanges are
slow because too many run at once, more of them make all of them slower and the model gets even less of the work. So while
exchanges are slow, at most an eighth of the fragments are in flight. Each fragment is then in flight about an eighth of the
time, whether load or distance makes exchanges slow. Fragments are exchanged less often than every H steps, the one merged
longest ago first. When exchanges are fast again, each of them raises the limit by one. Shards are limited independently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from skerry.core.quorum import MovingAverage
from skerry.core.state import FragmentProgress, Round

SHARE = 8
"""While exchanges are slow, at most 1/SHARE of the fragments are in flight, so each is in flight about 1/SHARE of the time."""
PATIENCE = 4
"""A round stops blocking others after this many times the average exchange."""


class Flow:
    """The limit for the fragments of one shard. A round blocks others for at most `silence_s`."""

    def __init__(self, fragments: Iterable[int], silence_s: float) -> None:
        self._silence_s = silence_s
        self._latest: dict[int, deque[float]] = {index: deque(maxlen=2) for index in fragments}
        """Fragment → durations of its last two exchanges."""
        self._few = max(1, int(len(self._latest) / SHARE + 0.5))
        self.at_once = len(self._latest)
        """The limit: rounds that may be open at once."""
        self._average = MovingAverage()
        self._paused_at = 0.0
        self._pause_s = 0.0

    @property
    def holds_back(self) -> bool:
        """Whether the limit is in effect."""
        return self.at_once < len(self._latest)

    def merged(self, index: int, now: float, taken_s: float, allowed_s: float, longest_s: float) -> None:
        """Adjust the limit after an exchange of `taken_s` seconds, where `allowed_s` are allowed. `longest_s` caps the sample
        that enters the average."""
        self._average.add(min(taken_s, longest_s))
        average_s = self._average.get()
        self.at_once = self._few if average_s > allowed_s else min(self.at_once + 1, len(self._latest))
        # With few fragments, rounding to whole rounds can exceed 1/SHARE, so pause between rounds to make up for it. Both of
        # the last exchanges must have been slow: a single stall says nothing about the next one.
        latest = self._latest[index]
        latest.append(taken_s)
        typical_s = min(average_s, *latest) if len(latest) == 2 else 0.0
        times = max(0.0, SHARE * self._few / len(self._latest) - 1.0)
        self._paused_at, self._pause_s = now, times * typical_s if typical_s > allowed_s else 0.0

    def room(self, fragments: Sequence[FragmentProgress], now: float) -> int:
        """How many more rounds may be opened now."""
        if self.paused_until(now) is not None:
            return 0
        return self.at_once - (len(self._waited_for(fragments, now)) if self.holds_back else 0)

    def wakes(self, fragments: Sequence[FragmentProgress], now: float) -> list[float]:
        """Times at which room appears even if no event arrives."""
        waited_for = self._waited_for(fragments, now) if self.holds_back else []
        paused_until = self.paused_until(now)
        pause = [] if paused_until is None else [paused_until]
        return pause + [round_.opened_at + self._patience_s for round_ in waited_for]

    def paused_until(self, now: float) -> float | None:
        """No round is opened before this time; None if there is no pause."""
        until = self._paused_at + self._pause_s
        return until if self._paused_at <= now < until else None  # the lower bound ignores a pause after the clock went back

    def _waited_for(self, fragments: Sequence[FragmentProgress], now: float) -> list[Round]:
        """Open rounds that block others. A round does not if its fragment is unserved, if its merge waits for a retry, or if
        it has been open for too long (an island may be unable to reach a shard, or may be slow to leave)."""
        rounds = [fragments[index].round for index in self._latest if fragments[index].away_since is None]
        return [r for r in rounds if r and r.not_before <= now and r.opened_at <= now < r.opened_at + self._patience_s]

    @property
    def _patience_s(self) -> float:
        return min(PATIENCE * self._average.get(), self._silence_s)
