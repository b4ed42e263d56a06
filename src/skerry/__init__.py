"""Skerry trains one PyTorch model on many separate islands of compute that never wait for each other.

    learner = skerry.join("syncer.example.org:7070", model, optimizer)

Public names are imported lazily, so that `import skerry` and `skerry --help` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skerry.config import BeginConfig, SyncConfig
    from skerry.launch.serve import create, serve
    from skerry.learner.join import join
    from skerry.learner.learner import Learner
    from skerry.wire.channel import TLS

__version__ = "0.1.0"

_HOMES = {
    "join": "skerry.learner.join",
    "Learner": "skerry.learner.learner",
    "create": "skerry.launch.serve",
    "serve": "skerry.launch.serve",
    "SyncConfig": "skerry.config",
    "BeginConfig": "skerry.config",
    "TLS": "skerry.wire.channel",
}

__all__ = ["TLS", "BeginConfig", "Learner", "SyncConfig", "create", "join", "serve"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'skerry' has no attribute {name!r}")
    return getattr(import_module(home), name)
