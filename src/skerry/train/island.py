"""One island of a job: an ordinary training loop with `skerry.join` in it."""

from __future__ import annotations

import logging
import math
import signal
import time
from types import FrameType

from skerry.config import Config
from skerry.errors import RunFailed
from skerry.learner.join import join
from skerry.learner.learner import Learner
from skerry.learner.seams import Seams
from skerry.train.job import build_job, lr_factor
from skerry.wire.channel import TLS

log = logging.getLogger("skerry.island")

REPORT_EVERY_S = 0.5
COLD_STEPS = 20
"""Warm-up steps after joining a running run without optimizer state."""


def run_island(
    address: str,
    name: str,
    config: Config,
    tls: TLS | None = None,
    *,
    keep: str | None = None,
    region: str = "",
    cap_mbit: float | None = None,
    seams: Seams | None = None,
) -> None:
    job = build_job(config, region)
    learner = join(
        address,
        job.model,
        job.optimizers,
        name=name,
        tokens_per_step=job.step_tokens,
        tls=tls,
        keep=keep,
        region=region,
        connections=config.islands.connections,
        cap_mbit=config.islands.cap_mbit if cap_mbit is None else cap_mbit,
        seams=seams,
    )
    where = (learner.slot, learner.step, learner.optimizer_state, job.device)
    log.info("%s joined in slot %d at step %d with optimizer state %s, on %s", name, *where)
    asked_to_stop = False

    def on_terminate(number: int, frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True
        learner.stop()

    signal.signal(signal.SIGTERM, on_terminate)
    cold = learner.optimizer_state == "cold"
    report_at = 0.0
    for own_step, samples in enumerate(learner.leased(job.pools, config.train.batch)):
        warm_up = min(1.0, (own_step + 1) / COLD_STEPS) if cold else 1.0
        job.set_lr(lr_factor(learner.progress, config.train) * warm_up)
        loss = job.backward(*job.read(samples))
        if time.monotonic() >= report_at:
            # Reading the loss synchronizes with the device, so not in every step.
            last_loss = float(loss)
            learner.report(last_loss)
            if learner.quarantined and not math.isfinite(last_loss):
                # NaN weights do not recover. A new process starts from the global weights and a healthy optimizer state.
                raise RunFailed(f"{name} is in quarantine and its loss is {last_loss}; it needs a restart")
            report_at = time.monotonic() + REPORT_EVERY_S
        job.apply()
    _leave(learner, asked_to_stop)


def _leave(learner: Learner, asked_to_stop: bool) -> None:
    if asked_to_stop:
        # SIGTERM means that the run is being stopped or the machine is needed: leave quickly.
        learner.leave(timeout_s=5.0)
    else:
        learner.leave()
    log.info("%s left at step %d", learner.name, learner.step)
