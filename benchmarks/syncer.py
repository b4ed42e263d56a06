"""Throughput of a syncer in merged bytes per second, relative to a plain gRPC stream of the same bytes; the cost of a merge as
learners and fragments grow; and the syncer's memory.

    python benchmarks/syncer.py [--quick] [--profile] [--shards 2 4]

The syncer is a separate process. This process makes the learners' calls: it answers every question at once with bytes prepared
in advance, so all time goes into sending, receiving, checking, decoding, merging and storing. The plain stream sends the same
messages to a process that only reads them. Versions are not fetched: this measures merging.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch
from torch import nn

import skerry
from skerry.admin import describe
from skerry.checksum import checksum
from skerry.syncer.memory import keep_freed_memory
from skerry.syncer.storage.version_file import Label, checksums_of, write_version
from skerry.tensors.codecs.codec import byte_tensor, codec, raw_bytes
from skerry.tensors.fragments import split
from skerry.tensors.merge import FragmentState, merge, nesterov, norms_of, publish, radial_mean
from skerry.tensors.model import model_tensors
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL, SERVER_OPTIONS, open_channel
from skerry.wire.framing import Assembly, Parcel, chunk, count_chunks
from skerry.wire.service import _SERVICE, SyncerStub

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory, if the machine has one."""
AHEAD = 3
"""Steps a learner reports ahead of the announced versions, and so the number of fragments in flight."""


class Wide(nn.Module):
    """A model of parameters only: one tensor per fragment."""

    def __init__(self, fragments: int, numel: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(numel // 1024, 1024)) for _ in range(fragments)])


class Caller:
    """A learner that makes only the RPC calls."""

    def __init__(self, address: str, model: nn.Module, name: str, fragments: int, data: list[memoryview]) -> None:
        self._channels = [open_channel(address, None) for _ in range(2)]
        self._control = SyncerStub(self._channels[0]).control()
        self._bulk = [SyncerStub(self._channels[1]).bulk()]
        self._place = [0] * fragments
        self._name, self._data = name, data
        self._sums = [checksum(one) for one in data]
        self._specs = [spec for spec, _ in model_tensors(model)]
        self._versions = [0] * fragments
        self._given = [0] * fragments
        self._step = 0
        self.sent = 0

    async def join(self, run_id: str) -> None:
        tensors = [pb.Tensor(name=s.name, shape=s.shape, dtype=s.dtype, rule=s.rule) for s in self._specs]
        hello = pb.Hello(protocol=PROTOCOL, name=self._name, session=self._name, tensors=tensors, run_id="")
        await self._control.write(pb.ToSyncer(hello=hello))
        places = (await self._until("welcome")).welcome.places
        while not all(places.addresses):
            places = (await self._until("places")).places
        if places.addresses:
            self._place = list(places.of_fragment)
            self._channels += [open_channel(address, None) for address in places.addresses]
            self._bulk = [SyncerStub(channel).bulk() for channel in self._channels[-len(places.addresses) :]]
        await self._control.write(pb.ToSyncer(ready=pb.Ready()))
        for bulk in self._bulk:
            await bulk.write(Parcel(pb.BulkToSyncer(hello=pb.BulkHello(name=self._name, session=self._name))))
        await self._until("begin")

    async def _until(self, kind: str) -> Any:
        while True:
            message = await self._control.read()
            assert message is not grpc.aio.EOF, f"{self._name} was disconnected"
            assert not message.HasField("refusal"), message.refusal.reason
            if message.WhichOneof("message") == kind:
                return message

    async def train(self, until_s: float) -> None:
        readers = [asyncio.ensure_future(self._read_replies(bulk)) for bulk in self._bulk]
        for _ in range(AHEAD):
            await self._report()
        while time.time() < until_s:
            message = await self._control.read()
            assert message is not grpc.aio.EOF
            if message.HasField("ask"):
                await self._give(message.ask)
            elif message.HasField("announce"):
                self._versions[message.announce.fragment] = message.announce.version
                await self._report()
        for reader in readers:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _report(self) -> None:
        self._step += 1
        report = pb.Report(step=self._step, tokens=10 * self._step, step_time_s=0.05, steps=self._step)
        await self._control.write(pb.ToSyncer(report=report))

    async def _give(self, ask: pb.Ask) -> None:
        number = self._given[ask.fragment] = (self._given[ask.fragment] + 1) % len(self._data)
        data = self._data[number]
        header = pb.Upload(
            fragment=ask.fragment, round=ask.round, base=self._versions[ask.fragment], steps=1, tokens=10, at_step=self._step,
            at_tokens=10 * self._step, codec="bf16", size_bytes=len(data), checksum=self._sums[number],
        )  # fmt: skip
        message = pb.BulkToSyncer(upload=header)
        for number in range(count_chunks(len(data))):
            await self._bulk[self._place[ask.fragment]].write(Parcel(message, chunk(data, number)))
            message = pb.BulkToSyncer()
        self.sent += len(data)

    async def _read_replies(self, bulk: Any) -> None:
        while (parcel := await bulk.read()) is not grpc.aio.EOF:
            reply = parcel.message.reply
            assert reply.accepted, reply.reason

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def contributions(numel: int) -> list[memoryview]:
    """A few encoded contributions, so that no two in a row are equal."""
    generator = torch.Generator().manual_seed(1)
    return [raw_bytes(codec("bf16").encode(1e-3 * torch.randn(numel, generator=generator))) for _ in range(3)]


def run_syncer(
    learners: int,
    fragments: int,
    numel: int,
    seconds: float,
    place: str | None = None,
    publish: Any = "fp32",
    shards: int = 0,
) -> dict[str, float]:
    model = Wide(fragments, numel)
    parameters = sum(p.numel() for p in model.parameters())
    sync = skerry.SyncConfig(
        fragments=fragments,
        every=fragments,
        overlap=2,
        quorum=0,
        wait=True,  # otherwise fragments would pause, because these learners' steps take no time
        start_with=learners,
        outlier=0.0,
        staleness=8,
        publish=publish,
    )
    layout = split([spec for spec, _ in model_tensors(model)], fragments)
    assert {fragment.numel for fragment in layout.fragments} == {numel}
    with tempfile.TemporaryDirectory(dir=place) as parent:
        folder = skerry.create(Path(parent) / "run", model, sync)
        with skerry.serve(folder, shards=shards) as address:
            run_id = describe(address, None, 60).run_id
            syncer = next(child for child in psutil.Process().children() if "syncer" in " ".join(child.cmdline()))
            data = contributions(numel)

            async def drive() -> dict[str, float]:
                callers = [Caller(address, model, f"learner-{n}", fragments, data) for n in range(learners)]
                await asyncio.gather(*(caller.join(run_id) for caller in callers))
                busy, started = sum(syncer.cpu_times()[:2]), time.time()
                await asyncio.gather(*(caller.train(started + seconds) for caller in callers))
                ended = time.time()
                busy = sum(syncer.cpu_times()[:2]) - busy
                await asyncio.gather(*(caller.close() for caller in callers))
                return {"started": started, "ended": ended, "busy_s": busy, "peak": _peak_bytes(syncer.pid)}

            found = asyncio.run(drive())
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        merges = [len(r["contributors"]) for r in records if r["kind"] == "merge" and r["at"] <= found["ended"]]
    spent = found["ended"] - found["started"]
    rate = sum(merges) * 2 * numel / spent
    return {**found, "spent": spent, "parameters": parameters, "merges": len(merges), "bytes_per_s": rate}


def _peak_bytes(pid: int) -> int:
    """Peak memory of the process."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def plain_stream(seconds: float, raw: bool = False) -> float:
    """Bytes per second of the same messages, or of raw bytes, sent to a process that discards them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read_only, args=(theirs, raw), daemon=True)
    process.start()
    port = ours.recv()

    async def drive() -> float:
        async with open_channel(f"127.0.0.1:{port}", None) as channel:
            serialize = None if raw else pb.BulkToSyncer.SerializeToString
            call = channel.stream_stream(f"/{_SERVICE}/Bulk", serialize, pb.BulkToLearner.FromString)()
            data = contributions(1 << 22)[0]
            sent, started = 0, time.monotonic()
            while time.monotonic() - started < seconds:
                for number in range(count_chunks(len(data))):
                    part = bytes(chunk(data, number))
                    await call.write(part if raw else pb.BulkToSyncer(chunk=part))
                sent += len(data)
            await call.done_writing()
            await call.read()
            return sent / (time.monotonic() - started)

    rate = asyncio.run(drive())
    process.kill()
    process.join()
    return rate


def _read_only(pipe: Any, raw: bool) -> None:
    async def bulk(messages: Any, context: Any) -> Any:
        async for _ in messages:
            pass
        yield pb.BulkToLearner()

    async def serve() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        parse = None if raw else pb.BulkToSyncer.FromString
        handler = grpc.stream_stream_rpc_method_handler(bulk, parse, pb.BulkToLearner.SerializeToString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Bulk": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await server.wait_for_termination()

    asyncio.run(serve())


def profile(learners: int = 8, numel: int = 1 << 22) -> None:
    """Time the steps of a merge one by one, on one core."""
    layout = split([spec for spec, _ in model_tensors(Wide(1, numel))], 1)
    [fragment] = layout.fragments
    data, bf16 = contributions(numel), codec("bf16")
    deltas = [bf16.decode(byte_tensor(data[n % len(data)]), numel) for n in range(learners)]
    norms = [norms_of(fragment, delta) for delta in deltas]
    before = FragmentState.fresh(torch.zeros(numel))
    after = merge(layout, fragment, before, deltas, [1.0] * learners, lr=0.5, momentum=0.8, norms=norms)
    shown, encoded = publish(before, after, bf16)
    with tempfile.TemporaryDirectory() as parent:
        (Path(parent) / "fragments").mkdir()
        steps: list[tuple[str, int, Callable[[], object]]] = [
            ("reassemble chunks", learners, lambda: _assembled(data[0])),
            ("checksum", learners, lambda: checksum(data[0])),
            ("norms", learners, lambda: norms_of(fragment, deltas[0])),
            ("mean", 1, lambda: radial_mean(deltas, [1.0] * learners, norms=[of[0] for of in norms])),
            ("outer step", 1, lambda: nesterov(before, after.momentum, 0.5, 0.8)),
            ("encode for publishing, checksum", 1, lambda: checksum(raw_bytes(publish(before, after, bf16)[1]))),
            ("checksum of the stored version", 1, lambda: checksums_of(shown)),
            ("write and fsync", 1, lambda: write_version(Path(parent), "version", shown, Label("", 0, 1, 1), 0)),
        ]
        print(f"{learners} contributions of {numel:,} elements in bf16, nanoseconds per byte:")
        for name, times, work in steps:
            work()
            took = min(_timed(work) for _ in range(5))
            print(f"  {name:36s} {1e9 * took * times / (learners * len(encoded)):6.3f}")


def _assembled(data: memoryview) -> Assembly:
    found = Assembly(len(data), 0)
    for number in range(found.chunks):
        found.add(number, chunk(data, number))
    return found


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--profile", action="store_true", help="only time the steps of a merge")
    parser.add_argument(
        "--shards", type=int, nargs="*", default=[], help="only the throughput with these numbers of shards, and with none"
    )
    options = parser.parse_args()
    seconds = 5.0 if options.quick else 15.0
    torch.set_num_threads(1)
    if options.profile:
        keep_freed_memory()
        profile()
        return
    if options.shards:
        for shards in [0, *options.shards]:
            found = run_syncer(8, 16, 1 << 22, seconds, MEMORY, shards=shards)
            print(f"{shards} shards, 8 learners, run folder in memory: {found['bytes_per_s'] / 1e6:.0f} MB/s", flush=True)
        return
    ratios = []
    for turn in range(1 if options.quick else 3):
        plain, raw = plain_stream(seconds / 3), plain_stream(seconds / 3, raw=True)
        print(f"turn {turn + 1}: plain stream of these messages {plain / 1e6:.0f} MB/s, of raw bytes {raw / 1e6:.0f} MB/s")
        cases = [(8, None, "fp32"), (4, None, "fp32"), (8, None, "bf16"), *([(8, MEMORY, "fp32")] if MEMORY else [])]
        for learners, place, shown in cases:
            found = run_syncer(learners, 8, 1 << 22, seconds, place, shown)
            ratio = found["bytes_per_s"] / plain
            if (learners, place, shown) == (8, None, "fp32"):
                ratios.append(ratio)
            where = "in memory" if place else "on disk"
            cores = found["busy_s"] / found["spent"]
            print(f"  {learners} learners, {shown} published, run folder {where}: {found['bytes_per_s'] / 1e6:.0f} MB/s, "
                  f"{ratio:.3f} and {found['bytes_per_s'] / raw:.3f} of them; {cores:.2f} cores, "
                  f"{1e9 * cores / found['bytes_per_s']:.2f} ns of CPU per byte", flush=True)  # fmt: skip
    ratio = statistics.median(ratios)
    empty = run_syncer(4, 64, 1 << 10, seconds, publish="bf16")["peak"]
    full = run_syncer(4, 64, 1 << 20, seconds, publish="bf16")
    memory = (full["peak"] - empty) / full["parameters"]
    print(f"memory: {empty / 1e6:.0f} MB with a tiny model, {full['peak'] / 1e6:.0f} MB with "
          f"{full['parameters'] / 1e6:.0f}M parameters: {memory:.1f} bytes per parameter", flush=True)  # fmt: skip
    growths = []
    for _ in range(3):
        costs = {}
        for learners, fragments in ((8, 8), (64, 8), (8, 64)):
            found = run_syncer(learners, fragments, 1 << 16, seconds)
            costs[learners, fragments] = 1e3 * found["busy_s"] / max(found["merges"] * learners, 1)
            rate = found["merges"] / found["spent"]
            print(f"{learners:3d} learners, {fragments:3d} fragments of 65,536: {rate:.1f} merges/s, "
                  f"{costs[learners, fragments]:.2f} ms of CPU per contribution", flush=True)  # fmt: skip
        growths.append(max(costs[64, 8], costs[8, 64]) / costs[8, 8])
    growth = statistics.median(growths)
    for bar, value, target, ok in (
        ("merged bytes over those of a plain stream, 8 learners", ratio, 0.5, ratio >= 0.5),
        ("bytes a parameter, with what is in flight", memory, 16, memory <= 16),
        ("cost of a contribution with 64 learners or fragments over that with 8", growth, 1.3, growth <= 1.3),
    ):
        print(json.dumps({"bar": bar, "value": round(value, 3), "target": target, "ok": ok}))


if __name__ == "__main__":
    main()
