"""Optimizer hooks that tell a learner where an inner step begins and ends, without changing the loop.

A loop may have several optimizers. An inner step ends when the last of them has stepped. If the last is skipped, for example by
a GradScaler that found infinities, the step ends when the next step begins.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.optim import Optimizer

log = logging.getLogger("skerry.learner")


class StepHooks:
    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        new_step: Callable[[], None],
        begin: Callable[[], None],
        part_done: Callable[[], None],
        done: Callable[[], None],
        name: str,
    ) -> None:
        """`new_step` runs before the first optimizer of an inner step, `begin` before each, `part_done` after each but the
        last, and `done` once all have stepped."""
        self._new_step, self._begin, self._part_done, self._done = new_step, begin, part_done, done
        self._name = name
        self._order = {id(optimizer): index for index, optimizer in enumerate(optimizers)}
        self._last = -1
        """Index of the optimizer that stepped last in this inner step; -1 between steps."""
        self._first_seen = False
        self._outer_call: FrameType | None = None
        self._handles: list[Any] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        caller = sys._getframe(1)
        if self._outer_call is not None and _is_within(caller, self._outer_call):
            return  # a step() that calls its base class's step(): torch hooks both
        self._outer_call = caller
        index = self._order[id(optimizer)]
        self._check_order(index)
        if self._last < 0 or index <= self._last:
            self._new_step()
        if index <= self._last:
            # The previous inner step never reached the last optimizer: it was skipped, or step() raised.
            self._last = -1
            self._done()
        self._begin()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if sys._getframe(1) is not self._outer_call:
            return
        self._outer_call = None
        index = self._order[id(optimizer)]
        if index == len(self._order) - 1:
            self._last = -1
            self._done()
        else:
            self._last = index
            self._part_done()

    def _check_order(self, index: int) -> None:
        """Warn if the optimizers seem to be listed in the wrong order, which would adopt versions in mid-iteration. Only a
        warning: a scaler may have skipped the first optimizer."""
        if not self._first_seen and index > 0:
            which = f"number {index + 1} of {len(self._order)}"
            log.warning("%s: the first optimizer to step is %s; pass them to join in the order they step", self._name, which)
        self._first_seen = True


def _is_within(frame: FrameType, outer: FrameType) -> bool:
    """Whether `outer` is among the callers of `frame`. If not, its call has ended with an exception."""
    caller = frame.f_back
    while caller is not None and caller is not outer:
        caller = caller.f_back
    return caller is not None
