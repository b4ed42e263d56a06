"""A process of its own carries bulk data: everything arrives as it would without, and nothing depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import psutil
import pytest
import torch
from islands import assert_same, poll, tape
from large_fragments import EXACT, Training, large_model

import skerry
from skerry.chaos.proxy import Condition, LinkProxy, LinkState
from skerry.checksum import checksum
from skerry.config import SyncConfig
from skerry.core.exchange import Question
from skerry.errors import WireError
from skerry.learner import device
from skerry.learner.contribute import Contributor, Encoded
from skerry.learner.pinned import PinnedMemory
from skerry.learner.replica import Snapshot
from skerry.learner.transport import routes as routes_module
from skerry.learner.transport import sidecar as sidecars
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.reachability import Reachability
from skerry.learner.transport.routes import Routes
from skerry.learner.transport.sidecar import Endpoint, Gone, Sidecar
from skerry.learner.transport.stream import MOST_CHUNKS, Download, NotAsWanted, TooLarge
from skerry.learner.transport.striped import StripedStreams
from skerry.syncer.storage.run_folder import read_model
from skerry.tensors.codecs.codec import raw_bytes
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import TLS
from skerry.wire.framing import Parcel, chunk, count_chunks
from skerry.wire.service import add_bulk_to_server

CPU = torch.device("cpu")
BF16 = SyncConfig(fragments=2, every=2, overlap=1, quorum=1, outer_lr=1.0, outer_momentum=0.0, outlier=0.0, silence_s=30.0)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory cannot be shared here, and is not")


@pytest.fixture(autouse=True)
def as_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "SETS_ASIDE", ("cuda", "cpu"))


def sidecar_of(island: Training) -> Sidecar:
    sidecar = island.learner._connection._sidecar
    assert sidecar is not None
    poll(lambda: sidecar.running, "the other process")
    return sidecar


def has_merged(folder: Path, more: int = 3) -> None:
    before = len(tape(folder, "merged"))
    poll(lambda: len(tape(folder, "merged")) >= before + more, "merges")


@pytest.mark.parametrize(("sync", "shards"), [(EXACT, 0), (BF16, 0), (BF16, 2)])
def test_what_it_carries_arrives_and_it_ends_with_the_island(
    tmp_path: Path, sync: SyncConfig, shards: int, start_syncer: Callable, start_shard: Callable
) -> None:
    folder = skerry.create(tmp_path / "run", large_model(), sync)
    syncer = start_syncer(folder, shards=shards)
    for number in range(shards):
        start_shard(syncer, number)
    island = Training(syncer.address)
    sidecar = sidecar_of(island)
    has_merged(folder)
    poll(lambda: min(sidecar._counted) > 8 << 20, "bytes both ways through the other process")
    before = sidecar._counted
    has_merged(folder)
    poll(lambda: sidecar._counted[0] > before[0] and sidecar._counted[1] > before[1], "more of them")
    connection = island.learner._connection
    assert connection.sent.by_kind["contributions"] >= sidecar._counted[0] and connection.sent.bytes_per_s > 0
    assert sidecar._process is not None
    process = psutil.Process(sidecar._process.pid)
    island.stop()
    assert not process.is_running()
    assert not sidecar._waiting
    assert_same(read_model(folder), dict(island.model.named_parameters()), tolerance=1e-6 if sync is EXACT else 1e-2)
    assert not tape(folder, "unhealthy")


def test_without_it_the_island_carries_everything_itself(tmp_path: Path, start_syncer: Callable) -> None:
    folder = skerry.create(tmp_path / "run", large_model(), EXACT)
    island = Training(start_syncer(folder).address)
    sidecar = sidecar_of(island)
    has_merged(folder, 2)
    assert sidecar._process is not None
    os.kill(sidecar._process.pid, signal.SIGKILL)
    poll(lambda: not sidecar.running, "its end to be noticed")
    has_merged(folder)
    island.stop()
    assert_same(read_model(folder), dict(island.model.named_parameters()), tolerance=1e-6)
    assert not tape(folder, "unhealthy")


def test_one_that_hangs_is_given_up(
    tmp_path: Path, start_syncer: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sidecars, "SILENT_LOOKS", 2)
    folder = skerry.create(tmp_path / "run", large_model(), EXACT)
    island = Training(start_syncer(folder).address)
    sidecar = sidecar_of(island)
    has_merged(folder, 2)
    assert sidecar._process is not None
    os.kill(sidecar._process.pid, signal.SIGSTOP)
    has_merged(folder)
    assert not sidecar.running and "it has gone silent" in caplog.text and "has exited" in caplog.text
    island.stop()
    assert_same(read_model(folder), dict(island.model.named_parameters()), tolerance=1e-6)


class Speechless:
    """A process that says nothing."""

    def __init__(self, code: int | None = None) -> None:
        self.code = code
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True


def silent_sidecar(code: int | None = None) -> tuple[Sidecar, Speechless]:
    memories = [PinnedMemory(1 << 20, 1, CPU, [], shared=True) for _ in range(2)]
    sidecar, process = Sidecar(memories[0], memories[1], Meter(), Meter()), Speechless(code)
    sidecar.running, sidecar._process = True, process  # type: ignore[assignment]
    return sidecar, process


@pytest.mark.parametrize("island_stood_still", [False, True])
def test_it_is_given_up_for_its_own_silence_and_not_because_the_island_was_frozen(
    island_stood_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecars, "LOOKS_APART_S", -1.0 if island_stood_still else 1e9)

    async def scenario() -> None:
        sidecar, process = silent_sidecar()
        for _ in range(sidecars.SILENT_LOOKS + 1):
            assert not process.killed
            sidecar.check_alive()
        assert process.killed is not island_stood_still
        if island_stood_still:
            monkeypatch.setattr(sidecars, "LOOKS_APART_S", 1e9)
            for _ in range(sidecars.SILENT_LOOKS):
                sidecar.check_alive()
                monkeypatch.setattr(sidecars, "LOOKS_APART_S", -1.0)
                sidecar.check_alive()  # a pause now and then does not save it
                monkeypatch.setattr(sidecars, "LOOKS_APART_S", 1e9)
            assert process.killed

    asyncio.run(scenario())


def test_one_that_has_ended_is_noticed_though_a_forked_process_keeps_its_socket_open() -> None:
    async def scenario() -> None:
        sidecar, _ = silent_sidecar(code=-9)
        waits = asyncio.get_running_loop().create_future()
        sidecar._waiting[0] = waits, None
        sidecar.check_alive()
        assert not sidecar.running
        with pytest.raises(Gone):
            await waits

    asyncio.run(scenario())


def test_a_defect_of_its_own_ends_it_and_signals_do_not(caplog: pytest.LogCaptureFixture) -> None:
    memories = [PinnedMemory(1 << 20, 1, CPU, [], shared=True) for _ in range(2)]

    async def scenario() -> None:
        sidecar = Sidecar(memories[0], memories[1], Meter(), Meter())
        await sidecar.start("a", "session", 1, None)
        assert sidecar._process is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            sidecar._process.send_signal(number)
        assert await sidecar._tell(None, b"", "forget", 0) == b""
        with pytest.raises(Gone):
            await sidecar._tell(None, b"no message", "upload", 1, "127.0.0.1:1", 0, 10, False)
        assert sidecar._process.wait() == -signal.SIGKILL and not sidecar.running
        await sidecar.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert "DecodeError" in caplog.text


def test_where_only_it_gets_nothing_through_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "DOUBT_S", 0.0)
    said: list[str] = []

    class Fails(Sidecar):
        def __init__(self) -> None:
            self.running, self.queue_s = True, 0.0

        def can_send(self, data: memoryview) -> bool:
            return self.running

        async def upload(self, endpoint: Endpoint, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
            said.append("carried")
            raise WireError("no more files may be opened")

        def give_up(self, why: str) -> None:
            said.append("given up")
            self.running = False

    class Works(StripedStreams):
        async def upload(self, header: pb.Upload, data: memoryview, resume: bool) -> pb.UploadReply:
            said.append("without it")
            if broken:
                raise WireError("the link is cut")
            return pb.UploadReply(accepted=True)

    broken = True

    async def scenario() -> None:
        nonlocal broken
        sidecar, lanes = Fails(), Works([], "a", "session", Meter(), Meter())
        routes = Routes(lanes, "127.0.0.1:1", 1, None, lambda stubs: lanes, lambda: sidecar)

        async def send(times: int) -> list[str]:
            said.clear()
            for _ in range(times):
                with contextlib.suppress(WireError):
                    await routes.to_send(0, memoryview(b"1")).upload(pb.Upload(), memoryview(b"1"), False)
            return said

        assert await send(4) == ["carried", "without it"] * 2  # nothing works: no reason to give it up
        broken = False
        assert await send(5) == ["carried", "without it", "carried", "without it", "given up", "without it"]

    asyncio.run(scenario())


def test_a_snapshot_is_not_kept_while_what_was_made_of_it_is_sent() -> None:
    async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    async def upload(*_: object) -> pb.UploadReply:
        kept.append(reference())
        return pb.UploadReply(accepted=True)

    kept: list[Snapshot | None] = []
    routes = Mock(shard_of=lambda _: "", to_send=lambda *_: types.SimpleNamespace(upload=upload))
    session: Any = types.SimpleNamespace(
        replica=types.SimpleNamespace(quick=False), exchange=types.SimpleNamespace(has_questions=lambda: False), routes=routes
    )
    contributor: Any = Contributor(session, types.SimpleNamespace(in_thread=at_once), Reachability("a"))  # type: ignore[arg-type]
    contributor._encode = lambda give, snapshot: Encoded(memoryview(b""), 0)
    contributor._header = contributor._delivered = lambda *_: None
    snapshot = Snapshot(0, 1, None, lambda: torch.empty(0))
    give = types.SimpleNamespace(question=Question(0, 1, 0), again=False)
    reference, giving = weakref.ref(snapshot), contributor._contribute(give, snapshot)
    del snapshot
    asyncio.run(giving)
    assert kept == [None]


@pytest.mark.parametrize("executable", ["nothing", "", None])
def test_where_it_cannot_be_started_that_is_said(
    tmp_path: Path,
    start_syncer: Callable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    executable: str | None,
) -> None:
    folder = skerry.create(tmp_path / "run", large_model(), EXACT)
    monkeypatch.setattr(sidecars.sys, "executable", executable and str(tmp_path / executable))
    island = Training(start_syncer(folder).address)
    has_merged(folder)
    island.stop()
    assert "carries bulk data in the training process" in caplog.text
    assert_same(read_model(folder), dict(island.model.named_parameters()), tolerance=1e-6)


def test_where_memory_cannot_be_shared_there_is_none(
    tmp_path: Path, start_syncer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError("not allowed here")

    monkeypatch.setattr(os, "memfd_create", refused)
    folder = skerry.create(tmp_path / "run", large_model(), EXACT)
    island = Training(start_syncer(folder).address)
    has_merged(folder)
    assert island.learner._connection._sidecar is None
    island.stop()
    assert_same(read_model(folder), dict(island.model.named_parameters()), tolerance=1e-6)


@pytest.fixture
def proxied(tmp_path: Path, start_syncer: Callable) -> Iterator[tuple[Path, LinkProxy]]:
    folder = skerry.create(tmp_path / "run", large_model(), EXACT)
    host, port = start_syncer(folder).address.split(":")
    proxy = LinkProxy(["a"], (host, int(port)))
    yield folder, proxy
    proxy.close()


def test_a_link_that_breaks_in_the_middle_spoils_nothing(proxied: tuple[Path, LinkProxy]) -> None:
    folder, proxy = proxied
    island = Training(proxy.address("a"))
    sidecar, connection = sidecar_of(island), island.learner._connection
    slow = Condition(bytes_per_s=40e6)
    proxy.set("a", LinkState(up=slow, down=slow))
    for way in (connection.sent, connection.received, connection.sent, connection.received):
        before = way.total_bytes
        poll(lambda way=way, before=before: way.total_bytes - before > 5 << 20, "something to be under way")
        proxy.set("a", LinkState(cut=True))
        proxy.set("a", LinkState(up=slow, down=slow))
        has_merged(folder, 1)
    proxy.set("a", LinkState())
    has_merged(folder)
    assert sidecar.running
    island.stop()
    assert_same(read_model(folder), dict(island.model.named_parameters()), tolerance=1e-6)
    assert not tape(folder, "unhealthy")


ISLAND = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from skerry.learner import device
device.SETS_ASIDE = ("cpu",)
from large_fragments import Training
island = Training(sys.argv[1])
sidecar = island.learner._connection._sidecar
while not sidecar.running:
    threading.Event().wait(0.01)
print(sidecar._process.pid, flush=True)
threading.Event().wait()
"""


def test_it_does_not_outlive_an_island_that_is_killed(tmp_path: Path, start_syncer: Callable) -> None:
    folder = skerry.create(tmp_path / "run", large_model(), EXACT)
    command = [sys.executable, "-c", ISLAND, start_syncer(folder).address, str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as island:
        assert island.stdout is not None
        process = psutil.Process(int(island.stdout.readline()))
        has_merged(folder, 1)
        process.send_signal(signal.SIGINT)  # what a terminal sends to all of them at once
        assert process.is_running()
        island.kill()
    poll(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "its end")


LEAVES_LAST = """
import atexit, sys, threading
import torch
sys.path.insert(0, sys.argv[2])
import skerry
from skerry.learner import device
device.SETS_ASIDE = ("cpu",)
from large_fragments import large_model
model = large_model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
learner = skerry.join(sys.argv[1], model, optimizer)
atexit.register(learner.leave)
while not learner._connection._sidecar.running:
    threading.Event().wait(0.01)
print(learner._connection._sidecar._process.pid, flush=True)
for _ in range(4):
    model(torch.randn(2, 1024)).square().mean().backward()
    optimizer.step()
"""


def test_an_island_may_leave_when_the_interpreter_ends(tmp_path: Path, start_syncer: Callable) -> None:
    folder = skerry.create(tmp_path / "run", large_model(), EXACT)
    command = [sys.executable, "-c", LEAVES_LAST, start_syncer(folder).address, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert not psutil.pid_exists(int(done.stdout))


# ---------------------------------------------------------------- the two ends by themselves


class Silent:
    """An address where a connection is accepted and nothing is ever said."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_memory_is_not_used_again_before_the_other_process_is_done_with_it() -> None:
    outgoing, incoming = (PinnedMemory(1 << 20, 1, CPU, [], shared=True) for _ in range(2))

    def room() -> memoryview:
        return raw_bytes(incoming.take(1 << 20, torch.uint8))

    async def scenario() -> None:
        sidecar = Sidecar(outgoing, incoming, Meter(), Meter())
        await sidecar.start("a", "session", 1, None)
        with Silent() as there:
            download = Download(pb.Fetch(fragment=0, version=1, have=0), lambda _: None, room())
            assert download.room is not None and sidecar.can_receive(download.room)
            assert not sidecar.can_receive(room()), "there is one piece"
            endpoint = Endpoint(7, there.address)
            fetching = asyncio.ensure_future(sidecar.fetch(endpoint, download, download.room))
            await asyncio.sleep(0.1)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            del download, fetching  # which remembers where it was interrupted
            assert not sidecar.can_receive(room()), "whoever wanted it has given up, but it may still be written to"
            sidecar.disconnect(7)
            while not sidecar.can_receive(room()):
                await asyncio.sleep(0.01)
        await sidecar.close()
        with pytest.raises(Gone):
            await sidecar.upload(Endpoint(7, there.address), pb.Upload(), raw_bytes(outgoing.take(10, torch.uint8)), False)

    asyncio.run(asyncio.wait_for(scenario(), 30))


class Breaking:
    """Serves one version in parts; the first stream ends when it is asked for more than the first of them."""

    def __init__(self, data: bytes) -> None:
        self._data, self._streams = data, 0
        self.asked_for: list[tuple[int, int]] = []
        """The stream, and the first chunk."""

    async def bulk(self, messages: AsyncIterator[Any], context: Any) -> None:
        self._streams += 1
        stream, answered = self._streams, 0
        async for parcel in messages:
            if parcel.message.WhichOneof("message") != "fetch":
                continue
            wanted = parcel.message.fetch
            self.asked_for.append((stream, wanted.first_chunk))
            if stream == 1 and answered:
                return
            answered += 1
            header = pb.Fetched(
                fragment=wanted.fragment, version=wanted.version, first_chunk=wanted.first_chunk, codec="fp32",
                size_bytes=len(self._data), checksum=checksum(self._data),
            )  # fmt: skip
            message = pb.BulkToLearner(fetched=header)
            for number in range(wanted.first_chunk, min(wanted.first_chunk + wanted.chunks, count_chunks(len(self._data)))):
                await context.write(Parcel(message, chunk(memoryview(self._data), number)))
                message = pb.BulkToLearner()


def test_what_has_come_is_not_asked_for_again() -> None:
    data = os.urandom(10 << 20)
    outgoing, incoming = (PinnedMemory(10 << 20, 1, CPU, [], shared=True) for _ in range(2))

    async def scenario() -> None:
        service, server = Breaking(data), grpc.aio.server()
        add_bulk_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        sidecar = Sidecar(outgoing, incoming, Meter(), Meter())
        await sidecar.start("a", "session", 1, None)
        endpoint = Endpoint(1, f"127.0.0.1:{port}")
        room = raw_bytes(incoming.take(10 << 20, torch.uint8))
        download = Download(pb.Fetch(fragment=0, version=1, have=0), lambda _: None, room)
        with pytest.raises(WireError):
            await sidecar.fetch(endpoint, download, room)
        await sidecar.fetch(endpoint, download, room)
        again = [first for stream, first in service.asked_for if stream > 1]
        assert again and min(again) == MOST_CHUNKS, "the first run had come"
        assert bytes(download.finish()[1]) == data
        await sidecar.close()
        await server.stop(None)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_whatever_goes_wrong_there_is_said(tmp_path: Path) -> None:
    memories = [PinnedMemory(1 << 20, 1, CPU, [], shared=True) for _ in range(2)]

    async def scenario() -> None:
        sidecar = Sidecar(memories[0], memories[1], Meter(), Meter())
        await sidecar.start("a", "session", 1, TLS(ca=str(tmp_path / "nothing")))
        data = raw_bytes(memories[0].take(10, torch.uint8))
        with pytest.raises(WireError, match="nothing"):
            await sidecar.upload(Endpoint(1, "127.0.0.1:1"), pb.Upload(), data, False)
        sidecar.disconnect(2)
        for ended in (1, 2):
            with pytest.raises(WireError, match="closed"):
                await sidecar.upload(Endpoint(ended, "127.0.0.1:1"), pb.Upload(), data, False)
        await sidecar.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_connections_that_have_ended_are_not_used_again() -> None:
    async def scenario() -> None:
        lanes = StripedStreams([], "a", "session", Meter(), Meter())
        routes = Routes(lanes, "127.0.0.1:1", 1, None, lambda stubs: lanes)
        await routes.close()
        with pytest.raises(WireError, match="closed"):
            await routes.to_send(0, memoryview(b"1")).upload(pb.Upload(), memoryview(b"1"), False)
        with pytest.raises(WireError, match="closed"):
            await routes.to_fetch(0, None).fetch(Download(pb.Fetch(), lambda _: None))

    asyncio.run(scenario())


def test_another_version_than_the_one_wanted_is_not_taken() -> None:
    download = Download(pb.Fetch(fragment=3, version=1), lambda _: None)
    for header in (pb.Fetched(fragment=4, version=1), pb.Fetched(fragment=3, version=2)):
        with pytest.raises(NotAsWanted):
            download.arrived(header, memoryview(b""))


def test_what_is_forgotten_is_not_written_to_any_more() -> None:
    taken = bytearray(16)
    download = Download(pb.Fetch(fragment=3, version=1), lambda _: None, memoryview(taken))
    header = pb.Fetched(fragment=3, version=1, codec="bf16", size_bytes=10, checksum=1)
    download.begins(header)
    assert download.assembly is not None
    download.give_up()
    download.assembly.add(0, b"x" * 10)
    assert taken == bytes(16)
    with pytest.raises(WireError, match="given up"):
        download.finish()


def test_what_does_not_fit_is_fetched_by_the_island_itself() -> None:
    class Fake(Sidecar):
        def __init__(self) -> None:
            self.running, self.queue_s = True, 0.0
            self.forgotten: list[memoryview] = []

        def can_receive(self, room: memoryview) -> bool:
            return True

        async def fetch(self, endpoint: Endpoint, download: Download, room: memoryview) -> None:
            raise TooLarge("a whole version")

        def forget(self, room: memoryview) -> None:
            self.forgotten.append(room)

    class Recording(StripedStreams):
        async def fetch(self, download: Download) -> None:
            fetched.append(download)

    fetched: list[Download] = []
    room = memoryview(bytearray(4))

    async def scenario() -> None:
        sidecar, lanes = Fake(), Recording([], "a", "session", Meter(), Meter())
        routes = Routes(lanes, "127.0.0.1:1", 1, None, lambda stubs: lanes, lambda: sidecar)
        download = Download(pb.Fetch(fragment=0, version=1, have=0), lambda _: None, room)
        await routes.to_fetch(0, download.room).fetch(download)
        assert fetched == [download] and download.room is None and sidecar.forgotten == [room]

    asyncio.run(scenario())
    with pytest.raises(TooLarge):
        Download(pb.Fetch(fragment=0, version=1), lambda _: None, room).begins(
            pb.Fetched(fragment=0, version=1, codec="fp32", size_bytes=5)
        )
