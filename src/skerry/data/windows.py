"""The order in which a corpus is trained on, and the fixed windows it is validated on.

A window is `context` tokens and the one after them; windows follow each other without overlap, except for that one
token. The order is a function of (seed, epoch) alone, the same on every platform and numpy version, so any learner can
work out any sample from its number: nothing about it needs to be stored or sent. Knows nothing of islands or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from skerry.data.token_files import TokenSequence
from skerry.errors import ConfigError

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, both int64 of shape (sequences, context); a target is the token after its input."""

_MASK = (1 << 64) - 1


class Windows:
    """All windows of a token sequence, each seen once per epoch in a seeded order."""

    def __init__(self, tokens: TokenSequence, context: int, seed: int) -> None:
        self.windows_count = _count(tokens, context)
        self._tokens = tokens
        self._context = context
        self._seed = seed
        # Two, because a batch may lie across the border of two epochs.
        self._orders: dict[int, npt.NDArray[np.integer[Any]]] = {}

    def batch(self, start: int, count: int) -> Batch:
        """Samples start..start+count-1 of the endless sequence of epochs."""
        if start < 0 or count < 1:
            raise ValueError(f"a batch must have start >= 0 and count >= 1, got start {start}, count {count}")
        return _gather(self._tokens, self._context, self.indices(start, count))

    def indices(self, start: int, count: int) -> list[int]:
        """Which windows those samples are."""
        samples = (divmod(sample, self.windows_count) for sample in range(start, start + count))
        return [int(self._order(epoch)[place]) for epoch, place in samples]

    def _order(self, epoch: int) -> npt.NDArray[np.integer[Any]]:
        order = self._orders.get(epoch)
        if order is None:
            order = permutation(self.windows_count, self._seed, epoch)
            if len(self._orders) >= 2:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return order


def validation_batches(tokens: TokenSequence, context: int, max_tokens: int, batch: int) -> Iterator[Batch]:
    """Evenly spaced windows of the held-out tokens, the same every time: at most `max_tokens`, at least one window."""
    count = _count(tokens, context)
    wanted = min(count, max(1, max_tokens // context))
    chosen = [k * count // wanted for k in range(wanted)]
    # Returned, not yielded, so that what is wrong with the arguments is said at the call.
    return (_gather(tokens, context, chosen[first : first + batch]) for first in range(0, wanted, batch))


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.integer[Any]]:
    """0..count-1 in an order drawn from (seed, epoch).

    Sorting by a hash of each number, instead of calling a library's shuffle, keeps the order the same for islands that
    run different library versions.
    """
    key = _mix_int(_mix_int(seed & _MASK) ^ (epoch & _MASK))
    hashes = _mix(np.arange(count, dtype=np.uint64) + np.uint64(key))
    order = np.argsort(hashes, kind="stable")
    return order.astype(np.uint32) if count <= 1 << 32 else order


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread 64-bit numbers so that neighbours have nothing in common (the finalizer of SplitMix64)."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _mix_int(value: int) -> int:
    return int(_mix(np.asarray([(value + 1) & _MASK], dtype=np.uint64))[0])


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
