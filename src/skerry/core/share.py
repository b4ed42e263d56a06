"""One contribution's part in a merge, and how much it counts."""

from __future__ import annotations

from dataclasses import dataclass


def weight(tokens: int, steps: int) -> float:
    """Tokens × tokens per step, so more data and larger batches count for more."""
    return tokens * tokens / steps if steps > 0 else 0.0


@dataclass(frozen=True)
class Share:
    learner: str
    session: str
    base: int
    """The version it is progress since."""
    steps: int
    tokens: int
    weight: float
    at_step: int = 0
    """The learner's own step count when the snapshot was taken, over all it has done in this session."""
    at_tokens: int = 0
    """Its token count at that moment."""
    samples: tuple[int, int] = (0, 0)
    """Leased samples in it, as positions in the sequence its session was given: from, to."""
