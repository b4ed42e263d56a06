"""The options of a dataclass under the names tyro gives them, for suggestions, completion, and telling settings apart."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional

from skerry.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Option:
    """A named argument."""

    flags: tuple[str, ...]
    """All spellings: `--sync.wait` and `--sync.no-wait`."""
    most_values: int | None
    """How many values may follow it; None means any number."""
    choices: tuple[str, ...] = ()
    """The values it accepts, if there are only a few."""


HELP = Option(("-h", "--help"), 0)


def options_of(cls: type[Any], prefix: str = "") -> list[Option]:
    """Every option of a dataclass and of the dataclasses inside it, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found: list[Option] = []
    for field in dataclasses.fields(cls):
        hint, markers = _unwrapped(hints[field.name])
        if Positional in markers:
            continue
        name = field.name.replace("_", "-")
        origin = typing.get_origin(hint)
        if dataclasses.is_dataclass(hint):
            found += options_of(typing.cast(type[Any], hint), prefix if OmitArgPrefixes in markers else f"{prefix}{name}.")
        elif hint is bool:
            negated = () if FlagCreatePairsOff in markers else (f"--{prefix}no-{name}",)
            found.append(Option((f"--{prefix}{name}", *negated), 0))
        elif origin is typing.Literal:
            found.append(Option((f"--{prefix}{name}",), 1, tuple(map(str, typing.get_args(hint)))))
        else:
            found.append(Option((f"--{prefix}{name}",), None if origin is tuple else 1))
    return found


def _unwrapped(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its `Annotated`, and what that adds to it."""
    return (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())


def split(
    arguments: Sequence[str], own: Iterable[Option], settings: Iterable[Option], prog: str
) -> tuple[list[str], list[str]]:
    """Arguments of the command itself, and settings of a job. An option that is neither is an error with a suggestion."""
    sides: dict[str, tuple[list[str], Option]] = {}
    command_side: list[str] = []
    settings_side: list[str] = []
    for side, options in ((settings_side, settings), (command_side, (*own, HELP))):
        sides.update({flag: (side, option) for option in options for flag in option.flags})
    rest = deque(arguments)
    while rest:
        word = rest.popleft()
        if word == "--":
            command_side += [word, *rest]
            break
        if not _is_option(word):
            command_side.append(word)
            continue
        flag, equals, _ = word.partition("=")
        if flag.replace("_", "-") not in sides:
            raise ConfigError(f"{prog} has no option {flag}; {_suggestion(flag.replace('_', '-'), list(sides), prog)}")
        side, option = sides[flag.replace("_", "-")]
        side.append(word)
        room = 0 if equals else option.most_values
        while rest and room != 0 and not rest[0].startswith("--"):
            side.append(rest.popleft())
            room = None if room is None else room - 1
    return command_side, settings_side


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not (word[1].isdigit() or word[1] == ".")


def _suggestion(flag: str, known: list[str], prog: str) -> str:
    bare = flag.lstrip("-")
    # A setting without its table (--every for --sync.every) is a better guess than a similar spelling.
    near = [name for name in known if name.endswith(f".{bare}")] or difflib.get_close_matches(flag, known, n=1)
    return f"did you mean {near[0]}?" if near else f"{prog} --help lists its options"
