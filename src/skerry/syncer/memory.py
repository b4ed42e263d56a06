"""Tunes the memory allocator of the syncer process."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt (M_TRIM_THRESHOLD and so on)."""
_LARGEST = ((1 << 31) - 1, 32 << 20)
"""Allocations up to this size use the heap instead of mmap. Older glibc versions reject the first value."""


def keep_freed_memory() -> None:
    """Keep freed memory in one heap for all threads, so the process never shrinks. Call before starting threads. Does nothing
    without glibc.

    gRPC allocates and frees megabyte buffers all the time. By default malloc maps and unmaps each one, and zeroing their pages
    costs more than processing the data."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # Setting one threshold stops malloc from adapting the other, so set both or none.
    if mallopt(_ARENA_MAX, 1) and any(mallopt(_MMAP_THRESHOLD, value) for value in _LARGEST):
        mallopt(_TRIM_THRESHOLD, _LARGEST[0])
