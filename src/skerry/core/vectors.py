"""Memory for flat vectors that come and go all the time: what is freed is used again for the next of about that size.

A general allocator cuts a freed vector up for a smaller one and then has no room for another like it: a syncer would get
half as large again. And memory that is got from the kernel anew has to be zeroed, which costs more than what is done with it.
"""

from __future__ import annotations

import collections
import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL_BYTES = 1 << 16
"""Up to this many, an allocation costs nothing to speak of."""
STEPS = 16
"""Sizes told apart between a power of two and the next."""

_free: collections.defaultdict[int, collections.deque[mmap.mmap]] = collections.defaultdict(collections.deque)


def empty_bytes(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """As numpy.empty. The memory is free again when nothing refers to the array, or to a tensor or view made from it."""
    if size_bytes <= SMALL_BYTES:
        return np.empty(size_bytes, dtype=np.uint8)
    step = (1 << (size_bytes - 1).bit_length()) // (2 * STEPS)
    free = _free[-(-size_bytes // step) * step]
    try:
        pages = free.pop()
    except IndexError:
        pages = mmap.mmap(-1, -(-size_bytes // step) * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(pages, dtype=np.uint8, count=size_bytes)
    # Any thread may free it, at any moment: a deque needs no lock.
    weakref.finalize(array, free.append, pages).atexit = False
    return array


def empty_like(vector: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As torch.empty_like."""
    if vector.device.type != "cpu" or not vector.numel():
        return torch.empty_like(vector, dtype=dtype)
    return torch.from_numpy(empty_bytes(vector.numel() * dtype.itemsize)).view(dtype).view(vector.shape)
