"""The order of training windows and the fixed validation windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.data import JoinedTokens, Windows, validation_batches
from skerry.data.shuffle import permutation
from skerry.errors import ConfigError

seeds = st.integers(-(2**63), 2**64)


def counting(length: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Tokens that are their own position, so that a window tells where it came from."""
    return np.arange(length, dtype=np.uint32)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(5, 400), context=st.integers(2, 40), seed=seeds, epoch=st.integers(0, 10**9))
def test_an_epoch_sees_every_window_exactly_once(length: int, context: int, seed: int, epoch: int) -> None:
    windows = Windows(counting(max(length, context + 1)), context, seed)
    count = windows.windows_count
    inputs, _ = windows.batch(epoch * count, count)
    assert sorted(inputs[:, 0].tolist()) == [window * context for window in range(count)]


@settings(max_examples=60, deadline=None)
@given(length=st.integers(20, 300), context=st.integers(2, 16), seed=seeds, start=st.integers(0, 2**70), data=st.data())
def test_a_batch_does_not_depend_on_how_the_samples_are_cut_into_batches(
    length: int, context: int, seed: int, start: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 60))
    cut = data.draw(st.integers(0, count))
    tokens = counting(length)
    whole_inputs, whole_targets = Windows(tokens, context, seed).batch(start, count)
    pieces = [(start, cut), (start + cut, count - cut)]
    # Later samples first: an answer must not depend on what was asked before.
    windows = Windows(tokens, context, seed)
    parts = [windows.batch(first, size) for first, size in reversed(pieces) if size][::-1]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole_inputs)
    assert torch.equal(torch.cat([targets for _, targets in parts]), whole_targets)


@given(length=st.integers(20, 300), context=st.integers(2, 16), seed=seeds)
def test_targets_are_the_tokens_after_the_inputs(length: int, context: int, seed: int) -> None:
    inputs, targets = Windows(counting(length), context, seed).batch(3, 5)
    assert inputs.shape == targets.shape == (5, context)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_windows_cover_the_tokens_and_share_only_their_last_one() -> None:
    # 31 tokens hold three windows of 10 and the token after them; 30 tokens lack the last target.
    assert Windows(counting(31), 10, 0).windows_count == 3
    assert Windows(counting(30), 10, 0).windows_count == 2
    _, targets = Windows(counting(31), 10, 0).batch(0, 3)
    assert sorted(targets.flatten().tolist()) == list(range(1, 31))


@given(seed=seeds, epoch=st.integers(0, 10**6))
def test_seeds_and_epochs_have_orders_of_their_own(seed: int, epoch: int) -> None:
    order = permutation(200, seed, epoch).tolist()
    assert order == permutation(200, seed, epoch).tolist()
    assert sorted(order) == list(range(200))
    assert order != permutation(200, seed, epoch + 1).tolist()
    assert order != permutation(200, seed + 1, epoch).tolist()
    assert order != permutation(200, epoch + 1, seed).tolist()


def test_the_order_is_the_one_that_plain_integer_arithmetic_gives() -> None:
    def mixed(value: int) -> int:
        value = value * 0x9E3779B97F4A7C15 % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 5), (-1, 7)):
        key = mixed(((mixed((seed + 1) % 2**64)) ^ epoch) + 1)
        expected = sorted(range(100), key=lambda i, key=key: mixed((key + i) % 2**64))  # type: ignore[misc]
        assert permutation(100, seed, epoch).tolist() == expected


def test_every_window_is_about_equally_likely_at_every_place() -> None:
    counts = np.zeros((6, 6))
    for epoch in range(3000):
        counts[np.arange(6), permutation(6, 11, epoch)] += 1
    # 500 expected, with a standard deviation of about 20.
    assert np.abs(counts - 500).max() < 100


def test_joined_files_give_the_windows_of_one_array() -> None:
    tokens = counting(101)
    joined = JoinedTokens([tokens[:7], tokens[7:7], tokens[7:60], tokens[60:]])
    for ours, reference in zip(Windows(joined, 9, 4).batch(0, 25), Windows(tokens, 9, 4).batch(0, 25), strict=True):
        assert torch.equal(ours, reference)


def test_a_batch_must_start_at_nought_or_later_and_hold_something() -> None:
    windows = Windows(counting(50), 5, 0)
    for start, count in ((-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"got start {start}, count {count}"):
            windows.batch(start, count)


def test_too_few_tokens_for_one_window_are_refused() -> None:
    line = r"^a window of model\.context 10 needs 11 tokens, got 10$"
    with pytest.raises(ConfigError, match=line):
        Windows(counting(10), 10, 0)
    with pytest.raises(ConfigError, match=line):
        validation_batches(counting(10), 10, 100, 4)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(12, 500), context=st.integers(2, 11), budget=st.integers(1, 600), batch=st.integers(1, 9))
def test_validation_windows_are_distinct_within_budget_and_the_same_every_time(
    length: int, context: int, budget: int, batch: int
) -> None:
    tokens = counting(length)
    batches = list(validation_batches(tokens, context, budget, batch))
    assert all(len(inputs) == batch for inputs, _ in batches[:-1]) and 1 <= len(batches[-1][0]) <= batch
    inputs = torch.cat([inputs for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    assert torch.equal(targets, inputs + 1)
    assert len(set(targets.flatten().tolist())) == targets.numel()
    available = (length - 1) // context
    assert len(inputs) == min(available, max(1, budget // context))
    # Evenly spaced: gaps, also that after the last, differ by one window at most.
    places = [*(inputs[:, 0] // context).tolist(), available]
    gaps = np.diff(places)
    assert places[0] == 0 and gaps.max() - gaps.min() <= 1
    again = list(validation_batches(tokens, context, budget, batch))
    assert all(torch.equal(a, b) for one, two in zip(batches, again, strict=True) for a, b in zip(one, two, strict=True))
