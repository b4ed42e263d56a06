"""An optimizer's state as named tensors, to save to disk or to send to an island that lost its own. No pickle.

The state is cut into parts of bounded size, identically on every island with the same optimizers. A GPU's state is copied piece
by piece while training goes on, so tensors may be a few steps apart, which optimizers tolerate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor
from torch.optim import Optimizer

from skerry.durable import DISK
from skerry.errors import WireError
from skerry.learner.replica import Replica
from skerry.tensors.tensor_file import NoSuchType, as_parts, in_one
from skerry.wire.framing import STATE_PART_BYTES

SET_BY_LOOP = ("lr", "initial_lr")
"""Entries of a parameter group that the loop or its schedule sets. They are never restored."""


class CannotKeep(Exception):
    """The optimizer has no state yet, or its state is neither tensors nor numbers."""


@dataclass(frozen=True)
class _StateOf:
    """A parameter, the optimizer and group that hold its state, and the state's name."""

    optimizer: Optimizer
    group: dict[str, Any]
    parameter: Tensor
    name: str


@dataclass(frozen=True)
class _Group:
    """A parameter group and its initial numbers. Some optimizers keep running numbers in it."""

    name: str
    entries: dict[str, Any]
    initial: dict[str, Any]

    def changed(self) -> dict[str, Any]:
        now = _plain_numbers(self.entries)
        return {f"{self.name}/{key}": value for key, value in now.items() if self.initial.get(key) != value}


@dataclass(frozen=True)
class Kept:
    """An optimizer state read from disk."""

    step: int
    """Step of the run at which it was saved."""
    parts: list[bytes]
    origin: list[tuple[str, int]] = field(default_factory=list)
    """The session it belonged to, and how many steps that session had taken."""
    journal: str = ""
    """The journal which that session had not handed over."""


class OptimizerState:
    """The state of a learner's optimizers, packed into parts and restored from them."""

    def __init__(self, optimizers: Sequence[Optimizer], replica: Replica, steps: Callable[[], int] = lambda: 0) -> None:
        self._replica = replica
        self._steps = steps
        """Returns the learner's step count. Called while the gate is held."""
        self._groups = [
            _Group(f"{number}/group-{index}", group, _plain_numbers(group))
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
        ]
        """Numbers of parameter groups are packed with the first part."""
        self._parts: list[list[_StateOf]] = [[]]
        size = 0
        for number, optimizer in enumerate(optimizers):
            parameters = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
            for index, (group, parameter) in enumerate(parameters):
                if size >= STATE_PART_BYTES:
                    self._parts.append([])
                    size = 0
                self._parts[-1].append(_StateOf(optimizer, group, parameter, f"{number}/{index}"))
                size += 8 * parameter.numel()

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self._parts)

    def pack(self, part: int) -> tuple[memoryview, int]:
        """One part as safetensors, and the learner's step count at that time. Must not be called on the training thread."""
        packed, steps = self._packed(self._parts[part], {})
        return in_one(packed), steps

    def pack_all(self) -> memoryview:
        """All parts in one safetensors buffer."""
        return in_one(self._packed(list(self._all()), {})[0])

    def _packed(
        self, states: Sequence[_StateOf], metadata: dict[str, str], journal: Callable[[], str] = str
    ) -> tuple[list[bytes | memoryview], int]:
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        steps = 0

        def find() -> list[Tensor]:
            for of in states:
                state = of.optimizer.state.get(of.parameter, {})
                tensors.update({f"{of.name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)})
                numbers.update(_numbers(of, state))
            if (tensors or numbers) and states[0] is self._parts[0][0]:
                for group in self._groups:
                    numbers.update(group.changed())
            return list(tensors.values())

        def at_last() -> None:
            nonlocal steps
            steps = self._steps()
            metadata["journal"] = journal()

        copies = self._replica.model_device.copy_out(find, at_last, self._replica.held_between_steps)
        if not tensors and not numbers:
            raise CannotKeep("the optimizer has no state yet")
        metadata.update(numbers=json.dumps(numbers), steps=str(steps))
        try:
            return as_parts(dict(zip(tensors, copies, strict=True)), metadata), steps
        except NoSuchType as error:
            raise CannotKeep(f"safetensors cannot hold it: {error}") from None

    def restore(self, packed: Sequence[bytes | memoryview]) -> None:
        """Load a packed state into the optimizers, before training.

        Raises WireError if anything does not fit, and then leaves the optimizers unchanged.
        """
        entries: dict[str, Any] = {}
        for data in map(bytes, packed):
            try:
                entries.update(load(data))
                entries.update(json.loads(_metadata(data).get("numbers", "{}")))
            except (SafetensorError, ValueError) as error:
                raise WireError(f"not an optimizer state: {error}") from None
        groups = [(group, _take(entries, group.name)) for group in self._groups]
        for group, changed in groups:
            if not changed.keys() <= _plain_numbers(group.entries).keys() or len(_plain_numbers(changed)) < len(changed):
                raise WireError(f"optimizer state of another optimizer: {group.name} has {', '.join(map(str, changed))}")
        states: list[tuple[_StateOf, dict[str, Any]]] = []
        for of in self._all():
            state = _take(entries, of.name)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    _check(f"{of.name}/{key}", value, of.parameter)
            if state:
                states.append((of, {key: _placed(key, value, of) for key, value in state.items()}))
        if entries or not states:
            raise WireError(f"optimizer state of another optimizer: {', '.join(list(entries)[:3]) or 'it is empty'}")
        for of, state in states:
            of.optimizer.state[of.parameter] = state
        for group, changed in groups:
            group.entries.update(changed)

    # ------------------------------------------------------------ on disk

    def save_to(self, path: Path, run_id: str, step: int, session: str = "", journal: Callable[[], str] = str) -> None:
        """Replace the file atomically with the whole state. Raises CannotKeep or OSError."""
        metadata = {"run_id": run_id, "step": str(step), "session": session}
        parts, _ = self._packed(list(self._all()), metadata, journal)
        path.parent.mkdir(parents=True, exist_ok=True)
        DISK.write_durably(path, *parts)

    def _all(self) -> Iterator[_StateOf]:
        return (of for part in self._parts for of in part)

    @staticmethod
    def read(path: Path, run_id: str) -> Kept | None:
        """Read the newest saved state of this run; None if there is none. Restoring a run from a snapshot puts the state into a
        folder beside the file."""
        own, restored = _read_file(path, run_id), _read_parts(path.with_suffix(""))
        readable = [kept for kept in (own, restored) if kept is not None]
        return max(readable, key=lambda kept: kept.step) if readable else None


def _read_parts(folder: Path) -> Kept | None:
    try:
        step = int((folder / "step").read_text())
        return Kept(step, [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))])
    except (OSError, ValueError):
        return None


def _read_file(path: Path, run_id: str) -> Kept | None:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("run_id") != run_id:
            return None
        origin = [(metadata.get("session", ""), int(metadata.get("steps", "0")))]
        return Kept(int(metadata["step"]), [path.read_bytes()], origin, metadata.get("journal", ""))
    except (OSError, SafetensorError, ValueError, KeyError):
        return None


def _plain_numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, (int, float)) and key not in SET_BY_LOOP}


def _take(entries: dict[str, Any], name: str) -> dict[str, Any]:
    """Remove and return the entries below this name."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): entries.pop(key) for key in list(entries) if key.startswith(prefix)}


def _numbers(of: _StateOf, state: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor) and value is not None}
    for key, value in numbers.items():
        if not isinstance(value, (int, float, bool)):
            raise CannotKeep(f"{type(of.optimizer).__name__} keeps {key!r} as {type(value).__name__}")
    return {f"{of.name}/{key}": value for key, value in numbers.items()}


def _metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata: dict[str, str] = header.get("__metadata__", {})
    return metadata


def _check(name: str, value: Tensor, parameter: Tensor) -> None:
    if value.numel() > max(1, parameter.numel()):
        raise WireError(f"optimizer state {name} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise WireError(f"optimizer state {name} is not finite")


def _placed(key: str, value: Any, of: _StateOf) -> Any:
    """Move a value to the device where torch's optimizers expect it. Step counters stay on the host unless a kernel reads
    them."""
    if not isinstance(value, Tensor):
        return value
    on_device = of.group.get("capturable") or of.group.get("fused")
    if key == "step" and not on_device:
        return value
    if value.shape != of.parameter.shape:
        return value.to(of.parameter.device)
    # foreach kernels rely on the parameter's own memory format.
    return torch.empty_like(of.parameter, dtype=value.dtype, requires_grad=False).copy_(value)
