"""The learner's side of data leases: which samples come next, and which have been trained on. Plain state, without threads.

Ranges are read in the order they were leased. A loader may read ahead of training: samples count as used only when their step
is done. When the leases run out (for example because the syncer is down for long), recently read samples are repeated instead
of waiting. Repeated samples are not counted as leased again.
"""

from __future__ import annotations

import itertools
from collections import deque

from skerry.core.leases.ranges import Need, Range

FIRST_STEPS = 64
"""Steps of data to request before the step time is known."""
LEAST_STEPS, LEAST_S = 16, 1.0
"""Data to request even at the end of an epoch, in steps and in seconds (the larger counts), to cover a round trip."""
LOW_STEPS = 8
"""With fewer steps of data left, more is requested at once instead of with the next report."""
REPEATED = 4096
"""Ranges to remember for repeating."""


class LeaseCursor:
    def __init__(self, batch: int = 1, batches_per_step: int = 1) -> None:
        self.given = 0
        """Position up to which samples were leased."""
        self.floor = 0
        """Position up to which leases were taken back."""
        self.taken = 0
        """Position up to which the loader has read."""
        self.used = 0
        """Position up to which samples were trained on."""
        self._ahead: deque[Range] = deque()
        self._read: deque[Range] = deque(maxlen=REPEATED)
        self._in_flight: deque[tuple[int, list[Range]]] = deque()
        """Per batch that was read but not trained on: the number of leased samples in it, and its ranges."""
        self._skipped = 0
        """Samples that were read and will not be trained on. They count as used with the next step."""
        self.last_step: list[Range] = []
        """The ranges the last step was trained on."""
        self.set_batch(batch, batches_per_step)
        self.repeats = 0
        """Samples that were repeated."""

    def set_batch(self, batch: int, batches_per_step: int) -> None:
        self._batch, self._batches_per_step = batch, batches_per_step
        self._step_samples = batch * batches_per_step

    @property
    def held(self) -> int:
        """Leased samples that have not been read."""
        return self.given - self.taken

    @property
    def low(self) -> bool:
        """Whether data runs out soon, so that the next request must not wait for the next report."""
        return self.held < LOW_STEPS * self._step_samples

    def granted(self, position: int, granted: Range) -> None:
        """Add a leased range. Ranges arrive in order; after a reconnect known ones are sent again and ignored here."""
        if position == self.given:
            self._ahead.append(granted)
            self.given += granted.count

    def void(self, position: int) -> None:
        """Give up all leases up to this position, because they were taken back. Batches in flight count as repeated."""
        self.given = self.taken = self.used = self.floor = position
        self._ahead.clear()
        self._in_flight = deque((0, ranges) for _, ranges in self._in_flight)
        self._skipped = 0

    def take(self, may_repeat: bool = True) -> list[Range]:
        """The ranges of the next batch, or an empty list if there is not enough data."""
        count = self._batch
        if self.held >= count:
            taken = _take(self._ahead, count)
            self._read.extend(taken)
            self.taken += count
            self._in_flight.append((count, taken))
            return taken
        if may_repeat and sum(read.count for read in self._read) >= count:
            again = _take(self._read, count)
            self._read.extend(again)
            self.repeats += count
            self._in_flight.append((0, again))
            return again
        return []

    def step_done(self) -> int:
        """Count the batches of one step as trained on. Returns how many samples that adds to those used."""
        batches = itertools.islice(self._in_flight, self._batches_per_step)
        self.last_step = [part for _, ranges in batches for part in ranges]
        self.skip_step()
        added, self._skipped = self._skipped, 0
        self.used += added
        return added

    def skip_step(self) -> None:
        """Skip the batches of one step: they were read, but the step was not taken."""
        for _ in range(min(self._batches_per_step, len(self._in_flight))):
            self._skipped += self._in_flight.popleft()[0]

    def skip_all(self) -> None:
        """Skip every batch in flight; none of them will be trained on."""
        self._skipped += sum(count for count, _ in self._in_flight)
        self._in_flight.clear()

    def need(self, step_time_s: float, ahead_s: float) -> Need:
        """The demand to report to the syncer: data for `ahead_s` seconds of training."""
        in_time = LEAST_S / step_time_s if step_time_s > 0 else 0.0
        least = max(LEAST_STEPS, in_time)
        wanted = max(least, ahead_s / step_time_s) if step_time_s > 0 else FIRST_STEPS
        ahead = [self.taken + int(steps * self._step_samples) for steps in (wanted, least)]
        return Need(self.given, self.taken, *ahead)


def _take(ranges: deque[Range], count: int) -> list[Range]:
    """Remove the first `count` samples, splitting a range if necessary."""
    taken = []
    while count > 0:
        first = ranges.popleft()
        if first.count > count:
            ranges.appendleft(Range(first.pool, first.start + count, first.count - count))
            first = Range(first.pool, first.start, count)
        taken.append(first)
        count -= first.count
    return taken
