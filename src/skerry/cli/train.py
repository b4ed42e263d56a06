"""Commands that make a job's run folder, or run the whole job on this machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from skerry.cli.command import Command, Flag, JobCommand, OptionalPath, OptionalText, PositionalPath
from skerry.cli.reading import read_settings
from skerry.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainCommand(JobCommand):
    """Train a model on this machine: start a syncer, its islands and a validator, and restart those that die.

    Every setting of the job is also an option under its dotted name, which takes precedence over the file:

      skerry train configs/default.toml --algorithm dp --train.tokens 1000000 --sync.every 12
      skerry train configs/default.toml --chaos "kill island-2 @ step 120, freeze island-1 @ 30s for 5s"
    """

    config: Annotated[OptionalPath, Positional] = None
    """Configuration file. Without one every setting has its default."""
    settings: Flag = False
    """List every setting with its value in CONFIG, or its default, and exit."""
    chaos: OptionalText = None
    """Faults to inject: a plan file, or a list of faults (docs/operate.md)."""
    proxy: Flag = False
    """Put a proxy between islands and syncer, for link faults from `skerry chaos`. A plan with link faults does the same."""

    def execute(self, settings: Sequence[str]) -> None:
        from skerry.chaos.parse import read_plan
        from skerry.config import Config, load

        plan = read_plan(self.chaos) if self.chaos is not None else None
        config = load(self.config) if self.config is not None else Config()
        config = read_settings(config, [*settings, *(["--help"] if self.settings else [])])
        from skerry.launch.local import run_here

        run_here(config, plan, self.proxy)


@dataclass(frozen=True, kw_only=True)
class CreateCommand(JobCommand):
    """Make a run folder with initial weights and settings. Start its syncer and learners by hand, on any machines.

    Every setting of the job is also an option under its dotted name, such as --islands.count 2. List all of them with
    skerry train --settings.
    """

    config: PositionalPath
    """Configuration file."""
    run: PositionalPath
    """Run folder to make."""

    def execute(self, settings: Sequence[str]) -> None:
        from skerry.config import load
        from skerry.launch.local import create_job

        config = read_settings(load(self.config), settings)
        create_job(dataclasses.replace(config, run=str(self.run)).resolved(), self.run)
        waits = f"training begins when {config.islands.count} islands have joined"
        print(f"made {self.run}; serve it with: skerry syncer {self.run}; {waits}")


@dataclass(frozen=True, kw_only=True)
class ResumeCommand(Command):
    """Continue an unfinished run of skerry train, with the settings in its run folder."""

    run: PositionalPath
    """Run folder."""

    def execute(self) -> None:
        from skerry.launch.local import read_config, run_here, write_config

        if not (self.run / "config.json").exists() and not (self.run / "run.json").exists():
            raise ConfigError(f"{self.run} holds no run of skerry train")
        config = read_config(self.run)
        if (self.run / "result.json").exists():
            raise ConfigError(f"the run in {self.run} has ended")
        moved = dataclasses.replace(config, run=str(self.run)).resolved()
        if moved != config:
            write_config(moved, self.run)
        run_here(moved)


@dataclass(frozen=True, kw_only=True)
class RestoreCommand(Command):
    """Make a run folder from a snapshot. Continue it with skerry resume, or skerry syncer for a loop of your own."""

    source: PositionalPath
    """A snapshot, or a run folder for its newest complete snapshot."""
    run: PositionalPath
    """Run folder to make."""
    islands: int = 0
    """Set the job up for this number of islands; 0 keeps the number."""

    def execute(self) -> None:
        from skerry.syncer.storage.restore import newest_complete, restore

        if self.islands < 0:
            raise ConfigError(f"--islands must be at least 1, got {self.islands}")
        snapshot = newest_complete(self.source, say=lambda what: print(what, file=sys.stderr))
        facts = restore(snapshot, self.run, self.islands)
        has_job = (self.run / "config.json").exists()
        following = f"skerry resume {self.run}" if has_job else f"skerry syncer {self.run}"
        print(f"made {self.run} from snapshot {facts['number']:06d} of step {facts['step']}; go on with: {following}")
