"""Memory for vectors that come and go: what is freed is used again, and nothing is that somebody still refers to."""

from __future__ import annotations

import functools
import gc
import random

import pytest
import torch
from islands import together

from skerry.tensors import memory as vectors
from skerry.tensors.memory import SMALL_BYTES, empty_bytes, empty_like


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5), (SMALL_BYTES // 4 + 1,), (1 << 18,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_memory_is_what_was_asked_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = empty_like(torch.zeros(shape), dtype)
    assert (found.shape, found.dtype, found.is_contiguous()) == (torch.Size(shape), dtype, True)
    assert torch.equal(found.fill_(3), torch.full(shape, 3, dtype=dtype))


@pytest.mark.parametrize(
    "share",
    [
        lambda a: a[3:5],
        lambda a: a.data,
        lambda a: a.view("float32"),
        lambda a: torch.from_numpy(a).view(torch.float32)[2:],
        lambda a: torch.frombuffer(a.data, dtype=torch.uint8)[8:].view(torch.float32),
    ],
    ids=["slice", "memoryview", "view", "tensor", "tensor of a memoryview"],
)
def test_freed_memory_is_used_again_unless_somebody_refers_to_it(share):
    size_bytes = 3_300_004  # of no other test
    array = empty_bytes(size_bytes)
    place = array.ctypes.data
    kept = share(array)
    del array
    gc.collect()
    other = empty_bytes(size_bytes)
    assert other.ctypes.data != place
    del kept
    gc.collect()
    assert empty_bytes(size_bytes - 1000).ctypes.data == place  # a little smaller is as good


def test_vectors_never_share_memory_whatever_is_freed_when_and_where():
    """Random lives of vectors of a few sizes in several threads; each holds a mark that only another's write could change."""
    wrong = []

    def live(mark: int) -> None:
        chance, kept = random.Random(mark), []
        for _ in range(1500):
            if kept and chance.random() < 0.5:
                vector = kept.pop(chance.randrange(len(kept)))
                if not vector.eq(mark).all():
                    wrong.append(mark)
            else:
                kept.append(empty_like(torch.empty(chance.choice([17_000, 17_100, 33_000]))).fill_(mark))

    together(*(functools.partial(live, mark) for mark in range(4)))
    assert not wrong


def test_memory_does_not_grow_while_as_many_vectors_are_in_use():
    size_bytes = 5_500_004
    places = set()
    held = [empty_bytes(size_bytes) for _ in range(4)]
    for turn in range(100):
        places.add(held[turn % 4].ctypes.data)
        held[turn % 4] = empty_bytes(size_bytes)
    assert len(places) <= 5


def test_all_that_is_free_can_be_given_back_at_once():
    held, gone = empty_bytes(3_300_000), empty_bytes(3_300_000)
    held[:] = 7
    del gone
    assert any(vectors._free.values())
    vectors.give_back()
    assert not any(vectors._free.values())
    assert (held == 7).all()


def test_what_nobody_wants_for_a_while_is_given_back(monkeypatch):
    now = vectors.monotonic()
    monkeypatch.setattr(vectors, "monotonic", lambda: now)
    size_bytes = 7_700_004
    held = [empty_bytes(size_bytes) for _ in range(3)]
    room = next(room for room in vectors._free if size_bytes <= room < size_bytes * 17 / 16)
    del held
    now += vectors.KEPT_S / 2
    one = empty_bytes(size_bytes)
    assert len(vectors._free[room]) == 2
    now += vectors.KEPT_S / 2 + vectors.SWEPT_EVERY_S
    del one
    there = sum(map(len, vectors._free.values()))
    empty_bytes(100_000)  # of any size
    assert sum(map(len, vectors._free.values())) >= there - 1, "no call gives back more than one"
    while vectors._swept_at != now:
        empty_bytes(100_000)
    assert len(vectors._free[room]) == 1, "the one that was in use meanwhile"
