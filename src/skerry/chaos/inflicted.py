"""Faults inside a process. The driver writes what is wrong with a part into `RUN/chaos/PART.json`; the part reads it here.

Nothing of this is known to the learner or the syncer: their methods are wrapped from outside, in processes that were started
with SKERRY_CHAOS_DIR set.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from skerry.learner.learner import Learner
    from skerry.learner.replica import Snapshot

log = logging.getLogger("skerry.chaos")

ENVIRONMENT = "SKERRY_CHAOS_DIR"


class Inflicted:
    """What is wrong with this process at present: kinds of faults and their amounts."""

    def __init__(self, folder: Path, part: str) -> None:
        self._path = folder / f"{part}.json"
        self._part = part
        self._stamp: tuple[int, int] | None = None
        self._found: dict[str, float] = {}
        self._told_first: dict[int, Tensor] = {}
        self._woke_at = time.monotonic()

    @staticmethod
    def here(part: str) -> Inflicted | None:
        """For a process that somebody may want to harm; None for all others."""
        folder = os.environ.get(ENVIRONMENT)
        return Inflicted(Path(folder), part) if folder and part else None

    def now(self) -> float:
        """A Clock that may be wrong, by what was read last: it is asked for the time more often than it need look."""
        return time.monotonic() + self._found.get("clock", 0.0)

    def amount(self, kind: str) -> float:
        """Of a fault of this kind; 0 if there is none."""
        return self.read().get(kind, 0.0)

    def read(self) -> Mapping[str, float]:
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                found = json.loads(self._path.read_text())
                self._stamp = stamp
                self._take_up({str(kind): float(amount) for kind, amount in found.items()})
        except FileNotFoundError:
            if self._stamp is not None:
                self._stamp = None
                self._take_up({})
        return self._found

    def _take_up(self, found: dict[str, float]) -> None:
        self._found = found
        if "stale" not in found:
            self._told_first.clear()
        now = ", ".join(f"{kind} {amount:g}" for kind, amount in found.items())
        log.warning("%s is told to suffer: %s", self._part, now or "nothing any more")

    # ------------------------------------------------------------ an island

    def attach(self, learner: Learner) -> None:
        """Let this island be slow, and what it gives be wrong. Its own model stays whole."""
        self.read()
        replica = learner._replica
        step_done, snapshot = learner._step_done, replica.snapshot

        def suffer_step() -> None:
            step_done()
            factor = self.amount("slow")
            if factor > 1:
                time.sleep((factor - 1) * (time.monotonic() - self._woke_at))
            self._woke_at = time.monotonic()

        def suffer_snapshot(index: int, at_step: int) -> Snapshot:
            return self.spoiled(snapshot(index, at_step))

        learner._step_done = suffer_step  # type: ignore[method-assign]
        replica.snapshot = suffer_snapshot  # type: ignore[method-assign]
        self._woke_at = time.monotonic()

    def spoiled(self, snapshot: Snapshot) -> Snapshot:
        """What is sent instead of a snapshot: progress that is not a number, too large, or sent before."""
        found = self.read()
        if not {"nan", "inf", "explode", "stale"} & found.keys():
            return snapshot

        def instead() -> Tensor:
            import torch

            progress = snapshot.progress()
            if progress.is_cuda:
                torch.cuda.synchronize(progress.device)  # it is made, and will be used, in another stream than this one
            if "stale" in found:
                progress = self._told_first.setdefault(snapshot.fragment, progress)
            if "explode" in found:
                progress = found["explode"] * progress
            for kind in ("nan", "inf"):
                if kind in found:
                    progress = progress.new_full(progress.shape, float(kind))
            if progress.is_cuda:
                torch.cuda.synchronize(progress.device)
            return progress

        return dataclasses.replace(snapshot, progress=instead)


def attach_to_syncer(inflicted: Inflicted) -> None:
    """Let the syncer's clock be wrong and its disk be full. Metrics are still written, so that one can see what happens."""
    from skerry.syncer import server
    from skerry.syncer.storage import database

    fsync, append = os.fsync, database.append

    def fsync_or_fail(descriptor: Any) -> None:
        # Whatever must be durable ends here, and a full disk may well be noticed no sooner.
        if inflicted.amount("fill_disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    def append_or_fail(database: sqlite3.Connection, entries: Any) -> None:
        if inflicted.amount("fill_disk"):
            raise sqlite3.OperationalError("database or disk is full")
        append(database, entries)

    vars(os).update(fsync=fsync_or_fail)
    vars(database).update(append=append_or_fail)
    vars(server).update(SystemClock=lambda: _WatchfulClock(inflicted))


class _WatchfulClock:
    """For a process without steps after which to look."""

    def __init__(self, inflicted: Inflicted) -> None:
        self._inflicted = inflicted

    def now(self) -> float:
        self._inflicted.read()
        return self._inflicted.now()
