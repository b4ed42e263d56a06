"""For scripts that bring their own loop: make a run from a model, and serve it from a syncer process on this machine."""

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
    """Make a run folder whose initial weights are this model's. Learners that join later take them from there."""
    folder = Path(folder)
    create_run(folder, model_tensors(model), sync or SyncConfig())
    return folder


@contextlib.contextmanager
def serve(folder: str | Path, port: int = 0, shards: int = 0) -> Iterator[str]:
    """Run a syncer for this folder as a process of its own, with as many more as it has shards; gives its address and stops
    them at the end."""
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
