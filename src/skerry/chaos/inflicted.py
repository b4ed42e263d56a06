"""Faults inside a process. The driver writes a part's faults to `RUN/chaos/PART.json`; the part's process reads them here.

The learner and the syncer do not know about faults. A process started with SKERRY_CHAOS_DIR gives them a clock, a disk and
snapshots that misbehave.
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
    """The faults that are active in this process: kinds and amounts."""

    def __init__(self, folder: Path, part: str) -> None:
        self._path = folder / f"{part}.json"
        self._part = part
        self._stamp: tuple[int, int] | None = None
        self._found: dict[str, float] = {}
        self._first_progress: dict[int, Tensor] = {}
        self._woke_at: float | None = None

    @staticmethod
    def here(part: str) -> Inflicted | None:
        """The faults of this process, or None if it was started without SKERRY_CHAOS_DIR."""
        folder = os.environ.get(ENVIRONMENT)
        return Inflicted(Path(folder), part) if folder and part else None

    def now(self) -> float:
        """The time, shifted by a clock fault. Uses the last read amount, because a clock is asked too often to read a file."""
        return time.monotonic() + self._found.get("clock", 0.0)

    def amount(self, kind: str) -> float:
        """The amount of the active fault of this kind; 0 if there is none."""
        return self.read().get(kind, 0.0)

    def read(self) -> Mapping[str, float]:
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                found = json.loads(self._path.read_text())
                self._stamp = stamp
                self._update({str(kind): float(amount) for kind, amount in found.items()})
        except FileNotFoundError:
            if self._stamp is not None:
                self._stamp = None
                self._update({})
        return self._found

    def _update(self, found: dict[str, float]) -> None:
        self._found = found
        if "stale" not in found:
            self._first_progress.clear()
        active = ", ".join(f"{kind} {amount:g}" for kind, amount in found.items())
        log.warning("%s has injected faults: %s", self._part, active or "none")

    # ------------------------------------------------------------ an island

    def seams(self) -> Seams:
        """Seams that slow an island down, shift its clock and corrupt its contributions. Its own model stays intact."""
        from skerry.learner.seams import Seams

        self.read()
        return Seams(self, self.spoiled, self._slow_step)

    def _slow_step(self) -> None:
        factor = self.amount("slow")
        if factor > 1 and self._woke_at is not None:  # joining is not part of the first step
            time.sleep((factor - 1) * (time.monotonic() - self._woke_at))
        self._woke_at = time.monotonic()

    def spoiled(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with corrupted progress: NaN, infinite, too large, or repeated."""
        found = self.read()
        if not {"nan", "inf", "explode", "stale"} & found.keys():
            return snapshot

        def corrupted() -> Tensor:
            import torch

            progress = snapshot.progress()
            if progress.is_cuda:
                torch.cuda.synchronize(progress.device)  # produced and consumed on other streams
            if "stale" in found:
                progress = self._first_progress.setdefault(snapshot.fragment, progress)
            if "explode" in found:
                progress = found["explode"] * progress
            for kind in ("nan", "inf"):
                if kind in found:
                    progress = progress.new_full(progress.shape, float(kind))
            if progress.is_cuda:
                torch.cuda.synchronize(progress.device)
            return progress

        return dataclasses.replace(snapshot, progress=corrupted)


class FaultyDisk(Disk):
    """A disk that is full during a fill_disk fault. Metrics are still written, so the fault can be observed."""

    def __init__(self, inflicted: Inflicted) -> None:
        self._inflicted = inflicted

    def sync(self, descriptor: int) -> None:
        # Everything durable passes through here, and a real full disk may also surface as late as fsync.
        self.before_commit()
        super().sync(descriptor)

    def before_commit(self) -> None:
        if self._inflicted.amount("fill_disk"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class WatchfulClock:
    """A clock that also checks for new faults: the syncer has no training steps that would."""

    def __init__(self, inflicted: Inflicted) -> None:
        self._inflicted = inflicted

    def now(self) -> float:
        self._inflicted.read()
        return self._inflicted.now()
