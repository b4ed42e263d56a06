"""Every command with its module, class and one line of help. Reading the table imports no command."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from skerry.cli.command import Command, JobCommand


class Entry(NamedTuple):
    """Where a command lives, and its line in `skerry --help`."""

    module: str
    """Module in `skerry.cli`; also the heading of the command in the list."""
    name: str
    """Class in that module."""
    help: str
    """What the command does; empty hides it from the list."""


COMMANDS = {
    "train": Entry("train", "TrainCommand", "run a whole job on this machine"),
    "resume": Entry("train", "ResumeCommand", "continue an unfinished run of skerry train"),
    "create": Entry("train", "CreateCommand", "make a run folder, to start its syncer and learners by hand"),
    "restore": Entry("train", "RestoreCommand", "make a run folder from a snapshot"),
    "syncer": Entry("serve", "SyncerCommand", "serve a run to its islands"),
    "shard": Entry("serve", "ShardCommand", "hold the data of some fragments for a syncer with --shards"),
    "learner": Entry("serve", "LearnerCommand", "run one island; the syncer sends it the job"),
    "validator": Entry("serve", "ValidatorCommand", "validate a run's global model as it trains; skerry train starts one"),
    "worker": Entry("serve", "WorkerCommand", ""),
    "close": Entry("operate", "CloseCommand", "end a run with one last merge"),
    "snapshot": Entry("operate", "SnapshotCommand", "save a consistent copy of a run while it trains"),
    "chaos": Entry("operate", "ChaosCommand", "inject faults into a run that skerry train is running"),
    "export": Entry("inspect", "ExportCommand", "write a run's global model as one safetensors file"),
    "plot": Entry("inspect", "PlotCommand", "draw a run's loss curves"),
    "account": Entry("inspect", "AccountCommand", "show where the islands' time went: goodput, stalls, recoveries"),
    "ledger": Entry("inspect", "LedgerCommand", "show what became of every sample and token"),
    "replay": Entry("inspect", "ReplayCommand", "execute a recorded run again, bit for bit, or compare two runs"),
    "plan": Entry("plan", "PlanCommand", "choose H, P, τ, K and codecs for a model, its islands and their links"),
    "doctor": Entry("plan", "DoctorCommand", "check the way to a syncer: TLS, clock, round trip, bandwidth"),
    "completion": Entry("completion", "CompletionCommand", "print a completion script for bash, zsh or fish"),
}

_HEADINGS = {
    "train": "jobs",
    "serve": "parts of a run",
    "operate": "a live run",
    "inspect": "a run folder",
    "plan": "links and settings",
    "completion": "shell",
}


def listed() -> dict[str, str]:
    """Commands meant for users, with their line of help."""
    return {name: entry.help for name, entry in COMMANDS.items() if entry.help}


def overview() -> str:
    """The text of `skerry --help`."""
    lines = [
        "usage: skerry COMMAND [ARGUMENTS]",
        "",
        "Train one model on many separate islands of compute that never wait for each other.",
    ]
    width = max(map(len, COMMANDS))
    for module, heading in _HEADINGS.items():
        shown = [name for name in listed() if COMMANDS[name].module == module]
        lines += ["", f"{heading}:", *(f"  {name:<{width}}  {COMMANDS[name].help}" for name in shown)]
    return "\n".join([*lines, "", "skerry COMMAND --help describes the arguments of a command."])


def command_class(name: str) -> type[Command | JobCommand]:
    """Import a command."""
    entry = COMMANDS[name]
    found: type[Command | JobCommand] = getattr(import_module(f"skerry.cli.{entry.module}"), entry.name)
    return found
