"""How the syncer's process gets its memory."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger("skerry.syncer")

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""As glibc's malloc.h names them."""
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Vectors as large as fragments come and go all the time. By default each is mapped from the kernel and given back, and
    to have its pages zeroed costs more than what is done with them; so what is freed stays, in one heap for all
    threads. To be called before there are threads. Does nothing where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _LARGEST)):
        if not mallopt(option, value):
            log.debug("malloc refused option %d", option)
