"""Error feedback: what a lossy codec left out of merged contributions, to be added to later ones.

Each merged contribution adds its error (the progress it stood for minus what was sent) to `missing`. A contribution that is
not merged changes nothing here, because its whole progress is sent again. This holds for any number of contributions in flight,
whatever share of `missing` they included.
"""

from __future__ import annotations

from torch import Tensor


class Feedback:
    def __init__(self, kept: int) -> None:
        """`kept` is the number of unconfirmed contributions to remember."""
        self.missing: Tensor | None = None
        """The accumulated error of merged contributions; None if there is none."""
        self._kept = kept
        self._open: dict[int, Tensor] = {}
        """The session's steps at a contribution → its error, until it is known whether it was merged."""

    def sent(self, at_step: int, progress: Tensor, sent: Tensor) -> None:
        """Remember the error of a contribution that was encoded."""
        kept = {**self._open, at_step: progress - sent}
        self._open = dict(list(kept.items())[-self._kept :])

    def undo(self) -> None:
        """Discard all errors, because the merges were rolled back."""
        self.missing, self._open = None, {}

    def merged(self, upto_step: int) -> None:
        """Account for the contribution at `upto_step`, which is part of the adopted version."""
        more = self._open.get(upto_step)
        if more is not None:
            self.missing = more if self.missing is None else self.missing + more
        self._open = {at: left for at, left in self._open.items() if at > upto_step}
