"""Train a job with plain data-parallel training (DDP), the baseline for decoupled runs."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from skerry.config import Config
from skerry.metrics import MetricsWriter
from skerry.train.job import build_job, load_weights_file, lr_factor, pick_device
from skerry.train.validate import finish, validate

METRICS_EVERY_S = 1.0


def run_worker(folder: Path, config: Config, rank: int, port: int) -> None:
    """Run one of `islands.count` workers. Together they read the same samples per step as the islands would."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=_loopback())
    world = config.islands.count
    device = pick_device(config.islands.device)
    gpu_each = device.type == "cuda" and device.index is None and torch.cuda.device_count() >= world
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    job = build_job(dataclasses.replace(config, islands=dataclasses.replace(config.islands, device=str(device))))
    if config.init:
        load_weights_file(job.model, config.init)
    backend = "nccl" if gpu_each else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    try:
        job.forward = DistributedDataParallel(job.forward, gradient_as_bucket_view=True)
        metrics = MetricsWriter(folder / "metrics.jsonl")
        steps = -(-config.train.tokens // (job.step_tokens * world))
        started, report_at, validate_at = time.time(), 0.0, config.eval.every_tokens
        validating_s = 0.0
        for step in range(steps):
            tokens = step * job.step_tokens * world
            job.set_lr(lr_factor(tokens / config.train.tokens, config.train))
            loss = job.backward(*job.batch(step, rank))
            job.apply()
            tokens += job.step_tokens * world
            if time.time() >= report_at:
                report_at = time.time() + METRICS_EVERY_S
                _report(metrics, config, rank, step + 1, tokens, float(loss), started)
            if rank == 0 and tokens >= validate_at and step + 1 < steps:
                validate_at += config.eval.every_tokens
                before = time.time()
                found = validate(job.model, job.corpus, config.model.context, config.eval.tokens, job.device)
                validating_s += time.time() - before
                metrics.write("validation", loss=found.loss, tokens=tokens, step=step + 1)
        dist.barrier()
        seconds = time.time() - started - validating_s  # islands do not wait for validation either
        if rank == 0:
            tokens = steps * job.step_tokens * world
            _report(metrics, config, rank, steps, tokens, float(loss), started, phase="ended")
            finish(folder, config, job.model, job.corpus, job.device, tokens=tokens, step=steps, seconds=seconds)
        metrics.close()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _report(
    metrics: MetricsWriter,
    config: Config,
    rank: int,
    step: int,
    tokens: int,
    loss: float,
    started: float,
    phase: str = "running",
) -> None:
    world = config.islands.count
    if rank == 0:
        metrics.write(
            "run", phase=phase, algorithm="dp", step=step, tokens=tokens, budget_tokens=config.train.tokens,
            merges=0, live=world, expected=world,
        )  # fmt: skip
    own = tokens // world
    rate = own / max(time.time() - started, 1e-9)
    metrics.write(
        "island", island=f"island-{rank}", state="training" if phase == "running" else "left", step=step, tokens=own,
        tokens_per_s=rate, loss=loss,
    )  # fmt: skip


def _loopback() -> str:
    return "lo0" if os.uname().sysname == "Darwin" else "lo"
