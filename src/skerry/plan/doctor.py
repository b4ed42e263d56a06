"""Diagnose the link to a syncer: reachability, TLS, protocol, clocks, round trip and bandwidth."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import os
import socket
import ssl
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from skerry.config import SyncConfig, from_json
from skerry.errors import JoinRefused, SkerryError, WireError
from skerry.wire import skerry_pb2 as pb
from skerry.wire.calls import describe, read, wire_errors
from skerry.wire.channel import PROTOCOL, TLS, check_reachable, open_channel, split_address
from skerry.wire.framing import CHUNK_BYTES
from skerry.wire.loop import run_here
from skerry.wire.service import SyncerStub

CONNECT_S = 10.0
ROUND_TRIPS = 20
CLOCK_S = 5.0
"""Tolerated clock difference. No decision depends on clocks, but timestamps of different machines are compared."""
PIECE_BYTES = CHUNK_BYTES // 4
AHEAD = 16
"""Pieces in flight per connection, enough to fill a link with a long round trip."""
SOON_DAYS = 14


@dataclass
class Diagnosis:
    address: str
    well: bool = True
    connect_s: float | None = None
    tls: bool = False
    certificate_days: float | None = None
    protocol: int | None = None
    run_id: str = ""
    clock_offset_s: float | None = None
    round_trip_s: float | None = None
    up_mbit: float | None = None
    down_mbit: float | None = None
    up_mbit_alone: float | None = None
    """With a single connection."""
    down_mbit_alone: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def examine(address: str, tls: TLS | None, connections: int, seconds: float, say: Callable[[str], None]) -> Diagnosis:
    """Run all checks and report each result as soon as it is known. Stops at the first check that cannot run."""
    found = Diagnosis(address, tls=tls is not None)

    def tell(what: str, finding: str, well: bool = True) -> None:
        found.well &= well
        say(f"{what:<16} {finding}" if well else f"{what:<16} PROBLEM: {finding}")

    try:
        check_reachable(address, tls)
        found.connect_s = _connect(address)
        tell("reachable", f"yes, {1000 * found.connect_s:.1f} ms to connect")
        _check_certificate(address, tls, found, tell)
        sync = run_here(_check_syncer(address, tls, found, tell))
        if sync is None:
            return found
        run_here(_check_bandwidth(address, tls, connections, seconds, found, tell))
    except (SkerryError, OSError) as error:
        tell("stopped here", str(error) or type(error).__name__, well=False)
    return found


Tell = Callable[..., None]


def _connect(address: str) -> float:
    host, port = split_address(address)
    started = time.monotonic()
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise WireError(f"no answer at {address}: {error.strerror or error}") from None
    return time.monotonic() - started


def _check_certificate(address: str, tls: TLS | None, found: Diagnosis, tell: Tell) -> None:
    if tls is None:
        tell("TLS", "off; use it only within one machine")
        return
    host, port = split_address(address)
    context = ssl.create_default_context(cafile=tls.ca or None)
    if tls.cert and tls.key:
        context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), CONNECT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            certificate = wrapped.getpeercert() or {}
            version = wrapped.version()
    except (ssl.SSLError, OSError) as error:
        raise WireError(f"TLS fails: {error}") from None
    ends = datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), datetime.timezone.utc)
    found.certificate_days = (ends - datetime.datetime.now(datetime.timezone.utc)).total_seconds() / 86_400
    finding = f"{version}; the syncer's certificate expires in {found.certificate_days:.0f} days"
    tell("TLS", finding, well=found.certificate_days > SOON_DAYS)


async def _check_syncer(address: str, tls: TLS | None, found: Diagnosis, tell: Tell) -> SyncConfig | None:
    async with open_channel(address, tls) as channel:
        stub = SyncerStub(channel)
        try:
            description = await describe(stub)
        except JoinRefused as refusal:
            tell("protocol", str(refusal), well=False)
            return None
        found.protocol, found.run_id = description.protocol, description.run_id
        sync: SyncConfig = from_json(SyncConfig, description.sync_json)
        settings = f"H = {sync.every}, P = {sync.fragments}, {sync.send} up, {sync.publish} down"
        tell("protocol", f"version {PROTOCOL}; run {description.run_id[:8]}, {settings}")
        trips, offsets = [], []
        for _ in range(ROUND_TRIPS):
            started, clock = time.monotonic(), time.time()
            description = await describe(stub)
            trips.append(time.monotonic() - started)
            offsets.append(description.now - (clock + trips[-1] / 2))
        found.round_trip_s = statistics.median(trips)
        best = min(range(ROUND_TRIPS), key=lambda number: trips[number])
        found.clock_offset_s = offsets[best]
        tell("round trip", f"{1000 * found.round_trip_s:.1f} ms ({1000 * min(trips):.1f} to {1000 * max(trips):.1f})")
        side = "behind" if found.clock_offset_s > 0 else "ahead of"
        tell("clock", f"{abs(found.clock_offset_s):.3f} s {side} the syncer's", well=abs(found.clock_offset_s) < CLOCK_S)
        return sync


async def _check_bandwidth(
    address: str, tls: TLS | None, connections: int, seconds: float, found: Diagnosis, tell: Tell
) -> None:
    async with contextlib.AsyncExitStack() as opened:
        channels = [await opened.enter_async_context(open_channel(address, tls)) for _ in range(connections)]
        stubs = [SyncerStub(channel) for channel in channels]
        await asyncio.gather(*(describe(stub) for stub in stubs))
        found.up_mbit_alone = await _rate(_upload, stubs[:1], seconds)
        found.up_mbit = await _rate(_upload, stubs, seconds) if connections > 1 else found.up_mbit_alone
        found.down_mbit_alone = await _rate(_download, stubs[:1], seconds)
        found.down_mbit = await _rate(_download, stubs, seconds) if connections > 1 else found.down_mbit_alone
    for way, together, alone in (
        ("up", found.up_mbit, found.up_mbit_alone),
        ("down", found.down_mbit, found.down_mbit_alone),
    ):
        tell(f"bandwidth {way}", f"{alone:,.1f} Mbit/s with one connection, {together:,.1f} with {connections}")


Probe = Callable[[Any, float, list[tuple[float, int]]], Any]


async def _rate(probe: Probe, stubs: list[SyncerStub], seconds: float) -> float:
    """Total rate in Mbit/s, between the first and the last bytes that arrived."""
    seen: list[tuple[float, int]] = []
    with wire_errors():
        await asyncio.gather(*(probe(stub.probe(), time.monotonic() + seconds, seen) for stub in stubs))
    seen.sort()
    spent = seen[-1][0] - seen[0][0] if len(seen) > 1 else 0.0
    if spent <= 0:
        raise WireError("the link is too slow to measure in this time; raise --seconds")
    return sum(size for _, size in seen[1:]) * 8 / 1e6 / spent


async def _upload(call: Any, until: float, seen: list[tuple[float, int]]) -> None:
    noise = os.urandom(PIECE_BYTES)
    in_flight = asyncio.Semaphore(AHEAD)

    async def write() -> None:
        while time.monotonic() < until:
            await in_flight.acquire()
            await call.write(pb.ProbeUp(chunk=noise))
        await call.done_writing()

    writing = asyncio.ensure_future(write())
    before = 0
    try:
        while (message := await read(call)) is not grpc.aio.EOF:
            seen.append((time.monotonic(), message.received_bytes - before))
            before = message.received_bytes
            in_flight.release()
    finally:
        await writing


async def _download(call: Any, until: float, seen: list[tuple[float, int]]) -> None:
    for _ in range(AHEAD * PIECE_BYTES // CHUNK_BYTES):
        await call.write(pb.ProbeUp(wanted=1))
    ended = False
    while (message := await read(call)) is not grpc.aio.EOF:
        if not message.chunk:
            continue
        seen.append((time.monotonic(), len(message.chunk)))
        if time.monotonic() < until:
            await call.write(pb.ProbeUp(wanted=1))
        elif not ended:
            ended = True
            await call.done_writing()
