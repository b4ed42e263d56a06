"""The replaceable parts of a learner. Fault injection uses them to slow an island, skew its clock or spoil contributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skerry.clock import Clock, SystemClock
from skerry.learner.replica import Snapshot


@dataclass(frozen=True)
class Seams:
    """Parts of a learner that tests and fault injection may replace."""

    clock: Clock = field(default_factory=SystemClock)
    snapshot: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot
    """Replaces each snapshot before it is encoded."""
    after_step: Callable[[], None] = lambda: None
    """Called on the training thread at the end of every inner step."""
