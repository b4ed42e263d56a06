"""Training windows in shuffled order, and the fixed windows for validation.

A window is `context` tokens plus the next one as the last target. Consecutive windows share only that token. The order depends
only on (seed, epoch) and is the same on every platform and numpy version, so any learner can compute any sample from its
number, and nothing about the order needs to be stored or sent.
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
"""Inputs and targets, both int64 of shape (sequences, context). A target is the token after its input."""


_LOOKED_AT = 1 << 20
"""Tokens at each end of the corpus that enter the fingerprint."""


class Windows:
    """All windows of a token sequence, each once per epoch in a seeded order."""

    def __init__(self, tokens: TokenSequence, context: int, seed: int) -> None:
        self.windows_count = _count(tokens, context)
        self._tokens = tokens
        self._context = context
        self._seed = seed
        self._shuffle = Shuffle(self.windows_count, seed)

    def batch(self, start: int, count: int) -> Batch:
        """The samples start..start+count-1, numbered through all epochs."""
        if start < 0 or count < 1:
            raise ValueError(f"a batch must have start >= 0 and count >= 1, got start {start}, count {count}")
        return _gather(self._tokens, self._context, self.indices(start, count))

    def fingerprint(self) -> int:
        """A hash of data and order. Large files enter with their beginning, end and length only."""
        count = len(self._tokens)
        parts = [self._tokens[:_LOOKED_AT], self._tokens[max(0, count - _LOOKED_AT) : count]]
        found = zlib.crc32(f"{count} {self._context} {self._seed}".encode())
        for part in parts:
            found = zlib.crc32(np.ascontiguousarray(part, dtype=np.int64).tobytes(), found)
        return found

    def indices(self, start: int, count: int) -> list[int]:
        """The window index of each of these samples."""
        return self._shuffle.indices(start, count)


def validation_batches(tokens: TokenSequence, context: int, max_tokens: int, batch: int) -> Iterator[Batch]:
    """Batches of evenly spaced windows of the held-out tokens, always the same: at most `max_tokens`, at least one window."""
    count = _count(tokens, context)
    wanted = min(count, max(1, max_tokens // context))
    chosen = [k * count // wanted for k in range(wanted)]
    # Not a generator function, so that invalid arguments raise at the call.
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
