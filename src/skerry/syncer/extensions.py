"""The names in a run's settings that something must be registered under, checked before anything is made or served."""

from __future__ import annotations

from skerry.config import SyncConfig
from skerry.core.guard import GUARDS
from skerry.syncer.sinks import SINKS
from skerry.tensors.codecs.codec import CODECS
from skerry.tensors.merge import merge_rule, outer_optimizer


def check_extensions(sync: SyncConfig, run: str = "") -> None:
    """Raises ConfigError with the first name that is not known here; `run` is the run that needs it."""
    CODECS.get(sync.send, "sync.send", run)
    CODECS.get(sync.publish, "sync.publish", run)
    merge_rule(sync, run)
    outer_optimizer(sync, run)
    GUARDS.get(sync.guard, "sync.guard", run)
    for name in sync.sinks:
        SINKS.get(name, "sync.sinks", run)
