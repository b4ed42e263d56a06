"""What a codec left out of contributions that were merged, so that it can be sent with later ones.

Only what was merged counts: a contribution that got lost was lost with all its progress, and changes nothing here. To each
merged one belongs the difference between the progress it stood for and what was sent; their sum is what is missing. So it
does not matter how many contributions are under way at once, nor what they already had of what was missing then.
"""

from __future__ import annotations

from torch import Tensor


class Feedback:
    def __init__(self, kept: int) -> None:
        self.missing: Tensor | None = None
        self._kept = kept
        self._open: dict[int, Tensor] = {}
        """The learner's count of steps at a contribution → what will be missing more if it is merged."""

    def sent(self, at_step: int, progress: Tensor, sent: Tensor) -> None:
        """A contribution was encoded; the newest few are remembered."""
        kept = {**self._open, at_step: progress - sent}
        self._open = dict(list(kept.items())[-self._kept :])

    def undo(self) -> None:
        """What was merged has been taken back, so what it left out is not wanted either."""
        self.missing, self._open = None, {}

    def merged(self, upto_step: int) -> None:
        """The version now held contains this learner's progress up to here."""
        more = self._open.get(upto_step)
        if more is not None:
            self.missing = more if self.missing is None else self.missing + more
        self._open = {at: left for at, left in self._open.items() if at > upto_step}
