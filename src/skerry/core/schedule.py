"""When each fragment is due, and with which outer settings, as a function of the outer step alone."""

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

    def due_between(self, after: int, upto: int) -> list[tuple[int, int]]:
        """(step, fragment) for each fragment due in (after, upto], each with the latest such step, in order of step.

        A clock that jumps (the syncer was away) asks for each fragment once, not once per missed turn.
        """
        latest: dict[int, int] = {}
        longest = max(stage.every for stage in self.stages)
        for step in range(max(after, upto - 2 * longest) + 1, upto + 1):
            for fragment in self.due(step):
                latest[fragment] = step
        return sorted((step, fragment) for fragment, step in latest.items())


def _stages(sync: SyncConfig) -> list[Stage]:
    begin = sync.begin
    lengths = [sync.every]
    if begin.steps:
        lengths = []
        every = begin.every
        while every < sync.every:
            lengths.append(every)
            every *= 2
    stages = []
    early = len(lengths) if begin.steps else 0
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
