"""Every error Skerry raises on purpose.

    SkerryError
    ├── ConfigError        a setting or an argument is invalid
    ├── JoinRefused        the syncer rejects this learner (different model, protocol or run)
    ├── WireError          a connection or a peer misbehaved; retrying may help
    ├── StoreError         the run folder cannot be read or written
    ├── ReplayError        a recorded run cannot be replayed, or the replay gives a different result
    └── RunFailed          a process of the run kept failing

Foreign exceptions (gRPC, SQLite, safetensors) are translated where they appear, so callers need to know only this tree.
The command line prints these errors as one line, without a traceback.
"""

from __future__ import annotations


class SkerryError(Exception):
    """Base of all errors that Skerry raises on purpose."""


class ConfigError(SkerryError):
    """A setting is unknown, of the wrong type, or out of range."""


class JoinRefused(SkerryError):
    """The syncer rejected a learner, and retrying unchanged would not help."""


class WireError(SkerryError):
    """A message could not be sent, or a received message was invalid."""


class StoreError(SkerryError):
    """The run folder is missing, damaged, in use, or cannot be written."""


class ReplayError(SkerryError):
    """The tape lacks something a replay needs, or the replay gives a different result."""


class RunFailed(SkerryError):
    """A process of the run failed more often than it may be restarted."""
