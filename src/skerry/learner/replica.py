"""A model's tensors seen as fragments: snapshots out, merged versions in. Knows nothing of the network or of rounds.

Snapshots may be taken by another thread while forward and backward passes run; only the optimizer's step and adoption
write parameters, and both hold the gate. On a GPU the gate orders work between streams, and training never waits on the host.
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
from skerry.learner.pinned import PinnedMemory
from skerry.tensors.codecs.codec import Codec, is_quick, raw_bytes
from skerry.tensors.codecs.feedback import Feedback
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.tensors.fragments import SET_ASIDE_SHARE, Fragment, Layout
from skerry.tensors.memory import empty_like
from skerry.tensors.model import model_tensors, slots_of

log = logging.getLogger("skerry.learner")

OPEN_ANSWERS = 2
"""Of one fragment: its rounds follow each other, so only answers to the same question can both be open."""
SETS_ASIDE = ("cuda",)
"""Devices beside which memory for the exchange is set aside when an island joins."""
PASSING_BYTES = 128 << 20
"""Of the optimizer's state, copied at a time beside a GPU."""
GATE_S = 0.2
HALF_STEP_S, RETRY_GATE_S = 1.0, 0.001


@dataclass(frozen=True)
class Snapshot:
    """A fragment as it was at one moment between two steps."""

    fragment: int
    at_step: int
    missing: Tensor | None
    """What earlier contributions left out, as far as that was known then."""
    progress: Callable[[], Tensor]
    """Works out the version held minus what the model had, on the model's device."""


@dataclass(frozen=True)
class Prepared:
    """A version ready to be put into the model at a step boundary."""

    values: Tensor
    """On the host, as the syncer has them. With `blend` the model then holds a mixture, and what it keeps of its own counts as
    progress again, as in Streaming DiLoCo."""
    change: Tensor
    """On the model's device: the values, or for `carry` what is to be added to the parameters."""
    event: Any
    """On a GPU: `change` has arrived."""
    since: Tensor | None
    """For `carry`: what `change` was computed against."""
    floor: int = 0
    """Versions before this one were taken back."""


@dataclass(frozen=True)
class _Pinned:
    """Memory beside a GPU."""

    versions: PinnedMemory
    """For those held and those that are to be adopted."""
    outgoing: PinnedMemory
    """For contributions, encoded."""
    incoming: PinnedMemory
    """For differences between versions, encoded."""
    passing: PinnedMemory
    """For the optimizer's state, on its way to ordinary memory."""


class Replica:
    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        sync: SyncConfig,
        alter: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot,
    ) -> None:
        """`alter` may put something else in place of every snapshot."""
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
        """The version adopted last, as the syncer has it, on the host."""
        with_feedback = [sync.feedback == "always" or (sync.feedback == "auto" and c.needs_feedback) for c in self._codecs]
        self._feedback = [Feedback(OPEN_ANSWERS) if wanted else None for wanted in with_feedback]
        self._feedback_lock = threading.Lock()
        self._floors = [0] * len(layout.fragments)
        # For `carry`: snapshots that were given, by the learner's count of steps at that moment, on the model's device.
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
        largest = max(fragment.numel for fragment in layout.fragments)
        self.quick = not self._cuda and is_quick(sync.send, largest) and is_quick(sync.publish, largest)
        """To copy and encode a fragment takes less time than to have another thread do it."""
        self._stream: Any = torch.cuda.Stream(self.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._copies: Any = torch.cuda.Stream(self.device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._written: Any = None
        self._step_end: Any = None
        self._being_read: list[Any] = []
        self._passing = threading.Lock()
        self._pinned: _Pinned | None = None
        if self.device.type in SETS_ASIDE:
            count, numel = len(layout.fragments), max(fragment.numel for fragment in layout.fragments)
            spare = max(2, count // SET_ASIDE_SHARE)
            streams = [self._stream, self._copies] if self._cuda else []
            sent, published = _most_bytes(self._codecs, layout), _most_bytes(self._published, layout)
            self._pinned = _Pinned(
                PinnedMemory(numel * torch.float32.itemsize, count + spare, self.device, streams),
                PinnedMemory(sent, spare, self.device, streams, shared=True),
                PinnedMemory(published, spare, self.device, streams[1:], shared=True),
                PinnedMemory(PASSING_BYTES, 1, self.device, streams[:1]),
            )

            with self._on_side():
                # What is compiled when it is first used is compiled now: later it would hold up the first of all fragments.
                for codec, fragment in zip(self._codecs, layout.fragments, strict=True):
                    codec.encode(torch.zeros(fragment.numel, dtype=torch.float32, device=self.device))

    def strangers_among(self, parameters: Sequence[Tensor]) -> int:
        """How many are none of the model's."""
        known = {id(tensor) for tensor in self._of_model}
        return sum(id(parameter) not in known for parameter in parameters)

    def is_captured(self) -> bool:
        """Whether kernels that are started now become part of a CUDA graph."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

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

    def step_done(self) -> None:
        """Call after a step, when what can be adopted is in the model."""
        self._step_end = self._written

    def keep_up(self) -> None:
        """Call before each step, without the gate: waits for the GPU to finish the one before. It has the gradients of this one
        to compute meanwhile. Where a loop runs ahead by more, what is sent and what is adopted would be late by as much."""
        if self._step_end is not None:
            self._step_end.synchronize()

    def adopt(self, index: int, prepared: Prepared, since_step: int, counted: int) -> bool:
        """Put a version into the model, holding the gate. It contains this learner's progress up to `counted`; for `carry`,
        what came after `since_step` is kept. Says whether it was taken whole, whatever the rule."""
        self._check_in_place(self.layout.fragments[index])
        if index == 0:
            self._look_at_frozen()
        change, event = prepared.change, prepared.event
        whole, self._start_whole[index] = self._start_whole[index], False
        if whole:
            self._given[index] = {}
            if self._sync.adopt != "overwrite":
                change, event = self._to_device(prepared.values)
        elif self._sync.adopt == "carry":
            since = self._since(index, since_step)
            if since[0] is not prepared.since:
                # Another version was adopted after this one was prepared.
                change, event = self._difference(index, prepared.values, *since)
        with torch.no_grad():
            if self._cuda:
                current = torch.cuda.current_stream(self.device)
                current.wait_event(event)
                change.record_stream(current)
            self._write(self.layout.fragments[index], change, "overwrite" if whole else self._sync.adopt)
        if self._sync.adopt == "carry":
            # What was given but is not part of this version moves along with the parameters.
            with self._on_side():
                self._given[index] = {at: given + change for at, given in self._given[index].items() if at > since_step}
        feedback = self._feedback[index]
        if feedback is not None:
            with self._on_side(), self._feedback_lock:
                if prepared.floor > self._floors[index]:
                    feedback.undo()
                feedback.merged(counted)
        self._floors[index] = prepared.floor
        self._held[index] = prepared.values
        return whole

    def _check_in_place(self, fragment: Fragment) -> None:
        """What is written must be the model's own memory, or it would train on alone without anybody noticing."""
        for piece in fragment.pieces:
            name, joined = self.layout.tensors[piece.tensor].name, self._of_model[piece.tensor]
            if joined.data_ptr() != self._tensors[piece.tensor].data_ptr():
                raise ConfigError(f"{name} was given other memory after join (.to, .half, .data = ...): do that before join")
            if self._slots[piece.tensor].tensor is not joined:
                raise ConfigError(
                    f"{name} was replaced by another tensor after join (an assignment, load_state_dict(assign=True)): "
                    "change it in place, or do that before join"
                )

    def _look_at_frozen(self) -> None:
        thawed = [name for name, parameter in self._frozen if parameter.requires_grad]
        if thawed:
            self._frozen = []  # once is enough
            more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
            log.warning("%s%s had no gradients at join, so only this island trains it: thaw before join", thawed[0], more)

    def _since(self, index: int, step: int) -> tuple[Tensor | None, bool]:
        """The values progress is counted from: those given at that step, or the version held, and whether it is that."""
        given = self._given[index].get(step)
        return (self._held[index], True) if given is None else (given, False)

    def _difference(self, index: int, values: Tensor, since: Tensor | None, is_version: bool) -> tuple[Tensor, Any]:
        with self._on_side():
            if since is None:
                before = torch.cat(self._read(self.layout.fragments[index]))
            else:
                before = self._as_model(index, since) if is_version else since
            return values.to(self.device, non_blocking=True) - before, self._recorded()

    def _to_device(self, flat: Tensor) -> tuple[Tensor, Any]:
        if not self._cuda:
            return flat, None
        with torch.cuda.stream(self._copies):  # not behind something that is being encoded
            return flat.to(self.device, non_blocking=True), _recorded(self._copies)

    def _on_side(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside is done beside that of the training thread, on a GPU."""
        return torch.cuda.stream(self._stream) if self._cuda else contextlib.nullcontext()

    def _recorded(self) -> Any:
        """On a GPU: what the other stream has been given so far."""
        return _recorded(self._stream) if self._cuda else None

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

    def release(self) -> None:
        """Nothing will be exchanged any more: memory that was set aside for it can go."""
        self._held = [None] * len(self._held)
        self._pinned = None

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

    def snapshot(self, index: int, at_step: int) -> Snapshot:
        """Copy a fragment as it is now, holding the gate."""
        held, feedback = self._held[index], self._feedback[index]
        assert held is not None, "a snapshot before the first adoption"
        with self._on_side():
            if self._written is not None:
                self._stream.wait_event(self._written)
            parts = self._read(self.layout.fragments[index])
            values = torch.cat(parts) if self._cuda else torch.cat(parts, out=empty_like(held))
            if self._cuda:
                self._being_read.append(self._recorded())
        if self._sync.adopt == "carry":
            kept = {**self._given[index], at_step: values}
            self._given[index] = dict(list(kept.items())[-KEPT_GIVES:])

        def progress() -> Tensor:
            with self._on_side():
                return torch.sub(self._as_model(index, held), values, out=empty_like(values))

        return self._alter(Snapshot(index, at_step, feedback.missing if feedback is not None else None, progress))

    def encode(self, snapshot: Snapshot) -> Tensor:
        """The bytes of a contribution, on the host. On a GPU it is encoded there, so that only they cross over."""
        codec, feedback = self._codecs[snapshot.fragment], self._feedback[snapshot.fragment]
        progress = snapshot.progress()
        with self._on_side():
            data = codec.encode(progress if snapshot.missing is None else progress + snapshot.missing)
            if feedback is not None:
                sent = codec.decode(data, progress.numel())
                with self._feedback_lock:
                    feedback.sent(snapshot.at_step, progress, sent)
            pinned = self._pinned
            if pinned is None:
                return data.cpu()
            arrived = pinned.outgoing.take(data.numel(), torch.uint8)
            arrived.copy_(data, non_blocking=True)
            event = self._recorded()
        if event is not None:
            event.synchronize()
        return arrived

    @property
    def shared(self) -> tuple[PinnedMemory, PinnedMemory] | None:
        """Memory for what is sent and what is received that another process can have as well."""
        pinned = self._pinned
        if pinned is None or min(pinned.outgoing.descriptor, pinned.incoming.descriptor) < 0:
            return None
        return pinned.outgoing, pinned.incoming

    def room(self, index: int) -> memoryview | None:
        """For a difference between two versions that is to be received, where memory is set aside for that."""
        pinned = self._pinned
        if pinned is None:
            return None
        codec, numel = self._published[index], self.layout.fragments[index].numel
        return raw_bytes(pinned.incoming.take_at_once(codec.size_bytes(numel), torch.uint8))

    def held(self, index: int) -> Tensor | None:
        return self._held[index]

    def _as_model(self, index: int, values: Tensor) -> Tensor:
        """A version as the model's types can hold it, on its device: progress counted from unrounded values would contain the
        rounding."""
        values = values.to(self.device, non_blocking=True)
        pieces = self.layout.fragments[index].pieces
        types = [self._tensors[piece.tensor].dtype for piece in pieces]
        if all(dtype == torch.float32 for dtype in types):
            return values
        parts = torch.split(values, [piece.numel for piece in pieces])
        return torch.cat([part.to(dtype).float() for part, dtype in zip(parts, types, strict=True)])

    def copy_out(self, find: Callable[[], list[Tensor]], at_last: Callable[[], None]) -> list[Tensor]:
        """Copies of tensors that only the optimizer writes, on the host, taken between steps. `find` is called with the gate
        held, and so is `at_last`, when the last of them is taken. On a CPU all are of one moment. On a GPU, where training goes
        on meanwhile, they are as many steps apart as it takes to get them through the memory that is set aside for it."""
        if self._pinned is None:
            with self.held_between_steps():
                copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in find()]
                at_last()
            return copies
        pinned = self._pinned
        tensors: list[Tensor] | None = None
        whole: list[Tensor] = []
        at = start = 0  # which tensor is next, and which of its bytes

        def pass_some() -> None:
            nonlocal tensors, whole, at, start
            free = pinned.passing.take(PASSING_BYTES, torch.uint8)
            passing: list[tuple[Tensor, Tensor]] = []
            with self.held_between_steps(), self._on_side():
                if tensors is None:
                    tensors = find()
                    whole = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
                if self._written is not None:
                    self._stream.wait_event(self._written)
                while at < len(tensors) and free.numel():
                    source = _as_bytes(tensors[at].detach().contiguous())[start:][: free.numel()]
                    target = _as_bytes(whole[at])[start:][: free.numel()]
                    here, free = free[: source.numel()], free[source.numel() :]
                    here.copy_(source, non_blocking=True)
                    passing.append((target, here))
                    start += source.numel()
                    if start == _as_bytes(whole[at]).numel():
                        at, start = at + 1, 0
                event = self._recorded()
                if event is not None:
                    self._being_read.append(event)
                if at == len(tensors):
                    at_last()
            if event is not None:
                event.synchronize()
            for target, here in passing:
                target.copy_(here)

        while tensors is None or at < len(tensors):
            with self._passing:  # others may want something in between
                pass_some()
        return whole

    def decode(self, codec: Codec, received: Tensor, numel: int, had: Tensor | None) -> Tensor:
        """A version from what was received: all of its values, or how it differs from the version `had`, perhaps in several
        steps. Differences beside a GPU are added up there."""
        if had is None:
            return codec.decode(received, numel)
        differences = torch.split(received, codec.size_bytes(numel))
        pinned = self._pinned
        if not self._cuda or pinned is None:
            values = torch.add(had, codec.decode(differences[0], numel), out=empty_like(had))
            for difference in differences[1:]:
                values.add_(codec.decode(difference, numel))
            return values
        with torch.cuda.stream(self._copies):
            values = had.to(self.device, non_blocking=True)
            for difference in differences:
                if pinned.incoming.offset_of(raw_bytes(difference)) is None:
                    difference = pinned.incoming.take(difference.numel(), torch.uint8).copy_(difference)
                values.add_(codec.decode(difference.to(self.device, non_blocking=True), numel))
            return values

    def prepare(self, index: int, values: Tensor, since_step: int, floor: int = 0) -> Prepared:
        """Make a version ready for adoption, off the training thread."""
        pinned, change, event = self._pinned, values, None
        if pinned is not None:
            values = pinned.versions.take(values.numel(), torch.float32)
            if change.is_cuda:
                with torch.cuda.stream(self._copies):
                    values.copy_(change, non_blocking=True)
                    event = _recorded(self._copies)
                event.synchronize()
            else:
                change, event = self._to_device(values.copy_(change))
        if self._sync.adopt != "carry":
            return Prepared(values, change, event, None, floor)
        since, is_version = self._since(index, since_step)
        return Prepared(values, *self._difference(index, values, since, is_version), since, floor)


def _most_bytes(codecs: Sequence[Codec], layout: Layout) -> int:
    """Of any fragment, encoded."""
    return max(codec.size_bytes(fragment.numel) for codec, fragment in zip(codecs, layout.fragments, strict=True))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _recorded(stream: Any) -> Any:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
