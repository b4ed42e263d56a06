"""Host memory that a GPU copies to and from by itself, set aside once and used again and again.

To allocate such memory makes the GPU wait, so none is allocated while training goes on. A piece is free again when no tensor
refers to it and the GPU has read what it was told to read. Who finds none free takes ordinary memory: that copies more
slowly, on a thread that training does not wait for.
"""

from __future__ import annotations

import collections
import functools
import logging
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("skerry.learner")


class PinnedMemory:
    def __init__(self, piece_bytes: int, count: int, streams: Sequence[Any]) -> None:
        """`streams` are those that read from it, or write to it without being waited for."""
        piece_bytes = -(-piece_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._piece_bytes, self._streams = piece_bytes, streams
        self._free: collections.deque[tuple[int, list[Any]]] = collections.deque()
        """Pieces, each with what the GPU had been told when it became free. The longest free is taken first."""
        self._memory = _pinned(piece_bytes * count)
        if self._memory is not None:
            self._free.extend((index * piece_bytes, []) for index in range(count))

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Room for a vector, which belongs to whoever refers to it."""
        size_bytes = numel * dtype.itemsize
        assert size_bytes <= self._piece_bytes
        try:
            start, told = self._free.popleft()
        except IndexError:
            return torch.empty(numel, dtype=dtype)
        for event in told:
            event.synchronize()
        assert self._memory is not None
        piece = self._memory[start : start + size_bytes]
        # A tensor keeps the array it was made from, and so do all that share its memory.
        weakref.finalize(piece, self._give_back, start).atexit = False
        return torch.from_numpy(piece).view(dtype)

    def _give_back(self, start: int) -> None:
        # Any thread may come here, also in the middle of `take`: nothing that could wait for it.
        self._free.append((start, [stream.record_event() for stream in self._streams]))


def _pinned(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Pages of our own: torch would round each allocation up to a power of two."""
    pages = mmap.mmap(-1, max(size_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer of them: pinned several times as fast
    memory = np.frombuffer(pages, dtype=np.uint8)
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = memory.ctypes.data
        error = cudart.cudaHostRegister(address, size_bytes, 0)
        if int(error) != 0:
            log.warning("%d MB of memory could not be pinned (%s): copies to the GPU are slower", size_bytes >> 20, error)
            return None
        weakref.finalize(memory, functools.partial(_unpin, cudart, address)).atexit = False
    return memory


def _unpin(cudart: Any, address: int) -> None:
    torch.cuda.synchronize()  # what was told last may still be reading
    cudart.cudaHostUnregister(address)
