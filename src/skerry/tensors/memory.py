"""Memory for flat vectors that come and go all the time: what is freed is used again for the next of about that size.

A general allocator cuts a freed vector up for a smaller one and then has no room for another like it: a syncer would get
half as large again. And memory that is got from the kernel anew has to be zeroed, which costs more than what is done with it.
What nobody has wanted for a while goes back to the kernel.
"""

from __future__ import annotations

import collections
import mmap
import weakref
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SMALL_BYTES = 1 << 16
"""Up to this many, an allocation costs nothing to speak of."""
STEPS = 16
"""Sizes told apart between a power of two and the next."""
KEPT_S, SWEPT_EVERY_S = 60.0, 10.0
"""What was not used for so long is given back; looked for so often."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Free = collections.deque[tuple[float, mmap.mmap]]
"""Of one size, each with when it was freed, the oldest first. The newest is used first, so what is too many gets old."""

_free: collections.defaultdict[int, Free] = collections.defaultdict(collections.deque)
_swept_at = monotonic()
_watched: dict[int, weakref.ref[Any]] = {}
"""By its identity, because references to arrays have no hash."""


def when_gone(array: np.ndarray[Any, Any], act: Callable[[], None]) -> None:
    """Call once nothing refers to the array, nor to a tensor or memoryview made from it. That may be in any thread, in the
    middle of anything: `act` must not wait for a lock. Not weakref.finalize, whose end does not expect other threads."""

    def gone(reference: weakref.ref[Any]) -> None:
        del _watched[id(reference)]
        act()

    reference = weakref.ref(array, gone)
    _watched[id(reference)] = reference


def empty_bytes(size_bytes: int) -> Bytes:
    """As numpy.empty. The memory is free again when nothing refers to the array, or to a tensor or view made from it."""
    if size_bytes <= SMALL_BYTES:
        return np.empty(size_bytes, dtype=np.uint8)
    _sweep()
    step = (1 << (size_bytes - 1).bit_length()) // (2 * STEPS)
    room = -(-size_bytes // step) * step
    free = _free[room]
    try:
        _, pages = free.pop()
    except IndexError:
        pages = private_pages(room)
    array = np.frombuffer(pages, dtype=np.uint8, count=size_bytes)
    when_gone(array, lambda: free.append((monotonic(), pages)))
    return array


def private_pages(size_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _sweep() -> None:
    global _swept_at
    now = monotonic()
    if now - _swept_at < SWEPT_EVERY_S:
        return
    for free in list(_free.values()):
        try:
            if now - free[0][0] > KEPT_S:
                free.popleft()
                return  # the rest at the next calls: to give back a gigabyte takes a tenth of a second
        except IndexError:
            pass  # empty, or made so by somebody else meanwhile
    _swept_at = now


def give_back() -> None:
    """All that is free, at once, because little will be wanted from now on."""
    for free in list(_free.values()):
        free.clear()


def empty_like(vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As torch.empty_like, in fp32 if no type is given."""
    import torch  # not above: a process that only carries bytes does without

    dtype = torch.float32 if dtype is None else dtype
    if vector.device.type != "cpu" or not vector.numel():
        return torch.empty_like(vector, dtype=dtype)
    return torch.from_numpy(empty_bytes(vector.numel() * dtype.itemsize)).view(dtype).view(vector.shape)
