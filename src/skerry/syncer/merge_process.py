"""Sets up a process that merges, before torch and gRPC are imported."""

from __future__ import annotations

import os
from pathlib import Path

from skerry.cores import cores
from skerry.syncer.memory import keep_freed_memory

MOST_MERGE_THREADS = 4
"""Threads inside one merge, on a machine with at least four times as many cores."""
LARGE_NUMEL = 1 << 23
"""Elements of a fragment from which a second thread pays."""


def prepare_to_merge(run: Path) -> None:
    """Set up memory and threads to merge the fragments of this run folder."""
    keep_freed_memory()  # malloc must be set up before torch and gRPC start threads
    # Islands may train on the same cores, so threads inside a merge must not spin while idle.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from skerry.syncer.storage.run_folder import find_identity

    # Merges already run in parallel, and waking a second thread costs as much as it saves on a small fragment.
    largest = max(fragment.numel for fragment in find_identity(run)[0].layout.fragments)
    torch.set_num_threads(max(1, min(MOST_MERGE_THREADS, cores() // 4)) if largest >= LARGE_NUMEL else 1)
