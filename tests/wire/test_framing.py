"""Seals, and chunks beside their messages: on the wire they are what protobuf makes of a message with both in it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from islands import flipped, sealed

from skerry.wire import framing as seal
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL
from skerry.wire.framing import Parcel, pack, unpack
from skerry.wire.service import parse_description

HEADERS = [
    pb.BulkToSyncer(),
    pb.BulkToSyncer(upload=pb.Upload(fragment=3, round=2**40, codec="bf16", size_bytes=1 << 33)),
    pb.BulkToSyncer(state=pb.State(part=1, parts=2, reason="none")),
    pb.BulkToLearner(),
    pb.BulkToLearner(fetched=pb.Fetched(fragment=1, version=7, since=0)),
    pb.BulkToLearner(state=pb.State(ticket=1)),
]
MESSAGES = [
    pb.ToSyncer(report=pb.Report(step=24)),
    pb.ToLearner(stop=pb.Stop()),
    pb.ToLearner(announce=pb.Announce(fragment=1, version=3)),
    pb.FromShard(moved=pb.Moved(names=["a", "b"])),
    pb.ToShard(goodbye=pb.ShardGoodbye(reason="the run is over")),
    pb.RunDescription(protocol=PROTOCOL, run_id="run", now=1.5),
]
chunks = st.one_of(st.binary(max_size=300), st.sampled_from([bytes(127), bytes(128), bytes(1 << 14), bytes(1 << 20)]))


@given(header=st.sampled_from(HEADERS), chunk=chunks)
def test_a_parcel_is_a_message_with_its_chunk_and_seal(header: Any, chunk: bytes) -> None:
    whole = type(header)()
    whole.CopyFrom(header)
    whole.chunk = chunk
    whole = sealed(whole)
    assert type(header).FromString(pack(Parcel(header, memoryview(chunk)))) == whole
    found = unpack(type(header))(whole.SerializeToString())
    assert found.message == header and bytes(found.chunk) == chunk


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_no_flipped_bit_of_a_parcel_is_believed(header: Any) -> None:
    chunk = b"a chunk"
    data = pack(Parcel(header, chunk))
    begin = data.index(chunk)
    for bit in range(8 * len(data)):
        if begin <= bit // 8 < begin + len(chunk):  # it has a checksum of its own, with the rest of its fragment
            found = unpack(type(header))(flipped(data, bit))
            assert found.message == header and bytes(found.chunk) == flipped(chunk, bit - 8 * begin)
        else:
            with pytest.raises(DecodeError):
                unpack(type(header))(flipped(data, bit))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_flipped_bit_of_a_message_is_believed(message: Any) -> None:
    data, parse = seal.serialize(message), seal.parser(type(message))
    assert parse(data) == message
    believed_by_protobuf = 0
    for bit in range(8 * len(data)):
        with pytest.raises(DecodeError):
            parse(flipped(data, bit))
        try:
            believed_by_protobuf += type(message).FromString(flipped(data, bit)) != type(message).FromString(data)
        except DecodeError:
            continue
    assert believed_by_protobuf, "else the seal would be of no use"


@given(data=st.binary(max_size=40), kind=st.sampled_from([pb.BulkToSyncer, pb.BulkToLearner, pb.ToSyncer]))
def test_bytes_from_anywhere_are_refused(data: bytes, kind: Any) -> None:
    for parse in (seal.parser(kind), *([unpack(kind)] if kind is not pb.ToSyncer else [])):
        with pytest.raises(DecodeError):
            parse(data)


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\x0a\x80", b"\x0a" + b"\xff" * 20, b"\x0a\x05abc", seal.seal(b"")[:-1]])
def test_what_is_cut_off_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        unpack(pb.BulkToSyncer)(data)


def test_a_syncer_of_another_version_is_told_by_its_number() -> None:
    older = pb.RunDescription(protocol=5, run_id="run")
    assert parse_description(older.SerializeToString()) == older
    newer = pb.RunDescription(protocol=99, run_id="run")
    assert parse_description(seal.serialize(newer)) == newer
    with pytest.raises(DecodeError):
        parse_description(pb.RunDescription(protocol=PROTOCOL).SerializeToString())
    ours = seal.serialize(pb.RunDescription(protocol=PROTOCOL, run_id="run"))
    for bit in range(8 * len(ours)):
        with pytest.raises(DecodeError):
            parse_description(flipped(ours, bit))
