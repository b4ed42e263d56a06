"""Commands that read a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional

from skerry.cli.command import Command, Flag, OptionalInt, OptionalPath, PositionalPath
from skerry.errors import ConfigError

REPORT_EVERY_S = 5.0
"""How often a replay prints its progress."""


@dataclass(frozen=True, kw_only=True)
class ExportCommand(Command):
    """Write a run's global model as one safetensors file, at any time."""

    run: PositionalPath
    """Run folder."""
    file: PositionalPath
    """File to write."""

    def execute(self) -> None:
        from skerry.syncer.storage.run_folder import read_model
        from skerry.train.validate import save_model

        save_model(self.file, read_model(self.run))
        print(f"wrote {self.file}")


@dataclass(frozen=True, kw_only=True)
class PlotCommand(Command):
    """Draw a run's loss curves. Needs matplotlib."""

    run: PositionalPath
    """Run folder."""
    file: Annotated[OptionalPath, Positional] = None
    """PNG to write. By default loss.png in the run folder."""

    def execute(self) -> None:
        from skerry.observe import plot_run

        target = self.file or self.run / "loss.png"
        if not plot_run(self.run / "metrics.jsonl", target):
            raise ConfigError(f"no plot: {self.run} has no metrics yet, or matplotlib is missing (pip install skerry[plot])")
        print(f"wrote {target}")


@dataclass(frozen=True, kw_only=True)
class AccountCommand(Command):
    """Show where the islands' time went: goodput, stalls, recoveries (docs/operate.md)."""

    run: PositionalPath
    """Run folder."""

    def execute(self) -> None:
        from skerry.metrics import MetricsTail
        from skerry.observe import RunStatus, account_lines, account_of, link_lines

        records = MetricsTail(self.run / "metrics.jsonl").read()
        text = account_lines(account_of(records))
        if not text:
            raise ConfigError(f"no account: {self.run} has no records of islands yet")
        status = RunStatus()
        for record in records:
            status.apply(record)
        print(text, link_lines(status), sep="\n")


@dataclass(frozen=True, kw_only=True)
class LedgerCommand(Command):
    """Show what became of every sample and token: applied, dropped, leased again."""

    run: PositionalPath
    """Run folder."""
    json: Flag = False
    """Print one JSON object."""

    def execute(self) -> None:
        import json

        from skerry.errors import StoreError
        from skerry.observe import audit_run, ledger_lines
        from skerry.syncer.storage.run_folder import read_identity

        sizes = [fragment.numel for fragment in read_identity(self.run).layout.fragments]
        ledger = audit_run(self.run)
        print(json.dumps(ledger.to_json()) if self.json else ledger_lines(ledger, sizes))
        if not ledger.adds_up:
            raise StoreError(f"the ledger of {self.run} does not add up")


@dataclass(frozen=True, kw_only=True)
class ReplayCommand(Command):
    """Execute a recorded run again, bit for bit, or find where two runs first differ (docs/operate.md)."""

    run: PositionalPath
    """Run folder."""
    outer_steps: OptionalInt = None
    """Stop after this number of outer steps. By default replay all."""
    write: OptionalPath = None
    """Write the global model at the end of the replay to this safetensors file."""
    against: OptionalPath = None
    """Another run folder: replay nothing, print where the two runs first differ."""

    def execute(self) -> None:
        from skerry.train.recording import first_difference

        if self.against is not None:
            found = first_difference(self.run, self.against)
            print(found or "no difference: one is the beginning of the other, or they are the same")
        elif self.outer_steps is not None and self.outer_steps < 0:
            raise ConfigError(f"--outer-steps must be at least 0, got {self.outer_steps}")
        else:
            self._replay()

    def _replay(self) -> None:
        import time

        from skerry.train.replay import Replay
        from skerry.train.validate import save_model

        replay = Replay(self.run)
        wanted = len(replay.recording.merges)
        wanted = wanted if self.outer_steps is None else min(wanted, self.outer_steps)
        reported = time.monotonic()
        for merged in replay.run(wanted):
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                print(f"{replay.done} of {wanted} outer steps, now in round {merged.merge.round}", flush=True)
        if self.write is not None:
            save_model(self.write, replay.model())
            print(f"wrote {self.write}")
        print(f"{replay.done} outer steps came out as they were, bit for bit")
