"""The number of usable CPU cores."""

from __future__ import annotations

import os


def cores() -> int:
    """Cores this process may use. An affinity mask can make that fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
