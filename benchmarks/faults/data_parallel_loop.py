"""A rank of plain data-parallel training that saves checkpoints and starts from the last one."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from faults.checkpoint import restore, save, state_of
from faults.replica import REPLICAS, Replica

CHECKPOINT_EVERY = 50


def loop(replica: Replica, address: str) -> None:
    host, port = address.split(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    job = replica.job
    checkpoint = replica.folder / "checkpoint.safetensors"
    dist.init_process_group("gloo", rank=replica.index, world_size=REPLICAS)
    step = restore(checkpoint, job)
    job.forward = DistributedDataParallel(job.forward, gradient_as_bucket_view=True)
    while True:
        loss = replica.inner_step(step)
        step += 1
        replica.log.step(step, loss)
        if replica.index == 0 and step % CHECKPOINT_EVERY == 0:
            save(checkpoint, state_of(job), step)
