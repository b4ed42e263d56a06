"""What every command is made of: the base class, and the types of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from tyro.conf import DisallowNone, FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

if TYPE_CHECKING:
    from skerry.wire.channel import TLS

# The help text of these says what happens without a value, so tyro's "(default: ...)" is left out.
# tyro checks the default of `X | None`, unlike that of Optional, with typeguard, whose import takes longer than all else.
_NO_DEFAULT_SHOWN = arg(help_behavior_hint="")
Flag = Annotated[bool, FlagCreatePairsOff, _NO_DEFAULT_SHOWN]
OptionalText = Annotated[Optional[str], DisallowNone, _NO_DEFAULT_SHOWN]  # noqa: UP045
OptionalInt = Annotated[Optional[int], DisallowNone, _NO_DEFAULT_SHOWN]  # noqa: UP045
OptionalFloat = Annotated[Optional[float], DisallowNone, _NO_DEFAULT_SHOWN]  # noqa: UP045
OptionalPath = Annotated[Optional[Path], DisallowNone, _NO_DEFAULT_SHOWN]  # noqa: UP045
PositionalPath = Annotated[Path, Positional]
PositionalText = Annotated[str, Positional]


class Command:
    """A frozen dataclass whose fields are the arguments of a command. The string below a field is its help text."""

    def execute(self) -> None:
        raise NotImplementedError


class JobCommand:
    """A command that also takes the settings of a job: `--sync.every 12`.

    The settings arrive as words, because their defaults may come from a file that an argument of the command names.
    """

    def execute(self, settings: Sequence[str]) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Required off loopback. By default the environment names the files: SKERRY_TLS_CA, SKERRY_TLS_CERT, SKERRY_TLS_KEY."""

    ca: OptionalText = None
    """Certificate authority of the other side."""
    cert: OptionalText = None
    """Own certificate."""
    key: OptionalText = None
    """Own private key."""

    def files(self) -> TLS | None:
        from skerry.wire.channel import TLS

        if self.ca or self.cert or self.key:
            return TLS(self.ca or "", self.cert or "", self.key or "")
        return TLS.from_environment()


TlsGroup = Annotated[TlsOptions, OmitArgPrefixes]
