"""Host memory for a GPU's copies: pieces go round, and none is written to while anyone still reads it."""

from __future__ import annotations

import functools
import gc
import mmap

import pytest
import torch
from islands import together

from skerry.learner import pinned
from skerry.learner.pinned import PinnedMemory

CPU = torch.device("cpu")
"""Nothing is pinned there, and everything else is the same."""


class Stream:
    """What PinnedMemory wants of a CUDA stream; remembers who waited for it."""

    def __init__(self) -> None:
        self.recorded = 0
        self.is_done = True
        self.waited_for: list[int] = []

    def record_event(self) -> Event:
        self.recorded += 1
        return Event(self, self.recorded)


class Event:
    def __init__(self, stream: Stream, number: int) -> None:
        self._stream, self._number = stream, number

    def synchronize(self) -> None:
        self._stream.waited_for.append(self._number)

    def query(self) -> bool:
        return self._stream.is_done


def test_pieces_do_not_overlap_and_are_used_again_once_nobody_refers_to_them():
    memory = PinnedMemory(400, 3, CPU, [Stream()])
    first, second = memory.take(100, torch.float32), memory.take(100, torch.float32)
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.eq(1).all() and second.eq(2).all()
    third = memory.take(50, torch.float32)
    places = {tensor.data_ptr() for tensor in (first, second, third)}
    assert len(places) == 3
    del first, second, third
    again = [memory.take(100, torch.float32) for _ in range(3)]
    assert {tensor.data_ptr() for tensor in again} == places


def test_who_must_not_wait_gets_a_piece_that_the_gpu_is_done_with_or_ordinary_memory():
    stream = Stream()
    memory = PinnedMemory(400, 1, CPU, [stream])
    place = memory.take(100, torch.float32).data_ptr()
    stream.is_done = False
    assert memory.take_at_once(100, torch.float32).data_ptr() != place
    stream.is_done = True
    assert memory.take_at_once(100, torch.float32).data_ptr() == place
    assert memory.take(100, torch.float32).data_ptr() == place, "nothing was lost on the way"


def test_without_a_free_piece_ordinary_memory_is_taken():
    memory = PinnedMemory(400, 1, CPU, [Stream()])
    held = memory.take(100, torch.float32)
    held.fill_(1.0)
    other = memory.take(100, torch.float32)
    other.fill_(2.0)
    assert held.eq(1).all() and other.eq(2).all()
    place = held.data_ptr()
    del other  # was never a piece, and does not become one
    assert memory.take(100, torch.float32).data_ptr() != place


@pytest.mark.parametrize(
    "share",
    [lambda t: t[3:5], lambda t: t.view(torch.uint8), lambda t: t.numpy(), lambda t: memoryview(t.numpy())],
    ids=["slice", "view", "array", "memoryview"],
)
def test_whatever_shares_the_memory_keeps_the_piece(share):
    memory = PinnedMemory(64, 1, CPU, [])
    tensor = memory.take(16, torch.float32)
    place = tensor.data_ptr()
    kept = share(tensor)
    del tensor
    gc.collect()
    assert memory.take(16, torch.float32).data_ptr() != place
    del kept
    gc.collect()
    assert memory.take(16, torch.float32).data_ptr() == place


def test_a_piece_is_not_given_out_before_the_gpu_has_read_it():
    copies, encoding = Stream(), Stream()
    memory = PinnedMemory(64, 1, CPU, [copies, encoding])
    tensor = memory.take(16, torch.float32)
    assert not copies.waited_for  # nobody has read from it yet
    del tensor
    assert (copies.recorded, encoding.recorded) == (1, 1)
    memory.take(16, torch.float32)
    assert (copies.waited_for, encoding.waited_for) == ([1], [1])


def test_many_threads_never_share_a_piece():
    memory = PinnedMemory(4096, 4, CPU, [Stream()])
    wrong = []

    def use(mark: int) -> None:
        for _ in range(2000):
            tensor = memory.take(1024, torch.int32)
            tensor.fill_(mark)
            if not tensor.eq(mark).all():
                wrong.append(mark)

    together(*(functools.partial(use, mark) for mark in range(6)))
    assert not wrong
    kept = [memory.take(1024, torch.int32) for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in kept}) == 4


def test_without_memory_to_pin_it_does_without(monkeypatch, caplog):
    def refused(size_bytes: int) -> mmap.mmap:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(pinned, "private_pages", refused)
    memory = PinnedMemory(1 << 20, 4, CPU, [Stream()])
    assert "4 MB of memory could not be pinned (Cannot allocate memory)" in caplog.text
    assert memory.take(16, torch.float32).shape == (16,)


def test_what_a_forked_process_frees_stays_with_its_parent(monkeypatch):
    stream = Stream()
    memory = PinnedMemory(64, 1, CPU, [stream])
    tensor = memory.take(16, torch.float32)
    monkeypatch.setattr(pinned.os, "getpid", lambda: -1)
    del tensor
    assert stream.recorded == 0, "there is no GPU in a forked process"
