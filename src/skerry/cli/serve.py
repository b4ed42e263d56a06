"""Commands that are the parts of a run: syncer, shards, learners, validator, data-parallel workers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from skerry.cli.command import (
    Command,
    Flag,
    OptionalFloat,
    OptionalInt,
    OptionalText,
    PositionalPath,
    PositionalText,
    TlsGroup,
    TlsOptions,
)
from skerry.errors import ConfigError

if TYPE_CHECKING:
    import asyncio

    from skerry.clock import Clock
    from skerry.syncer.storage.store import RunStore

STOPPED = 143
"""Exit code of a part that was told to stop before its run ended: as if the signal had ended it, so that a supervisor
starts it again."""


def _start_part(name: str) -> None:
    from skerry.launch.processes import die_with_parent

    die_with_parent()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s")


def _set_by_signals() -> asyncio.Event:
    import asyncio
    import signal

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


@dataclass(frozen=True, kw_only=True)
class SyncerCommand(Command):
    """Serve a run to its islands until it has ended. Needs no GPU."""

    run: PositionalPath
    """Run folder."""
    address: str = "127.0.0.1:7070"
    """host:port to listen on."""
    shards: int = 0
    """Spread the fragments over this number of `skerry shard` processes."""
    tls: TlsGroup = field(default_factory=TlsOptions)

    def execute(self) -> None:
        _start_part("syncer")
        from skerry.syncer.merge_process import prepare_to_merge

        prepare_to_merge(self.run)
        import asyncio

        from skerry.chaos.inflicted import FaultyDisk, Inflicted, WatchfulClock
        from skerry.durable import DISK
        from skerry.syncer.storage.store import RunStore

        inflicted = Inflicted.here("syncer")
        if self.shards < 0:
            raise ConfigError(f"--shards must be >= 0, got {self.shards}")
        store = RunStore(self.run, FaultyDisk(inflicted) if inflicted is not None else DISK)
        asyncio.run(self._serve(store, WatchfulClock(inflicted) if inflicted is not None else None))

    async def _serve(self, store: RunStore, clock: Clock | None) -> None:
        from skerry.syncer.process import run_syncer

        host = self.address.rpartition(":")[0]

        def listening(port: int) -> None:
            with contextlib.suppress(OSError):  # on a full disk the run is still served; its users can name the address
                (self.run / "address").write_text(f"{host}:{port}\n")
            print(f"serving {self.run} on {host}:{port}", flush=True)

        ended = await run_syncer(
            store,
            self.address,
            self.tls.files(),
            on_listening=listening,
            stop=_set_by_signals(),
            shards=self.shards,
            clock=clock,
        )
        if not ended:
            print("stopped; the run goes on when a syncer is started on this folder again")
            raise SystemExit(STOPPED)
        print("the run has ended")


@dataclass(frozen=True, kw_only=True)
class ShardCommand(Command):
    """Hold the data of some of a run's fragments, for a syncer that was started with --shards."""

    run: PositionalPath
    """Run folder, which the syncer and all shards share."""
    syncer: PositionalText
    """host:port of the syncer."""
    number: int
    """Number of this shard, from 0."""
    address: str = "127.0.0.1:0"
    """host:port to listen on; port 0 picks a free one."""
    advertise: OptionalText = None
    """host:port at which islands reach this shard, if not --address."""
    any_island: Flag = False
    """With TLS: accept islands without a certificate."""
    tls: TlsGroup = field(default_factory=TlsOptions)

    def execute(self) -> None:
        _start_part(f"shard-{self.number}")
        from skerry.syncer.merge_process import prepare_to_merge

        prepare_to_merge(self.run)
        import asyncio

        from skerry.wire.channel import EVERY_INTERFACE, split_address

        host, _ = split_address(self.address)
        if self.advertise:
            split_address(self.advertise)
        if host in EVERY_INTERFACE and not self.advertise:
            raise ConfigError(f"islands cannot reach {self.address}; say with --advertise where they can")
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        from skerry.syncer.sharding.shard import run_shard
        from skerry.wire.channel import TLS

        tls = self.tls.files()
        ended = await run_shard(
            self.run,
            self.number,
            self.syncer,
            self.address,
            self.advertise or "",
            tls,
            listening_tls=TLS("", tls.cert, tls.key) if tls is not None and self.any_island else None,
            on_listening=lambda port: print(f"shard {self.number} of {self.run} on port {port}", flush=True),
            stop=_set_by_signals(),
        )
        if not ended:
            print("stopped; its fragments wait for another process of this number")
            raise SystemExit(STOPPED)
        print("the run has ended")


@dataclass(frozen=True, kw_only=True)
class LearnerCommand(Command):
    """Run one island of a job. The syncer sends it the job."""

    address: PositionalText
    """host:port of the syncer."""
    name: OptionalText = None
    """Name of the island; keep it when the island is restarted. By default made from host and process."""
    device: OptionalText = None
    """cpu, cuda, cuda:1, ... By default as the job says."""
    threads: OptionalInt = None
    """CPU threads. By default as the job says, or all cores."""
    region: OptionalText = None
    """Region of this island, for data that is pinned to a region."""
    cap_mbit: OptionalFloat = None
    """Mbit/s this island may use each way. By default as the run says."""
    keep: OptionalText = None
    """Folder for the optimizer's state, to restart the island with on this machine."""
    tls: TlsGroup = field(default_factory=TlsOptions)

    def execute(self) -> None:
        _start_part(self.name or "learner")
        import socket

        from skerry.admin import describe_job
        from skerry.chaos.inflicted import Inflicted
        from skerry.cores import cores
        from skerry.train.island import run_island

        tls = self.tls.files()
        config = describe_job(self.address, tls)
        islands = config.islands
        if self.device:
            islands = dataclasses.replace(islands, device=self.device)
        # Only `skerry train` knows whether other islands share these cores, and then it names the threads.
        islands = dataclasses.replace(islands, threads=self.threads or islands.threads or cores())
        config = dataclasses.replace(config, islands=islands)
        name = self.name or f"{socket.gethostname()}-{os.getpid()}"
        inflicted = Inflicted.here(name)
        run_island(
            self.address,
            name,
            config,
            tls,
            keep=self.keep,
            region=self.region or "",
            cap_mbit=self.cap_mbit,
            seams=inflicted.seams() if inflicted is not None else None,
        )


@dataclass(frozen=True, kw_only=True)
class ValidatorCommand(Command):
    """Validate a run's global model as it trains. skerry train starts one by itself."""

    run: PositionalPath
    """Run folder."""

    def execute(self) -> None:
        _start_part("validator")
        from skerry.train.validate import watch_run

        watch_run(self.run)


@dataclass(frozen=True, kw_only=True)
class WorkerCommand(Command):
    """Run one worker of data-parallel training. skerry train starts them; not for use by hand."""

    run: PositionalPath
    """Run folder."""
    rank: Annotated[int, Positional]
    """Rank of this worker."""
    port: Annotated[int, Positional]
    """Port at which workers meet."""

    def execute(self) -> None:
        _start_part(f"worker-{self.rank}")
        from skerry.config import Config, from_json
        from skerry.train.data_parallel import run_worker

        run_worker(self.run, from_json(Config, (self.run / "config.json").read_text()), self.rank, self.port)
