"""`skerry.join`: attach a model and its optimizer to a run. The user's loop keeps its shape."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from skerry.clock import Clock
from skerry.errors import ConfigError, WireError
from skerry.learner.connection import CONNECTIONS, Connection
from skerry.learner.learner import Learner
from skerry.learner.seams import Seams
from skerry.learner.session import Session
from skerry.wire.channel import TLS


def join(
    address: str,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    name: str | None = None,
    tokens_per_step: int = 1,
    tls: TLS | None = None,
    timeout_s: float = 120.0,
    keep: str | Path | None = None,
    region: str = "",
    connections: int = CONNECTIONS,
    cap_mbit: float = 0.0,
    seams: Seams | None = None,
) -> Learner:
    """Attach this process to the run that the syncer at `address` serves.

    Returns once the model holds the run's current weights and the syncer has given the start. From then on
    `optimizer.step()` counts, sends and adopts. Give several optimizers in the order in which they step: an inner step is
    done when the last of the list has stepped.

    Args:
        name: keep it the same when the island is restarted, so that it takes its old place; by default host and process.
        tokens_per_step: how much one inner step counts in merging, unless `learner.count` says so step by step.
        tls: certificate files; by default from SKERRY_TLS_CA, SKERRY_TLS_CERT and SKERRY_TLS_KEY. Needed off loopback.
        timeout_s: how long to look for the syncer. Waiting for the other islands to start is not limited.
        keep: a folder on this machine in which the optimizer's state is written from time to time, for a process that takes
            this one's place. Without it, and on another machine, the state comes from a peer.
        region: where this island is, for data that is pinned to a region.
        connections: over how many connections large fragments are spread; one alone cannot fill a long link.
        cap_mbit: Mbit/s that this island may use each way; 0 means no limit.
        seams: for tests and chaos: another clock, altered snapshots.
    """
    if connections < 1 or cap_mbit < 0:
        raise ValueError(f"connections must be >= 1 and cap_mbit >= 0, got {connections!r} and {cap_mbit!r}")
    if not isinstance(tokens_per_step, int) or tokens_per_step < 1:
        raise ValueError(f"tokens_per_step must be a whole number >= 1, got {tokens_per_step!r}")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise ValueError(f"optimizer must be a torch optimizer or a list of them, got {optimizer!r}")
    _check_one_process(model)
    seams = seams or Seams()
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    connection = Connection(address, model, name, tls or TLS.from_environment(), seams, region, connections, cap_mbit)
    connection.start()
    try:
        session = _wait_for_start(connection, seams.clock, timeout_s)
    except BaseException:
        connection.close()
        raise
    learner = Learner(connection, session, optimizers, tokens_per_step, seams)
    try:
        learner.recover(Path(keep) / f"{quote(name, safe='')}.optimizer.safetensors" if keep is not None else None)
    except BaseException:
        learner.detach()
        raise
    return learner


def _wait_for_start(connection: Connection, clock: Clock, timeout_s: float) -> Session:
    """Until the model holds the run's weights and the syncer has given the start. Raises SkerryError."""
    deadline = clock.now() + timeout_s
    nobody = f"no syncer answered at {connection.address} within {timeout_s:.0f} s"
    with connection.news:
        while connection.session is None:
            if connection.failure is not None:
                raise connection.failure
            if clock.now() >= deadline:
                raise WireError(f"{nobody}: {connection.last_error}")
            connection.news.wait(1.0)
    session = connection.session
    with session.lock:
        while not (session.fixed_loaded and session.exchange.phase == "training"):
            if session.failure is not None:
                raise session.failure
            if session.goodbye is not None:
                raise WireError(f"the syncer at {connection.address} turned {session.name} away: {session.goodbye}")
            if clock.now() >= deadline and not session.connected:
                raise WireError(f"{nobody}: {connection.last_error}")
            session.lock.wait(1.0)
            session.adopt_ready()
    return session


def _check_one_process(model: nn.Module) -> None:
    """Ranks that average gradients but adopt versions each at its own moment would silently drift apart."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and dist.get_world_size(module.process_group) > 1:
            raise ConfigError("an island is one process: one that is trained by several ranks (DDP) cannot join")
    if sharded := [name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")]:
        raise ConfigError(f"an island is one process: {sharded[0]} is spread over several ranks (FSDP, tensor parallel)")
