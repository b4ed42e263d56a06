"""The way from here to a syncer: can it be reached, who answers, do the clocks agree, how far is it, and how wide."""

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
"""A difference that nobody needs to look at: nothing in a run depends on clocks, but its records are compared."""
PIECE_BYTES = CHUNK_BYTES // 4
AHEAD = 16
"""Pieces that are under way on a connection: a long link is full of them."""
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
    """With one connection."""
    down_mbit_alone: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def examine(address: str, tls: TLS | None, connections: int, seconds: float, say: Callable[[str], None]) -> Diagnosis:
    """Look at one thing after the other, and say what was found at once. What cannot be looked at ends it."""
    found = Diagnosis(address, tls=tls is not None)

    def tell(what: str, words: str, well: bool = True) -> None:
        found.well &= well
        say(f"{what:<16} {words}" if well else f"{what:<16} PROBLEM: {words}")

    try:
        check_reachable(address, tls)
        found.connect_s = _connect(address)
        tell("reachable", f"yes, {1000 * found.connect_s:.1f} ms to connect")
        _look_at_certificate(address, tls, found, tell)
        sync = run_here(_look_at_syncer(address, tls, found, tell))
        if sync is None:
            return found
        run_here(_look_at_bandwidth(address, tls, connections, seconds, found, tell))
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
        raise WireError(f"nobody answers at {address}: {error.strerror or error}") from None
    return time.monotonic() - started


def _look_at_certificate(address: str, tls: TLS | None, found: Diagnosis, tell: Tell) -> None:
    if tls is None:
        tell("TLS", "none, which is for one machine only")
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
    words = f"{version}; the syncer's certificate is good for {found.certificate_days:.0f} more days"
    tell("TLS", words, well=found.certificate_days > SOON_DAYS)


async def _look_at_syncer(address: str, tls: TLS | None, found: Diagnosis, tell: Tell) -> SyncConfig | None:
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
        there = f"{1000 * found.round_trip_s:.1f} ms there and back ({1000 * min(trips):.1f} to {1000 * max(trips):.1f})"
        tell("round trip", there)
        side = "behind" if found.clock_offset_s > 0 else "ahead of"
        clock_words = f"{abs(found.clock_offset_s):.3f} s {side} the syncer's"
        tell("clock", clock_words, well=abs(found.clock_offset_s) < CLOCK_S)
        return sync


async def _look_at_bandwidth(
    address: str, tls: TLS | None, connections: int, seconds: float, found: Diagnosis, tell: Tell
) -> None:
    async with contextlib.AsyncExitStack() as opened:
        channels = [await opened.enter_async_context(open_channel(address, tls)) for _ in range(connections)]
        stubs = [SyncerStub(channel) for channel in channels]
        await asyncio.gather(*(describe(stub) for stub in stubs))
        found.up_mbit_alone = await _rate(_upwards, stubs[:1], seconds)
        found.up_mbit = await _rate(_upwards, stubs, seconds) if connections > 1 else found.up_mbit_alone
        found.down_mbit_alone = await _rate(_downwards, stubs[:1], seconds)
        found.down_mbit = await _rate(_downwards, stubs, seconds) if connections > 1 else found.down_mbit_alone
    for way, all_of_them, alone in (
        ("up", found.up_mbit, found.up_mbit_alone),
        ("down", found.down_mbit, found.down_mbit_alone),
    ):
        tell(f"bandwidth {way}", f"{alone:,.1f} Mbit/s with one connection, {all_of_them:,.1f} with {connections}")


Probe = Callable[[Any, float, list[tuple[float, int]]], Any]


async def _rate(probe: Probe, stubs: list[SyncerStub], seconds: float) -> float:
    """Mbit/s of all together, from the first bytes that were seen to arrive to the last."""
    seen: list[tuple[float, int]] = []
    with wire_errors():
        await asyncio.gather(*(probe(stub.probe(), time.monotonic() + seconds, seen) for stub in stubs))
    seen.sort()
    spent = seen[-1][0] - seen[0][0] if len(seen) > 1 else 0.0
    if spent <= 0:
        raise WireError("the link is so slow that nothing could be measured; give --seconds more time")
    return sum(size for _, size in seen[1:]) * 8 / 1e6 / spent


async def _upwards(call: Any, until: float, seen: list[tuple[float, int]]) -> None:
    noise = os.urandom(PIECE_BYTES)
    under_way = asyncio.Semaphore(AHEAD)

    async def write() -> None:
        while time.monotonic() < until:
            await under_way.acquire()
            await call.write(pb.ProbeUp(chunk=noise))
        await call.done_writing()

    writing = asyncio.ensure_future(write())
    before = 0
    try:
        while (message := await read(call)) is not grpc.aio.EOF:
            seen.append((time.monotonic(), message.received_bytes - before))
            before = message.received_bytes
            under_way.release()
    finally:
        await writing


async def _downwards(call: Any, until: float, seen: list[tuple[float, int]]) -> None:
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
