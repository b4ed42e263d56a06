"""Reads dataclasses from the command line with tyro, and turns what tyro prints about bad input into one line."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from skerry.cli.command import Command, JobCommand
from skerry.cli.options import Option, options_of, split
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from skerry.config import Config

Read = TypeVar("Read")


def run_command(cls: type[Command | JobCommand], name: str, arguments: Sequence[str]) -> None:
    """Read a command's arguments and execute it. `--help` prints and exits."""
    prog = f"skerry {name}"
    see = f"{prog} --help"
    if "--help" in arguments or "-h" in arguments:
        _read(cls, prog, ["--help"], see)
    own, settings = split(arguments, options_of(cls), _settings() if issubclass(cls, JobCommand) else [], prog)
    command = _read(cls, prog, own, see)
    if isinstance(command, JobCommand):
        command.execute(settings)
    else:
        command.execute()


def read_settings(config: Config, given: Sequence[str]) -> Config:
    """A configuration with settings from the command line in place of its own. `--help` among them lists all and exits."""
    return _read(type(config), "skerry train", given, "skerry train --settings", config) if given else config


def _settings() -> list[Option]:
    from skerry.config import Config

    return options_of(Config)


def _read(cls: type[Read], prog: str, arguments: Sequence[str], see: str, default: Read | None = None) -> Read:
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            found = tyro.cli(
                cls,
                prog=prog,
                args=arguments,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.PositionalMetavarFromFieldName,),
            )
    except SystemExit as ended:
        if not ended.code:
            raise
        raise ConfigError(f"{_message(said.getvalue())}; see {see}") from None
    sys.stderr.write(said.getvalue())  # warnings
    return found


def _message(box: str) -> str:
    """The text in the box that tyro draws, without colours, title and frame, up to the first blank line or rule."""
    found: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]:
        text = line.strip("│ ")
        if text.strip("─-╰╯"):
            found.append(text)
        elif found:
            break
    message = " ".join(found).replace(" (required)", "").rstrip(".")
    return message[:1].lower() + message[1:] or "the arguments cannot be read"
