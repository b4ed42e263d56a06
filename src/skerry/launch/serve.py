"""Create a run from a model and serve it from a syncer process on this machine, for scripts with their own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from skerry.config import SyncConfig
from skerry.launch.processes import Child, free_port, skerry_command
from skerry.syncer.storage.create import create_run
from skerry.tensors.model import model_tensors


def create(folder: str | Path, model: nn.Module, sync: SyncConfig | None = None) -> Path:
    """Create a run folder with this model's weights as the initial ones. Learners fetch them when they join."""
    folder = Path(folder)
    create_run(folder, model_tensors(model), sync or SyncConfig())
    return folder


@contextlib.contextmanager
def serve(folder: str | Path, port: int = 0, shards: int = 0) -> Iterator[str]:
    """Run a syncer process for this folder, plus one process per shard. Yields its address and stops the processes on exit."""
    port = port or free_port()
    address = f"127.0.0.1:{port}"
    commands = {"syncer": ["syncer", str(folder), "--address", address, "--shards", str(shards)]}
    commands |= {f"shard-{n}": ["shard", str(folder), address, "--number", str(n)] for n in range(shards)}
    children = [Child(name, skerry_command(*words), Path(folder) / f"{name}.log") for name, words in commands.items()]
    with contextlib.ExitStack() as running:
        for child in children:
            child.start()
            running.callback(child.stop)
        yield address
