"""What the syncer takes from the network and what it refuses, asked with bare gRPC calls over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from islands import DEADLINE_S, RawLearner, assert_same, poll, small_model, tape, versions
from safetensors import safe_open
from torch import nn

import skerry
from skerry.admin import close_run, describe, describe_job, tell
from skerry.checksum import checksum
from skerry.clock import SystemClock
from skerry.config import SyncConfig
from skerry.core import messages as m
from skerry.core.records import PartRestarted
from skerry.core.syncer import SyncerCore
from skerry.errors import ConfigError, JoinRefused, StoreError, WireError
from skerry.syncer.metrics_log import MetricsLog
from skerry.syncer.process import run_syncer
from skerry.syncer.rpc.bulk import STREAM_QUEUE
from skerry.syncer.server import SyncerServer
from skerry.syncer.storage.run_folder import read_identity, read_model
from skerry.syncer.storage.store import RunStore
from skerry.tensors.codecs import codec as codecs
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL, open_channel, split_address
from skerry.wire.framing import CHUNK_BYTES, Assembly, Parcel, chunk, count_chunks, in_runs

FRAGMENTS = 2
SYNC = SyncConfig(fragments=FRAGMENTS, every=1, overlap=0, quorum=1, outer_lr=1.0, outer_momentum=0.0)

Scenario = Callable[[RawLearner], Awaitable[Any]]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return skerry.create(tmp_path / "run", small_model(), SYNC)


def play(address: str, scenario: Scenario, model: nn.Module | None = None, **identity: str) -> Any:
    """A scenario with one bare learner that has a connection and has not said anything."""

    async def main() -> Any:
        async with RawLearner(address, model or small_model(), FRAGMENTS, **identity) as raw:
            return await scenario(raw)

    return asyncio.run(main())


# ---------------------------------------------------------------- hello


async def refusal_of(raw: RawLearner, hello: pb.Hello) -> str:
    raw.send(hello=hello)
    reason = (await raw.receive("refusal", "welcome")).refusal.reason
    await raw.receive_end()
    return reason


def test_what_a_syncer_was_told_is_on_its_tape_when_it_has_answered(run_folder: Path, start_syncer) -> None:
    """Who tells it of a fault may kill it next."""
    address = start_syncer(run_folder).address
    for number in range(20):
        tell(address, None, PartRestarted("island-0", number))
        assert [entry["pid"] for entry in tape(run_folder, "part_restarted")] == list(range(number + 1))


def test_another_protocol_version_is_refused_and_both_versions_named(run_folder: Path, start_syncer) -> None:
    syncer = start_syncer(run_folder)
    reason = play(syncer.address, lambda raw: refusal_of(raw, raw.hello(protocol=PROTOCOL + 1)))
    assert reason == f"protocol mismatch: the syncer speaks version {PROTOCOL}, this learner {PROTOCOL + 1}"
    syncer.stop()
    assert [entry["reason"] for entry in tape(run_folder, "refused")] == [reason]
    assert tape(run_folder, "refused")[0]["learner"] == "raw"


@pytest.mark.parametrize("first", [{"ready": pb.Ready()}, {"report": pb.Report(step=1)}, {}], ids=["ready", "report", "empty"])
def test_a_first_message_that_is_no_hello_is_refused(run_folder: Path, start_syncer, first: dict[str, Any]) -> None:
    async def scenario(raw: RawLearner) -> str:
        raw.send(**first)
        reason = (await raw.receive("refusal")).refusal.reason
        await raw.receive_end()
        return reason

    assert play(start_syncer(run_folder).address, scenario) == "the first message must be a hello"


def test_a_stream_that_ends_without_a_word_is_ended(run_folder: Path, start_syncer) -> None:
    async def scenario(raw: RawLearner) -> None:
        raw.stop_sending()
        await raw.receive_end()

    play(start_syncer(run_folder).address, scenario)
    poll(lambda: tape(run_folder, "refused"), "the tape to say so")
    assert [entry["reason"] for entry in tape(run_folder, "refused")] == ["a control stream without a hello"]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"name": ""}, "a name and a session of 1 to 200 characters"),
        ({"name": "x" * 3_000_000}, "a name and a session of 1 to 200 characters"),
        ({"session": ""}, "a name and a session of 1 to 200 characters"),
        ({"session": "x" * 3_000_000}, "a name and a session of 1 to 200 characters"),
        ({"run_id": "0123"}, "the learner belongs to 0123"),
        ({"step": 2**64 - 1}, "step, tokens and samples must be at most"),
    ],
    ids=["no name", "long name", "no session", "long session", "other run", "huge step"],
)
def test_a_hello_without_a_proper_identity_is_refused(run_folder: Path, start_syncer, changes, reason: str) -> None:
    syncer = start_syncer(run_folder)
    assert reason in play(syncer.address, lambda raw: refusal_of(raw, raw.hello(**changes)))
    syncer.stop()
    assert len(str(tape(run_folder, "refused"))) < 1000  # what strangers say is not written down whole


class Odd(nn.Module):
    """A model with something of every kind: an embedding, a matrix, a vector, a frozen parameter and both kinds of buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def without(tensors: list[pb.Tensor], name: str) -> list[pb.Tensor]:
    return [t for t in tensors if t.name != name]


def changed(tensors: list[pb.Tensor], name: str, **changes: Any) -> list[pb.Tensor]:
    values = {t.name: {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "rule": t.rule} for t in tensors}
    values[name].update(changes)
    return [pb.Tensor(**v) for v in values.values()]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda t: without(t, "layer.bias"), "the run has tensor 'layer.bias' [4], this learner does not"),
        (
            lambda t: [*t, pb.Tensor(name="more", shape=[2], dtype="float32", rule="radial")],
            "this learner has tensor 'more' [2]",
        ),
        (lambda t: changed(t, "layer.weight", shape=[4, 5]), "'layer.weight' is [4, 4] in the run and [4, 5] here"),
        (lambda t: changed(t, "layer.weight", shape=[16]), "'layer.weight' is [4, 4] in the run and [16] here"),
        (lambda t: changed(t, "embedding.weight", rule="radial"), "'embedding.weight' is 'mean' in the run and 'radial' here"),
        (lambda t: changed(t, "frozen", rule="radial"), "'frozen' is 'fixed' in the run and 'radial' here"),
        (lambda t: changed(t, "count", dtype="float32"), "'count' is int64 in the run and float32 here"),
        (lambda t: changed(t, "mean", dtype="int64"), "'mean' is float32 in the run and int64 here"),
        (lambda t: [t[1], t[0], *t[2:]], "tensor 0 is 'frozen' in the run and 'embedding.weight' here"),
        (lambda t: [], "the run has tensor 'frozen' [3], this learner does not"),
    ],
    ids=["missing", "extra", "shape", "rank", "rule", "thawed", "float for int", "int for float", "order", "none at all"],
)
def test_another_model_is_refused_and_the_first_difference_named(tmp_path: Path, start_syncer, change, reason: str) -> None:
    folder = skerry.create(tmp_path / "run", Odd(), SYNC)
    syncer = start_syncer(folder)

    async def scenario(raw: RawLearner) -> str:
        return await refusal_of(raw, raw.hello(tensors=change(list(raw.hello().tensors))))

    refused = play(syncer.address, scenario, Odd())
    assert refused.startswith("model mismatch: ") and reason in refused and "\n" not in refused

    async def as_it_is(raw: RawLearner) -> None:
        await raw.join()

    play(syncer.address, as_it_is, Odd())
    syncer.stop()
    assert tape(folder, "refused") == [{"learner": "raw", "reason": refused}]


def test_an_island_may_train_in_another_float_type(tmp_path: Path, start_syncer) -> None:
    folder = skerry.create(tmp_path / "run", Odd(), SYNC)

    async def scenario(raw: RawLearner) -> bool:
        tensors = list(raw.hello().tensors)
        for tensor in tensors:
            if tensor.dtype == "float32":
                tensor.dtype = "bfloat16"
        raw.send(hello=raw.hello(tensors=tensors))
        return (await raw.receive("welcome", "refusal")).HasField("welcome")

    assert play(start_syncer(folder).address, scenario, Odd())


# ---------------------------------------------------------------- uploads


BadUpload = Callable[[RawLearner, pb.Ask], Awaitable[pb.UploadReply]]


def with_header(**changes: Any) -> BadUpload:
    return lambda raw, ask: raw.give(ask, **changes)


def with_parts(make: Callable[[pb.Upload, bytes], list[pb.Upload | bytes]]) -> BadUpload:
    return lambda raw, ask: raw.upload(*make(*raw.contribution(ask)))


def with_values(value: float) -> BadUpload:
    def upload(raw: RawLearner, ask: pb.Ask) -> Awaitable[pb.UploadReply]:
        delta = torch.zeros(raw.layout.fragments[ask.fragment].numel)
        delta[-1] = value
        return raw.give(ask, delta)

    return upload


BAD_UPLOADS: dict[str, tuple[BadUpload, str]] = {
    "truncated": (with_parts(lambda header, data: [header, data[:-3]]), "bytes, not "),
    "oversized": (with_parts(lambda header, data: [header, data + b"x"]), "bytes, not "),
    "large chunk": (with_parts(lambda header, data: [header, bytes(CHUNK_BYTES + 1)]), f"{CHUNK_BYTES + 1} bytes, not "),
    "no such chunk": (lambda raw, ask: raw.give(ask, first_chunk=1), "oversized: chunk 1 arrived"),
    "flipped bit": (with_parts(lambda header, data: [header, bytes([data[0] ^ 1]) + data[1:]]), "checksum mismatch"),
    "wrong checksum": (with_header(checksum=1), "checksum mismatch: declared 00000001"),
    "other codec": (with_header(codec="fp32"), "contributions are bf16, got 'fp32'"),
    "unknown codec": (with_header(codec="zip"), "contributions are bf16, got 'zip'"),
    "declared too small": (with_header(size_bytes=2), "2 declared"),
    "declared huge": (with_header(size_bytes=1 << 60), f"{1 << 60} declared"),
    "no such round": (with_header(round=99), "no round 99 is open"),
    "future base": (with_header(base=7), "base version 7 of fragment 0 does not exist"),
    "unknown fragment": (with_header(fragment=77), "there is no fragment 77"),
    "the fixed part": (with_header(fragment=FRAGMENTS), f"there is no fragment {FRAGMENTS}"),
    "other session": (with_header(session="another"), "'raw' is not connected with this session"),
    "other name": (with_header(name="somebody"), "'somebody' is not connected with this session"),
    "no steps": (with_header(steps=0), "steps and tokens must be >= 1"),
    "no tokens": (with_header(tokens=0), "steps and tokens must be >= 1"),
    "huge count": (with_header(tokens=2**64 - 1), "counts must be at most"),
    "chunk first": (with_parts(lambda header, data: [data, header]), "must start with its header"),
}


@pytest.mark.parametrize("bad, reason", BAD_UPLOADS.values(), ids=BAD_UPLOADS)
def test_a_bad_upload_is_refused_and_changes_nothing(run_folder: Path, start_syncer, bad: BadUpload, reason: str) -> None:
    syncer = start_syncer(run_folder)
    before = read_model(run_folder)

    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        ask = await raw.next_ask()
        reply = await asyncio.wait_for(bad(raw, ask), DEADLINE_S)
        assert not reply.accepted
        assert reason in reply.reason and "\n" not in reply.reason
        assert versions(run_folder) == [0] * FRAGMENTS
        assert_same(read_model(run_folder), before)
        header, data = await raw.download(ask.fragment, 0)
        assert len(data) == header.size_bytes
        # The same question is still open, and a proper answer is taken.
        assert (await raw.give(ask)).accepted
        announced = (await raw.receive("announce")).announce
        assert (announced.fragment, announced.version, announced.counted) == (ask.fragment, 1, 1)

    play(syncer.address, scenario)
    syncer.stop()
    refused = tape(run_folder, "refused")[0]
    assert reason in refused["reason"]
    if "header" not in reason and "empty" not in reason:
        assert refused["learner"] in ("raw", "somebody")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38], ids=["NaN", "inf", "-inf", "huge"])
def test_progress_no_merge_could_digest_is_refused_and_not_waited_for(run_folder: Path, start_syncer, value: float) -> None:
    """The numbers may be finite and still end as infinities: the norm of a vector squares them."""
    syncer = start_syncer(run_folder)
    before = read_model(run_folder)

    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        ask = await raw.next_ask()
        reply = await with_values(value)(raw, ask)
        assert not reply.accepted and not reply.damaged and "not finite, or beyond any plausible size" in reply.reason
        # Its answer is in: the round is over, and it is not asked for the same again.
        raw.report(2)
        while (again := (await raw.receive("ask")).ask).fragment != ask.fragment:
            pass
        assert again.round == 2
        assert_same(read_model(run_folder), before)
        assert (await raw.give(again)).accepted
        await raw.receive("announce")

    play(syncer.address, scenario)
    syncer.stop()
    [unhealthy] = tape(run_folder, "unhealthy")
    assert unhealthy["learner"] == "raw" and tape(run_folder, "cancelled")[0] == {"fragment": unhealthy["fragment"], "round": 1}


def test_a_learner_that_keeps_sending_nonsense_is_put_in_quarantine_and_comes_out(pair_folder: Path, start_syncer) -> None:
    """The other one's merges hold nothing of it, and both of them are told what is going on."""
    syncer = start_syncer(pair_folder)

    async def scenario(left: RawLearner, right: RawLearner) -> None:
        numel = left.layout.fragments[0].numel
        for step in range(1, 9):
            ask, other = await both_asked(left, right, step)
            healthy = step <= 1 or step > 4
            sent = torch.full((numel,), 0.125 + step / 64 if healthy else float("nan"))
            reply = await right.give(other, sent)
            assert reply.accepted == healthy
            assert (await left.give(ask)).accepted
            await left.receive("announce")
            if step in (4, 7):
                caution = (await right.receive("caution")).caution
                assert caution.quarantined == (step == 4)
        assert (await right.receive("announce")).announce.version >= 1  # it is served as before

    play_pair(syncer.address, scenario)
    syncer.stop()
    first = [entry for entry in tape(pair_folder, "merged") if entry["fragment"] == 0]
    merged = [{share["learner"] for share in entry["shares"]} for entry in first]
    both, alone = {"left", "right"}, {"left"}
    assert merged[:8] == [both, alone, alone, alone, alone, alone, both, both]
    assert [entry["learner"] for entry in tape(pair_folder, "unhealthy")] == ["right"] * 3
    assert [entry["learner"] for entry in tape(pair_folder, "quarantined") + tape(pair_folder, "readmitted")] == ["right"] * 2


def test_the_same_progress_again_is_not_taken_for_new(pair_folder: Path, start_syncer) -> None:
    syncer = start_syncer(pair_folder)

    async def scenario(left: RawLearner, right: RawLearner) -> None:
        old = torch.full((left.layout.fragments[0].numel,), 0.25)
        for step in (1, 2):
            ask, other = await both_asked(left, right, step)
            reply = await right.give(other, old)
            assert reply.accepted == (step == 1)
            assert (await left.give(ask)).accepted
            await left.receive("announce")
        assert "bit for bit identical" in reply.reason

    play_pair(syncer.address, scenario)
    syncer.stop()
    assert [entry["learner"] for entry in tape(pair_folder, "unhealthy")] == ["right"]


@pytest.mark.parametrize("shards", [0, 1])
def test_a_model_that_diverges_is_put_back_and_the_run_goes_on(tmp_path: Path, start_syncer, start_shard, shards: int) -> None:
    sync = SyncConfig(fragments=FRAGMENTS, every=1, overlap=0, quorum=1, outer_lr=1.0, outer_momentum=0.5, rollback=1.5)
    folder = skerry.create(tmp_path / "run", small_model(), sync)
    syncer = start_syncer(folder, shards=shards)
    shard = start_shard(syncer, 0).address if shards else ""
    poll(lambda: not shards or tape(folder, "shard_joined"), "the shard to join")

    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        step, good = 0, None
        while not (diverged := tape(folder, "diverged")):
            step += 1
            good = good or (read_model(folder) if tape(folder, "good_kept") else None)
            raw.report(step, loss=9.0 if good else 2.0)
            for _ in range(FRAGMENTS):
                ask = (await raw.receive("ask")).ask
                await raw.give(ask)
            assert step < 200
        assert diverged[0]["rolled_back"] and diverged[0]["good_step"] > 0
        while len(tape(folder, "restored")) < FRAGMENTS:
            await raw.receive("announce", "progress")
        with safe_open(folder / "good" / f"step-{diverged[0]['good_step']:010d}.safetensors", framework="pt") as copy:
            for entry in tape(folder, "restored"):
                header, data = await raw.download(entry["fragment"], entry["version"])
                if not header.reason:
                    values = codecs.codec(header.codec).decode(codecs.byte_tensor(memoryview(data)), len(data) // 4)
                    assert torch.equal(values, copy.get_tensor(str(entry["fragment"])))
        # Progress from before is refused, and from the restored versions it counts.
        raw.report(step + 1, loss=2.0)
        ask = (await raw.receive("ask")).ask
        while ask.round <= step:
            ask = (await raw.receive("ask")).ask
        assert ask.min_base >= min(entry["version"] for entry in tape(folder, "restored"))
        assert (await raw.give(ask)).accepted

    play(syncer.address, scenario, shard=shard)


@pytest.mark.parametrize("name", ["truncated", "flipped bit", "wrong checksum"])
def test_damage_on_the_way_is_told_apart_from_refusal(run_folder: Path, start_syncer, name: str) -> None:
    async def scenario(raw: RawLearner) -> tuple[bool, bool]:
        await raw.join()
        ask = await raw.next_ask()
        damaged = await BAD_UPLOADS[name][0](raw, ask)
        refused = await raw.give(ask, codec="zip")
        return damaged.damaged, refused.damaged

    assert play(start_syncer(run_folder).address, scenario) == (True, False)


@pytest.mark.parametrize(
    "report",
    [
        pb.Report(step=1, tokens=10, step_time_s=float("inf")),
        pb.Report(step=1, tokens=10, step_time_s=float("nan")),
        pb.Report(step=1, tokens=10, step_time_s=-1.0),
        pb.Report(step=2**64 - 1, tokens=10),
        pb.Report(step=1, tokens=2**64 - 1),
    ],
    ids=["infinite time", "no time", "negative time", "huge step", "huge token count"],
)
def test_a_report_with_impossible_numbers_is_passed_over(pair_folder: Path, start_syncer, report: pb.Report) -> None:
    syncer = start_syncer(pair_folder)

    async def scenario(left: RawLearner, right: RawLearner) -> None:
        right.send(report=report)
        ask, other = await both_asked(left, right, 1)
        assert (await left.give(ask)).accepted and (await right.give(other)).accepted
        await left.receive("announce")

    play_pair(syncer.address, scenario)
    syncer.stop()
    assert tape(pair_folder, "refused")[0] == {"learner": "right", "reason": "a report with impossible numbers"}
    assert tape(pair_folder, "merged")[0]["round"] == 1


def test_an_upload_larger_than_any_message_may_be_is_cut_off(run_folder: Path, start_syncer) -> None:
    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        ask = await raw.next_ask()
        header, _ = raw.contribution(ask)
        async with raw.lane() as lane:
            await lane.write(pb.BulkToSyncer(upload=header, chunk=bytes(5 << 20)))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await lane.read()
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await raw.give(ask)).accepted

    play(start_syncer(run_folder).address, scenario)


def test_an_upload_its_sender_abandons_leaves_the_question_open(run_folder: Path, start_syncer) -> None:
    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        ask = await raw.next_ask()
        header, data = raw.contribution(ask)
        async with raw.lane() as lane:
            await lane.write(pb.BulkToSyncer(upload=header, chunk=data[: len(data) // 2]))
        assert (await raw.give(ask)).accepted
        await raw.receive("announce")

    play(start_syncer(run_folder).address, scenario)


@pytest.fixture
def pair_folder(tmp_path: Path) -> Path:
    """A run whose merges need both of two learners."""
    sync = SyncConfig(fragments=FRAGMENTS, every=1, overlap=0, quorum=2, start_with=2, outer_lr=1.0, outer_momentum=0.0)
    return skerry.create(tmp_path / "pair", small_model(), sync)


def play_pair(address: str, scenario: Callable[[RawLearner, RawLearner], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with (
            RawLearner(address, small_model(), FRAGMENTS, name="left") as left,
            RawLearner(address, small_model(), FRAGMENTS, name="right", session="other") as right,
        ):
            await asyncio.gather(left.join(), right.join())
            return await scenario(left, right)

    return asyncio.run(main())


async def both_asked(left: RawLearner, right: RawLearner, step: int, fragment: int = 0) -> tuple[pb.Ask, pb.Ask]:
    asks = []
    for raw in (left, right):
        raw.report(step)
    for raw in (left, right):
        while (ask := (await raw.receive("ask")).ask).fragment != fragment or ask.round != step:
            pass
        asks.append(ask)
    return asks[0], asks[1]


def test_a_second_answer_to_the_same_question_is_a_duplicate_and_counts_once(pair_folder: Path, start_syncer) -> None:
    syncer = start_syncer(pair_folder)

    async def scenario(left: RawLearner, right: RawLearner) -> None:
        ask, other = await both_asked(left, right, 1)
        numel = left.layout.fragments[0].numel
        assert (await left.give(ask, torch.full((numel,), 0.5))).accepted
        again = await left.give(ask, torch.full((numel,), 64.0))
        assert not again.accepted and again.reason == "duplicate: left has answered round 1 of fragment 0"
        before = read_model(pair_folder)
        assert (await right.give(other, torch.full((numel,), 0.5))).accepted
        await left.receive("announce")
        after = read_model(pair_folder)
        moved = max(float((before[name] - after[name]).abs().max()) for name in before)
        assert moved == pytest.approx(0.5)

    play_pair(syncer.address, scenario)
    syncer.stop()
    [merged] = tape(pair_folder, "merged")
    assert [share["learner"] for share in merged["shares"]] == ["left", "right"]
    assert [refused["reason"] for refused in tape(pair_folder, "refused")] == [
        "duplicate: left has answered round 1 of fragment 0"
    ]


def test_progress_from_a_base_that_was_merged_already_is_stale(run_folder: Path, start_syncer) -> None:
    syncer = start_syncer(run_folder)

    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        ask = await raw.next_ask()
        assert (await raw.give(ask)).accepted
        await raw.receive("announce")
        raw.report(2)
        while (again := (await raw.receive("ask")).ask).fragment != ask.fragment:
            pass
        assert again.min_base == 1
        before = read_model(run_folder)
        stale = await raw.give(again, base=0)
        assert not stale.accepted and stale.reason == f"stale: base version 0 of fragment {ask.fragment}, the newest is 1"
        assert_same(read_model(run_folder), before)
        assert (await raw.give(again)).accepted
        assert (await raw.receive("announce")).announce.version == 2

    play(syncer.address, scenario)


def test_a_learner_that_was_not_asked_is_not_merged(run_folder: Path, start_syncer) -> None:
    syncer = start_syncer(run_folder)

    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        ask = await raw.next_ask()
        async with RawLearner(syncer.address, small_model(), FRAGMENTS, name="late", session="other") as late:
            await late.join()
            reply = await late.give(ask)
            assert not reply.accepted
            assert reply.reason == f"late was not asked for fragment {ask.fragment} in round {ask.round}"
        assert (await raw.give(ask)).accepted
        await raw.receive("announce")

    play(syncer.address, scenario)
    syncer.stop()
    assert all(share["learner"] == "raw" for merged in tape(run_folder, "merged") for share in merged["shares"])


def test_a_learner_that_has_not_begun_cannot_contribute(tmp_path: Path, start_syncer) -> None:
    folder = skerry.create(tmp_path / "run", small_model(), SyncConfig(fragments=FRAGMENTS, every=1, start_with=2, overlap=0))

    async def scenario(raw: RawLearner) -> str:
        raw.send(hello=raw.hello())
        await raw.receive("welcome")
        return (await raw.give(pb.Ask(fragment=0, round=1))).reason

    assert play(start_syncer(folder).address, scenario) == "raw is not in the run"


def test_control_messages_flow_while_a_large_upload_is_half_sent(tmp_path: Path, start_syncer) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1024, 2048)  # 4 MiB in bf16, so the upload is several chunks
    folder = skerry.create(tmp_path / "run", model, SyncConfig(fragments=1, every=1, overlap=0, outer_lr=1.0))
    syncer = start_syncer(folder)

    async def main() -> None:
        async with RawLearner(syncer.address, model, 1) as raw:
            await raw.join()
            ask = await raw.next_ask()
            header, data = raw.contribution(ask)
            chunks = [bytes(chunk(memoryview(data), number)) for number in range(count_chunks(len(data)))]
            async with raw.lane() as lane:
                await lane.write(pb.BulkToSyncer(upload=header))
                for part in chunks[:2]:
                    await lane.write(pb.BulkToSyncer(chunk=part))
                for step in range(2, 12):
                    raw.report(step)
                    # The fragment is due at every step, so each report brings the open question once more.
                    assert (await raw.receive("ask")).ask == ask
                while (await raw.receive("progress")).progress.run_tokens < 110:
                    pass
                # Fetching does not wait for it either.
                await lane.write(pb.BulkToSyncer(fetch=pb.Fetch(fragment=0, version=0)))
                assert (await lane.read()).fetched.size_bytes == 2 * len(data)
                for part in chunks[2:]:
                    await lane.write(pb.BulkToSyncer(chunk=part))
                while not (message := await lane.read()).HasField("reply"):
                    pass
                assert message.reply.accepted
            assert (await raw.receive("announce")).announce.version == 1

    asyncio.run(main())


# ---------------------------------------------------------------- downloads


def test_downloads_hold_the_published_bytes(run_folder: Path, start_syncer) -> None:
    async def scenario(raw: RawLearner) -> dict[int, torch.Tensor]:
        await raw.join()
        found = {}
        for fragment in range(FRAGMENTS):
            header, data = await raw.download(fragment, 0)
            assert (header.codec, header.size_bytes) == ("fp32", len(data))
            assert header.checksum == checksum(data)
            found[fragment] = codecs.codec("fp32").decode(codecs.byte_tensor(memoryview(data)), len(data) // 4)
        return found

    found = play(start_syncer(run_folder).address, scenario)
    model = dict(small_model().named_parameters())
    layout = read_identity(run_folder).layout
    for fragment, values in found.items():
        pieces = layout.fragments[fragment].pieces
        expected = [model[layout.tensors[p.tensor].name].detach().reshape(-1)[p.start : p.stop] for p in pieces]
        assert torch.equal(values, torch.cat(expected))


@pytest.mark.parametrize(
    "fragment, version, changes, reason",
    [
        (FRAGMENTS + 1, 0, {}, f"there is no fragment {FRAGMENTS + 1}"),
        (4_000_000_000, 0, {}, "there is no fragment 4000000000"),
        (0, 5, {}, "fragment 0 is at version 0, not 5"),
        (0, 0, {"session": "another"}, "'raw' is not connected with this session"),
        (0, 0, {"name": "somebody"}, "'somebody' is not connected with this session"),
    ],
)
def test_a_download_that_cannot_be_says_why(run_folder: Path, start_syncer, fragment, version, changes, reason) -> None:
    async def scenario(raw: RawLearner) -> tuple[pb.Fetched, bytes]:
        await raw.join()
        refused = await raw.download(fragment, version, **changes)
        assert not (await raw.download(0, 0))[0].reason
        return refused

    header, data = play(start_syncer(run_folder).address, scenario)
    assert (header.reason, header.size_bytes, data) == (reason, 0, b"")
    assert (header.fragment, header.version) == (fragment, version)


def test_a_download_before_hello_is_refused(run_folder: Path, start_syncer) -> None:
    header, data = play(start_syncer(run_folder).address, lambda raw: raw.download(0, 0))
    assert (header.reason, data) == ("'raw' is not connected with this session", b"")


def test_a_superseded_version_is_not_handed_out(run_folder: Path, start_syncer) -> None:
    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        ask = await raw.next_ask()
        assert (await raw.give(ask)).accepted
        await raw.receive("announce")
        assert (await raw.download(ask.fragment, 0))[0].reason == f"fragment {ask.fragment} is at version 1, not 0"
        assert not (await raw.download(ask.fragment, 1))[0].reason

    play(start_syncer(run_folder).address, scenario)


# ---------------------------------------------------------------- lanes


def test_one_lane_serves_many_transfers_and_survives_refusals(run_folder: Path, start_syncer) -> None:
    """What an unwanted contribution still sends is passed over; the next one on the same lane is taken."""

    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        ask = await raw.next_ask()
        header, data = raw.contribution(ask)
        half = len(data) // 2
        async with raw.lane() as lane:
            wrong = pb.Upload()
            wrong.CopyFrom(header)
            wrong.codec = "zip"
            await lane.write(pb.BulkToSyncer(upload=wrong, chunk=data[:half]))
            await lane.write(pb.BulkToSyncer(chunk=data[half:]))
            await lane.write(pb.BulkToSyncer(chunk=b"and more"))
            assert "contributions are bf16" in (await lane.read()).reply.reason
            await lane.write(pb.BulkToSyncer(upload=header, chunk=data))
            assert (await lane.read()).reply == pb.UploadReply(fragment=ask.fragment, round=ask.round, accepted=True)
            await raw.receive("announce")
            # Answers to fetches come in the order they were asked in, whatever the answer is.
            for fragment, version in [(ask.fragment, 1), (9, 0), (ask.fragment, 0), (ask.fragment, 1)]:
                await lane.write(pb.BulkToSyncer(fetch=pb.Fetch(fragment=fragment, version=version)))
            answers = [(await lane.read()).fetched for _ in range(4)]
            assert [(a.fragment, a.version, bool(a.reason)) for a in answers] == [
                (ask.fragment, 1, False), (9, 0, True), (ask.fragment, 0, True), (ask.fragment, 1, False)
            ]  # fmt: skip

    play(start_syncer(run_folder).address, scenario)


@pytest.mark.parametrize(
    "first, reason",
    [
        ([pb.BulkToSyncer(fetch=pb.Fetch())], "must be a hello"),
        ([pb.BulkToSyncer(hello=pb.BulkHello(name="raw"))] * 2, "a second hello"),
        ([], "must be a hello"),
    ],
    ids=["no hello", "two", "silence"],
)
def test_a_lane_that_is_not_introduced_properly_is_ended(run_folder: Path, start_syncer, first, reason: str) -> None:
    async def scenario(raw: RawLearner) -> None:
        call = raw.open_lane(timeout=DEADLINE_S)
        for message in first:
            await call.write(message)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT and reason in error.value.details()

    play(start_syncer(run_folder).address, scenario)


def test_a_learner_that_asks_and_never_reads_is_not_read_from_either(run_folder: Path) -> None:
    """What it asks for must not pile up in the syncer's memory."""

    async def main() -> int:
        server = SyncerServer(RunStore(run_folder))
        asked = 0

        async def without_end() -> AsyncIterator[Parcel[pb.BulkToSyncer]]:
            nonlocal asked
            yield Parcel(pb.BulkToSyncer(hello=pb.BulkHello(name="raw", session="first")))
            while True:
                asked += 1
                yield Parcel(pb.BulkToSyncer(fetch=pb.Fetch()))
                await asyncio.sleep(0)

        class Deaf:
            async def write(self, message: Parcel[pb.BulkToLearner]) -> None:
                await asyncio.Event().wait()

        serving = asyncio.ensure_future(server.bulk(without_end(), Deaf()))
        for _ in range(100 * STREAM_QUEUE):
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await server.close()
        return asked

    assert STREAM_QUEUE <= asyncio.run(main()) <= STREAM_QUEUE + 2


# ---------------------------------------------------------------- who is connected


def test_a_second_process_of_the_same_name_takes_over(run_folder: Path, start_syncer) -> None:
    syncer = start_syncer(run_folder)

    async def scenario(raw: RawLearner) -> None:
        first = await raw.join()
        ask = await raw.next_ask()
        async with RawLearner(syncer.address, small_model(), FRAGMENTS, session="second") as new:
            second = await new.join()
            goodbye = (await raw.receive("goodbye")).goodbye
            assert goodbye.final and goodbye.reason == "another process joined as raw"
            await raw.receive_end()
            assert (second.slot, second.resumed) == (first.slot, False)
            # What the first one was asked for is void, and it can neither give nor take any more.
            assert "not connected with this session" in (await raw.give(ask)).reason
            assert "not connected with this session" in (await raw.download(0, 0))[0].reason
            assert (await new.give(await new.next_ask())).accepted

    play(syncer.address, scenario)


def test_the_same_process_may_connect_again_and_keeps_its_progress(run_folder: Path, start_syncer) -> None:
    syncer = start_syncer(run_folder)

    async def scenario(raw: RawLearner) -> None:
        first = await raw.join()
        await raw.next_ask()
        async with RawLearner(syncer.address, small_model(), FRAGMENTS) as again:
            again.send(hello=again.hello(step=1, tokens=10, held=[0] * FRAGMENTS, run_id=first.run_id))
            welcome = (await again.receive("welcome")).welcome
            assert welcome.resumed and welcome.slot == first.slot and welcome.step == 1 and welcome.run_tokens == 10
            assert (await again.receive("begin")).begin.step == 1
            await raw.receive_end()
            assert (await again.give((await again.receive("ask")).ask)).accepted

    play(syncer.address, scenario)


def test_an_unexpected_message_is_written_down_and_the_stream_goes_on(run_folder: Path, start_syncer) -> None:
    syncer = start_syncer(run_folder)

    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        raw.send(hello=raw.hello())
        raw.send()
        raw.send(nothing=pb.NothingToGive(fragment=4_000_000_000, round=1))
        assert (await raw.give(await raw.next_ask())).accepted

    play(syncer.address, scenario)
    syncer.stop()
    assert [r["reason"] for r in tape(run_folder, "refused")] == ["unexpected hello message", "unexpected empty message"]


def test_the_run_describes_itself(run_folder: Path, start_syncer) -> None:
    syncer = start_syncer(run_folder)
    description = describe(syncer.address, None, timeout_s=10)
    assert description.protocol == PROTOCOL
    assert description.run_id == read_identity(run_folder).run_id
    with pytest.raises(JoinRefused, match="has no training job"):
        describe_job(syncer.address, None, timeout_s=10)


# ---------------------------------------------------------------- chunks


@settings(max_examples=30, deadline=None)
@given(
    size=st.one_of(st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]), st.integers(0, 5 * CHUNK_BYTES)),
    seed=st.integers(0, 1000),
    twice=st.booleans(),
)
def test_chunks_come_together_in_any_order(size: int, seed: int, twice: bool) -> None:
    chance = random.Random(seed)
    data = chance.randbytes(size)
    assembly = Assembly(size, checksum(data))
    numbers = list(range(count_chunks(size))) * (2 if twice else 1)
    chance.shuffle(numbers)
    left = set(numbers)
    for number in numbers:
        assert {n for first, count in assembly.missing for n in range(first, first + count)} == left
        assert assembly.complete == (not left)
        assembly.add(number, chunk(memoryview(data), number))
        left.discard(number)
    assert assembly.complete and assembly.missing == [] and bytes(assembly.finish()) == data


@settings(deadline=None)
@given(data=st.binary(min_size=1, max_size=2000), where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_any_changed_byte_is_found(data: bytes, where: float, flip: int) -> None:
    assembly = Assembly(len(data), checksum(data))
    at = int(where * len(data))
    assembly.add(0, data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
    with pytest.raises(WireError, match="checksum mismatch"):
        assembly.finish()


@settings(deadline=None)
@given(size=st.integers(1, 2 * CHUNK_BYTES), number=st.integers(0, 4), other=st.integers(0, CHUNK_BYTES + 5))
def test_a_chunk_of_another_length_is_found(size: int, number: int, other: int) -> None:
    assembly = Assembly(size, 0)
    fits = min(CHUNK_BYTES, size - number * CHUNK_BYTES)
    if other == fits > 0:
        assembly.add(number, bytes(other))
    else:
        with pytest.raises(WireError, match="oversized" if fits <= 0 else "bytes, not"):
            assembly.add(number, bytes(other))
        assert len(assembly.missing) == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=5), st.integers(1, 9))
def test_runs_are_cut_into_shorter_ones_of_the_same_chunks(runs: list[tuple[int, int]], most: int) -> None:
    cut = in_runs(runs, most)
    assert all(1 <= count <= most for _, count in cut)
    assert [n for first, count in cut for n in range(first, first + count)] == [
        n for first, count in runs for n in range(first, first + count)
    ]


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    "address, expected",
    [
        ("127.0.0.1:7070", ("127.0.0.1", 7070)),
        ("syncer.example.org:1", ("syncer.example.org", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":7070", "localhost:", "localhost:x", "localhost:-1", "localhost:65536", "localhost:²", "localhost:٣"],
)
def test_anything_else_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="address must be host:port"):
        split_address(address)
    with pytest.raises(ConfigError, match="address must be host:port"):
        join(address)


def join(address: str) -> None:
    model = small_model()
    skerry.join(address, model, torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=1)


@pytest.mark.parametrize("ask", [join, lambda a: open_channel(a, None), lambda a: describe(a, None, timeout_s=1)])
@pytest.mark.parametrize("host", ["10.1.2.3", "syncer.example.org", "0.0.0.0", "[2001:db8::1]"])
def test_plain_text_is_refused_off_loopback(host: str, ask: Callable[[str], object], caplog) -> None:
    with pytest.raises(ConfigError, match="is not this machine, and without TLS anyone on the network") as error:
        ask(f"{host}:7070")
    assert "\n" not in str(error.value) and not caplog.records


def test_a_proxy_in_the_environment_is_not_asked_for_this_machine(run_folder: Path, start_syncer) -> None:
    """gRPC would: what is allowed in plain text because it stays on this machine would leave it."""
    address = start_syncer(run_folder).address
    code = f"from skerry.admin import describe; describe({address!r}, None, timeout_s=5)"
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "http_proxy": "http://127.0.0.1:9"}, capture_output=True, check=False
    )
    assert process.returncode == 0, process.stderr.decode()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3"])
def test_serving_in_plain_text_off_loopback_is_refused(run_folder: Path, host: str) -> None:
    async def serve() -> None:
        await run_syncer(RunStore(run_folder), f"{host}:0", None, on_listening=lambda port: None)

    with pytest.raises(ConfigError, match=f"{host} is not this machine, and without TLS") as error:
        asyncio.run(serve())
    assert "\n" not in str(error.value)
    RunStore(run_folder).close()  # nobody holds it any more


def test_a_port_that_is_taken_is_named_and_the_folder_let_go(run_folder: Path, tmp_path: Path, start_syncer) -> None:
    syncer = start_syncer(run_folder)
    other = skerry.create(tmp_path / "other", small_model(), SYNC)

    async def serve() -> None:
        await run_syncer(RunStore(other), syncer.address, None, on_listening=lambda port: None)

    with pytest.raises(WireError, match=f"cannot listen on {syncer.address}: the port is taken"):
        asyncio.run(serve())
    RunStore(other).close()


def test_a_syncer_on_a_full_disk_can_be_stopped_while_its_run_closes(run_folder: Path, start_syncer, monkeypatch) -> None:
    """Learners are told that the run closes once that is written, which may never be."""

    def full(*_: object) -> None:
        raise StoreError("no space left")

    syncer = start_syncer(run_folder)

    async def scenario(raw: RawLearner) -> None:
        await raw.join()
        monkeypatch.setattr(RunStore, "commit", full)
        await asyncio.to_thread(close_run, syncer.address, None)

    play(syncer.address, scenario)
    with pytest.raises(StoreError, match="could not write the last .* records to the tape"):
        syncer.stop()


def test_one_that_is_gone_is_written_down_until_nothing_of_it_changes(tmp_path: Path) -> None:
    core = SyncerCore(SYNC, FRAGMENTS)
    log = MetricsLog(tmp_path, SystemClock())
    for event in (m.Hello("a", "one", 0, 0, ()), m.Ready("a"), m.Reported("a", 3, 30, 0.1), m.LeaveRequested("a")):
        core.handle(event, 0.0)
    log.summary(core, {})
    for fragment in range(FRAGMENTS):
        core.handle(m.NothingToGive("a", fragment, 3), 1.0)
    for _ in range(3):
        log.summary(core, {})
    core.handle(m.Hello("a", "two", 0, 0, ()), 2.0)
    core.handle(m.Ready("a"), 2.0)
    for _ in range(3):
        log.summary(core, {})
    log.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    states = [record["state"] for record in records if record["kind"] == "island"]
    assert states == ["training", "left", "training", "training", "training"]
