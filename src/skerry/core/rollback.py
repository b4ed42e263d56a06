"""Rollback: when to keep a good copy of the model, and when to restore it."""

from __future__ import annotations

import math

from skerry.config import SyncConfig
from skerry.core import records
from skerry.core.health import Health
from skerry.core.messages import Action, GoodCopyKept, KeepGood
from skerry.core.standing import Standing

KEEP_ROUNDS = 8
"""A good copy is kept at most once per this many times H steps."""
MAX_ROLLBACKS = 5
"""A run that keeps diverging has a problem that rolling back does not solve."""


class Rollback:
    def __init__(self, sync: SyncConfig, standing: Standing) -> None:
        self.health = Health(sync.rollback, standing.best_loss)
        self.good_step = standing.good_step
        """The run step of the good copy, or None."""
        self.count = standing.rollbacks
        self._every = sync.every
        self._checked_at = standing.step
        self._keeping = False

    def check(self, step: int, names: list[str], actions: list[Action]) -> bool:
        """Check the loss once per H steps, and order a good copy if it is healthy. Returns whether to roll back."""
        if self.health.factor == 0 or step < self._checked_at + self._every:
            return False
        self._checked_at = step
        status = self.health.check(names)
        copy_is_old = self.good_step is None or step - self.good_step >= KEEP_ROUNDS * self._every
        if status == "healthy" and copy_is_old and not self._keeping:
            self._keeping = True
            actions.append(KeepGood(step))
        return status == "diverged" and self._diverged(step, actions)

    def _diverged(self, step: int, actions: list[Action]) -> bool:
        level, best = self.health.level, self.health.best
        self.health.start_again()
        level = level if level is not None and math.isfinite(level) else None
        if self.good_step is None or self.count >= MAX_ROLLBACKS:
            why = "there is no good copy yet" if self.good_step is None else f"it was rolled back {self.count} times already"
            actions.append(records.Diverged(step, False, level, best, why=why))
            return False
        self.count += 1
        actions.append(records.Diverged(step, True, level, best, self.good_step))
        return True

    def kept(self, event: GoodCopyKept, now: float, actions: list[Action]) -> None:
        self._keeping = False
        if event.failure:
            actions.append(records.GoodNotKept(event.step, event.failure))
        else:
            self.good_step = event.step
            actions.append(records.GoodKept(event.step))
