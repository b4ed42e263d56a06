"""Commands that act on a live run."""

from __future__ import annotations

from dataclasses import dataclass, field

from skerry.cli.command import Command, PositionalPath, PositionalText, TlsGroup, TlsOptions


@dataclass(frozen=True, kw_only=True)
class CloseCommand(Command):
    """End a run: every island sends what it has, and the syncer merges one last time."""

    address: PositionalText
    """host:port of the syncer, or the run folder if the syncer is on this machine."""
    tls: TlsGroup = field(default_factory=TlsOptions)

    def execute(self) -> None:
        from skerry.admin import close_run, syncer_address

        close_run(syncer_address(self.address), self.tls.files())
        print("the run is closing")


@dataclass(frozen=True, kw_only=True)
class SnapshotCommand(Command):
    """Save a consistent copy of a whole run while it trains."""

    address: PositionalText
    """host:port of the syncer, or the run folder if the syncer is on this machine."""
    tls: TlsGroup = field(default_factory=TlsOptions)

    def execute(self) -> None:
        from skerry.admin import syncer_address, take_snapshot

        facts = take_snapshot(syncer_address(self.address), self.tls.files())
        print(f"snapshot {facts['number']:06d} of step {facts['step']}, {facts['tokens']:,} tokens")
        for name, found in facts["islands"].items():
            if found != "kept":
                print(f"without the inner state of {name}: {found}")


@dataclass(frozen=True, kw_only=True)
class ChaosCommand(Command):
    """Inject faults into a run that skerry train is running, to see it recover (docs/operate.md)."""

    run: PositionalPath
    """Run folder."""
    faults: PositionalText
    """For example "kill island-1" or "freeze syncer for 5s, slow island-0 3x for 20s"."""

    def execute(self) -> None:
        from skerry.chaos.mailbox import ask
        from skerry.chaos.parse import parse_faults

        parse_faults(self.faults)
        print(f"done or planned: {ask(self.run, self.faults)}")
