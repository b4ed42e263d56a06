"""Seeded shuffling that gives the same order on every platform and numpy version."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
KEPT_ORDERS = 4


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.integer[Any]]:
    """0..count-1 in a pseudo-random order that depends on (seed, epoch).

    Sorts by a hash of each number, because the order of a library's shuffle may change with its version.
    """
    key = _mix_int(_mix_int(seed & _MASK) ^ (epoch & _MASK))
    hashes = _mix(np.arange(count, dtype=np.uint64) + np.uint64(key))
    order = np.argsort(hashes, kind="stable")
    return order.astype(np.uint32) if count <= 1 << 32 else order


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash 64-bit numbers with the finalizer of SplitMix64."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _mix_int(value: int) -> int:
    return int(_mix(np.asarray([(value + 1) & _MASK], dtype=np.uint64))[0])


class Shuffle:
    """Maps sample numbers to items of a data set. Samples are numbered through all epochs, each in its own order."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed
        self._orders: dict[int, npt.NDArray[np.integer[Any]]] = {}
        """Cached orders by epoch. Several, because a batch may span two epochs and returned leases may be older still."""

    def indices(self, start: int, count: int) -> list[int]:
        samples = (divmod(sample, self.size) for sample in range(start, start + count))
        return [int(self._order(epoch)[place]) for epoch, place in samples]

    def _order(self, epoch: int) -> npt.NDArray[np.integer[Any]]:
        order = self._orders.get(epoch)
        if order is None:
            order = permutation(self.size, self._seed, epoch)
            if len(self._orders) >= KEPT_ORDERS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return order
