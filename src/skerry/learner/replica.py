"""A model's tensors seen as fragments: snapshots out, merged versions in. Knows nothing about the network or rounds.

Another thread may take snapshots while forward and backward passes run. Only the optimizer's step and adoption write
parameters, and both hold the gate. On a GPU the gate orders work between streams, so the training thread does not block.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skerry.config import SyncConfig
from skerry.core.exchange import KEPT_GIVES
from skerry.errors import ConfigError
from skerry.learner.device import ModelDevice
from skerry.tensors.codecs.codec import Codec, is_quick, raw_bytes
from skerry.tensors.codecs.feedback import Feedback
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.tensors.fragments import Fragment, Layout
from skerry.tensors.memory import empty_like
from skerry.tensors.model import model_tensors, slots_of

log = logging.getLogger("skerry.learner")

OPEN_ANSWERS = 2
"""Most open answers per fragment. Rounds of a fragment do not overlap, so both answer the same question."""
GATE_TIMEOUT_S = 0.2
HALF_STEP_S, RETRY_GATE_S = 1.0, 0.001
"""How long to wait for the end of an inner step before taking a half-done one, and the pause between looks."""


@dataclass(frozen=True)
class Snapshot:
    """A fragment's values between two steps."""

    fragment: int
    at_step: int
    missing: Tensor | None
    """Error feedback: progress that earlier contributions lost to their codec, as known at the time of the snapshot."""
    progress: Callable[[], Tensor]
    """Computes the held version minus the model's values, on the model's device."""


@dataclass(frozen=True)
class Prepared:
    """A version ready to be written into the model between two steps."""

    values: Tensor
    """The syncer's values, on the host. After a `blend` the model holds a mixture, and the part that is its own counts as
    progress again, as in Streaming DiLoCo."""
    change: Tensor
    """The values on the model's device; for `carry`, the difference to add to the parameters."""
    event: Any
    """Fires when `change` has arrived on the GPU; None on a CPU."""
    since: Tensor | None
    """For `carry`: the values that `change` was computed against."""
    floor: int = 0
    """The version of the last rollback: progress from before it is undone."""


class Replica:
    """The model's trained tensors, cut into fragments."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        sync: SyncConfig,
        alter: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
    ) -> None:
        """`alter` may replace each snapshot."""
        self.layout = layout
        self._alter = alter
        self._sync = sync
        self._of_model = [tensor for _, tensor in model_tensors(model)]
        self._slots = slots_of(model, self._of_model)
        self._tensors = [tensor.detach() for tensor in self._of_model]
        self._frozen = [
            (spec.name, tensor)
            for spec, tensor in zip(layout.tensors, self._of_model, strict=True)
            if spec.rule == "fixed" and isinstance(tensor, nn.Parameter)
        ]
        self._codecs = [fragment_codec(sync.send, layout, fragment) for fragment in layout.fragments]
        self._published = [fragment_codec(sync.publish, layout, fragment) for fragment in layout.fragments]
        self._held: list[Tensor | None] = [None] * len(layout.fragments)
        """By fragment: the syncer's values of the version adopted last, on the host."""
        with_feedback = [sync.feedback == "always" or (sync.feedback == "auto" and c.needs_feedback) for c in self._codecs]
        self._feedback = [Feedback(OPEN_ANSWERS) if wanted else None for wanted in with_feedback]
        self._feedback_lock = threading.Lock()
        self._floors = [0] * len(layout.fragments)
        self._given: list[dict[int, Tensor]] = [{} for _ in layout.fragments]
        """By fragment, for `carry`: values of recent snapshots by the learner's step count, on the model's device."""
        self._start_whole = [True] * len(layout.fragments)
        """By fragment: the next version overwrites the weights whatever the rule, because they hold no progress to keep."""
        self.gate = threading.Lock()
        """Held by whoever reads or writes parameters."""
        self.between_steps = True
        """False while an inner step of several optimizers is half done."""
        devices = {self._tensors[p.tensor].device for f in layout.fragments for p in f.pieces}
        if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
            names = ", ".join(sorted(map(str, devices)))
            raise ConfigError(f"all trained tensors of an island must be on one CPU or CUDA device, got {names}")
        self.device = next(iter(devices))
        self.model_device = ModelDevice(self.device, layout, self._codecs, self._published)
        largest = max(fragment.numel for fragment in layout.fragments)
        self.quick = not self.model_device.cuda and is_quick(sync.send, largest) and is_quick(sync.publish, largest)
        """Fragments are so small that encoding one costs less than handing it to another thread."""

    def count_unknown(self, parameters: Sequence[Tensor]) -> int:
        """How many of these parameters are not the model's."""
        known = {id(tensor) for tensor in self._of_model}
        return sum(id(parameter) not in known for parameter in parameters)

    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.model_device.cuda and torch.cuda.is_current_stream_capturing()

    # ------------------------------------------------------------ the training thread

    def adopt(self, index: int, prepared: Prepared, since_step: int, counted: int) -> bool:
        """Write a version into the model. The caller holds the gate.

        The version contains this learner's progress up to step `counted`; `carry` keeps the progress made after `since_step`.
        Returns whether the version overwrote the weights whatever the rule.
        """
        self._check_in_place(self.layout.fragments[index])
        if index == 0:
            self._warn_of_thawed()
        change, event = prepared.change, prepared.event
        whole, self._start_whole[index] = self._start_whole[index], False
        if whole:
            self._given[index] = {}
            if self._sync.adopt != "overwrite":
                change, event = self.model_device.fetch(prepared.values)
        elif self._sync.adopt == "carry":
            since = self._since(index, since_step)
            if since[0] is not prepared.since:
                # Another version was adopted since this one was prepared.
                change, event = self._difference(index, prepared.values, *since)
        with torch.no_grad():
            self.model_device.use(change, event)
            self._write(self.layout.fragments[index], change, "overwrite" if whole else self._sync.adopt)
        if self._sync.adopt == "carry":
            # Snapshots that are not part of this version move along with the parameters.
            with self.model_device.on_side():
                self._given[index] = {at: given + change for at, given in self._given[index].items() if at > since_step}
        feedback = self._feedback[index]
        if feedback is not None:
            with self.model_device.on_side(), self._feedback_lock:
                if prepared.floor > self._floors[index]:
                    feedback.undo()
                feedback.merged(counted)
        self._floors[index] = prepared.floor
        self._held[index] = prepared.values
        return whole

    def _check_in_place(self, fragment: Fragment) -> None:
        """Check that the model still uses the memory it joined with. Otherwise it would silently train on alone."""
        for piece in fragment.pieces:
            name, joined = self.layout.tensors[piece.tensor].name, self._of_model[piece.tensor]
            if joined.data_ptr() != self._tensors[piece.tensor].data_ptr():
                raise ConfigError(f"{name} was moved to other memory after join (.to, .half, .data = ...): do that before join")
            if self._slots[piece.tensor].tensor is not joined:
                raise ConfigError(
                    f"{name} was replaced by another tensor after join (an assignment, load_state_dict(assign=True)): "
                    "change it in place, or replace it before join"
                )

    def _warn_of_thawed(self) -> None:
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            self._frozen = []  # warn once
            more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
            log.warning("only this island trains %s%s: frozen at join; unfreeze parameters before join", thawed[0], more)

    def _since(self, index: int, step: int) -> tuple[Tensor | None, bool]:
        """The values that progress counts from: the snapshot of that step, else the held version. Also whether it is the
        latter."""
        given = self._given[index].get(step)
        return (self._held[index], True) if given is None else (given, False)

    def _difference(self, index: int, values: Tensor, since: Tensor | None, is_version: bool) -> tuple[Tensor, Any]:
        with self.model_device.on_side():
            if since is None:
                before = torch.cat(self._read(self.layout.fragments[index]))
            else:
                before = self._as_model(index, since) if is_version else since
            return values.to(self.device, non_blocking=True) - before, self.model_device.recorded()

    def start_over(self) -> None:
        """Discard progress since the held versions: the next version of every fragment overwrites the weights."""
        self._start_whole = [True] * len(self._start_whole)

    def start_whole(self, index: int) -> None:
        """Make the next version of one fragment overwrite the weights."""
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
        """Set the tensors that nobody trains to the values the run was created with."""
        with torch.no_grad():
            for spec, tensor in zip(self.layout.tensors, self._tensors, strict=True):
                if spec.rule == "fixed" and spec.name in tensors:
                    tensor.copy_(tensors[spec.name])

    def release(self) -> None:
        """Free the memory of the exchange. Nothing may be exchanged afterwards."""
        self._held = [None] * len(self._held)
        self.model_device.release()

    # ------------------------------------------------------------ any thread

    def acquire_between_steps(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Take the gate between two inner steps. Returns False if the caller has given up.

        If no inner step ends for HALF_STEP_S, because the last optimizer rarely steps, the gate is taken in a half-done one.
        """
        deadline = time.monotonic() + HALF_STEP_S
        while not given_up():
            # If optimizer.step() raised, the gate stays closed until the next step, which may never come.
            if self.gate.acquire(timeout=GATE_TIMEOUT_S):
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

    def snapshot(self, index: int, at_step: int) -> Snapshot:
        """Copy a fragment. The caller holds the gate."""
        held, feedback = self._held[index], self._feedback[index]
        assert held is not None, "snapshot before the first adoption"
        with self.model_device.on_side():
            self.model_device.after_writes()
            parts = self._read(self.layout.fragments[index])
            values = torch.cat(parts) if self.model_device.cuda else torch.cat(parts, out=empty_like(held))
            self.model_device.reads()
        if self._sync.adopt == "carry":
            kept = {**self._given[index], at_step: values}
            self._given[index] = dict(list(kept.items())[-KEPT_GIVES:])

        def progress() -> Tensor:
            with self.model_device.on_side():
                return torch.sub(self._as_model(index, held), values, out=empty_like(values))

        return self._alter(Snapshot(index, at_step, feedback.missing if feedback is not None else None, progress))

    def encode(self, snapshot: Snapshot) -> Tensor:
        """The bytes of a contribution, on the host. With a GPU, encoding runs there, so only the encoded bytes are copied."""
        codec, feedback = self._codecs[snapshot.fragment], self._feedback[snapshot.fragment]
        progress = snapshot.progress()
        with self.model_device.on_side():
            data = codec.encode(progress if snapshot.missing is None else progress + snapshot.missing)
            if feedback is not None:
                sent = codec.decode(data, progress.numel())
                with self._feedback_lock:
                    feedback.sent(snapshot.at_step, progress, sent)
            pinned = self.model_device.pinned
            if pinned is None:
                return data.cpu()
            arrived = pinned.outgoing.take(data.numel(), torch.uint8)
            arrived.copy_(data, non_blocking=True)
            event = self.model_device.recorded()
        if event is not None:
            event.synchronize()
        return arrived

    def room(self, index: int) -> memoryview | None:
        """Memory to receive a difference between two versions in; None if none is set aside."""
        pinned = self.model_device.pinned
        if pinned is None:
            return None
        codec, numel = self._published[index], self.layout.fragments[index].numel
        return raw_bytes(pinned.incoming.take_at_once(codec.size_bytes(numel), torch.uint8))

    def held(self, index: int) -> Tensor | None:
        """The syncer's values of the version adopted last; None before the first adoption."""
        return self._held[index]

    def _as_model(self, index: int, values: Tensor) -> Tensor:
        """A version rounded to the model's dtypes, on its device. Progress counted from unrounded values would contain the
        rounding error."""
        values = values.to(self.device, non_blocking=True)
        pieces = self.layout.fragments[index].pieces
        types = [self._tensors[piece.tensor].dtype for piece in pieces]
        if all(dtype == torch.float32 for dtype in types):
            return values
        parts = torch.split(values, [piece.numel for piece in pieces])
        return torch.cat([part.to(dtype).float() for part, dtype in zip(parts, types, strict=True)])

    def receive(self, index: int, codec: Codec, data: Tensor, had: Tensor | None, since_step: int, floor: int = 0) -> Prepared:
        """Decode a version and prepare it for adoption. `data` holds its values or, if `had` is given, one or more successive
        differences from that version."""
        return self.prepare(index, self._decode(index, codec, data, had), since_step, floor)

    def prepare(self, index: int, values: Tensor, since_step: int, floor: int = 0) -> Prepared:
        """Prepare a version for adoption, off the training thread."""
        event: Any = None
        device, pinned, change = self.model_device, self.model_device.pinned, values
        if pinned is not None:
            values = pinned.versions.take(values.numel(), torch.float32)
            if change.is_cuda:
                with device.on_copies():
                    values.copy_(change, non_blocking=True)
                    event = device.recorded()
                event.synchronize()
            else:
                change, event = device.fetch(values.copy_(change))
        if self._sync.adopt != "carry":
            return Prepared(values, change, event, None, floor)
        since, is_version = self._since(index, since_step)
        return Prepared(values, *self._difference(index, values, since, is_version), since, floor)

    def _decode(self, index: int, codec: Codec, data: Tensor, had: Tensor | None) -> Tensor:
        """Decode values, or add decoded differences to `had` on the model's device."""
        numel, device, pinned = self.layout.fragments[index].numel, self.model_device, self.model_device.pinned
        if had is None:
            return codec.decode(data, numel)
        differences = torch.split(data, codec.size_bytes(numel))
        if not device.cuda or pinned is None:
            values = torch.add(had, codec.decode(differences[0], numel), out=empty_like(had))
            for difference in differences[1:]:
                values.add_(codec.decode(difference, numel))
            return values
        with device.on_copies():
            values = had.to(self.device, non_blocking=True)
            for difference in differences:
                if pinned.incoming.offset_of(raw_bytes(difference)) is None:
                    difference = pinned.incoming.take(difference.numel(), torch.uint8).copy_(difference)
                values.add_(codec.decode(difference.to(self.device, non_blocking=True), numel))
            return values
