"""Chunks beside their messages: on the wire they are what protobuf makes of a message with a chunk in it."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from skerry.wire import parcel
from skerry.wire import skerry_pb2 as pb
from skerry.wire.parcel import Parcel, pack, unpack

HEADERS = [
    pb.BulkToSyncer(),
    pb.BulkToSyncer(upload=pb.Upload(fragment=3, step=2**40, codec="bf16", size_bytes=1 << 33)),
    pb.BulkToSyncer(state=pb.State(part=1, parts=2, reason="none")),
    pb.BulkToLearner(),
    pb.BulkToLearner(fetched=pb.Fetched(fragment=1, version=7, since=0)),
    pb.BulkToLearner(state=pb.State(ticket=1)),
]
chunks = st.one_of(st.binary(max_size=300), st.sampled_from([bytes(127), bytes(128), bytes(1 << 14), bytes(1 << 20)]))


@given(header=st.sampled_from(HEADERS), chunk=chunks)
def test_a_parcel_is_a_message_with_its_chunk(header: pb.BulkToSyncer | pb.BulkToLearner, chunk: bytes) -> None:
    whole = type(header)()
    whole.CopyFrom(header)
    whole.chunk = chunk
    assert type(header).FromString(pack(Parcel(header, memoryview(chunk)))) == whole
    found = unpack(type(header))(whole.SerializeToString())
    assert found.message == header and bytes(found.chunk) == chunk


@given(data=st.binary(max_size=40), kind=st.sampled_from([pb.BulkToSyncer, pb.BulkToLearner]))
def test_of_any_bytes_a_parcel_says_what_protobuf_says_or_refuses_them(data: bytes, kind: type) -> None:
    try:
        found = unpack(kind)(data)
    except DecodeError:
        return
    whole = kind.FromString(data)
    assert whole.chunk == bytes(found.chunk)
    whole.ClearField("chunk")
    assert whole == found.message


@pytest.mark.parametrize("data", [b"\xff" * 3, b"\xff" * 20, b"\x22", b"\x22\x05abc", b"\x12\x02\x08"])
def test_what_is_cut_off_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        unpack(pb.BulkToSyncer)(data)


def test_a_message_of_very_many_fields_is_not_taken_apart_here(monkeypatch) -> None:
    """It would take the event loop seconds."""
    looked_at = []
    read = parcel._read_varint
    monkeypatch.setattr(parcel, "_read_varint", lambda data, at: looked_at.append(at) or read(data, at))
    found = unpack(pb.BulkToSyncer)(b"\x0a\x00" * 100_000 + b"\x22\x01x" + b"\x78\x01")
    assert found == Parcel(found.message, b"x") and found.message.HasField("hello") and len(looked_at) < 20
