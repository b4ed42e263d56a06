"""The device a model trains on: CUDA streams for copying and encoding, and pinned host memory for the exchange.

On a CPU all of this is trivial. On a GPU the exchange runs its kernels on streams of its own. Events order them against the
training stream, so the training thread never blocks on them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skerry.learner.pinned import PinnedMemory
from skerry.tensors.codecs.codec import Codec
from skerry.tensors.fragments import SET_ASIDE_SHARE, Layout

SETS_ASIDE = ("cuda",)
"""Device types for which pinned memory is allocated when an island joins."""
PASSING_BYTES = 128 << 20
"""Optimizer state is copied from a GPU in pieces of this size."""


@dataclass(frozen=True)
class SetAside:
    """The pinned memory of one island."""

    versions: PinnedMemory
    """Versions held and versions about to be adopted."""
    outgoing: PinnedMemory
    """Encoded contributions."""
    incoming: PinnedMemory
    """Encoded differences between versions."""
    passing: PinnedMemory
    """Staging buffer for optimizer state on its way to ordinary memory."""


class ModelDevice:
    """Orders the exchange's reads and writes of parameters against training."""

    def __init__(self, device: torch.device, layout: Layout, sent: Sequence[Codec], published: Sequence[Codec]) -> None:
        """`sent` and `published` are the codecs of each fragment's contributions and versions."""
        self.device = device
        self.cuda = device.type == "cuda"
        self._side: Any = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._copies: Any = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._written: Any = None
        self._step_end: Any = None
        self._being_read: list[Any] = []
        self._passing = threading.Lock()
        self.pinned: SetAside | None = None
        if device.type in SETS_ASIDE:
            count, numel = len(layout.fragments), max(fragment.numel for fragment in layout.fragments)
            spare = max(2, count // SET_ASIDE_SHARE)
            streams = [self._side, self._copies] if self.cuda else []
            self.pinned = SetAside(
                PinnedMemory(numel * torch.float32.itemsize, count + spare, device, streams),
                PinnedMemory(_most_bytes(sent, layout), spare, device, streams, shared=True),
                PinnedMemory(_most_bytes(published, layout), spare, device, streams[1:], shared=True),
                PinnedMemory(PASSING_BYTES, 1, device, streams[:1]),
            )
            with self.on_side():
                # Kernels compile on first use; compile them now rather than during the first exchange.
                for codec, fragment in zip(sent, layout.fragments, strict=True):
                    codec.encode(torch.zeros(fragment.numel, dtype=torch.float32, device=device))

    # ------------------------------------------------------------ the training thread

    def before_write(self) -> None:
        """Make writes of parameters wait for kernels that still read them. Call it before a write, holding the gate."""
        if self.cuda:
            current = torch.cuda.current_stream(self.device)
            for event in self._being_read:
                current.wait_event(event)
            self._being_read.clear()

    def after_write(self) -> None:
        """Record that parameters were written. Call it after a write, holding the gate."""
        if self.cuda:
            self._written = _recorded(torch.cuda.current_stream(self.device))

    def step_done(self) -> None:
        """Record the end of a step. Call it once all adoptable versions are in the model."""
        self._step_end = self._written

    def keep_up(self) -> None:
        """Wait until the GPU has finished the previous step. Call it before each step, without the gate.

        The GPU does not idle: it still has this step's gradients to compute. If the host ran further ahead, snapshots and
        adoptions would be delayed by as many steps.
        """
        if self._step_end is not None:
            self._step_end.synchronize()

    def use(self, tensor: Tensor, event: Any) -> None:
        """Make the current stream wait for `event` before it uses a tensor from another stream."""
        if self.cuda:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            tensor.record_stream(current)

    # ------------------------------------------------------------ background threads

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        """Run kernels on the side stream, parallel to training."""
        return torch.cuda.stream(self._side) if self.cuda else contextlib.nullcontext()

    def on_copies(self) -> contextlib.AbstractContextManager[Any]:
        """Run kernels on the copy stream, which never waits behind an encoder."""
        return torch.cuda.stream(self._copies) if self.cuda else contextlib.nullcontext()

    def recorded(self) -> Any:
        """An event for all work queued on the current stream so far; None on a CPU."""
        return _recorded(torch.cuda.current_stream(self.device)) if self.cuda else None

    def after_writes(self) -> None:
        """Make the side stream wait for the last write of the parameters."""
        if self._written is not None:
            self._side.wait_event(self._written)

    def reads(self) -> Any:
        """Protect parameters from writes until the current stream has read them. Call it after queueing the reads, holding the
        gate. Returns the event of the last read."""
        event = self.recorded()
        if event is not None:
            self._being_read.append(event)
        return event

    def fetch(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Copy a host tensor to the device. Returns the copy and the event of its arrival."""
        if not self.cuda:
            return flat, None
        with self.on_copies():
            return flat.to(self.device, non_blocking=True), self.recorded()

    @property
    def shared(self) -> tuple[PinnedMemory, PinnedMemory] | None:
        """Outgoing and incoming memory that another process can map; None if it is not shared."""
        pinned = self.pinned
        if pinned is None or min(pinned.outgoing.descriptor, pinned.incoming.descriptor) < 0:
            return None
        return pinned.outgoing, pinned.incoming

    def release(self) -> None:
        self.pinned = None

    def copy_out(
        self,
        find: Callable[[], list[Tensor]],
        at_last: Callable[[], None],
        between_steps: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> list[Tensor]:
        """Copy tensors that only the optimizer writes to the host.

        `find` lists the tensors when copying begins; `at_last` runs when the last of them has been read. Both are called
        inside `between_steps()`. On a CPU all copies are from the same step. On a GPU training goes on between pieces of
        PASSING_BYTES, so tensors may be a few steps apart.
        """
        pinned = self.pinned
        if pinned is None:
            with between_steps():
                copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in find()]
                at_last()
            return copies
        tensors: list[Tensor] | None = None
        copies = []
        at = start = 0  # index of the next tensor, and its next byte

        def copy_piece() -> None:
            nonlocal tensors, copies, at, start
            free = pinned.passing.take(PASSING_BYTES, torch.uint8)
            passing: list[tuple[Tensor, Tensor]] = []
            with between_steps(), self.on_side():
                if tensors is None:
                    tensors = find()
                    copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
                self.after_writes()
                while at < len(tensors) and free.numel():
                    source = _as_bytes(tensors[at].detach().contiguous())[start:][: free.numel()]
                    target = _as_bytes(copies[at])[start:][: free.numel()]
                    staged, free = free[: source.numel()], free[source.numel() :]
                    staged.copy_(source, non_blocking=True)
                    passing.append((target, staged))
                    start += source.numel()
                    if start == _as_bytes(copies[at]).numel():
                        at, start = at + 1, 0
                event = self.reads()
                if at == len(tensors):
                    at_last()
            if event is not None:
                event.synchronize()
            for target, staged in passing:
                target.copy_(staged)

        while tensors is None or at < len(tensors):
            with self._passing:  # released between pieces so that other copies can take turns
                copy_piece()
        return copies


def _most_bytes(codecs: Sequence[Codec], layout: Layout) -> int:
    """Size of the largest encoded fragment."""
    return max(codec.size_bytes(fragment.numel) for codec, fragment in zip(codecs, layout.fragments, strict=True))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
