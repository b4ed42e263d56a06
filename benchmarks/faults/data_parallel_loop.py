"""A rank of plain data-parallel training that saves a checkpoint now and then and goes on from the last one when started."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from faults.replica import REPLICAS, Replica
from skerry.train.job import Job

CHECKPOINT_EVERY = 50


def loop(replica: Replica, address: str) -> None:
    host, port = address.split(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    job = replica.job
    checkpoint = replica.folder / "checkpoint.safetensors"
    dist.init_process_group("gloo", rank=replica.index, world_size=REPLICAS)
    step = _restore(checkpoint, job)
    job.forward = DistributedDataParallel(job.forward, gradient_as_bucket_view=True)
    while True:
        loss = replica.inner_step(step)
        step += 1
        replica.log.step(step, loss)
        if replica.index == 0 and step % CHECKPOINT_EVERY == 0:
            _save(checkpoint, job, step)


def _save(path: Path, job: Job, step: int) -> None:
    tensors = {f"model.{name}": parameter.detach() for name, parameter in job.model.named_parameters()}
    for place, optimizer in enumerate(job.optimizers):
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{place}.{index}.{key}"] = value
    beside = path.with_suffix(".new")
    save_file(tensors, beside, metadata={"step": str(step)})
    beside.rename(path)


def _restore(path: Path, job: Job) -> int:
    """Put the last checkpoint into the job; returns its step, or 0 if there is none."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as saved:
        for name, parameter in job.model.named_parameters():
            parameter.detach().copy_(saved.get_tensor(f"model.{name}"))
        for place, optimizer in enumerate(job.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for key in saved.keys():  # noqa: SIM118 (not a dict)
                kind, *where = key.split(".")
                if kind == "optimizer" and int(where[0]) == place:
                    optimizer.state[parameters[int(where[1])]][where[2]] = saved.get_tensor(key)
        return int(saved.metadata()["step"])
