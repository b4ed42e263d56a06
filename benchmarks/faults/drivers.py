"""A driver per system, all with the same commands (start, inject a fault, heal it, stop) and the same queries.

Every system has two replicas, processes with one thread each, and a coordinator: the syncer, the lighthouse, or rank 0. A
process that ends without being told to counts as an exit.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import skerry
from faults.data_parallel_loop import CHECKPOINT_EVERY
from faults.replica import REPLICAS, ROOT, job_config, replica_name
from faults.steps import Step, StepReader, taken_back
from skerry.launch.processes import Child, free_port, skerry_command
from skerry.train.job import build_job

POLL_S = 0.05
START_S = 120.0
STEPS_S = 120.0
FAULTS = ("straggler", "outage", "long outage", "poison", "kill")


class Driver:
    name = ""
    coordinator = ""
    faults: tuple[str, ...] = FAULTS
    waits = True
    """Replicas wait for each other. A fault then costs several steps at least, so few measurements suffice."""

    def __init__(self, folder: Path, python: str) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.python = python
        self.logs = [StepReader(folder / f"{replica_name(index)}.steps.jsonl") for index in range(REPLICAS)]
        self.children: dict[str, Child] = {}
        self.exits: list[str] = []
        self._gone: set[str] = set()

    # ------------------------------------------------------------ commands

    def start(self) -> None:
        """Start everything and return once every replica has taken a few steps."""
        self.start_coordinator()
        for index in range(REPLICAS):
            self.start_replica(index)
        if not self.run_until(lambda: all(len(log.steps()) >= 10 for log in self.logs), START_S):
            raise RuntimeError(f"{self.name} did not start:\n" + "\n".join(c.last_lines() for c in self.children.values()))

    def start_coordinator(self) -> None:
        raise NotImplementedError

    def kill_coordinator(self) -> None:
        self.kill("coordinator")

    def start_replica(self, index: int) -> None:
        raise NotImplementedError

    def kill_replica(self, index: int) -> None:
        self.kill(replica_name(index))

    def slow(self, index: int, how: str | None) -> None:
        """Make a replica a straggler ("busy" or "sleep"), or restore its speed (None)."""
        path = self.folder / f"{replica_name(index)}.slow"
        if how is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(how)

    def poison(self, index: int) -> None:
        (self.folder / f"{replica_name(index)}.nan").touch()

    def start_decoy(self) -> None:
        """Start an unused coordinator, to measure what starting one costs the machine."""

    def kill_decoy(self) -> None:
        if "decoy" in self.children:
            self.kill("decoy")

    def stop(self) -> None:
        for child in self.children.values():
            child.signal(signal.SIGKILL)
        for child in self.children.values():
            child.wait(10.0)

    # ------------------------------------------------------------ time

    def run_for(self, seconds: float) -> None:
        self.run_until(lambda: False, seconds)

    def run_steps(self, index: int, count: int) -> list[Step]:
        """Wait for the next `count` steps of a replica and return them; fewer if it times out."""
        since = time.time()
        self.run_until(lambda: len(self.logs[index].steps(since)) >= count, STEPS_S)
        return self.logs[index].steps(since)[:count]

    def run_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.time() + timeout_s
        while not done():
            if time.time() >= deadline:
                return False
            time.sleep(POLL_S)
            self.tend()
        return True

    def tend(self) -> None:
        """Notice processes that ended, and react as the system's own supervisor would."""
        for name, child in self.children.items():
            if name not in self._gone and child.poll() is not None:
                self._gone.add(name)
                self.exits.append(name)

    # ------------------------------------------------------------ queries

    def took_part(self, index: int, since: float) -> float:
        """When this replica's work first reached the common model after `since`; infinity if not yet."""
        raise NotImplementedError

    def kept(self, index: int, since: float, until: float) -> float:
        """Share of a replica's inner steps in this interval that reached the common model."""
        steps = self.logs[index].steps(since, until)
        return 1 - min(1.0, taken_back(steps) / len(steps)) if steps else 0.0

    def accused(self) -> str:
        """Replicas that the system blames for bad contributions."""
        return ""

    # ------------------------------------------------------------ processes

    def launch(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        paths = {"PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
        child = Child(name, command, self.folder / f"{name}.log", {**paths, **(environment or {})})
        self.children[name] = child
        self._gone.discard(name)
        child.start()

    def launch_replica(self, index: int, system: str, address: str, environment: dict[str, str] | None = None) -> None:
        command = [self.python, "-m", "faults.replica", system, str(self.folder), str(index), address]
        self.launch(replica_name(index), command, environment)

    def kill(self, name: str) -> None:
        self._gone.add(name)
        self.children[name].signal(signal.SIGKILL)
        self.children[name].wait(10.0)


class Skerry(Driver):
    name = "Skerry"
    coordinator = "syncer"
    waits = False

    def __init__(self, folder: Path, python: str) -> None:
        super().__init__(folder, python)
        config = job_config()
        self._run = folder / "run"
        self._decoy = folder / "decoy"
        model = build_job(config).model
        skerry.create(self._run, model, config.sync)
        skerry.create(self._decoy, model, config.sync)
        self._address = f"127.0.0.1:{free_port()}"

    def start_coordinator(self) -> None:
        self.launch("coordinator", skerry_command("syncer", str(self._run), "--address", self._address))

    def start_replica(self, index: int) -> None:
        self.launch_replica(index, "skerry", self._address)

    def start_decoy(self) -> None:
        self.launch("decoy", skerry_command("syncer", str(self._decoy), "--address", "127.0.0.1:0"))

    def took_part(self, index: int, since: float) -> float:
        for line in (self._run / "metrics.jsonl").read_text().splitlines():
            if '"merge"' in line:
                record = json.loads(line)
                if record["at"] >= since and replica_name(index) in record["contributors"]:
                    return float(record["at"])
        return math.inf

    def kept(self, index: int, since: float, until: float) -> float:
        steps = self.logs[index].steps(since, until)
        merges = [entry for at, entry in self._tape("merged") if since <= at <= until]
        given = [share["steps"] for merge in merges for share in merge["shares"] if share["learner"] == replica_name(index)]
        return min(1.0, sum(given) / job_config().sync.fragments / len(steps)) if steps else 0.0

    def accused(self) -> str:
        found = [entry for _, entry in self._tape("refused", "unhealthy", "quarantined")]
        return ", ".join(sorted({entry["learner"] for entry in found if "finite" in entry["reason"]}))

    def _tape(self, *kinds: str) -> list[tuple[float, dict[str, Any]]]:
        marks = ", ".join("?" for _ in kinds)
        tape = sqlite3.connect(f"file:{self._run / 'tape.sqlite'}?mode=ro", uri=True)
        rows = tape.execute(f"SELECT at, data FROM tape WHERE kind IN ({marks}) ORDER BY seq", kinds).fetchall()
        tape.close()
        return [(at, json.loads(data)) for at, data in rows]


class Torchft(Driver):
    """torchft's examples run each replica group under torchrun, which restarts ended processes."""

    name = "torchft DiLoCo"
    coordinator = "lighthouse"
    quorum_retries = 0
    """The default of 0 ends a replica when one call to the lighthouse fails."""

    def __init__(self, folder: Path, python: str) -> None:
        super().__init__(folder, python)
        self._port = free_port()

    def _lighthouse(self, port: int) -> list[str]:
        return [
            str(Path(self.python).parent / "torchft_lighthouse"),
            "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000",
        ]  # fmt: skip

    def start_coordinator(self) -> None:
        self.launch("coordinator", self._lighthouse(self._port))

    def start_replica(self, index: int) -> None:
        environment = {"TORCHFT_QUORUM_RETRIES": str(self.quorum_retries)}
        self.launch_replica(index, "torchft", f"127.0.0.1:{self._port}", environment)

    def start_decoy(self) -> None:
        self.launch("decoy", self._lighthouse(free_port()))

    def tend(self) -> None:
        known = len(self.exits)
        super().tend()
        for index in range(REPLICAS):
            if replica_name(index) in self.exits[known:]:
                self.start_replica(index)

    def took_part(self, index: int, since: float) -> float:
        found = [event["at"] for event in self.logs[index].events("synced", since) if event["participants"] == REPLICAS]
        return min(found, default=math.inf)


class TorchftRetries(Torchft):
    """The same with torchft's setting for a lighthouse that goes away."""

    name = "torchft, 10 quorum retries"
    faults = ("outage", "long outage")
    quorum_retries = 10


class DataParallel(Driver):
    """Like torchrun: when a rank ends, all ranks are stopped and restarted from the last checkpoint."""

    name = f"DDP, checkpoint every {CHECKPOINT_EVERY} steps"
    coordinator = "rank 0"

    def __init__(self, folder: Path, python: str) -> None:
        super().__init__(folder, python)
        self._address = ""
        self._held: set[int] = set()
        """Ranks whose machine is down; the group cannot start without them."""

    def start_coordinator(self) -> None:
        self._held.discard(0)
        if self.children:
            self._restart()

    def kill_coordinator(self) -> None:
        self.kill_replica(0)

    def start_replica(self, index: int) -> None:
        self._held.discard(index)
        if len(self.children) < REPLICAS:
            self._address = self._address or f"127.0.0.1:{free_port()}"
            self.launch_replica(index, "dp", self._address)
        else:
            self._restart()

    def kill_replica(self, index: int) -> None:
        self._held.add(index)
        self.kill(replica_name(index))

    def tend(self) -> None:
        super().tend()
        if self._gone and not self._held and len(self.children) == REPLICAS:
            self._restart()

    def _restart(self) -> None:
        if self._held:
            return
        for name in self.children:
            self.kill(name)
        self._address = f"127.0.0.1:{free_port()}"
        for index in range(REPLICAS):
            self.launch_replica(index, "dp", self._address)

    def took_part(self, index: int, since: float) -> float:
        return min((step.at for step in self.logs[index].steps(since)), default=math.inf)
