"""Large fragments over several connections, through links that are slow and break in the middle."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from islands import RawLearner, assert_same, poll, tape
from large_fragments import EXACT, Training, large_model
from torch import nn

import skerry
from skerry.chaos.proxy import Condition, LinkProxy, LinkState
from skerry.config import SyncConfig
from skerry.errors import WireError
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.stream import Download
from skerry.learner.transport.striped import StripedStreams, _checked, _longest_s
from skerry.syncer.rpc.uploads import Contributions
from skerry.syncer.storage.run_folder import read_model
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import open_channel
from skerry.wire.framing import CHUNK_BYTES, chunk, count_chunks
from skerry.wire.service import SyncerStub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return skerry.create(tmp_path / "run", large_model(), EXACT)


@pytest.fixture
def proxied(folder: Path, start_syncer) -> Iterator[tuple[LinkProxy, str]]:
    host, port = start_syncer(folder).address.split(":")
    proxy = LinkProxy(["a"], (host, int(port)))
    yield proxy, proxy.address("a")
    proxy.close()


def test_a_large_fragment_uses_the_connections_there_are(folder: Path, start_syncer) -> None:
    syncer = start_syncer(folder)
    port = int(syncer.address.split(":")[1])

    def connections() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(1 for c in found if c.raddr and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED)

    island = Training(syncer.address, connections=3)
    poll(lambda: len(tape(folder, "merged")) >= 3, "a few merges")
    assert connections() == 1 + 3
    island.stop()
    assert_same(read_model(folder), dict(island.model.named_parameters()), tolerance=1e-6)


def test_what_breaks_in_the_middle_is_finished_and_not_begun_again(folder: Path, proxied: tuple[LinkProxy, str]) -> None:
    proxy, address = proxied
    island = Training(address)
    link = island.learner._connection
    slow = Condition(bytes_per_s=40e6)
    proxy.set("a", LinkState(up=slow, down=slow))
    for way in (link.sent, link.received, link.sent, link.received):
        before = way.total_bytes
        poll(lambda way=way, before=before: way.total_bytes - before > 5 << 20, "something to be under way")
        proxy.set("a", LinkState(cut=True))
        proxy.set("a", LinkState(up=slow, down=slow))
        merged = len(tape(folder, "merged"))
        poll(lambda merged=merged: len(tape(folder, "merged")) > merged, "a merge after the link came back")
    proxy.set("a", LinkState())
    island.stop()
    assert_same(read_model(folder), dict(island.model.named_parameters()), tolerance=1e-6)
    assert not tape(folder, "unhealthy")
    whole = 16 << 20
    merges = len(tape(folder, "merged"))
    assert link.sent.total_bytes < whole * (merges + 2), "what had arrived was not sent again"
    assert link.received.total_bytes < whole * (merges + 3), "nor fetched again, nor twice at once"


def test_what_a_learner_tells_with_a_contribution_is_written_down_whichever_part_comes_first(
    tmp_path: Path, start_syncer
) -> None:
    """It goes with the first part alone, and parts on several connections overtake each other."""
    model = nn.Linear(1024, 2048, bias=False)
    folder = skerry.create(tmp_path / "run", model, SyncConfig(fragments=1, every=1, overlap=0, outer_lr=1.0))
    syncer = start_syncer(folder)
    journal = {"since": 0, "until": 1, "adopted": [], "tokens": [], "gaps": [], "data": []}

    async def scenario() -> None:
        async with RawLearner(syncer.address, model, 1) as raw:
            await raw.join()
            header, data = raw.contribution(await raw.next_ask())

            def part(number: int, journal_json: str = "") -> pb.BulkToSyncer:
                message = pb.BulkToSyncer(upload=header, chunk=bytes(chunk(memoryview(data), number)))
                message.upload.first_chunk, message.upload.journal_json = number, journal_json
                return message

            async with raw.lane() as sooner, raw.lane() as later:
                for number in range(1, count_chunks(len(data))):
                    await sooner.write(part(number))
                question = pb.BulkToSyncer(upload=header)
                question.upload.resume = True
                await sooner.write(question)
                assert list((await sooner.read()).reply.missing) == [0, 1]
                await later.write(part(0, json.dumps(journal)))
                assert (await later.read()).reply.accepted
            await raw.receive("announce")

    asyncio.run(scenario())
    syncer.stop()
    assert [(entry["learner"], entry["until"]) for entry in tape(folder, "journaled")] == [("raw", 1)]


def test_a_syncer_says_what_is_missing_and_takes_the_rest_on_any_lane(tmp_path: Path, start_syncer) -> None:
    model = nn.Linear(1024, 2048, bias=False)
    folder = skerry.create(tmp_path / "run", model, SyncConfig(fragments=1, every=1, overlap=0, outer_lr=1.0))
    syncer = start_syncer(folder)

    async def scenario() -> None:
        async with RawLearner(syncer.address, model, 1) as raw:
            await raw.join()
            ask = await raw.next_ask()
            header, data = raw.contribution(ask)
            parts = [bytes(chunk(memoryview(data), number)) for number in range(count_chunks(len(data)))]
            assert len(parts) == 4

            def part(number: int) -> pb.BulkToSyncer:
                message = pb.BulkToSyncer(upload=header, chunk=parts[number])
                message.upload.first_chunk = number
                return message

            async def missing(lane) -> list[int]:
                message = pb.BulkToSyncer(upload=header)
                message.upload.resume = True
                await lane.write(message)
                return list((await lane.read()).reply.missing)

            async with raw.lane() as first:
                assert await missing(first) == [0, 4]
                await first.write(part(2))
                assert await missing(first) == [0, 2, 3, 1]
            async with raw.lane() as second, raw.lane() as third:
                await second.write(part(0))
                await third.write(part(3))
                # A lane is read in order, so its answer comes after what it was sent.
                assert await missing(second) in ([1, 1], [1, 1, 3, 1])
                assert await missing(third) == [1, 1]
                await second.write(part(1))
                assert (await second.read()).reply.accepted
            await raw.receive("announce")
            # Parts of a version are handed out as they are asked for.
            async with raw.lane() as lane:
                await lane.write(pb.BulkToSyncer(fetch=pb.Fetch(fragment=0, version=1, first_chunk=5, chunks=2)))
                first_part, second_part = await lane.read(), await lane.read()
                assert first_part.fetched.first_chunk == 5 and first_part.fetched.size_bytes == 8 << 20
                await lane.write(pb.BulkToSyncer(fetch=pb.Fetch(fragment=0, version=1)))
                whole = [await lane.read() for _ in range(8)]
                assert [first_part.chunk, second_part.chunk] == [message.chunk for message in whole[5:7]]

    asyncio.run(scenario())


def test_a_contribution_that_could_not_be_taken_is_answered_and_taken_when_it_comes_again(
    tmp_path: Path, start_syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no memory for it, for instance. Without an answer its learner would wait for one."""
    model = nn.Linear(8, 8, bias=False)
    folder = skerry.create(tmp_path / "run", model, SyncConfig(fragments=1, every=1, overlap=0, outer_lr=1.0))
    real, troubles = Contributions._decode, iter(["no memory"])

    def decode(*arguments: object) -> object:
        if (trouble := next(troubles, None)) is not None:
            raise RuntimeError(trouble)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Contributions, "_decode", decode)
    syncer = start_syncer(folder)

    async def scenario() -> None:
        async with RawLearner(syncer.address, model, 1) as raw:
            await raw.join()
            ask = await raw.next_ask()
            reply = await raw.give(ask)
            assert not reply.accepted and reply.damaged and "no memory" in reply.reason
            assert (await raw.give(ask)).accepted

    asyncio.run(scenario())


def test_what_was_begun_is_forgotten_when_nobody_wants_it_any_more(tmp_path: Path, start_syncer) -> None:
    model = nn.Linear(1024, 2048, bias=False)
    folder = skerry.create(tmp_path / "run", model, SyncConfig(fragments=1, every=1, overlap=0, quorum=1, grace=0.0))
    syncer = start_syncer(folder)

    async def scenario() -> None:
        async with RawLearner(syncer.address, model, 1) as slow, RawLearner(syncer.address, model, 1, "quick") as quick:
            await slow.join()
            await quick.join()
            ask = await slow.next_ask()
            header, data = slow.contribution(ask)
            async with slow.lane() as lane:
                await lane.write(pb.BulkToSyncer(upload=header, chunk=bytes(chunk(memoryview(data), 0))))
                asked = await quick.next_ask()
                assert asked.round == ask.round
                assert (await quick.give(asked)).accepted
                await slow.receive("announce")
                # The round is over: the rest is not wanted, and said to be so.
                for number in range(1, 4):
                    await lane.write(pb.BulkToSyncer(chunk=bytes(chunk(memoryview(data), number))))
                reply = (await lane.read()).reply
                assert not reply.accepted and "round" in reply.reason and not reply.damaged

    asyncio.run(scenario())


def test_what_waits_for_a_connection_ends_with_the_lanes() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nothing is ever said
            async with open_channel(f"127.0.0.1:{silent.getsockname()[1]}", None) as channel:
                lanes = StripedStreams([SyncerStub(channel)], "a", "session", Meter(), Meter())
                fetching = asyncio.ensure_future(lanes.fetch(Download(pb.Fetch(fragment=0, version=1), lambda _: None)))
                while lanes._streams[0]._call is None:
                    await asyncio.sleep(0)
                await lanes.close()
                with pytest.raises(WireError):
                    await fetching

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_what_is_being_sent_is_not_sent_beside_itself_and_ends_with_the_lanes() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with open_channel(f"127.0.0.1:{silent.getsockname()[1]}", None) as channel:
                lanes = StripedStreams([SyncerStub(channel)], "a", "session", Meter(), Meter())
                header, data = pb.Upload(fragment=1, round=2), memoryview(b"data")
                first = asyncio.ensure_future(lanes.upload(header, data, resume=False))
                await asyncio.sleep(0)
                with pytest.raises(WireError, match="being sent already"):
                    await lanes.upload(header, data, resume=False)
                # What says what is missing answers another question.
                lanes.replied(pb.UploadReply(fragment=1, round=2, missing=[0, 1]))
                await asyncio.sleep(0)
                assert not first.done()
                await lanes.close()
                with pytest.raises(WireError, match="closed|broke"):
                    await first

    asyncio.run(scenario())


@pytest.mark.parametrize("missing", [[0], [0, 0], [3, 2], [0, 1 << 31], [4, 1], [0, 1, 1, 1, 2, 1, 3, 1, 0, 1]])
def test_chunks_that_there_are_not_cannot_be_missing(missing: list[int]) -> None:
    with pytest.raises(WireError, match="as missing, of 4"):
        _checked(missing, 4)
    assert _checked([1, 2, 3, 1], 4) == [(1, 2), (3, 1)]


def test_how_long_nothing_may_move_follows_the_rate_within_limits() -> None:
    assert _longest_s(0.0) == 60, "while nothing is known"
    assert _longest_s(100e6) == 10
    assert _longest_s(CHUNK_BYTES / 2) == 40
    assert _longest_s(CHUNK_BYTES / 10) == 60
    assert _longest_s(CHUNK_BYTES / 100) == 300, "three chunks at least"
    assert _longest_s(1.0) == 600


def test_who_gives_up_has_used_nothing_of_a_cap() -> None:
    async def scenario() -> None:
        meter, given_up = Meter(cap_mbit=8.0), False  # 1 MB/s
        await meter.allow(500_000)
        waiting = [asyncio.ensure_future(meter.allow(10_000_000, lambda: given_up)) for _ in range(20)]
        await asyncio.sleep(0)
        given_up = True
        await asyncio.gather(*waiting)
        started = asyncio.get_running_loop().time()
        await meter.allow(1)
        assert asyncio.get_running_loop().time() - started < 1.0

    asyncio.run(scenario())


def test_a_cap_holds_over_time() -> None:
    async def send(meter: Meter, sizes: list[int]) -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        with meter.busy():
            for size in sizes:
                await meter.allow(size)
                meter.moved(size, "contributions")
        return loop.time() - started

    capped = Meter(cap_mbit=80.0)  # 10 MB/s
    assert asyncio.run(send(capped, [CHUNK_BYTES // 4] * 20)) >= 0.5 * 20 / 4 * CHUNK_BYTES / 10e6
    assert capped.total_bytes == 5 * CHUNK_BYTES and 0 < capped.bytes_per_s <= 20e6
    free = Meter()
    asyncio.run(send(free, [CHUNK_BYTES] * 1000))
    assert free.total_bytes == 1000 * CHUNK_BYTES
