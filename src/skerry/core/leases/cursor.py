"""The learner's side of data leases: which samples come next, and which have been trained on. Plain state, without threads.

Ranges are read in the order they were given. A loader may read ahead of training: what it took counts as used only when the
step it went into is done. When nothing is left (the syncer is away for long, say), samples that were read lately are read once
more instead of waiting; they are not counted as leased again.
"""

from __future__ import annotations

import itertools
from collections import deque

from skerry.core.leases.ranges import Need, Range

FIRST_STEPS = 64
"""What is wanted before the pace is known, in steps."""
LEAST_STEPS, LEAST_S = 16, 1.0
"""What is wanted even at the end of an epoch, as the larger of the two: a request takes its time."""
LOW_STEPS = 8
REPEATED = 4096
"""Ranges that are remembered to be read once more."""


class LeaseCursor:
    def __init__(self, batch: int = 1, batches_per_step: int = 1) -> None:
        self.given = 0
        self.floor = 0
        """What was given up to here is not ours any more."""
        self.taken = 0
        self.used = 0
        self._ahead: deque[Range] = deque()
        self._read: deque[Range] = deque(maxlen=REPEATED)
        self._under_way: deque[tuple[int, list[Range]]] = deque()
        """Of each batch that was taken and not trained on yet: how many of its samples count as used then."""
        self._skipped = 0
        """Samples that were taken and will not be trained on. They count as used with those of the next step."""
        self.last_step: list[Range] = []
        """What the last step was trained on."""
        self.set_batch(batch, batches_per_step)
        self.repeats = 0
        """Samples that were read once more."""

    def set_batch(self, batch: int, batches_per_step: int) -> None:
        self._batch, self._batches_per_step = batch, batches_per_step
        self._step_samples = batch * batches_per_step

    @property
    def held(self) -> int:
        """Samples that can be taken now."""
        return self.given - self.taken

    @property
    def low(self) -> bool:
        """It would be over soon, and the next report should not be waited for."""
        return self.held < LOW_STEPS * self._step_samples

    def granted(self, position: int, found: Range) -> None:
        """Ranges come in order on one connection; after a new one some come again."""
        if position == self.given:
            self._ahead.append(found)
            self.given += found.count

    def void(self, position: int) -> None:
        """What was given up to here is not ours any more. What is being trained on meanwhile counts as read once more."""
        self.given = self.taken = self.used = self.floor = position
        self._ahead.clear()
        self._under_way = deque((0, ranges) for _, ranges in self._under_way)
        self._skipped = 0

    def take(self, may_repeat: bool = True) -> list[Range]:
        """The samples of the next batch, or none if they are not there."""
        count = self._batch
        if self.held >= count:
            taken = _take(self._ahead, count)
            self._read.extend(taken)
            self.taken += count
            self._under_way.append((count, taken))
            return taken
        if may_repeat and sum(found.count for found in self._read) >= count:
            again = _take(self._read, count)
            self._read.extend(again)
            self.repeats += count
            self._under_way.append((0, again))
            return again
        return []

    def step_done(self) -> int:
        """The batches of one step are trained on. Returns how many samples that adds to those used."""
        batches = itertools.islice(self._under_way, self._batches_per_step)
        self.last_step = [found for _, ranges in batches for found in ranges]
        self.skip_step()
        added, self._skipped = self._skipped, 0
        self.used += added
        return added

    def skip_step(self) -> None:
        """The batches of one step were read, and the step was not taken."""
        for _ in range(min(self._batches_per_step, len(self._under_way))):
            self._skipped += self._under_way.popleft()[0]

    def skip_all(self) -> None:
        """Nothing that was taken before will be trained on any more."""
        self._skipped += sum(count for count, _ in self._under_way)
        self._under_way.clear()

    def need(self, step_time_s: float, ahead_s: float) -> Need:
        in_time = LEAST_S / step_time_s if step_time_s > 0 else 0.0
        least = max(LEAST_STEPS, in_time)
        wanted = max(least, ahead_s / step_time_s) if step_time_s > 0 else FIRST_STEPS
        ahead = [self.taken + int(steps * self._step_samples) for steps in (wanted, least)]
        return Need(self.given, self.taken, *ahead)


def _take(ranges: deque[Range], count: int) -> list[Range]:
    taken = []
    while count > 0:
        first = ranges.popleft()
        if first.count > count:
            ranges.appendleft(Range(first.pool, first.start + count, first.count - count))
            first = Range(first.pool, first.start, count)
        taken.append(first)
        count -= first.count
    return taken
