"""A model's tensors seen as fragments: snapshots out, merged versions in. Knows nothing of the network or of rounds.

Snapshots may be taken by another thread while forward and backward passes run; only the optimizer's step and adoption
write parameters, and both hold the gate. On a GPU the gate orders work between streams, and nobody waits on the host unless
`carry` has to move a snapshot that is still open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skerry.config import SyncConfig
from skerry.core.exchange import KEPT_GIVES
from skerry.core.fragment import Fragment, Layout
from skerry.core.tensors import model_tensors
from skerry.errors import ConfigError

QUICK_NUMEL = 1 << 19
GATE_S = 0.2
HALF_STEP_S, RETRY_GATE_S = 1.0, 0.001

Arrival = Callable[[], tuple[Tensor, Tensor]]
"""Waits for a snapshot's copy to arrive on the host, then gives (base, values)."""


@dataclass(frozen=True)
class Prepared:
    """A version ready to be put into the model at a step boundary."""

    values: Tensor
    base: Tensor
    """The version as the model's type can hold it, on the host: what later progress is counted from. With `blend` the model
    then holds a mixture, and what it keeps of its own counts as progress again, as in Streaming DiLoCo."""
    change: Tensor
    """On the model's device: the values, or for `carry` what is to be added to the parameters."""
    since: Tensor | None
    """For `carry`: what `change` was computed against."""
    event: Any
    """On a GPU: `change` has arrived."""


class Replica:
    def __init__(self, model: nn.Module, layout: Layout, sync: SyncConfig) -> None:
        self.layout = layout
        self._sync = sync
        self._tensors = [tensor.detach() for _, tensor in model_tensors(model)]
        self._base: list[Tensor | None] = [None] * len(layout.fragments)
        # For `carry`: snapshots that were given, by the learner's count of steps at that moment.
        self._given: list[dict[int, Tensor]] = [{} for _ in layout.fragments]
        self._start_whole = [True] * len(layout.fragments)
        """The next version is taken as it is, whatever the rule: nothing here is progress since another one."""
        self.gate = threading.Lock()
        self.between_steps = True
        """Not in the middle of an inner step of several optimizers, of which some have stepped."""
        devices = {self._tensors[p.tensor].device for f in layout.fragments for p in f.pieces}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            names = ", ".join(sorted(map(str, devices)))
            raise ConfigError(f"all trained tensors of an island must be on one CPU or CUDA device, got {names}")
        self.device = next(iter(devices))
        self._cuda = self.device.type == "cuda"
        self.quick = not self._cuda and max(fragment.numel for fragment in layout.fragments) <= QUICK_NUMEL
        """To copy a fragment takes less time than to have another thread do it."""
        self._stream: Any = torch.cuda.Stream(self.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._written: Any = None
        self._being_read: list[Any] = []

    @property
    def on_cpu(self) -> bool:
        return not self._cuda

    # ------------------------------------------------------------ the training thread

    def before_write(self) -> None:
        """Call before parameters are written, holding the gate: kernels that still read them go first."""
        if self._cuda:
            current = torch.cuda.current_stream(self.device)
            for event in self._being_read:
                current.wait_event(event)
            self._being_read.clear()

    def after_write(self) -> None:
        """Call after parameters were written, holding the gate."""
        if self._cuda:
            self._written = _recorded(torch.cuda.current_stream(self.device))

    def adopt(self, index: int, prepared: Prepared, since_step: int) -> bool:
        """Put a version into the model, holding the gate. For `carry`, progress up to `since_step` is part of it. Says
        whether it was taken whole, whatever the rule."""
        change, event = prepared.change, prepared.event
        whole, self._start_whole[index] = self._start_whole[index], False
        if whole:
            self._given[index] = {}
            if self._sync.adopt != "overwrite":
                change, event = self._to_device(prepared.values)
        elif self._sync.adopt == "carry":
            since = self._since(index, since_step)
            if since is not prepared.since:
                # Another version was adopted after this one was prepared.
                change, event = self._to_device(prepared.values - self._or_current(index, since))
        with torch.no_grad():
            if self._cuda:
                current = torch.cuda.current_stream(self.device)
                current.wait_event(event)
                change.record_stream(current)
            self._write(self.layout.fragments[index], change, "overwrite" if whole else self._sync.adopt)
        if self._sync.adopt == "carry":
            # What was given but is not part of this version moves along with the parameters.
            left = {at: given for at, given in self._given[index].items() if at > since_step}
            moved = change.cpu() if left else change
            if left and self._cuda:
                self._stream.synchronize()  # snapshots may still be on their way to the host
            self._given[index] = {at: given + moved for at, given in left.items()}
        self._base[index] = prepared.base
        return whole

    def _since(self, index: int, step: int) -> Tensor | None:
        """The values progress is counted from: those given at that step, or the version held."""
        return self._given[index].get(step, self._base[index])

    def _or_current(self, index: int, since: Tensor | None) -> Tensor:
        return since if since is not None else torch.cat(self._read(self.layout.fragments[index])).cpu()

    def _to_device(self, flat: Tensor) -> tuple[Tensor, Any]:
        if not self._cuda:
            return flat, None
        with torch.cuda.stream(self._stream):
            moved = flat.pin_memory().to(self.device, non_blocking=True)
            return moved, _recorded(self._stream)

    def start_over(self) -> None:
        """What was learnt since the versions held does not count, and must not stay in the model."""
        self._start_whole = [True] * len(self._start_whole)

    def start_whole(self, index: int) -> None:
        self._start_whole[index] = True

    def _write(self, fragment: Fragment, flat: Tensor, rule: str) -> None:
        for piece, change in zip(fragment.pieces, torch.split(flat, [p.numel for p in fragment.pieces]), strict=True):
            tensor = self._tensors[piece.tensor]
            whole = tensor.contiguous().view(-1)
            target = whole[piece.start : piece.stop]
            if rule == "carry":
                target.add_(change)
            elif rule == "blend":
                target.lerp_(change.to(target.dtype), self._sync.blend)
            else:
                target.copy_(change)
            if not tensor.is_contiguous():
                tensor.copy_(whole.view(tensor.shape))

    def _read(self, fragment: Fragment) -> list[Tensor]:
        return [self._tensors[p.tensor].reshape(-1)[p.start : p.stop].float() for p in fragment.pieces]

    def load_fixed(self, tensors: dict[str, Tensor]) -> None:
        """Tensors nobody trains, as the run's creator set them."""
        with torch.no_grad():
            for spec, tensor in zip(self.layout.tensors, self._tensors, strict=True):
                if spec.rule == "fixed" and spec.name in tensors:
                    tensor.copy_(tensors[spec.name])

    # ------------------------------------------------------------ any thread

    def acquire_between_steps(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Take the gate between two inner steps. A loop that hardly ever comes to the end of one (its last optimizer does not
        step) is taken as it is after a while. False if the caller has given up meanwhile."""
        deadline = time.monotonic() + HALF_STEP_S
        while not given_up():
            # After an exception inside optimizer.step() the gate stays closed until the next step, if there is one.
            if self.gate.acquire(timeout=GATE_S):
                if self.between_steps or time.monotonic() >= deadline:
                    return True
                self.gate.release()
                time.sleep(RETRY_GATE_S)
        return False

    @contextlib.contextmanager
    def held_between_steps(self) -> Iterator[None]:
        self.acquire_between_steps()
        try:
            yield
        finally:
            self.gate.release()

    def snapshot(self, index: int, at_step: int) -> Arrival:
        """Copy a fragment as it is now, holding the gate. The result gives (base, values) once the copy has arrived."""
        fragment = self.layout.fragments[index]
        base = self._base[index]
        assert base is not None, "a snapshot before the first adoption"
        event: Any = None
        if self._cuda:
            values = torch.empty(fragment.numel, pin_memory=True)
            with torch.cuda.stream(self._stream):
                if self._written is not None:
                    self._stream.wait_event(self._written)
                values.copy_(torch.cat(self._read(fragment)), non_blocking=True)
                event = _recorded(self._stream)
            self._being_read.append(event)
        else:
            values = torch.cat(self._read(fragment))
        if self._sync.adopt == "carry":
            kept = {**self._given[index], at_step: values}
            self._given[index] = dict(list(kept.items())[-KEPT_GIVES:])

        def arrived() -> tuple[Tensor, Tensor]:
            if event is not None:
                event.synchronize()
            return base, values

        return arrived

    def copy_out(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Copy tensors that only the optimizer writes, holding the gate. The result gives the copies once they have arrived."""
        if not self._cuda:
            copies = [tensor.detach().clone() for tensor in tensors]
            return lambda: copies
        with torch.cuda.stream(self._stream):
            if self._written is not None:
                self._stream.wait_event(self._written)
            copies = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
            event = _recorded(self._stream)
        self._being_read.append(event)

        def arrived() -> list[Tensor]:
            event.synchronize()
            return copies

        return arrived

    def prepare(self, index: int, values: Tensor, since_step: int) -> Prepared:
        """Make a version ready for adoption, off the training thread."""
        fragment = self.layout.fragments[index]
        base = values.clone()
        at = 0
        for piece in fragment.pieces:
            # A model in bf16 holds rounded values; progress counted from unrounded ones would contain the rounding.
            here = slice(at, at + piece.numel)
            base[here] = values[here].to(self._tensors[piece.tensor].dtype).float()
            at += piece.numel
        change, since = values, None
        if self._sync.adopt == "carry":
            since = self._since(index, since_step)
            change = values - self._or_current(index, since)
        change, event = self._to_device(change)
        return Prepared(values, base, change, since, event)


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
