"""Where something else can be put into a learner: chaos makes an island slow, its clock wrong, and its contributions bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skerry.clock import Clock, SystemClock
from skerry.learner.replica import Snapshot


@dataclass(frozen=True)
class Seams:
    clock: Clock = field(default_factory=SystemClock)
    snapshot: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    """What is sent in place of a snapshot."""
    after_step: Callable[[], None] = lambda: None
    """Called on the training thread, last in every inner step."""
