"""How long bytes must wait for a limited link. Pure: time is passed in."""

from __future__ import annotations

BURST_S = 0.02
"""What may be sent at once after a pause, as time at the full rate: sleeping is not exact, and lost time is made up for."""

EXACT_S = 1e-6
"""Shorter waits are none: rounding must not make somebody wait for a moment that a clock cannot tell."""


class TokenBucket:
    """Lets bytes through at a rate. A piece may go as soon as there is any credit and is paid for afterwards, so that pieces
    larger than the credit for a burst still pass."""

    def __init__(self) -> None:
        self._credit_bytes = 0.0
        self._at_s = 0.0

    def wait_s(self, size_bytes: int, bytes_per_s: float, now_s: float) -> float:
        """0: the piece goes now, and is paid for. Otherwise nothing has changed, and this is how long to wait."""
        burst_bytes = bytes_per_s * BURST_S
        credit = min(burst_bytes, self._credit_bytes + max(0.0, now_s - self._at_s) * bytes_per_s)
        self._credit_bytes, self._at_s = credit, now_s
        if credit < -bytes_per_s * EXACT_S:
            return -credit / bytes_per_s
        self._credit_bytes -= size_bytes
        return 0.0
