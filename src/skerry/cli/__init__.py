"""The command line: one dataclass per command, read by tyro.

`main` imports only the module of the command that runs, and command modules import torch, gRPC and numpy only inside
`execute`. Help is therefore instant.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

from skerry.cli.table import COMMANDS, command_class, overview
from skerry.errors import ConfigError, SkerryError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Expected errors become one line on stderr and an exit code: 2 for bad input, 1 for the rest."""
    try:
        _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except SkerryError as error:
        print(f"skerry: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except BrokenPipeError:
        # The reader of our output is gone. Redirect stdout so that the interpreter's last flush does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:  # such as a full disk, or a folder without write permission
        print(f"skerry: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _dispatch(arguments: list[str]) -> None:
    if not arguments:
        print(overview(), file=sys.stderr)
        raise SystemExit(2)
    name = arguments[0]
    if name in ("-h", "--help"):
        print(overview())
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "skerry --help lists the commands"
        raise ConfigError(f"{name} is not a command; {hint}")
    from skerry.cli.reading import run_command

    run_command(command_class(name), name, arguments[1:])
