"""The order in which a corpus is trained on, and the fixed windows it is validated on.

A window is `context` tokens and the one after them; windows follow each other without overlap, except for that one
token. The order is a function of (seed, epoch) alone, the same on every platform and numpy version, so any learner can
work out any sample from its number: nothing about it needs to be stored or sent. Knows nothing of islands or devices.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from skerry.data.shuffle import Shuffle
from skerry.data.token_files import TokenSequence
from skerry.errors import ConfigError

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, both int64 of shape (sequences, context); a target is the token after its input."""


_LOOKED_AT = 1 << 20


class Windows:
    """All windows of a token sequence, each seen once per epoch in a seeded order."""

    def __init__(self, tokens: TokenSequence, context: int, seed: int) -> None:
        self.windows_count = _count(tokens, context)
        self._tokens = tokens
        self._context = context
        self._seed = seed
        self._shuffle = Shuffle(self.windows_count, seed)

    def batch(self, start: int, count: int) -> Batch:
        """Samples start..start+count-1 of the endless sequence of epochs."""
        if start < 0 or count < 1:
            raise ValueError(f"a batch must have start >= 0 and count >= 1, got start {start}, count {count}")
        return _gather(self._tokens, self._context, self.indices(start, count))

    def fingerprint(self) -> int:
        """Tells other texts and other orders apart. Of large files the beginning, the end and the length must do."""
        count = len(self._tokens)
        parts = [self._tokens[:_LOOKED_AT], self._tokens[max(0, count - _LOOKED_AT) : count]]
        found = zlib.crc32(f"{count} {self._context} {self._seed}".encode())
        for part in parts:
            found = zlib.crc32(np.ascontiguousarray(part, dtype=np.int64).tobytes(), found)
        return found

    def indices(self, start: int, count: int) -> list[int]:
        """Which windows those samples are."""
        return self._shuffle.indices(start, count)


def validation_batches(tokens: TokenSequence, context: int, max_tokens: int, batch: int) -> Iterator[Batch]:
    """Evenly spaced windows of the held-out tokens, the same every time: at most `max_tokens`, at least one window."""
    count = _count(tokens, context)
    wanted = min(count, max(1, max_tokens // context))
    chosen = [k * count // wanted for k in range(wanted)]
    # Returned, not yielded, so that what is wrong with the arguments is said at the call.
    return (_gather(tokens, context, chosen[first : first + batch]) for first in range(0, wanted, batch))


def _count(tokens: TokenSequence, context: int) -> int:
    count = (len(tokens) - 1) // context
    if count < 1:
        raise ConfigError(f"a window of model.context {context} needs {context + 1} tokens, got {len(tokens)}")
    return count


def _gather(tokens: TokenSequence, context: int, windows: Iterable[int]) -> Batch:
    chosen = list(windows)
    inputs = np.empty((len(chosen), context), dtype=np.int64)
    targets = np.empty_like(inputs)
    for row, window in enumerate(chosen):
        first = window * context
        tokens_here = tokens[first : first + context + 1]
        inputs[row] = tokens_here[:-1]
        targets[row] = tokens_here[1:]
    return torch.from_numpy(inputs), torch.from_numpy(targets)
