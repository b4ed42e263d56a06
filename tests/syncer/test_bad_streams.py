"""Streams that stand while what comes through them does not: messages that are damaged, or that stop coming.

A relay of whole gRPC messages between a real learner and a real syncer does it, so that TCP and HTTP/2 find nothing wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from islands import batches, flipped, poll, small_model, tape, train

import skerry
from skerry.config import SyncConfig
from skerry.errors import JoinRefused
from skerry.learner.transport import stream as lane
from skerry.learner.transport import striped as lanes
from skerry.wire import calls
from skerry.wire import framing as seal
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import CHANNEL_OPTIONS, PROTOCOL, SERVER_OPTIONS
from skerry.wire.loop import run_here

SYNC = SyncConfig(fragments=2, every=4, overlap=1, quorum=1, outer_lr=1.0, outer_momentum=0.0, merge="mean", silence_s=2.0)
GARBAGE = b"\xff\xff\xff"
"""No protobuf message: the tag does not end."""

Change = Callable[[bytes], "bytes | None"]
"""What becomes of a message; None if nothing does."""


class Relay(grpc.GenericRpcHandler):
    def __init__(self, syncer: str) -> None:
        self.down: dict[str, Change] = {}
        self.up: dict[str, Change] = {}
        """For the calls whose name ends like this."""
        self.opened: Counter[str] = Counter()
        self._syncer = syncer

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def pass_on(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
            self.opened[details.method.rpartition("/")[2]] += 1
            call = self._channel.stream_stream(details.method)(_changed(messages, details.method, self.up))
            try:
                async for message in _changed(call, details.method, self.down):
                    yield message
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(pass_on)

    async def start(self) -> str:
        self._channel = grpc.aio.insecure_channel(self._syncer, options=CHANNEL_OPTIONS)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(grace=0)
        await self._channel.close()


async def _changed(messages: Any, method: str, changes: dict[str, Change]) -> AsyncIterator[bytes]:
    async for message in messages:
        change = next((change for end, change in changes.items() if method.endswith(end)), None)
        changed = change(message) if change is not None else message
        if changed is not None:
            yield changed


@pytest.fixture
def run(tmp_path: Path, start_syncer) -> Iterator[tuple[Path, Relay, str]]:
    folder = skerry.create(tmp_path / "run", small_model(), SYNC)
    relay = Relay(start_syncer(folder).address)
    address = run_here(relay.start())
    yield folder, relay, address
    run_here(relay.stop())


def merges(folder: Path) -> int:
    return len(tape(folder, "merged"))


def joins(folder: Path) -> list[bool]:
    return [entry["resumed"] for entry in tape(folder, "joined")]


def once(change: Change) -> Change:
    left = [change]
    return lambda message: left.pop()(message) if left else message


@pytest.mark.parametrize("end", ["Control", "Bulk"])
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("what", ["one message damaged", "one bit flipped", "nothing comes through any more"])
def test_a_learner_whose_stream_stands_but_is_of_no_use_comes_back(run, monkeypatch, end: str, way: str, what: str) -> None:
    folder, relay, address = run
    monkeypatch.setattr(lanes, "STUCK_S", (2.0, 2.0, 2.0))
    monkeypatch.setattr(lane, "FORGOTTEN_S", 4.0)
    model = small_model(seed=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    learner = skerry.join(address, model, optimizer, name="island", timeout_s=30)
    data = batches(0, 20)

    def trains_until(done: Callable[[], Any], what: str) -> None:
        poll(lambda: train(model, optimizer, [data[learner.step % 20]]) and done(), what)

    trains_until(lambda: merges(folder) >= 4, "merges")
    before, opened = learner.step, relay.opened[end]
    changes = relay.up if way == "up" else relay.down
    if what == "one message damaged":
        changes[end] = once(lambda message: GARBAGE)
    elif what == "one bit flipped":
        # The last before the seal: part of a number that protobuf would believe.
        changes[end] = once(lambda message: flipped(message, 8 * (len(message) - seal.SEAL_SIZE) - 4))
    else:
        # Until the learner or the syncer has noticed: what begins after that comes through.
        changes[end] = lambda message: None
        if end == "Control":
            trains_until(lambda: not learner.connected or tape(folder, "lost"), "it to be noticed")
        else:
            quiet = merges(folder)
            trains_until(lambda: tape(folder, "opened")[-1]["round"] > before, "a round that nothing is sent for")
            poll(lambda: learner._session.routes.main.idle, "the lane to be given up")
            assert merges(folder) <= quiet + 2, "what was under way already"
    changes.clear() if what == "nothing comes through any more" else None
    if end == "Control":
        trains_until(lambda: joins(folder) == [False, True], "it to come back with what it has")
    else:
        trains_until(lambda: relay.opened[end] > opened, "the stream to be opened again")
    merged = merges(folder)
    trains_until(lambda: merges(folder) >= merged + 4, "merges again")
    assert learner.failure is None and learner.connected
    learner.detach()


@pytest.mark.parametrize("what", ["the description", "the hello"])
def test_what_is_damaged_on_its_way_before_one_has_joined_is_said_again(run, what: str) -> None:
    folder, relay, address = run
    changes, end = (relay.down, "Describe") if what == "the description" else (relay.up, "Control")
    changes[end] = once(lambda message: GARBAGE)
    model = small_model()
    learner = skerry.join(address, model, torch.optim.SGD(model.parameters(), lr=0.1), name="island", timeout_s=30)
    refused = ["a control stream without a hello"] if what == "the hello" else []
    poll(lambda: [entry["reason"] for entry in tape(folder, "refused")] == refused and joins(folder) == [False], "the tape")
    learner.detach()


def test_fragments_there_are_not_make_the_learner_connect_again(run) -> None:
    folder, relay, address = run
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = skerry.join(address, model, optimizer, name="island", timeout_s=30)
    for number, message in enumerate((pb.ToLearner(ask=pb.Ask(fragment=9)), pb.ToLearner(announce=pb.Announce(fragment=9)))):
        relay.down["Control"] = once(lambda _, sent=message: seal.serialize(sent))
        poll(lambda expected=number + 2: len(joins(folder)) == expected, "it to connect again")
    assert learner.failure is None
    learner.detach()


@pytest.mark.parametrize("what", ["the hello", "the welcome", "the description"])
def test_a_shard_is_let_in_although_a_bit_was_flipped_on_the_way(tmp_path: Path, start_syncer, start_shard, what: str) -> None:
    folder = skerry.create(tmp_path / "run", small_model(), SYNC)
    relay = Relay(start_syncer(folder, shards=1).address)
    changes, end = (relay.up if what == "the hello" else relay.down), ("Describe" if what == "the description" else "Shard")
    changes[end] = once(lambda message: flipped(message, 8 * len(message) // 2))
    start_shard(SimpleNamespace(folder=folder, address=run_here(relay.start())), 0)
    poll(lambda: tape(folder, "shard_joined"), "the shard")
    assert relay.opened[end] == 2
    run_here(relay.stop())


def test_a_shard_of_another_version_is_told_so(tmp_path: Path, start_syncer, start_shard, monkeypatch) -> None:
    folder = skerry.create(tmp_path / "run", small_model(), SYNC)
    syncer = start_syncer(folder, shards=1)
    monkeypatch.setattr(calls, "PROTOCOL", 99)
    shard = start_shard(syncer, 0)
    with pytest.raises(JoinRefused, match=f"the syncer speaks version {PROTOCOL}, Skerry here 99"):
        shard.wait()
