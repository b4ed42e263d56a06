"""Runs a syncer until its run has ended, or until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from skerry.clock import Clock
from skerry.core import messages as m
from skerry.syncer.server import SyncerServer
from skerry.syncer.storage.store import RunStore
from skerry.wire.channel import TLS

LINGER_S = (0.5, 10.0)
"""How long an ended run is still served: if every learner knows of the end, and if one may still come back."""


async def run_syncer(
    store: RunStore,
    address: str,
    tls: TLS | None,
    *,
    on_listening: Callable[[int], None],
    stop: asyncio.Event | None = None,
    shards: int = 0,
    clock: Clock | None = None,
) -> bool:
    """Serve until the run has ended (returns True) or `stop` is set (returns False). `shards` is the number of shard processes
    that will connect and hold the fragments; with 0 this process holds them."""
    try:
        syncer = SyncerServer(store, shards=shards, clock=clock)
    except BaseException:
        store.close()
        raise
    try:
        server, port = await syncer.serve(address, tls)
    except BaseException:
        await syncer.close()
        raise
    syncer.decisions.dispatch(m.Tick())  # a run resumed while closing may have no learner left to wait for
    pulse = asyncio.create_task(syncer.pulse())
    ended = asyncio.create_task(syncer.ended.wait())
    stopped = asyncio.create_task((stop or asyncio.Event()).wait())
    waits: set[asyncio.Future[Any]] = {pulse, ended, stopped, syncer.failed}
    try:
        on_listening(port)
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for failed in done & {pulse, syncer.failed}:
            failed.result()
        if syncer.ended.is_set():
            await asyncio.sleep(LINGER_S[syncer.missed_the_end])
    finally:
        for task in (pulse, ended, stopped):
            task.cancel()
        await asyncio.gather(pulse, ended, stopped, return_exceptions=True)
        await syncer.hang_up()
        await server.stop(grace=1.0)
        await syncer.close()
    return syncer.ended.is_set()
