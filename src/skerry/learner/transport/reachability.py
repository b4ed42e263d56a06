"""Warns, once each, about shards that this island cannot reach."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from skerry.errors import WireError
from skerry.learner.transport.stream import NotAsWanted

log = logging.getLogger("skerry.learner")

WARN_S = 30.0
"""Warn after failing for this long."""
QUIET_S = 120.0
"""A failure this long after the last one starts a new episode."""


@dataclass
class _Unreached:
    since: float
    last: float = 0.0
    warned: bool = False


class Reachability:
    """Tracks failed transfers to shards."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._unreached: dict[str, _Unreached] = {}
        """Failing shards by address."""

    def failed(self, shard: str, error: WireError) -> None:
        """Count a failed transfer. An empty address means the syncer itself, whose absence the connection reports."""
        if not shard or isinstance(error, NotAsWanted):
            return
        now = time.monotonic()
        trouble = self._unreached.get(shard)
        if trouble is None or now - trouble.last > QUIET_S:
            trouble = self._unreached[shard] = _Unreached(now)
        trouble.last = now
        if now - trouble.since >= WARN_S and not trouble.warned:
            trouble.warned = True
            log.warning("%s cannot reach the shard at %s: %s; training goes on", self._name, shard, error)

    def went_through(self, shard: str) -> None:
        """Note a transfer that succeeded."""
        self._unreached.pop(shard, None)
