"""One rank of data-parallel training, as a process that starts from the last checkpoint.

    python -m time_to_loss.worker ORDERS.json RANK

A step always uses the whole global batch. If there are fewer ranks than parts of it, a rank computes several parts at once.
Rank 0 writes checkpoints, and copies of the weights for validation, in a thread. SIGUSR1 makes it write a last checkpoint and
end, for a planned restart.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from faults.checkpoint import restore, save, state_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from skerry.config import Config, from_json
from skerry.core.leases.ranges import Range
from skerry.launch.processes import die_with_parent
from skerry.metrics import MetricsWriter
from skerry.train.job import Job, build_job, lr_factor
from time_to_loss.curves import shares_of, weight_of, young_daly_s

PROGRESS_EVERY_S = 1.0
CHECKPOINT_FLOOR_S = 1.0
"""Minimum interval. A failure costs half of it on average, which is little compared with a start-up of seconds."""


@dataclass(frozen=True)
class Orders:
    """Settings from the launcher for all ranks of one start."""

    folder: str
    job_json: str
    """The job. Its islands.count is the number of parts of a global batch."""
    port: int
    world: int
    mtbf_s: float
    """Mean time between failures of the whole job."""
    sample_every_s: float


class Saver:
    """Writes files in a thread, so that training does not wait for them."""

    def __init__(self) -> None:
        self._orders: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def do(self, order: Callable[[], None]) -> None:
        self._orders.put(order)

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            order()


class Keeper:
    """Checkpoints, copies of the weights, and a log of both, for rank 0."""

    def __init__(self, folder: Path, job: Job, orders: Orders) -> None:
        self.log = MetricsWriter(folder / "log.jsonl")
        self._folder, self._job, self._orders = folder, job, orders
        self._saver = Saver()
        self._step_tokens = job.step_tokens * job.config.islands.count
        self._checkpoint_every_s = 0.0
        self._checkpoint_at = self._sample_at = self._progress_at = 0.0

    def begun(self, step: int) -> None:
        self.log.write("started", step=step, world=self._orders.world)
        if step == 0:
            self._sample(step)

    def stepped(self, step: int, loss: Tensor) -> None:
        now = time.monotonic()
        if not self._checkpoint_every_s:
            self._measure_checkpoint(step)
        elif now >= self._checkpoint_at:
            self._checkpoint_at = now + self._checkpoint_every_s
            tensors = copied(state_of(self._job))
            self._saver.do(lambda: save(self._folder / "checkpoint.safetensors", tensors, step))
        if now >= self._sample_at:
            self._sample(step)
        if now >= self._progress_at:
            self._progress_at = now + PROGRESS_EVERY_S
            self.log.write("progress", step=step, tokens=step * self._step_tokens, loss=float(loss))

    def close(self, step: int, finished: bool) -> None:
        if finished:
            self._sample(step)
        self._saver.close()
        if not finished:
            save(self._folder / "checkpoint.safetensors", state_of(self._job), step)
        self.log.write("ended" if finished else "stopped", step=step)
        self.log.close()

    def _measure_checkpoint(self, step: int) -> None:
        """Write the first checkpoint synchronously: its cost determines the interval. Later ones run in the thread."""
        started = time.monotonic()
        save(self._folder / "checkpoint.safetensors", copied(state_of(self._job)), step)
        cost_s = time.monotonic() - started
        self._checkpoint_every_s = young_daly_s(cost_s, self._orders.mtbf_s, CHECKPOINT_FLOOR_S)
        self._checkpoint_at = time.monotonic() + self._checkpoint_every_s
        self.log.write("checkpoints", cost_s=cost_s, every_s=self._checkpoint_every_s)

    def _sample(self, step: int) -> None:
        self._sample_at = time.monotonic() + self._orders.sample_every_s
        at, weights = time.time(), copied({name: p.detach() for name, p in self._job.model.named_parameters()})
        path = self._folder / "samples" / f"{at:.3f}.safetensors"

        def write() -> None:
            save(path, weights, step)
            self.log.write("sample", at=at, file=path.name, tokens=step * self._step_tokens)

        self._saver.do(write)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def run_rank(orders: Orders, rank: int) -> None:
    asked_to_stop = False

    def on_stop(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGUSR1, on_stop)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(orders.port), GLOO_SOCKET_IFNAME=loopback)
    config: Config = from_json(Config, orders.job_json)
    folder, shares = Path(orders.folder), config.islands.count
    job = build_job(config)
    step = restore(folder / "checkpoint.safetensors", job)
    dist.init_process_group("gloo", rank=rank, world_size=orders.world)
    if orders.world > 1:
        job.forward = DistributedDataParallel(job.forward, gradient_as_bucket_view=True)
    mine = shares_of(rank, orders.world, shares)
    weight = weight_of(len(mine), orders.world, shares)
    batch, global_tokens = config.train.batch, job.step_tokens * shares
    steps = -(-config.train.tokens // global_tokens)
    keeper = Keeper(folder, job, orders) if rank == 0 else None
    dist.barrier()
    if keeper:
        keeper.begun(step)
    while step < steps and not asked_to_stop:
        job.set_lr(lr_factor(step * global_tokens / config.train.tokens, config.train))
        inputs, targets = job.read([Range("", (step * shares + share) * batch, batch) for share in mine])
        with job.autocast():
            loss = job.forward(inputs, targets)
        (loss * weight).backward()
        job.apply()
        step += 1
        if keeper:
            keeper.stepped(step, loss.detach())
    if keeper:
        keeper.close(step, finished=step >= steps)
    if step >= steps:
        dist.barrier()  # rank 0 ends last, so that no rank takes its end for a failure
        dist.destroy_process_group()


def main() -> None:
    die_with_parent()
    orders: Orders = from_json(Orders, Path(sys.argv[1]).read_text())
    run_rank(orders, int(sys.argv[2]))


if __name__ == "__main__":
    main()
