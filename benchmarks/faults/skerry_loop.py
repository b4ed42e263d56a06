"""A Skerry island, with the training loop of the README."""

from __future__ import annotations

import skerry
from faults.replica import Replica


def loop(replica: Replica, address: str) -> None:
    job = replica.job
    learner = skerry.join(address, job.model, job.optimizers, name=replica.name, tokens_per_step=job.step_tokens)
    replica.log.event("joined", step=learner.step)
    step = 0
    while not learner.finished:
        loss = replica.inner_step(learner.step)
        step += 1
        replica.log.step(step, loss)
    replica.log.event("finished", why=str(learner.failure or ""))
    learner.leave(timeout_s=5.0)
