"""Blocking one-off calls to a syncer, for callers without an event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skerry.config import Config, from_json
from skerry.core.schema import TapeRecord
from skerry.errors import ConfigError, JoinRefused, WireError
from skerry.wire import calls
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import EVERY_INTERFACE, TLS, open_channel
from skerry.wire.loop import run_here
from skerry.wire.service import SyncerStub


def syncer_address(given: str) -> str:
    """The address itself, or the address of the syncer that serves the run folder given in its place."""
    folder = Path(given)
    if not folder.is_dir():
        return given
    try:
        address = (folder / "address").read_text().strip()
    except OSError:
        raise ConfigError(f"no syncer serves {folder}, or it was started long ago: give its host:port") from None
    host, _, port = address.rpartition(":")
    if host in EVERY_INTERFACE:
        raise ConfigError(f"the syncer of {folder} listens on {address}: give the name in its certificate, NAME:{port}")
    return address


def describe(address: str, tls: TLS | None, timeout_s: float = 120.0) -> pb.RunDescription:
    """Ask the syncer at this address which run it serves. Retries until `timeout_s` while it is unreachable."""
    deadline = time.monotonic() + timeout_s

    async def ask() -> pb.RunDescription:
        while True:
            async with open_channel(address, tls) as channel:
                try:
                    return await calls.describe(SyncerStub(channel))
                except WireError as error:
                    if time.monotonic() >= deadline:
                        raise WireError(f"no syncer answered at {address} within {timeout_s:.0f} s: {error}") from None
            await asyncio.sleep(0.3)

    return run_here(ask())


def close_run(address: str, tls: TLS | None, timeout_s: float = 10.0) -> None:
    """Ask the syncer to end its run, with a last merge of everyone's progress."""
    run_id = describe(address, tls, timeout_s).run_id
    _call(address, tls, lambda stub: stub.close_run, pb.CloseRequest(run_id=run_id), timeout_s)


def take_snapshot(address: str, tls: TLS | None, timeout_s: float = 600.0) -> dict[str, Any]:
    """Ask the syncer for a snapshot and wait until it is written. Returns the syncer's description of it."""
    run_id = describe(address, tls, 10.0).run_id
    reply = _call(address, tls, lambda stub: stub.snapshot, pb.SnapshotRequest(run_id=run_id), timeout_s)
    facts: dict[str, Any] = json.loads(reply.facts_json)
    return facts


def tell(address: str, tls: TLS | None, record: TapeRecord, timeout_s: float = 10.0) -> None:
    """Add a record to the run's tape, for example that a fault was injected."""
    run_id = describe(address, tls, timeout_s).run_id
    request = pb.TellRequest(run_id=run_id, kind=record.kind, data_json=json.dumps(record.to_json()))
    _call(address, tls, lambda stub: stub.tell, request, timeout_s)


def _call(address: str, tls: TLS | None, method: Callable[[SyncerStub], Any], request: Any, timeout_s: float) -> Any:
    async def ask() -> Any:
        async with open_channel(address, tls) as channel:
            with calls.wire_errors():
                # wait_for_ready retries connecting until the timeout.
                return await method(SyncerStub(channel))(request, timeout=timeout_s, wait_for_ready=True)

    return run_here(ask())


def describe_job(address: str, tls: TLS | None, timeout_s: float = 120.0) -> Config:
    """Fetch the training job that the run at this address was created with."""
    description = describe(address, tls, timeout_s)
    if not description.job_json:
        raise JoinRefused(f"the run at {address} has no training job; its islands call skerry.join from their own loop")
    config: Config = from_json(Config, description.job_json)
    return config
