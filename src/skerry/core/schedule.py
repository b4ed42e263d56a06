"""The schedule: when each fragment is due, and with which outer settings. A function of the run's step only."""

from __future__ import annotations

from dataclasses import dataclass

from skerry.config import SyncConfig


@dataclass(frozen=True)
class Stage:
    """A part of the run with constant H and outer settings."""

    first_step: int
    every: int
    outer_lr: float
    outer_momentum: float


class Schedule:
    """Spreads the fragments evenly over H steps, so that the link is used evenly. H may grow during the beginning."""

    def __init__(self, sync: SyncConfig, fragments: int) -> None:
        self.fragments = fragments
        self.stages = _stages(sync)

    def stage(self, step: int) -> Stage:
        return next(stage for stage in reversed(self.stages) if stage.first_step <= step)

    def due(self, step: int) -> list[int]:
        """Fragments to exchange after inner step `step`. Nothing is due before step 1."""
        if step < 1:
            return []
        every = self.stage(step).every
        return [p for p in range(self.fragments) if step % every == p * every // self.fragments]

    def adopt_step(self, fragment: int, step: int, overlap: int) -> int:
        """In lock-step: the step at which the merge of a fragment due at `step` is adopted, before it is due again."""
        for later in range(step + 1, step + overlap + 1):
            if fragment in self.due(later):
                return later - 1
        return step + overlap

    def last_due(self, fragment: int, step: int) -> int:
        """The latest step up to `step` at which this fragment was due; 0 if it never was."""
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
