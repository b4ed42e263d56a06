"""How the syncer's process gets its memory."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""As glibc's malloc.h names them."""
_LARGEST = ((1 << 31) - 1, 32 << 20)
"""What is still not mapped; older versions allow no more than the second."""


def keep_freed_memory() -> None:
    """What gRPC receives comes and goes all the time, a megabyte at a time (vectors have memory of their own: core/vectors.py).
    By default each is mapped from the kernel and given back, and to have its pages zeroed costs more than what is done with
    them; so what is freed stays, in one heap for all threads: the process does not get smaller again. To be called before
    there are threads. Does nothing where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    # Once a threshold is set malloc does not adapt them by itself any more: so both, or none.
    if mallopt(_ARENA_MAX, 1) and any(mallopt(_MMAP_THRESHOLD, value) for value in _LARGEST):
        mallopt(_TRIM_THRESHOLD, _LARGEST[0])
