"""A pool of memory for large, short-lived vectors: a freed block is reused for the next vector of about the same size.

A general allocator splits freed blocks for smaller vectors and fragments the heap; a syncer would grow by half. Fresh memory
from the kernel has to be zeroed, which costs more than the work done in it. Blocks unused for a while go back to the kernel.
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
"""Vectors up to this size are not pooled; allocating them is cheap."""
STEPS = 16
"""Size classes between two powers of two."""
KEPT_S, SWEPT_EVERY_S = 60.0, 10.0
"""How long a free block is kept, and how often to look for older ones."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Free = collections.deque[tuple[float, mmap.mmap]]
"""Free blocks of one size as (time freed, block), oldest first. The newest is reused first, so surplus blocks expire."""

_free: collections.defaultdict[int, Free] = collections.defaultdict(collections.deque)
_swept_at = monotonic()
_watched: dict[int, weakref.ref[Any]] = {}
"""Keyed by id, because weak references to arrays are not hashable."""


def when_gone(array: np.ndarray[Any, Any], act: Callable[[], None]) -> None:
    """Call `act` once nothing refers to the array or to a tensor or memoryview made from it.

    The call can come at any point in any thread, so `act` must not wait for a lock. weakref.finalize is not used because its
    shutdown is not safe with other threads running.
    """

    def gone(reference: weakref.ref[Any]) -> None:
        del _watched[id(reference)]
        act()

    reference = weakref.ref(array, gone)
    _watched[id(reference)] = reference


def empty_bytes(size_bytes: int) -> Bytes:
    """Like numpy.empty, from the pool. The block is reused when nothing refers to the array or to a view or tensor of it."""
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
    """Give old free blocks back to the kernel."""
    global _swept_at
    now = monotonic()
    if now - _swept_at < SWEPT_EVERY_S:
        return
    for free in list(_free.values()):
        try:
            if now - free[0][0] > KEPT_S:
                free.popleft()
                return  # one block per call: freeing a gigabyte takes a tenth of a second
        except IndexError:
            pass  # empty, or emptied by another thread
    _swept_at = now


def give_back() -> None:
    """Give all free blocks back to the kernel, when little memory will be needed from now on."""
    for free in list(_free.values()):
        free.clear()


def empty_like(vector: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Like torch.empty_like, from the pool, and in fp32 by default."""
    import torch  # lazily, because the sidecar process does not need torch

    dtype = torch.float32 if dtype is None else dtype
    if vector.device.type != "cpu" or not vector.numel():
        return torch.empty_like(vector, dtype=dtype)
    return torch.from_numpy(empty_bytes(vector.numel() * dtype.itemsize)).view(dtype).view(vector.shape)
