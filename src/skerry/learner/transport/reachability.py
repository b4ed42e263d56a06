"""Notices shards that the syncer has named and that this island cannot reach, and says so once."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from skerry.errors import WireError
from skerry.learner.transport.stream import NotAsWanted

log = logging.getLogger("skerry.learner")

WARN_S = 30.0
"""After this long without getting through."""
QUIET_S = 120.0
"""After this long without trying, a failure is a new one."""


@dataclass
class _Unreached:
    since: float
    last: float = 0.0
    said: bool = False


class Reachability:
    def __init__(self, name: str) -> None:
        self._name = name
        self._unreached: dict[str, _Unreached] = {}
        """By the address of a shard to which nothing has got through lately."""

    def failed(self, shard: str, error: WireError) -> None:
        """An empty address is the syncer itself, whose absence is noticed elsewhere."""
        if not shard or isinstance(error, NotAsWanted):
            return
        now = time.monotonic()
        trouble = self._unreached.get(shard)
        if trouble is None or now - trouble.last > QUIET_S:
            trouble = self._unreached[shard] = _Unreached(now)
        trouble.last = now
        if now - trouble.since >= WARN_S and not trouble.said:
            trouble.said = True
            log.warning("%s gets nothing through to the shard at %s: %s; training goes on", self._name, shard, error)

    def went_through(self, shard: str) -> None:
        self._unreached.pop(shard, None)
