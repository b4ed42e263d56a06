"""Pools of pinned host memory, which a GPU copies to and from directly.

Pinning memory stalls the GPU, so a pool is allocated once, before training. A piece returns to the pool when no tensor refers
to it and the GPU has finished with it. When the pool is empty, callers get ordinary memory, which copies more slowly.
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
        """`streams` are the device's streams that read this memory, or write it without the host waiting for them. `shared`
        memory can be mapped by another process, on systems with memfd."""
        piece_bytes = -(-piece_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size_bytes = piece_bytes * count
        self.descriptor = -1
        """File descriptor to map in another process; -1 if not shared."""
        self._piece_bytes, self._streams = piece_bytes, streams
        self._process = os.getpid()
        self._free: collections.deque[tuple[int, list[Any]]] = collections.deque()
        """Offsets of free pieces, each with the GPU's events at the time it was freed. The one free for longest goes first."""
        self._memory = self._shared(device) if shared and hasattr(os, "memfd_create") else None
        if self._memory is None:
            self._memory = _pinned(self.size_bytes, device)
        if self._memory is not None:
            self._free.extend((index * piece_bytes, []) for index in range(count))

    def _shared(self, device: torch.device) -> Bytes | None:
        """Shared pinned memory; None if the system refuses it."""
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
        """An uninitialized vector. Its memory returns to the pool when nothing refers to it. May wait for the GPU."""
        return self._take(numel, dtype, wait=True)

    def take_at_once(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Like `take`, but never waits for the GPU."""
        return self._take(numel, dtype, wait=False)

    def _take(self, numel: int, dtype: torch.dtype, wait: bool) -> Tensor:
        size_bytes = numel * dtype.itemsize
        assert size_bytes <= self._piece_bytes
        try:
            start, events = self._free.popleft()
        except IndexError:
            return torch.empty(numel, dtype=dtype)
        if not wait and not all(event.query() for event in events):
            self._free.append((start, events))
            return torch.empty(numel, dtype=dtype)
        for event in events:
            event.synchronize()
        assert self._memory is not None
        piece = self._memory[start : start + size_bytes]
        # The tensor keeps this array alive, and views of the tensor keep the tensor alive. A slice of the array would not keep
        # it alive, so the array must not leave this function.
        when_gone(piece, lambda: self._give_back(start))
        return torch.from_numpy(piece).view(dtype)

    def offset_of(self, data: memoryview) -> int | None:
        """Offset of `data` in this memory; None if it is elsewhere."""
        if self._memory is None or not len(data):
            return None
        start = np.frombuffer(data, dtype=np.uint8).ctypes.data - self._memory.ctypes.data
        return int(start) if 0 <= start < self.size_bytes else None

    def _give_back(self, start: int) -> None:
        if os.getpid() == self._process:  # a forked process has no GPU
            self._free.append((start, [stream.record_event() for stream in self._streams]))


def _pinned(size_bytes: int, device: torch.device, descriptor: int = -1) -> Bytes | None:
    """Pinned pages; None, with a warning, on failure. Not by torch, which rounds each allocation up to a power of two."""
    try:
        if descriptor < 0:
            pages = private_pages(max(size_bytes, 1))
        else:
            os.ftruncate(descriptor, size_bytes)
            pages = mmap.mmap(descriptor, size_bytes)
    except OSError as error:
        _warn(size_bytes, str(error))
        return None
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        # A fork must not make the kernel move pages whose physical address the GPU knows. Huge pages are pinned faster.
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
                torch.cuda.synchronize(device)  # the last copies may still be in flight
                cudart.cudaHostUnregister(address)

        # CUDA keeps the last error per thread and would blame it on the next kernel, so this uses a thread of its own.
        thread = threading.Thread(target=register, name="skerry-pinning")
        thread.start()
        thread.join()
        if not errors or int(errors[0]) != 0:
            _warn(size_bytes, cudart.cudaGetErrorString(errors[0]) if errors else "no answer")
            return None
        when_gone(memory, release)
    return memory


def _warn(size_bytes: int, why: str) -> None:
    log.warning("%d MB of memory could not be pinned (%s): copies to and from the GPU are slower", size_bytes >> 20, why)
