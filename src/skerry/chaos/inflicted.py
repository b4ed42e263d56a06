"""Faults inside a process. The driver writes what is wrong with a part into `RUN/chaos/PART.json`; the part reads it here.

The learner and the syncer know nothing of this: in processes that were started with SKERRY_CHAOS_DIR set they are given another
clock, another disk, and altered snapshots.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.durable import Disk

if TYPE_CHECKING:  # torch is imported only in processes that train
    from torch import Tensor

    from skerry.learner.replica import Snapshot
    from skerry.learner.seams import Seams

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

    def seams(self) -> Seams:
        """Let an island be slow, its clock be wrong, and what it gives be wrong. Its own model stays whole."""
        from skerry.learner.seams import Seams

        self.read()
        self._woke_at = time.monotonic()
        return Seams(self, self.spoiled, self._suffer_step)

    def _suffer_step(self) -> None:
        factor = self.amount("slow")
        if factor > 1:
            time.sleep((factor - 1) * (time.monotonic() - self._woke_at))
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


class FaultyDisk(Disk):
    """A disk that is full while it is told to be. Metrics are still written, so that one can see what happens."""

    def __init__(self, inflicted: Inflicted) -> None:
        self._inflicted = inflicted

    def sync(self, descriptor: int) -> None:
        # Whatever must be durable passes here, and a full disk may well be noticed no sooner.
        self.before_commit()
        super().sync(descriptor)

    def before_commit(self) -> None:
        if self._inflicted.amount("fill_disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class WatchfulClock:
    """For a process without steps after which to look."""

    def __init__(self, inflicted: Inflicted) -> None:
        self._inflicted = inflicted

    def now(self) -> float:
        self._inflicted.read()
        return self._inflicted.now()
