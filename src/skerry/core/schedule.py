"""When each fragment is due, and with which outer settings, as a function of the run's step alone."""

from __future__ import annotations

from dataclasses import dataclass

from skerry.config import SyncConfig


@dataclass(frozen=True)
class Stage:
    """A stretch of the run with one H and one outer setting."""

    first_step: int
    every: int
    outer_lr: float
    outer_momentum: float


class Schedule:
    """Offsets are evenly spread over H, so that the link is used evenly. H may grow while the run begins."""

    def __init__(self, sync: SyncConfig, fragments: int) -> None:
        self.fragments = fragments
        self.stages = _stages(sync)

    def stage(self, step: int) -> Stage:
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)

    def due(self, step: int) -> list[int]:
        """The fragments to be exchanged once inner step `step` is done. The first step that can be due is 1."""
        if step < 1:
            return []
        every = self.stage(step).every
        return [p for p in range(self.fragments) if step % every == p * every // self.fragments]

    def adopt_step(self, fragment: int, step: int, overlap: int) -> int:
        """Lock-step: when the merge of a fragment due at `step` is adopted. Never later than its next turn needs it."""
        for later in range(step + 1, step + overlap + 1):
            if fragment in self.due(later):
                return later - 1
        return step + overlap

    def last_due(self, fragment: int, step: int) -> int:
        """The latest step up to `step` at which this fragment was due; 0 if there is none."""
        end = step
        for stage in reversed(self.stages):
            if stage.first_step > end:
                continue
            found = end - (end - fragment * stage.every // self.fragments) % stage.every
            if found >= max(stage.first_step, 1):
                return found
            end = stage.first_step - 1
        return 0


def _stages(sync: SyncConfig) -> list[Stage]:
    begin = sync.begin
    lengths = [begin.every] if begin.steps else []
    while begin.steps and lengths[-1] * 2 < sync.every:
        lengths.append(lengths[-1] * 2)
    stages = []
    early = len(lengths)
    for index in range(early):
        share = index / early
        stages.append(
            Stage(
                first_step=begin.steps * index // early,
                every=lengths[index],
                outer_lr=begin.outer_lr + share * (sync.outer_lr - begin.outer_lr),
                outer_momentum=begin.outer_momentum + share * (sync.outer_momentum - begin.outer_momentum),
            )
        )
    stages.append(Stage(begin.steps if early else 0, sync.every, sync.outer_lr, sync.outer_momentum))
    return stages
