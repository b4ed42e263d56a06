"""The numerics of a merge against references in float64, and what must hold for any input."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skerry.core.messages import Merge
from skerry.core.share import Share, weight
from skerry.tensors.fragments import Layout, Rule, TensorSpec, split
from skerry.tensors.merge import BLOCK, ROW, FragmentState, mean, merge, nesterov, norm, norms_of, radial_mean


def vectors(count: int, numel: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


def reference_mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> np.ndarray:
    return np.average(np.stack([delta.double().numpy() for delta in deltas]), axis=0, weights=weights)


def reference_radial(deltas: Sequence[Tensor], weights: Sequence[float]) -> np.ndarray:
    rows = [delta.double().numpy() for delta in deltas]
    norms = [np.linalg.norm(row) for row in rows]
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    direction = sum(share * row / norm for share, row, norm in zip(shares, rows, norms, strict=True) if norm > 0)
    length = np.linalg.norm(direction)
    return direction * (float(np.dot(shares, norms)) / length) if length > 0 else np.zeros_like(rows[0])


def close(actual: Tensor, expected: np.ndarray, relative: float = 1e-5) -> None:
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-30)
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=0, atol=relative * scale)


def layout_of(*tensors: tuple[Rule, tuple[int, ...]]) -> Layout:
    return split([TensorSpec(f"t{i}", shape, "float32", rule) for i, (rule, shape) in enumerate(tensors)], 1)


cases = st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 2**31))


def drawn(case: tuple[int, int, int, int]) -> tuple[list[Tensor], list[float]]:
    """Vectors of different lengths and weights over two orders of magnitude."""
    count, numel, seed, other = case
    rng = np.random.default_rng(other)
    scales = 10 ** rng.uniform(-2, 2, count)
    deltas = [vector * float(scale) for vector, scale in zip(vectors(count, numel, seed), scales, strict=True)]
    return deltas, list(10 ** rng.uniform(-1, 1, count))


@settings(max_examples=80, deadline=None)
@given(case=cases)
def test_the_mean_equals_the_weighted_mean(case: tuple[int, int, int, int]) -> None:
    deltas, weights = drawn(case)
    result = mean(deltas, weights)
    scale = max(float(delta.abs().max()) for delta in deltas)
    np.testing.assert_allclose(result.double().numpy(), reference_mean(deltas, weights), rtol=0, atol=1e-6 * scale)


@settings(max_examples=80, deadline=None)
@given(case=cases)
def test_the_radial_mean_equals_its_definition(case: tuple[int, int, int, int]) -> None:
    count, numel, seed, other = case
    # In fewer dimensions directions cancel, and then the reference is as ill-conditioned as what it is to judge.
    deltas, weights = drawn((count, numel + 20, seed, other))
    close(radial_mean(deltas, weights), reference_radial(deltas, weights))


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [5.0, 1.0, 0.25]])
def test_the_radial_mean_of_orthogonal_progress_keeps_the_mean_length(weights: list[float]) -> None:
    deltas = [torch.zeros(9) for _ in range(3)]
    lengths = [3.0, 1.0, 0.5]
    for index, length in enumerate(lengths):
        deltas[index][3 * index] = length
    expected = sum(w * length for w, length in zip(weights, lengths, strict=True)) / sum(weights)
    assert float(radial_mean(deltas, weights).norm()) == pytest.approx(expected, rel=1e-6)
    assert float(mean(deltas, weights).norm()) < 0.95 * expected


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_the_radial_mean_always_has_the_weighted_mean_length(case: tuple[int, int, int, int]) -> None:
    count, numel, seed, other = case
    deltas, weights = drawn((count, numel + 20, seed, other))
    expected = np.average([float(delta.double().norm()) for delta in deltas], weights=weights)
    assert float(radial_mean(deltas, weights).double().norm()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("average", [mean, radial_mean])
@pytest.mark.parametrize("share", [1.0, 3.7, 1e-9, 1e12])
def test_a_single_contribution_is_taken_as_it_is(average, share: float) -> None:
    [delta] = vectors(1, 100)
    result = average([delta], [share])
    assert torch.equal(result, delta)
    result.add_(1)
    assert not torch.equal(result, delta), "the result must not be the contribution itself"


@pytest.mark.parametrize("average", [mean, radial_mean])
def test_equal_contributions_give_that_contribution(average) -> None:
    [delta] = vectors(1, 100)
    close(average([delta, delta.clone(), delta.clone()], [1.0, 2.0, 4.0]), delta.double().numpy())


@pytest.mark.parametrize("average", [mean, radial_mean])
@settings(max_examples=50, deadline=None)
@given(case=cases, data=st.data())
def test_the_order_of_contributions_does_not_matter(average, case: tuple[int, int, int, int], data: st.DataObject) -> None:
    count, numel, seed, other = case
    deltas, weights = drawn((count, numel + 20, seed, other))
    order = data.draw(st.permutations(range(len(deltas))))
    one = average(deltas, weights)
    two = average([deltas[i] for i in order], [weights[i] for i in order])
    close(two, one.double().numpy())


@pytest.mark.parametrize("average", [mean, radial_mean])
@settings(max_examples=50, deadline=None)
@given(case=cases, factor=st.floats(1e-3, 1e3), share=st.floats(1e-3, 1e3))
def test_scaling_contributions_scales_the_result_and_scaling_weights_does_not(
    average, case: tuple[int, int, int, int], factor: float, share: float
) -> None:
    count, numel, seed, other = case
    deltas, weights = drawn((count, numel + 20, seed, other))
    one = average(deltas, weights).double().numpy()
    close(average([delta * factor for delta in deltas], weights), one * factor)
    close(average(deltas, [w * share for w in weights]), one)


@pytest.mark.parametrize("average", [mean, radial_mean])
def test_equal_inputs_give_equal_bits_and_stay_untouched(average) -> None:
    deltas, weights = vectors(4, 1000), [1.0, 2.0, 3.0, 0.1]
    before = [delta.clone() for delta in deltas]
    assert torch.equal(average(deltas, weights), average(deltas, weights))
    assert all(torch.equal(a, b) for a, b in zip(deltas, before, strict=True))


def test_no_progress_at_all_stays_none() -> None:
    zeros = [torch.zeros(5), torch.zeros(5)]
    assert torch.equal(radial_mean(zeros, [1.0, 2.0]), torch.zeros(5))
    one = torch.tensor([0.0, 2.0])
    close(radial_mean([one, torch.zeros(2)], [1.0, 3.0]), np.array([0.0, 0.5]))


def test_exactly_opposite_progress_cancels() -> None:
    delta = torch.tensor([0.0, 4.0, 0.0])
    assert torch.equal(radial_mean([delta, -delta], [1.0, 1.0]), torch.zeros(3))


def test_progress_that_cancels_does_not_become_a_full_step_in_a_random_direction() -> None:
    [delta] = vectors(1, 1000)
    deltas = [delta, -0.37 * delta]
    close(radial_mean(deltas, [1.0, 1.0]), reference_mean(deltas, [1.0, 1.0]))


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_lengths_beyond_the_squares_of_single_precision_are_measured(scale: float) -> None:
    deltas = [vector * scale for vector in vectors(3, 100)]
    close(radial_mean(deltas, [1.0, 2.0, 3.0]), reference_radial(deltas, [1.0, 2.0, 3.0]))


def test_weight_is_tokens_times_tokens_per_step() -> None:
    assert weight(tokens=800, steps=4) == 800 * 200
    assert weight(tokens=1600, steps=8) == 2 * weight(tokens=800, steps=4), "twice the time counts twice"
    assert weight(tokens=1600, steps=4) == 4 * weight(tokens=800, steps=4), "twice the batch counts four times"
    assert weight(tokens=5, steps=0) == 0.0


# ---------------------------------------------------------------- one merge of a fragment


def plain(values: Tensor) -> FragmentState:
    return FragmentState.fresh(values.clone())


def test_each_tensor_of_a_fragment_has_its_own_direction_and_embeddings_use_the_plain_mean() -> None:
    layout = layout_of(("radial", (4, 5)), ("mean", (6, 5)), ("radial", (7,)))
    [fragment] = layout.fragments
    deltas, weights = vectors(3, fragment.numel), [1.0, 2.0, 0.5]
    state = merge(layout, fragment, plain(torch.zeros(fragment.numel)), deltas, weights, lr=1.0, momentum=0.0)
    at = 0
    for piece in fragment.pieces:
        here = slice(at, at + piece.numel)
        at += piece.numel
        reference = reference_mean if layout.tensors[piece.tensor].rule == "mean" else reference_radial
        close(state.values[here], -reference([delta[here] for delta in deltas], weights))


def test_the_plain_merge_uses_the_mean_everywhere() -> None:
    layout = layout_of(("radial", (4, 5)), ("mean", (6, 5)), ("average", (3,)))
    [fragment] = layout.fragments
    deltas, weights = vectors(3, fragment.numel), [1.0, 2.0, 0.5]
    start = vectors(1, fragment.numel, seed=9)[0]
    state = merge(layout, fragment, plain(start), deltas, weights, rule=mean, lr=1.0, momentum=0.0)
    close(state.values, start.double().numpy() - reference_mean(deltas, weights))


def test_statistics_become_the_weighted_mean_of_the_members_values_without_rate_or_momentum() -> None:
    layout = layout_of(("radial", (3, 4)), ("average", (6,)))
    [fragment] = layout.fragments
    [statistics] = [index for index, piece in enumerate(fragment.pieces) if layout.tensors[piece.tensor].rule == "average"]
    offset = sum(piece.numel for piece in fragment.pieces[:statistics])
    here = slice(offset, offset + 6)
    state, weights = plain(vectors(1, fragment.numel, seed=1)[0]), [1.0, 3.0]
    for turn in range(4):
        members = vectors(2, fragment.numel, seed=20 + turn)
        deltas = [state.values - member for member in members]
        state = merge(layout, fragment, state, deltas, weights, lr=0.3, momentum=0.9)
        close(state.values[here], reference_mean([member[here] for member in members], weights))
        assert torch.equal(state.momentum[here], torch.zeros(6))
        assert float(state.momentum.abs().sum()) > 0, "the parameters beside them do have momentum"


def test_presence_scales_the_progress() -> None:
    layout = layout_of(("radial", (4, 5)))
    [fragment] = layout.fragments
    deltas, start = vectors(2, 20), vectors(1, 20, seed=5)[0]
    whole = merge(layout, fragment, plain(start), deltas, [1.0, 1.0], lr=0.7, momentum=0.6)
    quarter = merge(layout, fragment, plain(start), deltas, [1.0, 1.0], lr=0.7, momentum=0.6, presence=0.25)
    close(quarter.values - start, 0.25 * (whole.values - start).double().numpy())
    close(quarter.momentum, 0.25 * whole.momentum.double().numpy())


@pytest.mark.parametrize("presence", [1.0, 0.25])
def test_running_statistics_are_those_of_the_islands_in_the_merge_however_few(presence: float) -> None:
    layout = layout_of(("average", (20,)), ("radial", (2, 2)))
    [fragment] = layout.fragments
    start, *members = vectors(3, fragment.numel, seed=5)
    deltas = [start - member for member in members]
    state = merge(layout, fragment, plain(start), deltas, [1.0, 3.0], lr=0.7, momentum=0.6, presence=presence)
    statistic = torch.cat([torch.full((p.numel,), layout.tensors[p.tensor].rule == "average") for p in fragment.pieces])
    close(state.values[statistic], reference_mean([member[statistic] for member in members], [1.0, 3.0]))
    assert not state.momentum[statistic].any()


def test_a_member_on_an_older_version_says_nothing_of_running_statistics() -> None:
    """The variance fell from 1 to 0.3. To subtract what one on the old version saw of that once more would make it negative."""
    layout = layout_of(("average", (4,)), ("mean", (1, 2)))
    [fragment] = layout.fragments
    [first] = [index for index, piece in enumerate(fragment.pieces) if layout.tensors[piece.tensor].rule == "average"]
    offset = sum(piece.numel for piece in fragment.pieces[:first])
    here, there = slice(offset, offset + 4), torch.ones(6, dtype=torch.bool)
    there[here] = False
    base = torch.full((6,), 0.3)
    stale, fresh = torch.full((6,), 1.0 - 0.3), torch.full((6,), 0.3 - 0.2)
    settings = {"lr": 1.0, "momentum": 0.0}
    both = merge(layout, fragment, plain(base), [stale, fresh], [3.0, 1.0], fresh=[False, True], **settings)
    close(both.values[here], torch.full((4,), 0.2).double().numpy())
    close(both.values[there], (base - 0.75 * stale - 0.25 * fresh)[there].double().numpy())
    alone = merge(layout, fragment, plain(base), [stale], [3.0], fresh=[False], **settings)
    assert torch.equal(alone.values[here], base[here])
    close(alone.values[there], (base - stale)[there].double().numpy())


def test_an_order_says_which_contributions_are_fresh() -> None:
    shares = tuple(Share(f"island-{base}", "first", base, 1, 1, 1.0) for base in (3, 4, 2, 4))
    assert Merge(0, 5, 10, shares, 0.5, 0.8, 1.0).fresh == (False, True, False, True)


def test_a_merge_leaves_the_state_it_started_from_alone() -> None:
    layout = layout_of(("radial", (4, 5)), ("average", (3,)))
    [fragment] = layout.fragments
    values, momentum = vectors(2, 23, seed=3)
    state = FragmentState(values, {"momentum": momentum})
    before = (state.values.clone(), state.momentum.clone())
    merge(layout, fragment, state, vectors(2, 23), [1.0, 2.0], lr=0.7, momentum=0.6, presence=0.5)
    assert torch.equal(state.values, before[0]) and torch.equal(state.momentum, before[1])


@pytest.mark.parametrize("radial", [True, False])
@pytest.mark.parametrize("lr, momentum", [(0.7, 0.6), (1.0, 0.9), (0.4, 0.05)])
def test_many_merges_of_one_member_equal_torch_nesterov_sgd_to_the_bit(radial: bool, lr: float, momentum: float) -> None:
    """The outer gradient is the global value minus the member's, and the member is drawn to the same place each time."""
    layout = layout_of(("radial", (5, 4)), ("mean", (3, 4)), ("radial", (8,)))
    [fragment] = layout.fragments
    start, member = vectors(2, fragment.numel, seed=11)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=True)
    state = plain(start)
    for _ in range(40):
        gradient = state.values - member
        parameter.grad = gradient.clone()
        optimizer.step()
        state = merge(
            layout, fragment, state, [gradient], [2.5], rule=radial_mean if radial else mean, lr=lr, momentum=momentum
        )
        assert torch.equal(state.values, parameter.detach())


@pytest.mark.parametrize("count", [2, 5])
def test_merging_constant_members_settles_at_their_weighted_mean(count: int) -> None:
    """With the plain mean the outer optimizer is SGD on a quadratic; it must reach the minimum whatever the momentum."""
    layout = layout_of(("radial", (5, 4)))
    [fragment] = layout.fragments
    members, weights = vectors(count, 20, seed=2), [1.0 + index for index in range(count)]
    state = plain(torch.zeros(20))
    for _ in range(200):
        deltas = [state.values - member for member in members]
        state = merge(layout, fragment, state, deltas, weights, rule=mean, lr=0.7, momentum=0.6)
    close(state.values, reference_mean(members, weights), relative=1e-4)


def test_without_momentum_and_with_rate_one_the_outer_step_takes_the_progress_as_it_is() -> None:
    values, gradient = vectors(2, 50)
    state = nesterov(plain(values), gradient, lr=1.0, momentum=0.0)
    assert torch.equal(state.values, values - gradient)


def test_two_learners_on_different_bases_add_what_each_has_learned() -> None:
    """Progress, not position: one that started a version earlier must not pull the model back to where it started."""
    layout = layout_of(("mean", (1, 3)))
    [fragment] = layout.fragments
    old_base, base = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([10.0, 10.0, 10.0])
    fresh = base - torch.tensor([11.0, 10.0, 10.0])
    stale = old_base - torch.tensor([0.0, 1.0, 0.0])
    state = merge(layout, fragment, plain(base), [fresh, stale], [1.0, 1.0], lr=1.0, momentum=0.0)
    assert torch.equal(state.values, torch.tensor([10.5, 10.5, 10.0]))


def test_the_shrinkage_of_the_plain_mean_is_what_the_radial_mean_undoes() -> None:
    """The paper's argument in numbers: independent progress of M learners loses length as 1/√M in the plain mean."""
    for count in (4, 16):
        deltas = vectors(count, 50_000, seed=count)
        length = float(deltas[0].norm())
        assert float(mean(deltas, [1.0] * count).norm()) == pytest.approx(length / math.sqrt(count), rel=0.02)
        assert float(radial_mean(deltas, [1.0] * count).norm()) == pytest.approx(length, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, ROW - 1, ROW, ROW + 1, BLOCK, BLOCK + ROW + 7, 3 * BLOCK])
def test_a_norm_is_that_of_the_whole_vector_wherever_blocks_end(numel: int, dtype: torch.dtype) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    assert norm(vector) == pytest.approx(float(vector.double().norm()), rel=1e-5)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, ROW, BLOCK + ROW + 6])
def test_a_norm_is_not_finite_if_one_element_is_not(odd: float, at: int) -> None:
    vector = torch.zeros(BLOCK + ROW + 7)
    vector[at] = odd
    assert not math.isfinite(norm(vector))


@pytest.mark.parametrize("radial", [False, True])
def test_a_merge_in_blocks_is_that_of_the_whole_and_does_not_depend_on_threads_or_on_who_worked_out_the_norms(radial) -> None:
    numel = 2 * BLOCK + 5
    layout = layout_of(("radial", (numel,)), ("mean", (7,)))
    fragment = layout.fragments[0]
    generator = torch.Generator().manual_seed(1)
    deltas = [torch.randn(fragment.numel, generator=generator).bfloat16() for _ in range(3)]
    start, weights = FragmentState.fresh(torch.randn(fragment.numel, generator=generator)), [1.0, 2.0, 0.5]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(
                merge(layout, fragment, start, deltas, weights, rule=radial_mean if radial else mean, lr=0.5, momentum=0.8)
            )
    finally:
        torch.set_num_threads(threads)
    norms = [norms_of(fragment, delta) for delta in deltas]
    results.append(
        merge(layout, fragment, start, deltas, weights, rule=radial_mean if radial else mean, lr=0.5, momentum=0.8, norms=norms)
    )
    for other in results[1:]:
        assert torch.equal(other.values, results[0].values) and torch.equal(other.momentum, results[0].momentum)
    at = 0
    for piece in fragment.pieces:
        here, at = slice(at, at + piece.numel), at + piece.numel
        rule = layout.tensors[piece.tensor].rule
        reference = reference_radial if radial and rule == "radial" else reference_mean
        close(results[0].momentum[here], reference([delta[here].float() for delta in deltas], weights))
