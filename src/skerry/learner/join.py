"""`skerry.join`: attach a model and its optimizer to a run, without changing the training loop."""

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
    """Attach this process to the run served by the syncer at `address`.

    Blocks until the model holds the run's current weights and the syncer starts training. From then on hooks on
    `optimizer.step()` count steps, send contributions and adopt merged versions; the network work runs in the background.

        learner = skerry.join("127.0.0.1:7070", model, optimizer, name="east-0", tokens_per_step=8192)
        with learner:
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if learner.finished:
                    break

    Args:
        address: host:port of the syncer.
        model: overwritten with the run's weights. It must have the same tensors as the model the run was created from.
        optimizer: one optimizer, or several in the order in which they step. An inner step ends when the last has stepped.
        name: name of this island, by default host and process id. Keep it the same across restarts so that the new process
            replaces the old one.
        tokens_per_step: weight of one inner step when contributions are merged; `Learner.count` overrides it step by step.
        tls: certificate files, by default from SKERRY_TLS_CA, SKERRY_TLS_CERT and SKERRY_TLS_KEY. Required off loopback.
        timeout_s: how long to try to reach the syncer. Waiting for other islands to start has no limit.
        keep: a local folder for periodic copies of the optimizer state. A process restarted under the same name restores
            it from there. Without a usable copy, the state comes from a peer.
        region: region of this island. Data sets that `SyncConfig.pins` pins to a region go only to islands of that region.
        connections: TCP connections for bulk data. Large fragments are spread over all of them, because one connection
            rarely fills a long link.
        cap_mbit: bandwidth limit in Mbit/s for each direction; 0 means no limit.
        seams: replaceable parts (clock, snapshots) for tests and fault injection.

    Raises:
        ValueError: an argument is out of range.
        ConfigError: the address, the TLS files or the model cannot be used as they are.
        JoinRefused: the syncer rejects this learner: another model, another protocol version, another run.
        WireError: no syncer answered within `timeout_s`, or the run is over.
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
    """Wait until the model holds the run's weights and the syncer starts training. Raises SkerryError."""
    deadline = clock.now() + timeout_s
    no_answer = f"no syncer answered at {connection.address} within {timeout_s:.0f} s"
    with connection.news:
        while connection.session is None:
            if connection.failure is not None:
                raise connection.failure
            if clock.now() >= deadline:
                raise WireError(f"{no_answer}: {connection.last_error}")
            connection.news.wait(1.0)
    session = connection.session
    with session.lock:
        while not (session.fixed_loaded and session.exchange.phase == "training"):
            if session.failure is not None:
                raise session.failure
            if session.goodbye is not None:
                raise WireError(f"the syncer at {connection.address} turned {session.name} away: {session.goodbye}")
            if clock.now() >= deadline and not session.connected:
                raise WireError(f"{no_answer}: {connection.last_error}")
            session.lock.wait(1.0)
            session.adopt_ready()
    return session


def _check_one_process(model: nn.Module) -> None:
    """Reject models trained by several ranks: each rank would adopt versions at its own time, and they would silently drift
    apart."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and dist.get_world_size(module.process_group) > 1:
            raise ConfigError("an island is one process: a model trained by several ranks (DDP) cannot join")
    if sharded := [name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")]:
        raise ConfigError(f"an island is one process: {sharded[0]} is spread over several ranks (FSDP, tensor parallel)")
