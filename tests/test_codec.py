"""Vectors as bytes: sizes, round trips and damage."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.core.codec import checksum, codec, raw_bytes
from skerry.errors import WireError

floats = st.lists(st.floats(width=32, allow_nan=False), max_size=40)


@pytest.mark.parametrize("name, width", [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 1000])
def test_the_declared_size_is_the_size(name: str, width: int, numel: int) -> None:
    chosen = codec(name)
    data = chosen.encode(torch.arange(numel, dtype=torch.float32))
    assert chosen.name == name
    assert len(data) == data.nbytes == chosen.size_bytes(numel) == width * numel


@settings(max_examples=100, deadline=None)
@given(values=floats)
def test_fp32_gives_back_the_same_bits(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    back = codec("fp32").decode(codec("fp32").encode(vector), len(values))
    assert bytes(raw_bytes(back)) == bytes(raw_bytes(vector))


def test_fp32_is_little_endian_ieee_in_order() -> None:
    values = [1.0, -2.5, 0.0, 3e38]
    assert bytes(codec("fp32").encode(torch.tensor(values))) == struct.pack("<4f", *values)


@settings(max_examples=100, deadline=None)
@given(values=floats)
def test_bf16_gives_back_what_torch_rounds_to(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    back = codec("bf16").decode(codec("bf16").encode(vector), len(values))
    assert back.dtype == torch.float32
    assert torch.equal(back, vector.to(torch.bfloat16).float())


def test_bf16_is_the_upper_half_of_the_float() -> None:
    assert bytes(codec("bf16").encode(torch.tensor([1.0, -2.5]))) == struct.pack("<f", 1.0)[2:] + struct.pack("<f", -2.5)[2:]


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_vectors_of_no_and_of_one_element_come_back(name: str) -> None:
    for vector in (torch.empty(0), torch.tensor([-0.5])):
        back = codec(name).decode(codec(name).encode(vector), vector.numel())
        assert torch.equal(back, vector) and back.dtype == torch.float32


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_views_and_other_types_are_encoded_as_their_values(name: str) -> None:
    matrix = torch.arange(12, dtype=torch.float32).view(3, 4)
    column = matrix[:, 1]
    assert not column.is_contiguous()
    assert torch.equal(codec(name).decode(codec(name).encode(column), 3), column)
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert torch.equal(codec(name).decode(codec(name).encode(half), 2), half.float())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_what_was_decoded_does_not_share_memory_with_what_was_received(name: str) -> None:
    received = bytearray(codec(name).encode(torch.tensor([1.0, 2.0])))
    back = codec(name).decode(memoryview(received), 2)
    received[:] = bytes(len(received))
    back.add_(1)
    assert torch.equal(back, torch.tensor([2.0, 3.0]))
    assert torch.equal(codec(name).decode(memoryview(bytes(received)), 2), torch.zeros(2))


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_checksum_notices_every_single_flipped_bit(name: str) -> None:
    data = bytearray(codec(name).encode(torch.linspace(-1, 1, 33)))
    whole = checksum(data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data) != whole
        data[bit // 8] ^= 1 << bit % 8
    assert checksum(data) == whole


@given(data=st.binary(max_size=64), cut=st.integers(0, 64))
def test_a_checksum_can_be_continued(data: bytes, cut: int) -> None:
    assert checksum(data[cut:], checksum(data[:cut])) == checksum(data) == checksum(memoryview(data))


def test_an_unknown_codec_is_named_with_those_there_are() -> None:
    with pytest.raises(WireError, match="codec must be one of fp32, bf16, got 'int4'"):
        codec("int4")
