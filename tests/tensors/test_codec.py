"""Vectors as bytes: sizes, round trips and damage."""

from __future__ import annotations

import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from skerry.checksum import checksum
from skerry.config import SyncConfig
from skerry.errors import ConfigError
from skerry.learner.replica import Replica
from skerry.syncer.rpc.published import Published
from skerry.tensors.codecs import block as block_codecs
from skerry.tensors.codecs import topk as topk_codec
from skerry.tensors.codecs.block import BLOCK
from skerry.tensors.codecs.codec import CODECS, byte_tensor, codec, raw_bytes
from skerry.tensors.codecs.feedback import Feedback
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.tensors.codecs.topk import CHUNK
from skerry.tensors.fragments import TensorSpec, split
from skerry.tensors.merge import FragmentState, publish
from skerry.tensors.model import model_tensors

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
    assert torch.equal(back.float(), vector.to(torch.bfloat16).float())


def test_bf16_is_the_upper_half_of_the_float() -> None:
    assert bytes(codec("bf16").encode(torch.tensor([1.0, -2.5]))) == struct.pack("<f", 1.0)[2:] + struct.pack("<f", -2.5)[2:]


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_vectors_of_no_and_of_one_element_come_back(name: str) -> None:
    for vector in (torch.empty(0), torch.tensor([-0.5])):
        back = codec(name).decode(codec(name).encode(vector), vector.numel())
        assert torch.equal(back.float(), vector)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_views_and_other_types_are_encoded_as_their_values(name: str) -> None:
    matrix = torch.arange(12, dtype=torch.float32).view(3, 4)
    column = matrix[:, 1]
    assert not column.is_contiguous()
    assert torch.equal(codec(name).decode(codec(name).encode(column), 3), column)
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert torch.equal(codec(name).decode(codec(name).encode(half), 2), half.float())


def test_bytes_that_may_not_be_written_to_are_copied() -> None:
    received = bytearray(range(8))
    byte_tensor(memoryview(received)).add_(1)
    assert received == bytearray(range(1, 9)), "what may be written to is not copied"
    kept = bytes(range(8))
    byte_tensor(memoryview(kept)).add_(1)
    assert kept == bytes(range(8))
    assert byte_tensor(memoryview(b"")).numel() == 0


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_checksum_notices_every_single_flipped_bit(name: str) -> None:
    data = bytearray(codec(name).encode(torch.linspace(-1, 1, 33)))
    whole = checksum(data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data) != whole
        data[bit // 8] ^= 1 << bit % 8
    assert checksum(data) == whole


def test_the_checksum_is_the_lower_half_of_xxh3() -> None:
    """Values that its specification gives: other programs may have to compute the same."""
    assert checksum(b"") == 0x2D06800538D394C2 & 0xFFFFFFFF
    assert checksum(memoryview(b"skerry")) == checksum(bytearray(b"skerry"))


def test_a_checksum_that_goes_on_from_another_depends_on_both() -> None:
    found = {checksum(second, checksum(first)) for first in (b"", b"a", b"b") for second in (b"", b"a", b"b")}
    assert len(found) == 9


def test_the_default_type_of_a_loop_does_not_matter() -> None:
    """Models are often made in bf16 by changing it, before anything of ours is imported."""
    names = CODECS.names()
    code = (
        "import torch\ntorch.set_default_dtype(torch.bfloat16)\nfrom skerry.checksum import checksum\n"
        "from skerry.tensors.codecs.codec import codec, raw_bytes\n"
        "vector = torch.sin(torch.arange(10_000, dtype=torch.float32))\n"
        f"for name in {names!r}:\n"
        "    data = codec(name).encode(vector)\n"
        "    found = codec(name).decode(data, 10_000)\n"
        "    print(name, checksum(raw_bytes(data)), checksum(raw_bytes(found.contiguous())), found.dtype)\n"
    )
    plain = code.replace("torch.set_default_dtype(torch.bfloat16)", "")
    said = [subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout for c in (code, plain)]
    assert said[0] == said[1] and said[0].count("\n") == len(names)


def test_an_unknown_codec_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="codec must be one of fp32, bf16, fp8, int8, int4, e3m0, topk1, topk3, got 'zip'"):
        codec("zip")


# ------------------------------------------------------------ a few bits and a scale for each block


def levels(name: str) -> np.ndarray:
    """All numbers an element can be, before it is scaled."""
    if name in ("int8", "int4"):
        largest = 127 if name == "int8" else 7
        return np.arange(-largest, largest + 1, dtype=np.float64)
    if name == "e3m0":
        powers = 2.0 ** -np.arange(7)
        return np.concatenate([-powers, [0.0], powers])
    exponents, mantissas = np.meshgrid(np.arange(16), np.arange(8))
    normal = 2.0 ** (exponents - 7.0) * (1 + mantissas / 8)
    found = np.where(exponents == 0, 2.0**-6 * mantissas / 8, normal).ravel()
    found = found[found <= 448]
    return np.unique(np.concatenate([-found, found]))


BLOCK_CODECS = ["fp8", "int8", "int4", "e3m0"]
sizes = st.integers(1, 700)
spreads = st.floats(0.0, 6.0)


def vector_of(numel: int, seed: int, spread: float) -> torch.Tensor:
    """Of both signs and, with some spread, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10.0 ** (spread * torch.randn(numel, generator=generator))


@pytest.mark.parametrize("name", BLOCK_CODECS)
@settings(max_examples=60, deadline=None)
@given(numel=sizes, seed=st.integers(0, 1 << 30), spread=spreads)
def test_every_element_becomes_the_nearest_there_is(name: str, numel: int, seed: int, spread: float) -> None:
    """By a search among all levels, in float64."""
    vector = vector_of(numel, seed, spread)
    data = codec(name).encode(vector)
    assert data.numel() == codec(name).size_bytes(numel)
    back = codec(name).decode(data, numel).double().numpy()
    blocks = -(-numel // BLOCK)
    scales = data[: 2 * blocks].view(torch.bfloat16).double().numpy()
    wanted = vector.double().numpy()
    for block in range(blocks):
        here = slice(block * BLOCK, min((block + 1) * BLOCK, numel))
        reach = np.abs(wanted[here]).max()
        assert scales[block] == pytest.approx(reach / levels(name).max(), rel=2**-8)
        possible = levels(name) * scales[block]
        nearest = np.abs(wanted[here, None] - possible[None, :]).min(axis=1)
        # The product with the inverse of the scale is rounded, so at the very middle either neighbour may come out.
        assert np.all(np.abs(wanted[here] - back[here]) <= nearest * (1 + 1e-6) + 1e-7 * reach)


@pytest.mark.parametrize("name", BLOCK_CODECS)
@settings(max_examples=30, deadline=None)
@given(numel=sizes, seed=st.integers(0, 1 << 30))
def test_what_was_decoded_is_encoded_to_itself_and_signs_make_no_difference(name: str, numel: int, seed: int) -> None:
    vector = vector_of(numel, seed, 1.0)
    once = codec(name).decode(codec(name).encode(vector), numel)
    assert torch.equal(codec(name).decode(codec(name).encode(-vector), numel), -once)
    if name in ("int8", "int4"):
        twice = codec(name).decode(codec(name).encode(once), numel)
        assert torch.allclose(twice, once, rtol=2**-7)


def test_the_bytes_of_int4_are_as_documented() -> None:
    vector = torch.zeros(BLOCK)
    vector[0], vector[1], vector[64] = 14.0, -14.0, 3.9  # two to the unit
    expected = struct.pack("<f", 2.0)[2:] + bytes([15 | 10 << 4, 1 | 8 << 4]) + bytes([8 | 8 << 4] * 62)
    assert bytes(raw_bytes(codec("int4").encode(vector))) == expected


@pytest.mark.parametrize("name", [*BLOCK_CODECS, "topk1", "topk3"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_become_finite(name: str, bad: float) -> None:
    vector = torch.ones(10_000)
    vector[5000] = bad
    back = codec(name).decode(codec(name).encode(vector), 10_000)
    assert not torch.isfinite(back[5000]) and bool(torch.isfinite(back[:4096]).all())


@pytest.mark.parametrize("name", [*BLOCK_CODECS, "topk1", "topk3"])
def test_nothing_stays_nothing_and_the_largest_floats_stay_finite(name: str) -> None:
    chosen = codec(name)
    assert torch.equal(chosen.decode(chosen.encode(torch.zeros(300)), 300), torch.zeros(300))
    assert torch.equal(chosen.decode(chosen.encode(torch.full((300,), 1e-42)), 300), torch.zeros(300)) or "topk" in name
    assert chosen.encode(torch.empty(0)).numel() == chosen.size_bytes(0) == 0
    assert chosen.decode(chosen.encode(torch.empty(0)), 0).numel() == 0
    large = chosen.decode(chosen.encode(torch.full((300,), 3e38)), 300)
    assert bool(torch.isfinite(large).all()) and float(large.max()) > 2e38


# ------------------------------------------------------------ the largest few


@pytest.mark.parametrize("name, kept", [("topk1", 40), ("topk3", 120)])
@settings(max_examples=30, deadline=None)
@given(numel=st.integers(1, 10_000), seed=st.integers(0, 1 << 30), ties=st.booleans())
def test_the_largest_few_come_through_with_one_of_two_sizes(name: str, kept: int, numel: int, seed: int, ties: bool) -> None:
    """Against a plain sort and means in float64."""
    vector = vector_of(numel, seed, 0.5)
    if ties:
        vector = vector.sign() * vector.abs().ceil().clamp(max=3)
    data = codec(name).encode(vector)
    assert data.numel() == codec(name).size_bytes(numel)
    back = codec(name).decode(data, numel).double().numpy()
    values = vector.double().numpy()
    for start in range(0, numel, CHUNK):
        chunk, got = values[start : start + CHUNK], back[start : start + CHUNK]
        order = sorted(range(len(chunk)), key=lambda place: (-abs(chunk[place]), place))[:kept]
        assert set(np.flatnonzero(got)) <= set(order)
        sizes = np.abs(chunk[order])
        if len(order) < kept or not sizes.all():  # zeros are chosen as well: all others have one size
            allowed = [np.where(sizes > 0, sizes[sizes > 0].mean() if sizes.any() else 0.0, 0.0)]
        else:  # those at the very mean may be on either side
            allowed = [_two_means(sizes, sizes > sizes.mean() * (1 + margin)) for margin in (1e-5, -1e-5)]
        signed = [np.sign(chunk[order]) * expected for expected in allowed]
        assert any(np.allclose(got[order], expected, rtol=2**-7, atol=0.0) for expected in signed)


def _two_means(sizes: np.ndarray, large: np.ndarray) -> np.ndarray:
    small_mean, large_mean = (sizes[group].mean() if group.any() else 0.0 for group in (~large, large))
    return np.where(large, large_mean, small_mean)


def test_top_few_of_a_large_vector_take_less_than_half_a_bit_an_element() -> None:
    assert 8 * codec("topk1").size_bytes(1 << 20) / (1 << 20) < 0.15
    assert 8 * codec("topk3").size_bytes(1 << 20) / (1 << 20) < 0.42


# ------------------------------------------------------------ statistics, feedback, publishing


def test_running_statistics_travel_exactly_beside_a_codec_that_loses_something() -> None:
    specs = [
        TensorSpec("weight", (40, 10), "float32", "radial"),
        TensorSpec("mean", (33,), "float32", "average"),
        TensorSpec("bias", (50,), "float32", "radial"),
        TensorSpec("variance", (33,), "float32", "average"),
    ]
    layout = split(specs, 1)
    fragment = layout.fragments[0]
    vector = torch.randn(fragment.numel)
    statistic = torch.cat([torch.full((p.numel,), layout.tensors[p.tensor].rule == "average") for p in fragment.pieces])
    for name in ("bf16", "int4", "topk1"):
        chosen, plain = fragment_codec(name, layout, fragment), codec(name)
        data = chosen.encode(vector)
        # Each tensor has scales of its own, so it is as if it were encoded alone.
        assert data.numel() == chosen.size_bytes(fragment.numel) == 4 * 66 + plain.size_bytes(400) + plain.size_bytes(50)
        back = chosen.decode(data, fragment.numel)
        assert torch.equal(back[statistic], vector[statistic])
        for here in (slice(0, 400), slice(433, 483)):
            assert torch.equal(back[here], plain.decode(plain.encode(vector[here]), vector[here].numel()))
        # One behind another, as a learner that missed a version gets them: not where an fp32 may begin.
        moved = torch.cat([torch.zeros(2, dtype=torch.uint8), data])[2:]
        assert torch.equal(chosen.decode(moved, fragment.numel), back)
        assert (chosen.name, chosen.needs_feedback) == (name, plain.needs_feedback)
    assert fragment_codec("fp32", layout, fragment) is codec("fp32")
    only = split(specs[1:2], 1)
    chosen, values = fragment_codec("int4", only, only.fragments[0]), torch.randn(33)
    assert torch.equal(chosen.decode(chosen.encode(values), 33), values)


def test_small_tensors_are_not_rounded_away_beside_large_ones() -> None:
    layout = split([TensorSpec("large", (64,), "float32", "radial"), TensorSpec("small", (64,), "float32", "radial")], 1)
    vector = torch.cat([torch.full((64,), 1e-2), torch.full((64,), 1e-5)])
    for name in BLOCK_CODECS:
        chosen = fragment_codec(name, layout, layout.fragments[0])
        assert torch.allclose(chosen.decode(chosen.encode(vector), 128), vector, rtol=0.01)


def test_the_largest_few_of_mostly_nothing_are_just_those() -> None:
    vector = torch.zeros(4096)
    vector[100:110], vector[200:210] = 1.0, -0.5
    for name in ("topk1", "topk3"):
        back = codec(name).decode(codec(name).encode(vector), 4096)
        assert torch.equal(back != 0, vector != 0) and torch.equal(back.sign(), vector.sign())
        assert torch.allclose(back[vector != 0].abs(), torch.tensor(0.75), rtol=0.01)


def test_large_vectors_are_encoded_a_part_at_a_time_to_the_same_bytes(monkeypatch) -> None:
    vector = vector_of(40_000, 3, 1.0)
    whole = {name: codec(name).encode(vector) for name in [*BLOCK_CODECS, "topk1", "topk3"]}
    monkeypatch.setattr(block_codecs, "SLICE", 8192)
    monkeypatch.setattr(topk_codec, "SLICE", 8192)
    for name, data in whole.items():
        assert torch.equal(codec(name).encode(vector), data)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), fates=st.lists(st.sampled_from(["merged", "lost", "late"]), min_size=1, max_size=20))
def test_all_progress_of_merged_contributions_is_sent_or_missing(seed: int, fates: list[str]) -> None:
    """Whatever happens to contributions and in whichever order it is heard of: nothing is sent twice and nothing forgotten."""
    generator = torch.Generator().manual_seed(seed)
    chosen, feedback = codec("topk1"), Feedback(kept=len(fates))
    progressed, arrived = torch.zeros(5000), torch.zeros(5000)
    unheard: list[int] = []
    for step, fate in enumerate(fates, start=1):
        progress = torch.randn(5000, generator=generator)
        missing = feedback.missing
        sent = chosen.decode(chosen.encode(progress if missing is None else progress + missing), 5000)
        feedback.sent(step, progress, sent)
        if fate != "lost":
            progressed, arrived = progressed + progress, arrived + sent
        if fate == "merged":
            for at in [*unheard, step]:
                feedback.merged(at)
            unheard = []
        elif fate == "late" and len(unheard) < 2:
            unheard.append(step)
        elif fate == "late":
            progressed, arrived = progressed - progress, arrived - sent
    for at in unheard:
        feedback.merged(at)
    missing = feedback.missing if feedback.missing is not None else torch.zeros(5000)
    assert torch.allclose(arrived + missing, progressed, atol=1e-4)


def test_what_was_missing_before_a_rollback_is_not_sent_after_it() -> None:
    torch.manual_seed(0)
    model = nn.Linear(100, 50, bias=False)
    layout = split([spec for spec, _ in model_tensors(model)], 1)
    replica = Replica(model, layout, SyncConfig(fragments=1, send="topk1"))
    first = torch.randn(5000)

    def adopt(values: torch.Tensor, counted: int, floor: int) -> None:
        replica.adopt(0, replica.prepare(0, values, 0, floor), 0, counted)

    def give(step: int) -> torch.Tensor | None:
        with torch.no_grad():
            model.weight.sub_(torch.randn(50, 100))
        snapshot = replica.snapshot(0, step)
        replica.encode(snapshot)
        return snapshot.missing

    adopt(first, 0, 0)
    assert give(1) is None
    adopt(first, 1, 0)
    assert give(2) is not None, "what the first left out"
    adopt(first, 2, 5)
    assert give(3) is None, "versions up to there were taken back"
    adopt(first, 3, 5)
    assert give(4) is not None


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "int4", "e3m0", "topk3"])
def test_published_differences_follow_the_model_and_learners_have_what_the_syncer_thinks(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    state = FragmentState.fresh(torch.randn(5000, generator=generator))
    learner = state.public.clone()
    published = Published(0, "fp32", raw_bytes(state.public))
    for version in range(1, 30):
        pull = torch.randn(5000, generator=generator) if version < 10 else torch.zeros(5000)
        after = FragmentState(state.values + 0.1 * pull, state.state)
        state, data = publish(state, after, codec(name))
        published = published.followed_by(version, raw_bytes(state.public), raw_bytes(data), name)
        found = published.find(version - 1)
        assert (found.since, found.codec, bytes(found.data)) == (version - 1, name, bytes(raw_bytes(data)))
        learner = learner + codec(name).decode(byte_tensor(found.data), 5000)
        assert torch.equal(learner, state.public)
    # The model stood still for twenty versions: what the first ones could not express has come by now.
    limit = {"topk3": 0.3}.get(name, 1e-4)
    assert float((state.public - state.values).norm() / state.values.norm()) < limit


def test_learners_get_the_differences_they_need_or_the_whole() -> None:
    state = FragmentState.fresh(torch.randn(1000))
    published, at = Published(0, "fp32", raw_bytes(state.public)), [state.public]
    for version in range(1, 13):
        state, data = publish(state, FragmentState(state.values + torch.randn(1000), state.state), codec("int4"))
        published = published.followed_by(version, raw_bytes(state.public), raw_bytes(data), "int4")
        at.append(state.public)
    size = codec("int4").size_bytes(1000)
    for have in range(12):
        found = published.find(have)
        if have < 8:  # four differences of int4 fit into the room there is
            assert found.since is None and found.codec == "fp32" and len(found.data) == 4000
            continue
        assert found.since == have and len(found.data) == size * (12 - have)
        values = at[have]
        for difference in torch.split(byte_tensor(found.data), size):
            values = values + codec("int4").decode(difference, 1000)
        assert torch.equal(values, at[12])
    for have in (None, 12, 13, 1 << 40):
        assert published.find(have).since is None
    assert published.find(11) is published.find(11), "nothing is put together twice"
