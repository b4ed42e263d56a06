"""The newest version of a fragment, encoded for learners: in full, or as differences from an older version.

Each form is encoded once and shared by all learners that fetch it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from skerry.checksum import checksum

KEPT_BYTES = 2.25
"""Size limit for the kept differences of a fragment, in bytes per element. The newest difference is always kept."""
KEPT_DIFFERENCES = 8


@dataclass(frozen=True)
class EncodedVersion:
    """What a learner receives."""

    codec: str
    data: memoryview
    checksum: int
    since: int | None
    """The version to which the data is added; None if the data is the full values."""


@dataclass(frozen=True)
class Published:
    version: int
    codec: str
    """Codec of the values."""
    values: memoryview
    differences: tuple[memoryview, ...] = ()
    """One per version, oldest first. The last one leads to this version."""
    difference_codec: str = ""
    _encoded: dict[int | None, EncodedVersion] = field(default_factory=dict)

    def followed_by(self, version: int, values: memoryview, difference: memoryview, codec: str) -> Published:
        """The next version, with the difference that leads to it."""
        room = KEPT_BYTES * len(values) / 4
        sizes = itertools.accumulate(len(kept) for kept in reversed((*self.differences, difference)))
        fit = max(1, sum(size <= room for size in sizes))
        kept = (*self.differences, difference)[-min(fit, KEPT_DIFFERENCES) :]
        return Published(version, self.codec, values, kept, codec)

    def find(self, have: int | None) -> EncodedVersion:
        """The differences since version `have` if they are still kept, else the full values."""
        since = have if have is not None and 0 < self.version - have <= len(self.differences) else None
        if since not in self._encoded:
            if since is None:
                codec, data = self.codec, self.values
            else:
                wanted = self.differences[since - self.version :]
                codec, data = self.difference_codec, wanted[0] if len(wanted) == 1 else memoryview(b"".join(wanted))
            self._encoded[since] = EncodedVersion(codec, data, checksum(data), since)
        return self._encoded[since]
