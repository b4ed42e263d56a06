"""Helpers for tests with real learners: small models and data, threads, queries of the run folder, and a learner made of raw
gRPC calls that can send what a real one never would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor, nn

from skerry.checksum import checksum
from skerry.tensors.codecs import codec as codecs
from skerry.tensors.fragments import Layout, split
from skerry.tensors.model import model_tensors
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL
from skerry.wire.framing import CHUNK_BYTES, chunk, count_chunks
from skerry.wire.service import SyncerStub

DEADLINE_S = 30.0


# ---------------------------------------------------------------- models and data


def small_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(island: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + island)
    xs = [torch.randn(4, 6, generator=generator) for _ in range(steps)]
    return [(x, x.square().mean(1, keepdim=True)) for x in xs]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype)) - y.to(dtype)).float().square().mean()


def train(model: nn.Module, optimizers: Any, data: Iterable[tuple[Tensor, Tensor]]) -> int:
    """A plain training loop for one or several optimizers. Returns the number of steps taken."""
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    steps = 0
    for batch in data:

        def closure(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            for optimizer in several:
                optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        if isinstance(several[0], torch.optim.LBFGS):
            several[0].step(closure)
        else:
            closure()
            for optimizer in several:
                optimizer.step()
        steps += 1
    return steps


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's tensors by the names they have in the run. Tied tensors appear once."""
    return {spec.name: tensor.detach().clone() for spec, tensor in model_tensors(model)}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


# ---------------------------------------------------------------- threads and waiting


def poll(ready: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Wait until `ready` returns something true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (result := ready()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        threading.Event().wait(0.005)
    return result


def together(*works: Callable[[], Any], timeout_s: float = 60.0) -> list[Any]:
    """Run each function in its own thread and return their results. Raises the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), name=f"island-{index}", daemon=True) for index in range(len(works))]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not errors:
        assert time.monotonic() < deadline, (
            f"still running after {timeout_s:.0f} s: {[t.name for t in threads if t.is_alive()]}"
        )
        next(thread for thread in threads if thread.is_alive()).join(0.05)
    if errors:
        raise errors[0]
    return results


def learner_threads() -> list[str]:
    """Names of running threads that belong to learners."""
    return [t.name for t in threading.enumerate() if t.name.startswith("skerry-exchange")]


# ---------------------------------------------------------------- queries of a run folder, while the syncer runs


def _rows(folder: Path, query: str) -> list[Any]:
    uri = f"{(folder / 'tape.sqlite').resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30.0)) as database:
        return database.execute(query).fetchall()


def versions(folder: Path) -> list[int]:
    """The newest stored version of each fragment."""
    return [version for _, version in _rows(folder, "SELECT fragment, max(version) FROM versions GROUP BY fragment")]


def tape(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The tape's records of one kind, as JSON objects."""
    return [json.loads(data) for k, data in _rows(folder, "SELECT kind, data FROM tape ORDER BY seq") if k == kind]


def tape_kinds(folder: Path) -> list[str]:
    return [kind for (kind,) in _rows(folder, "SELECT kind FROM tape ORDER BY seq")]


# ---------------------------------------------------------------- a learner of raw calls


def sealed(message: Any) -> Any:
    """A copy of the message with its seal: the checksum of everything but the chunk."""
    without_chunk, whole = type(message)(), type(message)()
    without_chunk.CopyFrom(message)
    without_chunk.ClearField("chunk")
    whole.CopyFrom(message)
    whole.seal = checksum(without_chunk.SerializeToString())
    return whole


def flipped(data: bytes, bit: int) -> bytes:
    """The data with one bit flipped."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class RawLearner:
    """A control stream and a bulk channel without any checks, so that tests see those of the syncer."""

    def __init__(
        self, address: str, model: nn.Module, fragments: int, name: str = "raw", session: str = "first", shard: str = ""
    ) -> None:
        self.name, self.session = name, session
        self._bulk_address = shard or address
        self.specs = [spec for spec, _ in model_tensors(model)]
        self.layout: Layout = split(self.specs, fragments)
        self._address = address
        self._outbox: asyncio.Queue[pb.ToSyncer | None] = asyncio.Queue()
        self._step = 0

    async def __aenter__(self) -> RawLearner:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        self._control = grpc.aio.insecure_channel(self._address, options=options)
        self._bulk = grpc.aio.insecure_channel(self._bulk_address, options=options)
        # Serialized by protobuf alone, to test that Skerry's own framing is compatible.
        self.open_lane = self._bulk.stream_stream(
            "/skerry.v1.Syncer/Bulk", lambda message: sealed(message).SerializeToString(), pb.BulkToLearner.FromString
        )
        self._stream = SyncerStub(self._control).control(self._outgoing())
        self._incoming = self._stream.__aiter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.cancel()
        await self._control.close()
        await self._bulk.close()

    async def _outgoing(self) -> AsyncIterator[pb.ToSyncer]:
        while (message := await self._outbox.get()) is not None:
            yield message

    def send(self, **message: Any) -> None:
        self._outbox.put_nowait(pb.ToSyncer(**message))

    def stop_sending(self) -> None:
        self._outbox.put_nowait(None)

    async def receive(self, *kinds: str) -> pb.ToLearner:
        """Wait for the next message of one of these kinds and skip others."""
        while True:
            message = await asyncio.wait_for(self._incoming.__anext__(), DEADLINE_S)
            if message.WhichOneof("message") in kinds:
                return message

    async def receive_end(self) -> None:
        """Wait until the syncer ends the stream."""
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await asyncio.wait_for(self._incoming.__anext__(), DEADLINE_S)

    def hello(self, **changes: Any) -> pb.Hello:
        tensors = [pb.Tensor(name=s.name, shape=s.shape, dtype=s.dtype, rule=s.rule) for s in self.specs]
        values: dict[str, Any] = {"protocol": PROTOCOL, "name": self.name, "session": self.session, "tensors": tensors}
        return pb.Hello(**{**values, **changes})

    async def join(self) -> pb.Welcome:
        """Join the run and wait for the start of training."""
        self.send(hello=self.hello())
        message = await self.receive("welcome", "refusal")
        assert message.WhichOneof("message") == "welcome", message.refusal.reason
        self.send(ready=pb.Ready())
        self._step = (await self.receive("begin")).begin.step
        return message.welcome

    async def next_ask(self) -> pb.Ask:
        """Report one more step, with ten tokens, and wait to be asked for a fragment."""
        self.report(self._step + 1)
        return (await self.receive("ask")).ask

    def report(self, step: int, **changes: Any) -> None:
        self._step = step
        self.send(report=pb.Report(**{"step": step, "tokens": 10 * step, "step_time_s": 0.001, **changes}))

    def contribution(self, ask: pb.Ask, delta: Tensor | None = None, **changes: Any) -> tuple[pb.Upload, bytes]:
        """Header and data of a valid answer, with changes applied to the header."""
        if delta is None:  # repeated progress would be refused
            delta = torch.full((self.layout.fragments[ask.fragment].numel,), 0.125 * (1 + self._step % 64 / 64))
        data = bytes(codecs.raw_bytes(codecs.codec("bf16").encode(delta)))
        values: dict[str, Any] = {
            "fragment": ask.fragment, "round": ask.round, "base": ask.min_base, "steps": 1, "tokens": 10, "at_step": self._step,
            "at_tokens": 10 * max(1, self._step), "codec": "bf16", "size_bytes": len(data), "checksum": checksum(data),
        }  # fmt: skip
        return pb.Upload(**{**values, **changes}), data

    @contextlib.asynccontextmanager
    async def lane(self, **changes: str) -> AsyncIterator[Any]:
        """A new bulk stream, after its hello."""
        call = self.open_lane(timeout=DEADLINE_S)
        await call.write(pb.BulkToSyncer(hello=pb.BulkHello(**{"name": self.name, "session": self.session, **changes})))
        yield call
        call.cancel()

    async def upload(self, *parts: pb.Upload | bytes, **changes: str) -> pb.UploadReply:
        """Send these headers and chunks unchanged on a new stream, end it, and return the first reply."""
        async with self.lane(**changes) as lane:
            for part in parts:
                await lane.write(pb.BulkToSyncer(chunk=part) if isinstance(part, bytes) else pb.BulkToSyncer(upload=part))
            await lane.done_writing()
            reply = await lane.read()
            if reply is grpc.aio.EOF:
                raise ConnectionError(await lane.details())
            return reply.reply

    async def give(self, ask: pb.Ask, delta: Tensor | None = None, **changes: Any) -> pb.UploadReply:
        """Answer a question with a valid contribution, except for the changes."""
        identity = {key: changes.pop(key) for key in ("name", "session") if key in changes}
        header, data = self.contribution(ask, delta, **changes)
        chunks = [bytes(chunk(memoryview(data), number)) for number in range(count_chunks(len(data)))]
        return await self.upload(header, *chunks, **identity)

    async def download(self, fragment: int, version: int, **changes: str) -> tuple[pb.Fetched, bytes]:
        """Fetch a version and return its header and data. A refusal has a reason and no bytes."""
        header, data = None, b""
        async with self.lane(**changes) as lane:
            await lane.write(pb.BulkToSyncer(fetch=pb.Fetch(fragment=fragment, version=version)))
            await lane.done_writing()
            while (part := await lane.read()) is not grpc.aio.EOF:
                if part.HasField("fetched"):
                    header = part.fetched
                assert len(part.chunk) <= CHUNK_BYTES
                data += part.chunk
        assert header is not None
        return header, data
