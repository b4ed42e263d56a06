"""How much a contribution counts in a merge."""

from __future__ import annotations


def weight(tokens: int, steps: int) -> float:
    """Tokens × tokens per step, so more data and larger batches count for more."""
    return tokens * tokens / steps if steps > 0 else 0.0
