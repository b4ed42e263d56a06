"""The command that prints shell completion scripts.

The scripts are static: all commands and options are written into them, so that pressing TAB starts no Python. A word that
is neither a command nor an option completes to a file, which suits run folders and configuration files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional

from skerry.cli.command import Command, JobCommand
from skerry.cli.options import HELP, Option, options_of
from skerry.cli.table import command_class, listed

# zsh runs bash scripts through bashcompinit, so both shells share one.
_BASH = """\
# Completion of skerry for bash and zsh.
if [ -n "${ZSH_VERSION-}" ]; then
  autoload -U +X compinit && compinit
  autoload -U +X bashcompinit && bashcompinit
fi
_skerry() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="COMMANDS"
  else
    case "${COMP_WORDS[1]}:$before" in
VALUES
    *)
      case "$word" in -*)
        case "${COMP_WORDS[1]}" in
OPTIONS
        esac ;;
      esac ;;
    esac
  fi
  [ -z "$words" ] || COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _skerry skerry
"""


@dataclass(frozen=True, kw_only=True)
class CompletionCommand(Command):
    """Print a script that completes commands, options and paths. Load it in your shell's start-up file.

    bash, zsh:  source <(skerry completion bash)
    fish:       skerry completion fish | source
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], Positional]
    """Your shell."""

    def execute(self) -> None:
        options = {name: _options(name) for name in listed()}
        print(_fish(options) if self.shell == "fish" else _bash(options), end="")


def _options(name: str) -> list[Option]:
    cls = command_class(name)
    found = [HELP, *options_of(cls)]
    if issubclass(cls, JobCommand):
        from skerry.config import Config

        found += options_of(Config)
    return found


def _bash(options: dict[str, list[Option]]) -> str:
    values = [
        f'    {name}:{flag}) words="{" ".join(option.choices)}" ;;'
        for name, known in options.items()
        for option in known
        for flag in option.flags
        if option.choices
    ]
    flags = {name: " ".join(flag for option in known for flag in option.flags) for name, known in options.items()}
    listing = [f'          {name}) words="{text}" ;;' for name, text in flags.items()]
    script = _BASH.replace("COMMANDS", " ".join(options))
    return script.replace("VALUES", "\n".join(values)).replace("OPTIONS", "\n".join(listing))


def _fish(options: dict[str, list[Option]]) -> str:
    lines = ["# Completion of skerry for fish."]
    for name, known in options.items():
        about = listed()[name].replace("'", "\\'")
        lines.append(f"complete -c skerry -f -n __fish_use_subcommand -a {name} -d '{about}'")
        for option in known:
            takes = f" -x -a '{' '.join(option.choices)}'" if option.choices else " -r" if option.most_values != 0 else ""
            for flag in option.flags:
                kind = "l" if flag.startswith("--") else "s"
                lines.append(f"complete -c skerry -n '__fish_seen_subcommand_from {name}' -{kind} {flag.lstrip('-')}{takes}")
    return "\n".join(lines) + "\n"
