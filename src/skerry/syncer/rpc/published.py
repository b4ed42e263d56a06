"""One fragment's newest version as learners fetch it: whole, or as the differences that lead to it from a version they have.

It is encoded once, however many fetch it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from skerry.checksum import checksum

KEPT_BYTES = 2.25
"""Differences are kept while they have no more bytes than this for each element, and the newest in any case."""
KEPT_DIFFERENCES = 8


@dataclass(frozen=True)
class Found:
    """What is sent to a learner."""

    codec: str
    data: memoryview
    checksum: int
    since: int | None
    """The version that the data is to be added to."""


@dataclass(frozen=True)
class Published:
    version: int
    codec: str
    """Of the values."""
    values: memoryview
    differences: tuple[memoryview, ...] = ()
    """Oldest first. The last leads to this version."""
    difference_codec: str = ""
    _found: dict[int | None, Found] = field(default_factory=dict)

    def followed_by(self, version: int, values: memoryview, difference: memoryview, codec: str) -> Published:
        """The next version, published by a difference."""
        room = KEPT_BYTES * len(values) / 4
        sizes = itertools.accumulate(len(kept) for kept in reversed((*self.differences, difference)))
        fit = max(1, sum(size <= room for size in sizes))
        kept = (*self.differences, difference)[-min(fit, KEPT_DIFFERENCES) :]
        return Published(version, self.codec, values, kept, codec)

    def find(self, have: int | None) -> Found:
        """For a learner that has that version, or none."""
        since = have if have is not None and 0 < self.version - have <= len(self.differences) else None
        if since not in self._found:
            if since is None:
                codec, data = self.codec, self.values
            else:
                wanted = self.differences[since - self.version :]
                codec, data = self.difference_codec, wanted[0] if len(wanted) == 1 else memoryview(b"".join(wanted))
            self._found[since] = Found(codec, data, checksum(data), since)
        return self._found[since]
