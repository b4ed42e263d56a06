"""Every error Skerry raises on purpose.

    SkerryError
    ├── ConfigError        what the user asked for cannot be done as written
    ├── JoinRefused        the syncer will not have this learner (other model, other protocol, other run)
    ├── WireError          a link or a peer misbehaved; retrying may help
    ├── StoreError         the run folder cannot be read or written
    ├── ReplayError        a recorded run cannot be executed again, or does not come out as it was
    └── RunFailed          a part of a run ended badly and was not brought back

Foreign exceptions (gRPC, SQLite, safetensors) become one of these at the edge where they appear, so that callers need
to know only this tree. The command line prints them as one line, without a traceback.
"""

from __future__ import annotations


class SkerryError(Exception):
    """Base of all errors that Skerry raises on purpose."""


class ConfigError(SkerryError):
    """A setting is unknown, of the wrong type, or out of range."""


class JoinRefused(SkerryError):
    """The syncer turned a learner away, and trying again unchanged would not help."""


class WireError(SkerryError):
    """A message could not be sent, or what arrived was not what was declared."""


class StoreError(SkerryError):
    """The run folder is missing, damaged, in use, or cannot be written."""


class ReplayError(SkerryError):
    """A recorded run cannot be executed again from what the tape has, or came out otherwise."""


class RunFailed(SkerryError):
    """A process of the run ended badly too often to be started again."""
