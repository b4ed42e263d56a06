"""One island of benchmarks/wan.py: trains alone, data-parallel or with Skerry, and logs each step.

    loop.py WAY INDEX COUNT ADDRESS LOG JOB

WAY is `alone`, `dp` (DistributedDataParallel over gloo, gradients in 16 bits), or `skerry`.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from skerry.config import Config, from_json
from skerry.train.job import build_job


def main() -> None:
    way, index, count, address, log, job_file = sys.argv[1:]
    config: Config = from_json(Config, Path(job_file).read_text())
    torch.set_num_threads(1)
    job = build_job(config)
    torch.set_num_threads(1)
    job.set_lr(1.0)
    learner = None
    if way == "dp":
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        os.environ["GLOO_SOCKET_IFNAME"] = "net0"
        host, port = address.split(":")
        store = dist.TCPStore(host, int(port), int(count), is_master=index == "0", timeout=timedelta(seconds=600))
        dist.init_process_group("gloo", store=store, rank=int(index), world_size=int(count), timeout=timedelta(seconds=600))
        job.forward = torch.nn.parallel.DistributedDataParallel(job.model)
        job.forward.register_comm_hook(None, fp16_compress_hook)
    elif way == "skerry":
        import skerry

        learner = skerry.join(
            address, job.model, job.optimizers, name=f"island-{index}", tokens_per_step=job.step_tokens, timeout_s=300
        )
    with open(log, "w", buffering=1) as out:
        step = 0
        while learner is None or not learner.finished:
            job.backward(*job.batch(step, int(index)))
            job.apply()
            step += 1
            out.write(f"{time.monotonic()} {step}\n")


if __name__ == "__main__":
    main()
