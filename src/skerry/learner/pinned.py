"""Host memory that a GPU copies to and from by itself, set aside once and used again and again.

To allocate such memory makes the GPU wait, so none is allocated while training goes on. A piece is free again when no tensor
refers to it and the GPU has done what it was told to do with it. Who finds none free takes ordinary memory, which copies
more slowly.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skerry.tensors.memory import Bytes, private_pages, when_gone

log = logging.getLogger("skerry.learner")


class PinnedMemory:
    def __init__(
        self, piece_bytes: int, count: int, device: torch.device, streams: Sequence[Any], shared: bool = False
    ) -> None:
        """`streams` are those of that device which read from it, or write to it without being waited for. What is shared can be
        given to another process, where the system has such memory."""
        piece_bytes = -(-piece_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size_bytes = piece_bytes * count
        self.descriptor = -1
        """For another process; -1 if it is not shared."""
        self._piece_bytes, self._streams = piece_bytes, streams
        self._process = os.getpid()
        self._free: collections.deque[tuple[int, list[Any]]] = collections.deque()
        """Pieces, each with what the GPU had been told when it became free. The longest free is taken first."""
        self._memory = self._shared(device) if shared and hasattr(os, "memfd_create") else None
        if self._memory is None:
            self._memory = _pinned(self.size_bytes, device)
        if self._memory is not None:
            self._free.extend((index * piece_bytes, []) for index in range(count))

    def _shared(self, device: torch.device) -> Bytes | None:
        """None if the system does not want to."""
        try:
            descriptor = os.memfd_create("skerry")
        except OSError:
            return None
        memory = _pinned(self.size_bytes, device, descriptor)
        if memory is None:
            os.close(descriptor)
        else:
            self.descriptor = descriptor
            when_gone(memory, lambda: os.close(descriptor))
        return memory

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Room for a vector, which belongs to whoever refers to it."""
        return self._take(numel, dtype, wait=True)

    def take_at_once(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The same for who must not wait for the GPU."""
        return self._take(numel, dtype, wait=False)

    def _take(self, numel: int, dtype: torch.dtype, wait: bool) -> Tensor:
        size_bytes = numel * dtype.itemsize
        assert size_bytes <= self._piece_bytes
        try:
            start, told = self._free.popleft()
        except IndexError:
            return torch.empty(numel, dtype=dtype)
        if not wait and not all(event.query() for event in told):
            self._free.append((start, told))
            return torch.empty(numel, dtype=dtype)
        for event in told:
            event.synchronize()
        assert self._memory is not None
        piece = self._memory[start : start + size_bytes]
        # The tensor keeps this very array, and whatever shares the tensor's memory keeps the tensor. A slice of the array would
        # not keep it, so nobody else may have it.
        when_gone(piece, lambda: self._give_back(start))
        return torch.from_numpy(piece).view(dtype)

    def offset_of(self, data: memoryview) -> int | None:
        """Where in this memory that is; None if it is elsewhere."""
        if self._memory is None or not len(data):
            return None
        start = np.frombuffer(data, dtype=np.uint8).ctypes.data - self._memory.ctypes.data
        return int(start) if 0 <= start < self.size_bytes else None

    def _give_back(self, start: int) -> None:
        if os.getpid() == self._process:  # a forked one has no GPU, and no use for it
            self._free.append((start, [stream.record_event() for stream in self._streams]))


def _pinned(size_bytes: int, device: torch.device, descriptor: int = -1) -> Bytes | None:
    """Pages of our own: torch would round each allocation up to a power of two."""
    try:
        if descriptor < 0:
            pages = private_pages(max(size_bytes, 1))
        else:
            os.ftruncate(descriptor, size_bytes)
            pages = mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        _say_why(size_bytes, str(error))
        return None
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        # A forked process must not make the kernel move what the GPU knows the place of; and larger pages are pinned faster.
        with contextlib.suppress(OSError, AttributeError):
            pages.madvise(getattr(mmap, advice))
    memory = np.frombuffer(pages, dtype=np.uint8)
    if device.type == "cuda":
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, errors = memory.ctypes.data, []

        def register() -> None:
            with torch.cuda.device(device):
                errors.append(cudart.cudaHostRegister(address, size_bytes, 0))

        def release() -> None:
            with torch.cuda.device(device):
                torch.cuda.synchronize(device)  # what was told last may still be under way
                cudart.cudaHostUnregister(address)

        # In a thread of its own: an error would stay behind in it, and be taken for that of the next kernel.
        thread = threading.Thread(target=register, name="skerry-pinning")
        thread.start()
        thread.join()
        if not errors or int(errors[0]) != 0:
            _say_why(size_bytes, cudart.cudaGetErrorString(errors[0]) if errors else "no answer")
            return None
        when_gone(memory, release)
    return memory


def _say_why(size_bytes: int, why: str) -> None:
    log.warning("%d MB of memory could not be pinned (%s): copies to and from the GPU are slower", size_bytes >> 20, why)
