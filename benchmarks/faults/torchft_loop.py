"""A single-process replica group of torchft's DiLoCo, set up as in its examples: synchronous quorum, gloo, HTTP recovery."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from faults.replica import Replica


def loop(replica: Replica, address: str) -> None:
    # Optional: only this benchmark needs torchft.
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    job, sync = replica.job, replica.config.sync
    (inner,) = job.optimizers
    outer = torch.optim.SGD(job.model.parameters(), lr=sync.outer_lr, momentum=sync.outer_momentum, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state: dict[str, Any]) -> None:
        job.model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    def state_dict() -> dict[str, Any]:
        return {"model": job.model.state_dict(), "inner": inner.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=replica.name,
        hostname="127.0.0.1",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{address}",
        timeout=timedelta(seconds=30),
        use_async_quorum=False,
    )
    step = since_sync = 0
    with DiLoCo(manager, [job.model], inner, outer, sync_every=sync.every):
        while True:
            outer_step = manager.current_step()
            loss = replica.inner_step(step)
            step += 1
            since_sync += 1
            if since_sync == sync.every:
                since_sync = 0
                if manager.current_step() == outer_step:
                    step -= sync.every  # not committed: the model is back to where it was before these steps
                    replica.log.event("discarded")
                else:
                    replica.log.event("synced", participants=manager.num_participants(), outer_step=manager.current_step())
            replica.log.step(step, loss)
