"""A whole run on this machine: a syncer, its islands and a validator as processes, watched and started again when they die."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from skerry.config import Config, from_json, to_json
from skerry.errors import ConfigError, RunFailed
from skerry.launch.processes import STOP_S, Child, free_port, skerry_command
from skerry.metrics import MetricsTail, MetricsWriter
from skerry.observe import RunStatus, open_view, plot_run, summary

if TYPE_CHECKING:
    from skerry.data.corpus import Corpus
    from skerry.models.gpt import GPT

POLL_S = 0.2
RESTART_PAUSE_S = 0.5
DISMISS_S = 5.0
HEALTHY_S = 60.0
"""A part that ran this long before it died is given its restarts anew."""


def run_here(config: Config) -> Path:
    """Train as configured, on this machine, and return the run folder. Ctrl-C stops everything and can be resumed."""
    config = config.resolved()
    folder, resumed = _folder_for(config)
    if config.algorithm == "dp":
        check_job(config)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(to_json(config) + "\n")
    elif not resumed:
        create_job(config, folder)
    _say_what_starts(config, folder, resumed)
    supervisor = Supervisor(config, folder)
    supervisor.workers = (_data_parallel_workers if config.algorithm == "dp" else _parts)(config, folder)
    supervisor.run()
    return folder


def _parts(config: Config, folder: Path) -> list[Worker]:
    """A syncer, its islands and a validator."""
    address = f"127.0.0.1:{free_port()}"
    one_thread = {"OMP_NUM_THREADS": "1"}

    def part(name: str, environment: dict[str, str], *arguments: str) -> Worker:
        child = Child(name, skerry_command(*arguments), folder / "logs" / f"{name}.log", environment)
        return Worker(child, config.islands.restarts)

    names = [f"island-{index}" for index in range(config.islands.count)]
    return [
        part("syncer", one_thread, "syncer", str(folder), "--address", address),
        *(part(name, _threads_for_island(config), "learner", address, "--name", name) for name in names),
        part("validator", one_thread, "validator", str(folder)),
    ]


def _data_parallel_workers(config: Config, folder: Path) -> list[Worker]:
    """Data-parallel workers live and die together, so none is started again."""
    port = free_port()
    workers = []
    for rank in range(config.islands.count):
        command = skerry_command("worker", str(folder), str(rank), str(port))
        log = folder / "logs" / f"island-{rank}.log"
        workers.append(Worker(Child(f"island-{rank}", command, log, _threads_for_island(config)), restarts=0))
    return workers


def check_job(config: Config) -> tuple[Corpus, GPT]:
    """The corpus and the initial model, which is also the quickest way to find out whether the settings make sense."""
    from skerry.data.corpus import load_corpus
    from skerry.models.gpt import build_gpt
    from skerry.train.job import load_weights_file, pick_device

    pick_device(config.islands.device)
    corpus = load_corpus(config.data, config.model.context)
    model = build_gpt(config.model, corpus.vocab, config.train.seed)
    if config.init:
        load_weights_file(model, config.init)
    return corpus, model


def create_job(config: Config, folder: Path) -> None:
    """Make a run folder: initial weights, settings, an empty tape."""
    from skerry.core.tensors import model_tensors
    from skerry.syncer.store import create_run

    _, model = check_job(config)
    folder.mkdir(parents=True, exist_ok=True)
    # First: a folder with settings but no run is one whose making was cut short, and is made anew.
    (folder / "config.json").write_text(to_json(config) + "\n")
    create_run(folder, model_tensors(model), config.sync, to_json(config))


def _folder_for(config: Config) -> tuple[Path, bool]:
    """The folder to use, and whether an unfinished run of the same job goes on in it."""
    wanted = Path(config.run)
    for number in range(1, 10_000):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if not (folder / "config.json").exists():
            return folder, False
        if (folder / "result.json").exists():
            continue
        before: Config = from_json(Config, (folder / "config.json").read_text())
        if before == config and config.algorithm != "dp" and (folder / "run.json").exists():
            return folder, True
        if before == config:
            shutil.rmtree(folder)
            return folder, False
        raise ConfigError(
            f"{folder} holds an unfinished run with other settings; finish it, remove it, or give --run another folder"
        )
    raise ConfigError(f"{wanted} and its numbered followers are all taken")


def _threads_for_island(config: Config) -> dict[str, str]:
    from skerry.train.job import island_threads

    return {"OMP_NUM_THREADS": str(island_threads(config))}


def _say_what_starts(config: Config, folder: Path, resumed: bool) -> None:
    from skerry.train.job import cores, island_threads, pick_device

    count, device = config.islands.count, pick_device(config.islands.device)
    where = f"{count} islands x {island_threads(config)} thread{'s' if island_threads(config) > 1 else ''} on {cores()} cores"
    if device.type == "cpu" and count * island_threads(config) > cores():
        where += " (they share cores, so each is slower than it would be alone)"
    if device.type == "cuda":
        where = f"{count} islands on {device}"
    print(f"{'resuming' if resumed else 'starting'} {config.algorithm} run in {folder}: {where}", flush=True)


@dataclass
class Worker:
    child: Child
    restarts: int
    used: int = 0
    started_at: float = 0.0
    start_again_at: float | None = None
    done: bool = False


class Supervisor:
    def __init__(self, config: Config, folder: Path) -> None:
        self.workers: list[Worker] = []
        self._config = config
        self._folder = folder
        self._metrics = MetricsWriter(folder / "metrics.jsonl")
        self._interrupted = 0
        self._ended_at: float | None = None

    def run(self) -> None:
        status = RunStatus(self._folder.name)
        status.algorithm = self._config.algorithm
        tail = MetricsTail(self._folder / "metrics.jsonl")
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        view = open_view(sys.stdout)
        try:
            for worker in self.workers:
                self._start(worker)
            while not all(worker.done for worker in self.workers) and not self._interrupted:
                time.sleep(POLL_S)
                self._look_after()
                for record in tail.read():
                    status.apply(record)
                view.update(status)
        finally:
            self._stop_all()
            for record in tail.read():
                status.apply(record)
            view.update(status)
            view.close()
            self._metrics.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._interrupted:
            again = "" if self._config.algorithm == "dp" else "; the same command goes on from here"
            print(f"stopped{again}: {self._folder}", flush=True)
            raise SystemExit(130)
        if plot_run(self._folder / "metrics.jsonl", self._folder / "loss.png"):
            print(f"loss curves: {self._folder / 'loss.png'}")
        view.say(summary(status))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._interrupted += 1
        if self._interrupted > 1:
            for worker in self.workers:
                worker.child.signal(signal.SIGKILL)

    def _start(self, worker: Worker) -> None:
        worker.child.start()
        worker.started_at = time.monotonic()
        worker.start_again_at = None
        if worker.used:
            self._metrics.write("event", what=f"{'syncer ' if worker.child.name == 'syncer' else ''}restarted",
                                island=worker.child.name, detail=f"pid {worker.child.pid}")  # fmt: skip

    def _look_after(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if worker.done:
                continue
            if worker.start_again_at is not None:
                if now >= worker.start_again_at:
                    self._start(worker)
                continue
            exit_status = worker.child.poll()
            if exit_status == 0:
                worker.done = True
            elif exit_status is not None:
                self._died(worker, exit_status, now)
        self._dismiss_islands(now)

    def _dismiss_islands(self, now: float) -> None:
        """Once the run has ended and the syncer is gone, an island that was just starting again has nowhere to go."""
        if self._ended_at is None:
            if not any(worker.done and worker.child.name == "syncer" for worker in self.workers):
                return
            self._ended_at = now
        for worker in self.workers:
            if worker.done or not worker.child.name.startswith("island-"):
                continue
            if worker.start_again_at is not None or now - self._ended_at > DISMISS_S:
                worker.child.stop(timeout_s=1.0)
                worker.done = True

    def _died(self, worker: Worker, exit_status: int, now: float) -> None:
        how = f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"
        killed = "syncer killed" if worker.child.name == "syncer" else "killed"
        self._metrics.write("event", what=killed, island=worker.child.name, detail=how)
        if now - worker.started_at > HEALTHY_S:
            worker.used = 0
        if worker.used >= worker.restarts:
            raise RunFailed(
                f"{worker.child.name} ended with {how}"
                + (f" after {worker.used} restarts" if worker.used else "")
                + f"; the end of its log:\n{worker.child.last_lines()}"
            )
        worker.used += 1
        worker.start_again_at = now + RESTART_PAUSE_S

    def _stop_all(self) -> None:
        """Islands leave first, while there is still a syncer to take leave of."""
        for last in (False, True):
            group = [worker for worker in self.workers if (worker.child.name == "syncer") == last]
            for worker in group:
                worker.child.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
            for worker in group:
                worker.child.stop(max(0.1, deadline - time.monotonic()))
