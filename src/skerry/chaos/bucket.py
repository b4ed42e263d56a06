"""Rate limiting for a throttled link. The caller passes in the time."""

from __future__ import annotations

BURST_S = 0.02
"""Burst size, as seconds at the full rate. It makes up for sleeps that overshoot."""

EXACT_S = 1e-6
"""Waits shorter than this count as zero, so that rounding causes no sleep below the clock's resolution."""


class TokenBucket:
    """A token bucket that may go into debt: a piece passes as soon as there is any credit and is charged afterwards. Pieces
    larger than a burst therefore still pass."""

    def __init__(self) -> None:
        self._credit_bytes = 0.0
        self._at_s = 0.0

    def wait_s(self, size_bytes: int, bytes_per_s: float, now_s: float) -> float:
        """Charge for the piece and return 0 if it may go now. Otherwise charge nothing and return how long to wait."""
        burst_bytes = bytes_per_s * BURST_S
        credit = min(burst_bytes, self._credit_bytes + max(0.0, now_s - self._at_s) * bytes_per_s)
        self._credit_bytes, self._at_s = credit, now_s
        if credit < -bytes_per_s * EXACT_S:
            return -credit / bytes_per_s
        self._credit_bytes -= size_bytes
        return 0.0
