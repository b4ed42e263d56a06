"""A contribution's part in a merge, and its weight."""

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
    """The version from which the progress counts."""
    steps: int
    tokens: int
    weight: float
    at_step: int = 0
    """The session's total steps when the snapshot was taken."""
    at_tokens: int = 0
    """The session's total tokens when the snapshot was taken."""
    samples: tuple[int, int] = (0, 0)
    """Leased samples it covers, as (from, to) positions in the session's lease sequence."""
