"""The command line. Nothing heavy is imported before it is known which command runs, so that help is instant."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.errors import ConfigError, SkerryError

if TYPE_CHECKING:
    import asyncio

    from skerry.config import Config
    from skerry.wire.channel import TLS

MOST_MERGE_THREADS = 4
"""Of one merge, on a machine with four times as many cores."""
LARGE_NUMEL = 1 << 23
"""Elements of a fragment that is worth more than one thread."""
STOPPED = 143
"""As if by the signal, so that whoever looks after a process that was told to stop before its run ended starts it again."""
EVERY_INTERFACE = ("0.0.0.0", "::", "[::]")

_TRAIN_USAGE = """usage: skerry train [CONFIG.toml] [--SETTING VALUE ...] [--chaos PLAN] [--proxy]

Train a model as the file says, on this machine: a syncer, its islands and a validator. Every setting can be given on the
command line with its dotted name, which takes precedence over the file:

  skerry train configs/default.toml --algorithm dp --train.tokens 1000000 --sync.every 12

`skerry train --settings` lists all settings with their defaults.

--chaos says what is to go wrong: a plan file, or words (docs/operate.md). Faults of links need a proxy between islands and
syncer, which such a plan puts there; --proxy does so without a plan, for `skerry chaos` later:

  skerry train configs/default.toml --chaos "kill island-2 @ step 120, freeze island-1 @ 30s for 5s"
"""


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["train"]:
            _train(arguments[1:])
        else:
            options = _parser().parse_args(arguments)
            options.act(options)
    except SkerryError as error:
        print(f"skerry: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except BrokenPipeError:
        # Whoever read our output has gone; point it elsewhere so that the interpreter's last flush does not fail too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:  # a disk that is full, a folder that may not be written
        print(f"skerry: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="skerry", description="Train one model on many separate islands of compute that never wait for each other."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Only for the list of commands: `train` is handled before this parser is reached.
    commands.add_parser("train", help="run a whole job on this machine", add_help=False)

    syncer = commands.add_parser("syncer", help="serve a run to its islands")
    syncer.add_argument("run", type=Path, help="the run folder")
    syncer.add_argument("--address", default="127.0.0.1:7070", help="host:port to listen on (default: %(default)s)")
    syncer.add_argument("--shards", type=int, default=0, help="spread the fragments over so many `skerry shard` processes")
    _tls_options(syncer)
    syncer.set_defaults(act=_syncer)

    shard = commands.add_parser("shard", help="have the data of some of a run's fragments, for a syncer with --shards")
    shard.add_argument("run", type=Path, help="the run folder, which the syncer and all shards share")
    shard.add_argument("syncer", help="host:port of the syncer")
    shard.add_argument("--number", type=int, required=True, help="which one this is, from 0")
    shard.add_argument("--address", default="127.0.0.1:0", help="host:port to listen on (default: %(default)s, a free port)")
    shard.add_argument("--advertise", default="", help="host:port at which islands reach it, if that is another one")
    shard.add_argument("--any-island", action="store_true", help="with TLS: islands need no certificate of their own")
    _tls_options(shard)
    shard.set_defaults(act=_shard)

    create = commands.add_parser("create", help="make a run folder from a configuration, for syncer and learner by hand")
    create.usage = "skerry create [-h] CONFIG RUN [--SETTING VALUE ...]"
    create.add_argument("config", type=Path, help="a configuration file")
    create.add_argument("run", type=Path, help="the run folder to make")
    create.add_argument("settings", nargs=argparse.REMAINDER, help="any setting, as for skerry train: --islands.count 2")
    create.set_defaults(act=_create)

    learner = commands.add_parser("learner", help="run one island of a job; the syncer tells it what the job is")
    learner.add_argument("address", help="host:port of the syncer")
    learner.add_argument("--name", help="keep it the same when the island is restarted (default: host and process)")
    learner.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: as the job says)")
    learner.add_argument("--threads", type=int, help="CPU threads (default: as the job says, or all cores)")
    learner.add_argument("--region", default="", help="where this island is, for data that is pinned to a region")
    learner.add_argument("--cap-mbit", type=float, help="Mbit/s this island may use each way; by default as the run says")
    learner.add_argument("--keep", help="a folder for the optimizer's state, for when the island is restarted on this machine")
    _tls_options(learner)
    learner.set_defaults(act=_learner)

    close = commands.add_parser("close", help="end a run: one last merge of what every island has")
    close.add_argument("address", help="host:port of the syncer, or the run folder if it is on this machine")
    _tls_options(close)
    close.set_defaults(act=_close)

    snapshot = commands.add_parser("snapshot", help="keep a consistent copy of a whole run while it goes on")
    snapshot.add_argument("address", help="host:port of the syncer, or the run folder if it is on this machine")
    _tls_options(snapshot)
    snapshot.set_defaults(act=_snapshot)

    restore = commands.add_parser("restore", help="make a run folder from a snapshot; skerry resume goes on with it")
    restore.add_argument("source", type=Path, help="a snapshot, or a run folder for its newest one that is whole")
    restore.add_argument("run", type=Path, help="the run folder to make")
    restore.add_argument("--islands", type=int, default=0, help="set the job up for another number of islands")
    restore.set_defaults(act=_restore)

    resume = commands.add_parser("resume", help="go on with an unfinished run of skerry train")
    resume.add_argument("run", type=Path, help="the run folder")
    resume.set_defaults(act=_resume)

    export = commands.add_parser("export", help="write a run's global model as one safetensors file")
    export.add_argument("run", type=Path, help="the run folder")
    export.add_argument("file", type=Path, help="the file to write")
    export.set_defaults(act=_export)

    plot = commands.add_parser("plot", help="draw a run's loss curves")
    plot.add_argument("run", type=Path, help="the run folder")
    plot.add_argument("file", type=Path, nargs="?", help="the PNG to write (default: loss.png in the run folder)")
    plot.set_defaults(act=_plot)

    account = commands.add_parser("account", help="what became of the islands' time: goodput, stalls, recoveries")
    account.add_argument("run", type=Path, help="the run folder")
    account.set_defaults(act=_account)

    ledger = commands.add_parser("ledger", help="what became of every sample and token: applied, dropped, leased again")
    ledger.add_argument("run", type=Path, help="the run folder")
    ledger.add_argument("--json", action="store_true", help="as one JSON object")
    ledger.set_defaults(act=_ledger)

    replay = commands.add_parser("replay", help="execute a recorded run again, to the bit; or say where two runs first differ")
    replay.add_argument("run", type=Path, help="the run folder")
    replay.add_argument("--outer-steps", type=int, help="stop after so many (default: all)")
    replay.add_argument("--write", type=Path, help="write the global model as it is then to this safetensors file")
    replay.add_argument("--against", type=Path, help="another run folder: only say where the two first differ")
    replay.set_defaults(act=_replay)

    chaos = commands.add_parser("chaos", help="do harm to a run that skerry train is running, to see it recover")
    chaos.add_argument("run", type=Path, help="the run folder")
    chaos.add_argument("faults", help='for example "kill island-1" or "freeze syncer for 5s, slow island-0 3x for 20s"')
    chaos.set_defaults(act=_chaos)

    plan = commands.add_parser("plan", help="which H, P, τ, K and codec fit a model, its islands and their links")
    plan.add_argument("--params", required=True, help="the model's parameters, such as 350m or 1.2b")
    plan.add_argument(
        "--island", action="append", required=True, metavar="DEVICES[@LINK]",
        help="8xh100, or a measured step time such as 0.8s; once for each island; @500:40 gives it a link of its own",
    )  # fmt: skip
    plan.add_argument("--link", help="of all islands: Mbit/s and the round trip in ms, 500:40, or down/up, 500/100:40")
    plan.add_argument("--measured", type=Path, help="the link as skerry doctor --json wrote it")
    plan.add_argument(
        "--tokens-per-step", default="524288", help="of one island, where a device is given (default: %(default)s)"
    )
    plan.set_defaults(act=_plan)

    doctor = commands.add_parser("doctor", help="look at the way to a syncer: reachable, TLS, clock, round trip, bandwidth")
    doctor.add_argument("address", help="host:port of the syncer, or its run folder")
    doctor.add_argument("--connections", type=int, default=4, help="how many an island would use (default: %(default)s)")
    doctor.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: %(default)s)")
    doctor.add_argument("--json", type=Path, help="write what was found here, for skerry plan --measured")
    _tls_options(doctor)
    doctor.set_defaults(act=_doctor)

    validator = commands.add_parser("validator", help="validate a run's global model as it goes; skerry train starts one")
    validator.add_argument("run", type=Path, help="the run folder")
    validator.set_defaults(act=_validator)
    worker = commands.add_parser("worker")  # a part that `train` starts
    worker.add_argument("run", type=Path)
    worker.add_argument("rank", type=int)
    worker.add_argument("port", type=int)
    worker.set_defaults(act=_worker)
    return parser


def _tls_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS (default: SKERRY_TLS_CA, SKERRY_TLS_CERT, SKERRY_TLS_KEY; needed off loopback)")
    group.add_argument("--ca", default="", help="certificate authority of the other side")
    group.add_argument("--cert", default="", help="own certificate")
    group.add_argument("--key", default="", help="own private key")


def _tls(options: argparse.Namespace) -> TLS | None:
    from skerry.wire.channel import TLS

    if options.ca or options.cert or options.key:
        return TLS(options.ca, options.cert, options.key)
    return TLS.from_environment()


def _train(arguments: list[str]) -> None:
    if "--help" in arguments or "-h" in arguments:
        print(_TRAIN_USAGE)
        return
    from skerry.chaos.parse import read_plan
    from skerry.config import Config, load

    arguments, given, proxy = _take_chaos(arguments)
    plan = read_plan(given) if given is not None else None
    config = Config()
    if arguments and not arguments[0].startswith("-"):
        config = load(Path(arguments.pop(0)))
    config = _with_settings(config, ["--help"] if arguments == ["--settings"] else arguments, "skerry train")
    from skerry.launch.local import run_here

    run_here(config, plan, proxy)


def _with_settings(config: Config, given: list[str], prog: str) -> Config:
    """With those of the command line in place of the file's."""
    if not given:
        return config
    import tyro

    return tyro.cli(type(config), default=config, args=given, prog=prog)


def _take_chaos(arguments: list[str]) -> tuple[list[str], str | None, bool]:
    """What is said about faults, which is no setting of the job: the same job goes on with other faults, or none."""
    left: list[str] = []
    plan: str | None = None
    rest = iter(arguments)
    for argument in rest:
        if argument == "--chaos":
            plan = next(rest, "")
        elif argument.startswith("--chaos="):
            plan = argument.removeprefix("--chaos=")
        elif argument != "--proxy":
            left.append(argument)
    return left, plan, "--proxy" in arguments


def _part(name: str) -> None:
    """What every started part does first."""
    from skerry.launch.processes import die_with_parent

    die_with_parent()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s")


def _merging_part(name: str, run: Path) -> None:
    _part(name)
    from skerry.cores import cores
    from skerry.syncer.memory import keep_freed_memory

    keep_freed_memory()  # before torch and gRPC start threads
    # Islands may train here: threads inside a merge must not spin idly.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from skerry.syncer.storage.run_folder import find_identity

    # Merges run side by side, and to wake a second thread takes as long as it saves where fragments are small.
    largest = max(fragment.numel for fragment in find_identity(run)[0].layout.fragments)
    torch.set_num_threads(max(1, min(MOST_MERGE_THREADS, cores() // 4)) if largest >= LARGE_NUMEL else 1)


def _stopped_by_signal() -> asyncio.Event:
    import asyncio
    import signal

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _syncer(options: argparse.Namespace) -> None:
    _merging_part("syncer", options.run)
    import asyncio

    from skerry.chaos.inflicted import FaultyDisk, Inflicted, WatchfulClock
    from skerry.durable import DISK
    from skerry.syncer.process import run_syncer
    from skerry.syncer.storage.store import RunStore

    inflicted = Inflicted.here("syncer")
    if options.shards < 0:
        raise ConfigError(f"--shards must be >= 0, got {options.shards}")
    store = RunStore(options.run, FaultyDisk(inflicted) if inflicted is not None else DISK)

    async def serve() -> None:
        host = options.address.rpartition(":")[0]

        def listening(port: int) -> None:
            with contextlib.suppress(OSError):  # a disk that is full; whoever needs it can be told the address
                (options.run / "address").write_text(f"{host}:{port}\n")
            print(f"serving {options.run} on {host}:{port}", flush=True)

        ended = await run_syncer(
            store,
            options.address,
            _tls(options),
            on_listening=listening,
            stop=_stopped_by_signal(),
            shards=options.shards,
            clock=WatchfulClock(inflicted) if inflicted is not None else None,
        )
        if not ended:
            print("stopped; the run goes on when a syncer is started on this folder again")
            raise SystemExit(STOPPED)
        print("the run has ended")

    asyncio.run(serve())


def _shard(options: argparse.Namespace) -> None:
    _merging_part(f"shard-{options.number}", options.run)
    import asyncio

    from skerry.syncer.sharding.shard import run_shard
    from skerry.wire.channel import TLS, split_address

    host, _ = split_address(options.address)
    if options.advertise:
        split_address(options.advertise)
    tls = _tls(options)
    if host in EVERY_INTERFACE and not options.advertise:
        raise ConfigError(f"islands cannot reach {options.address}; say with --advertise where they can")

    async def serve() -> None:
        ended = await run_shard(
            options.run,
            options.number,
            options.syncer,
            options.address,
            options.advertise,
            tls,
            listening_tls=TLS("", tls.cert, tls.key) if tls is not None and options.any_island else None,
            on_listening=lambda port: print(f"shard {options.number} of {options.run} on port {port}", flush=True),
            stop=_stopped_by_signal(),
        )
        if not ended:
            print("stopped; its fragments wait for another process of this number")
            raise SystemExit(STOPPED)
        print("the run has ended")

    asyncio.run(serve())


def _create(options: argparse.Namespace) -> None:
    import dataclasses

    from skerry.config import load
    from skerry.launch.local import create_job

    config = _with_settings(load(options.config), options.settings, "skerry create CONFIG RUN")
    create_job(dataclasses.replace(config, run=str(options.run)).resolved(), options.run)
    waits = f"training begins when {config.islands.count} islands have joined"
    print(f"made {options.run}; serve it with: skerry syncer {options.run}; {waits}")


def _learner(options: argparse.Namespace) -> None:
    _part(options.name or "learner")
    import dataclasses
    import socket

    from skerry.admin import describe_job
    from skerry.chaos.inflicted import Inflicted
    from skerry.cores import cores
    from skerry.train.island import run_island

    tls = _tls(options)
    config = describe_job(options.address, tls)
    islands = config.islands
    if options.device:
        islands = dataclasses.replace(islands, device=options.device)
    # The job's islands share this machine's cores only if something that knows of all of them says so.
    islands = dataclasses.replace(islands, threads=options.threads or islands.threads or cores())
    config = dataclasses.replace(config, islands=islands)
    name = options.name or f"{socket.gethostname()}-{os.getpid()}"
    inflicted = Inflicted.here(name)
    run_island(
        options.address,
        name,
        config,
        tls,
        keep=options.keep,
        region=options.region,
        cap_mbit=options.cap_mbit,
        seams=inflicted.seams() if inflicted is not None else None,
    )


def _chaos(options: argparse.Namespace) -> None:
    from skerry.chaos.mailbox import ask
    from skerry.chaos.parse import parse_faults

    parse_faults(options.faults)
    print(f"done or planned: {ask(options.run, options.faults)}")


def _close(options: argparse.Namespace) -> None:
    from skerry.admin import close_run

    close_run(_address(options.address), _tls(options))
    print("the run is closing")


def _address(given: str) -> str:
    """An address, or that of the syncer which serves the run folder given in its place."""
    folder = Path(given)
    if not folder.is_dir():
        return given
    try:
        address = (folder / "address").read_text().strip()
    except OSError:
        raise ConfigError(f"no syncer serves {folder}, or it was started long ago: give its host:port") from None
    host, _, port = address.rpartition(":")
    if host in EVERY_INTERFACE:
        raise ConfigError(f"the syncer of {folder} listens on {address}: give the name in its certificate, NAME:{port}")
    return address


def _snapshot(options: argparse.Namespace) -> None:
    from skerry.admin import take_snapshot

    facts = take_snapshot(_address(options.address), _tls(options))
    print(f"snapshot {facts['number']:06d} of step {facts['step']}, {facts['tokens']:,} tokens")
    for name, found in facts["islands"].items():
        if found != "kept":
            print(f"without the inner state of {name}: {found}")


def _restore(options: argparse.Namespace) -> None:
    from skerry.syncer.storage.restore import newest_complete, restore

    if options.islands < 0:
        raise ConfigError(f"--islands must be at least 1, got {options.islands}")
    snapshot = newest_complete(options.source, say=lambda what: print(what, file=sys.stderr))
    facts = restore(snapshot, options.run, options.islands)
    has_job = (options.run / "config.json").exists()
    following = f"skerry resume {options.run}" if has_job else f"skerry syncer {options.run}"
    print(f"made {options.run} from snapshot {facts['number']:06d} of step {facts['step']}; go on with: {following}")


def _resume(options: argparse.Namespace) -> None:
    import dataclasses

    from skerry.launch.local import read_config, run_here, write_config

    if not (options.run / "config.json").exists() and not (options.run / "run.json").exists():
        raise ConfigError(f"{options.run} holds no run of skerry train")
    config = read_config(options.run)
    if (options.run / "result.json").exists():
        raise ConfigError(f"the run in {options.run} has ended")
    moved = dataclasses.replace(config, run=str(options.run)).resolved()
    if moved != config:
        write_config(moved, options.run)
    run_here(moved)


def _export(options: argparse.Namespace) -> None:
    from skerry.syncer.storage.run_folder import read_model
    from skerry.train.validate import save_model

    save_model(options.file, read_model(options.run))
    print(f"wrote {options.file}")


def _plot(options: argparse.Namespace) -> None:
    from skerry.observe import plot_run

    target = options.file or options.run / "loss.png"
    if not plot_run(options.run / "metrics.jsonl", target):
        raise ConfigError(f"no plot: {options.run} has no metrics yet, or matplotlib is missing (pip install skerry[plot])")
    print(f"wrote {target}")


def _plan(options: argparse.Namespace) -> None:
    from skerry.plan.text import island_of, link_of, measured_link, number_of, plan_lines

    parameters = number_of(options.params, "--params")
    tokens = number_of(options.tokens_per_step, "--tokens-per-step")
    link = measured_link(options.measured) if options.measured else link_of(options.link) if options.link else None
    islands = [island_of(text, number, parameters, tokens, link) for number, text in enumerate(options.island)]
    print(plan_lines(parameters, islands))


def _doctor(options: argparse.Namespace) -> None:
    import json

    from skerry.plan.doctor import examine

    if options.connections < 1 or options.seconds <= 0:
        raise ConfigError("--connections must be at least 1 and --seconds more than 0")
    found = examine(_address(options.address), _tls(options), options.connections, options.seconds, print)
    if options.json:
        options.json.write_text(json.dumps(found.to_json(), indent=1) + "\n")
    if not found.well:
        raise SystemExit(1)


def _account(options: argparse.Namespace) -> None:
    from skerry.metrics import MetricsTail
    from skerry.observe import RunStatus, account_lines, account_of, link_lines

    records = MetricsTail(options.run / "metrics.jsonl").read()
    text = account_lines(account_of(records))
    if not text:
        raise ConfigError(f"no account: {options.run} has no records of islands yet")
    status = RunStatus()
    for record in records:
        status.apply(record)
    print(text, link_lines(status), sep="\n")


def _ledger(options: argparse.Namespace) -> None:
    import json

    from skerry.errors import StoreError
    from skerry.observe import audit_run, ledger_lines
    from skerry.syncer.storage.run_folder import read_identity

    sizes = [fragment.numel for fragment in read_identity(options.run).layout.fragments]
    ledger = audit_run(options.run)
    print(json.dumps(ledger.to_json()) if options.json else ledger_lines(ledger, sizes))
    if not ledger.adds_up:
        raise StoreError(f"the ledger of {options.run} does not add up")


def _replay(options: argparse.Namespace) -> None:
    import time

    from skerry.train.recording import first_difference
    from skerry.train.replay import Replay
    from skerry.train.validate import save_model

    if options.against is not None:
        found = first_difference(options.run, options.against)
        print(found or "no difference: one is the beginning of the other, or they are the same")
        return
    if options.outer_steps is not None and options.outer_steps < 0:
        raise ConfigError(f"--outer-steps must be at least 0, got {options.outer_steps}")
    replay = Replay(options.run)
    wanted = len(replay.recording.merges)
    wanted = wanted if options.outer_steps is None else min(wanted, options.outer_steps)
    said = time.monotonic()
    for merged in replay.run(wanted):
        if time.monotonic() - said >= 5.0:
            said = time.monotonic()
            print(f"{replay.done} of {wanted} outer steps, now in round {merged.merge.round}", flush=True)
    if options.write is not None:
        save_model(options.write, replay.model())
        print(f"wrote {options.write}")
    print(f"{replay.done} outer steps came out as they were, bit for bit")


def _validator(options: argparse.Namespace) -> None:
    _part("validator")
    from skerry.train.validate import watch_run

    watch_run(options.run)


def _worker(options: argparse.Namespace) -> None:
    _part(f"worker-{options.rank}")
    from skerry.config import Config, from_json
    from skerry.train.data_parallel import run_worker

    run_worker(options.run, from_json(Config, (options.run / "config.json").read_text()), options.rank, options.port)
