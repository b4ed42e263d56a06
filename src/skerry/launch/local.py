"""Run a whole job on this machine: syncer, islands and validator as supervised processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.chaos.driver import Driver
from skerry.chaos.inflicted import ENVIRONMENT
from skerry.chaos.plan import Plan
from skerry.chaos.proxy import LinkProxy
from skerry.chaos.recorder import Recorder
from skerry.config import Config, from_json, to_json
from skerry.cores import cores
from skerry.durable import DISK
from skerry.errors import ConfigError, RunFailed, StoreError
from skerry.launch.processes import Child, free_port, skerry_command
from skerry.launch.supervisor import Supervisor, Worker
from skerry.wire.channel import TLS, split_address

if TYPE_CHECKING:
    from skerry.data.corpus import Corpus
    from skerry.models.gpt import GPT


def run_here(config: Config, plan: Plan | None = None, proxy: bool = False) -> Path:
    """Train as configured on this machine and return the run folder. Ctrl-C stops all processes; the run can be resumed.

    `plan` lists faults to inject. Link faults need a proxy, which is started if the plan needs it or `proxy` is set.
    """
    config = config.resolved()
    plan = plan or Plan()
    if config.algorithm == "dp" and (plan.timed(config.islands.count) or proxy):
        raise ConfigError("chaos needs islands and a syncer; algorithm 'dp' has neither")
    if config.islands.shards and (proxy or plan.needs_proxy):
        raise ConfigError("link faults do not work with islands.shards: the proxy only covers links to the syncer")
    with _folder_for(config) as (folder, resumed):
        if config.algorithm == "dp":
            check_job(config)
            _make(folder, config)
        elif not resumed:
            create_job(config, folder)
        _run_in(folder, config, resumed, plan, proxy)
    return folder


def _run_in(folder: Path, config: Config, resumed: bool, plan: Plan, proxy: bool) -> None:
    _print_start(config, folder, resumed)
    supervisor = Supervisor(config, folder)
    if config.algorithm == "dp":
        supervisor.workers = _data_parallel_workers(config, folder)
        supervisor.run()
        return
    address = f"127.0.0.1:{free_port()}"
    names = [f"island-{index}" for index in range(config.islands.count)]
    recorder = Recorder(address, TLS.from_environment(), supervisor.metrics)
    links = LinkProxy(names, split_address(address), config.train.seed) if proxy or plan.needs_proxy else None
    faults = plan.timed(config.islands.count)
    supervisor.driver = Driver(faults, len(names), folder, supervisor, supervisor.metrics, recorder, links)
    supervisor.workers = _parts(config, folder, address, {name: links.address(name) if links else address for name in names})
    supervisor.run()


def _parts(config: Config, folder: Path, address: str, seen_by: dict[str, str]) -> list[Worker]:
    """The syncer, its shards, the islands and the validator. `seen_by` maps each island to its address of the syncer."""
    one_thread = {"OMP_NUM_THREADS": "1"}
    chaos = {ENVIRONMENT: str(folder.resolve() / "chaos")}

    def part(name: str, environment: dict[str, str], *arguments: str) -> Worker:
        child = Child(name, skerry_command(*arguments), folder / "logs" / f"{name}.log", environment)
        return Worker(child, config.islands.restarts)

    threads, gpus = _threads_for_island(config), _gpus(config)
    keep = ("--keep", str(folder / "islands"))
    regions, shards = config.islands.regions, config.islands.shards

    def island(index: int, name: str, seen: str) -> Worker:
        region = ("--region", regions[index % len(regions)]) if regions else ()
        one_gpu = {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}
        few_threads = ("--threads", threads["OMP_NUM_THREADS"])
        return part(name, {**threads, **one_gpu, **chaos}, "learner", seen, "--name", name, *few_threads, *keep, *region)

    return [
        part("syncer", {**one_thread, **chaos}, "syncer", str(folder), "--address", address, "--shards", str(shards)),
        *(part(f"shard-{n}", one_thread, "shard", str(folder), address, "--number", str(n)) for n in range(shards)),
        *(island(index, name, seen) for index, (name, seen) in enumerate(seen_by.items())),
        part("validator", one_thread, "validator", str(folder)),
    ]


def _data_parallel_workers(config: Config, folder: Path) -> list[Worker]:
    """Data-parallel workers without restarts: if one dies, all fail."""
    port = free_port()
    workers = []
    for rank in range(config.islands.count):
        command = skerry_command("worker", str(folder), str(rank), str(port))
        log = folder / "logs" / f"island-{rank}.log"
        workers.append(Worker(Child(f"island-{rank}", command, log, _threads_for_island(config)), restarts=0))
    return workers


def check_job(config: Config) -> tuple[Corpus, GPT]:
    """Load the corpus and build the initial model. Also the quickest check of the settings."""
    from skerry.data.corpus import load_corpus
    from skerry.models.gpt import build_gpt
    from skerry.syncer.extensions import check_extensions
    from skerry.train.job import load_weights_file, pick_device

    check_extensions(config.sync)
    pick_device(config.islands.device)
    corpus = load_corpus(config.data, config.model.context)
    model = build_gpt(config.model, corpus.vocab, config.train.seed)
    if config.init:
        load_weights_file(model, config.init)
    return corpus, model


def create_job(config: Config, folder: Path) -> None:
    """Create a run folder: settings, initial weights, an empty tape."""
    from skerry.syncer.storage.create import create_run
    from skerry.syncer.storage.run_folder import is_run
    from skerry.tensors.model import model_tensors

    if is_run(folder):
        raise StoreError(f"{folder} already holds a run")  # before its settings are overwritten
    _, model = check_job(config)
    # Settings first: a folder with settings but no run is an interrupted creation, which is then repeated.
    _make(folder, config)
    create_run(folder, model_tensors(model), config.sync, to_json(config))


def _make(folder: Path, config: Config) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder)


def write_config(config: Config, folder: Path) -> None:
    DISK.write_durably(folder / "config.json", (to_json(config) + "\n").encode())


def read_config(folder: Path) -> Config:
    """Read the job's settings. If config.json is missing or damaged, restore it from the copy in run.json."""
    from skerry.syncer.storage.run_folder import read_identity

    path = folder / "config.json"
    try:
        return typing.cast(Config, from_json(Config, path.read_text()))
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        with contextlib.suppress(StoreError):
            if job_json := read_identity(folder).job_json:
                config = typing.cast(Config, from_json(Config, job_json))
                write_config(config, folder)
                print(f"{path} was missing or damaged; restored it from run.json", flush=True)
                return config
        raise ConfigError(f"{path}: {error}") from None


@contextlib.contextmanager
def _folder_for(config: Config) -> Iterator[tuple[Path, bool]]:
    """Lock and yield the folder to use, and whether it holds an unfinished run of the same job to resume."""
    wanted = Path(config.run)
    for number in range(1, 10_000):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        with _claimed(folder):
            if not (folder / "result.json").exists():
                yield folder, _can_resume(folder, config)
                return
    raise ConfigError(f"{wanted} and its numbered successors are all taken")


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunFailed(f"{folder} is already run by another skerry train") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty
    finally:
        os.close(descriptor)


def _can_resume(folder: Path, config: Config) -> bool:
    """Whether the folder holds a run of this job to resume. Remains of an interrupted creation are removed."""
    from skerry.syncer.storage.run_folder import is_run

    exists = config.algorithm != "dp" and is_run(folder)
    if not (folder / "config.json").exists() and not exists:
        return False
    if read_config(folder) != config:
        raise ConfigError(
            f"{folder} holds an unfinished run with other settings; finish it, remove it, or choose another folder with --run"
        )
    if exists:
        return True
    for left in folder.iterdir():
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()
    return False


def _gpus(config: Config) -> list[str]:
    """GPUs to assign to islands round-robin. Empty if there is at most one, or the settings name one."""
    import torch

    from skerry.train.job import pick_device

    device = pick_device(config.islands.device)
    count = torch.cuda.device_count() if device.type == "cuda" and device.index is None else 0
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (seen or [str(number) for number in range(count)])[:count] if count > 1 else []


def _threads_for_island(config: Config) -> dict[str, str]:
    from skerry.train.job import island_threads

    return {"OMP_NUM_THREADS": str(island_threads(config))}


def _print_start(config: Config, folder: Path, resumed: bool) -> None:
    from skerry.train.job import island_threads, pick_device

    count, device = config.islands.count, pick_device(config.islands.device)
    where = f"{count} islands x {island_threads(config)} thread{'s' if island_threads(config) > 1 else ''} on {cores()} cores"
    if device.type == "cpu" and count * island_threads(config) > cores():
        where += " (islands share cores, so each is slower than alone)"
    if device.type == "cuda":
        where = f"{count} islands on {device}" + (f", {len(gpus)} GPUs round-robin" if (gpus := _gpus(config)) else "")
    print(f"{'resuming' if resumed else 'starting'} {config.algorithm} run in {folder}: {where}", flush=True)
