"""An optimizer's state as named tensors: to keep on disk, or to hand to an island that has lost its own. No pickle.

The state is cut into parts of bounded size, the same on every island that has the same optimizers. On a GPU it is copied bit by
bit while training goes on, so two moments may be some steps apart; they do not mind.
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

OF_THE_LOOP = ("lr", "initial_lr")
"""Entries of a parameter group that the loop or its schedule sets."""


class CannotKeep(Exception):
    """There is no state yet, or it holds something that is neither a tensor nor a number."""


@dataclass(frozen=True)
class _Place:
    """A parameter and where its state is found."""

    optimizer: Optimizer
    group: dict[str, Any]
    parameter: Tensor
    name: str


@dataclass(frozen=True)
class _Group:
    """A parameter group, some optimizers' place for running numbers, and the numbers that it had at first."""

    name: str
    entries: dict[str, Any]
    at_first: dict[str, Any]

    def moved(self) -> dict[str, Any]:
        now = _plain_numbers(self.entries)
        return {f"{self.name}/{key}": value for key, value in now.items() if self.at_first.get(key) != value}


@dataclass(frozen=True)
class Kept:
    """A state that was kept: at which step of the run, its parts, of which process after how many of its steps, and what that
    process had not handed over of its journal."""

    step: int
    parts: list[bytes]
    origin: list[tuple[str, int]] = field(default_factory=list)
    journal: str = ""


class OptimizerState:
    def __init__(self, optimizers: Sequence[Optimizer], replica: Replica, steps: Callable[[], int] = lambda: 0) -> None:
        self._replica = replica
        self._steps = steps
        """The learner's own count of steps, while the gate is held."""
        self._groups = [
            _Group(f"{number}/group-{index}", group, _plain_numbers(group))
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
        ]
        """They go with the first part."""
        self._parts: list[list[_Place]] = [[]]
        size = 0
        for number, optimizer in enumerate(optimizers):
            parameters = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
            for index, (group, parameter) in enumerate(parameters):
                if size >= STATE_PART_BYTES:
                    self._parts.append([])
                    size = 0
                self._parts[-1].append(_Place(optimizer, group, parameter, f"{number}/{index}"))
                size += 8 * parameter.numel()

    @property
    def parts(self) -> int:
        return len(self._parts)

    def pack(self, part: int) -> tuple[memoryview, int]:
        """One part, as safetensors, and after how many steps it was. Called from another thread than the one that trains."""
        packed, steps = self._packed(self._parts[part], {})
        return in_one(packed), steps

    def pack_all(self) -> memoryview:
        """Every part in one."""
        return in_one(self._packed(list(self._places()), {})[0])

    def _packed(
        self, places: Sequence[_Place], metadata: dict[str, str], journal: Callable[[], str] = str
    ) -> tuple[list[bytes | memoryview], int]:
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        steps = 0

        def find() -> list[Tensor]:
            for place in places:
                state = place.optimizer.state.get(place.parameter, {})
                tensors.update({f"{place.name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)})
                numbers.update(_numbers(place, state))
            if (tensors or numbers) and places[0] is self._parts[0][0]:
                for group in self._groups:
                    numbers.update(group.moved())
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
            raise CannotKeep(f"it cannot be written: {error}") from None

    def restore(self, packed: Sequence[bytes | memoryview]) -> None:
        """Before training. All parts or none: raises WireError, and leaves the optimizer as it is, if anything does not fit."""
        found: dict[str, Any] = {}
        for data in map(bytes, packed):
            try:
                found.update(load(data))
                found.update(json.loads(_metadata(data).get("numbers", "{}")))
            except (SafetensorError, ValueError) as error:
                raise WireError(f"this is no optimizer state: {error}") from None
        groups = [(group, _taken(found, group.name)) for group in self._groups]
        for group, moved in groups:
            if not moved.keys() <= _plain_numbers(group.entries).keys() or len(_plain_numbers(moved)) < len(moved):
                raise WireError(f"optimizer state of another optimizer: {group.name} has {', '.join(map(str, moved))}")
        states: list[tuple[_Place, dict[str, Any]]] = []
        for place in self._places():
            prefix, state = f"{place.name}/", _taken(found, place.name)
            for key, value in state.items():
                if isinstance(value, Tensor):
                    _check(f"{prefix}{key}", value, place.parameter)
            if state:
                states.append((place, {key: _placed(key, value, place) for key, value in state.items()}))
        if found or not states:
            raise WireError(f"optimizer state of another optimizer: {', '.join(list(found)[:3]) or 'it is empty'}")
        for place, state in states:
            place.optimizer.state[place.parameter] = state
        for group, moved in groups:
            group.entries.update(moved)

    # ------------------------------------------------------------ on disk

    def save_to(self, path: Path, run_id: str, step: int, session: str = "", journal: Callable[[], str] = str) -> None:
        """Every part into one file, which is there whole or as it was before."""
        metadata = {"run_id": run_id, "step": str(step), "session": session}
        parts, _ = self._packed(list(self._places()), metadata, journal)
        path.parent.mkdir(parents=True, exist_ok=True)
        DISK.write_durably(path, *parts)

    def _places(self) -> Iterator[_Place]:
        return (place for part in self._parts for place in part)

    @staticmethod
    def read(path: Path, run_id: str) -> Kept | None:
        """None if there is none of this run. A run restored from a snapshot has it in a folder beside the file."""
        own, restored = _read_file(path, run_id), _read_parts(path.with_suffix(""))
        found = [kept for kept in (own, restored) if kept is not None]
        return max(found, key=lambda kept: kept.step) if found else None


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
    return {key: value for key, value in group.items() if isinstance(value, (int, float)) and key not in OF_THE_LOOP}


def _taken(found: dict[str, Any], name: str) -> dict[str, Any]:
    """What is found under this name is taken out."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): found.pop(key) for key in list(found) if key.startswith(prefix)}


def _numbers(place: _Place, state: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in state.items() if not isinstance(value, Tensor) and value is not None}
    for key, value in found.items():
        if not isinstance(value, (int, float, bool)):
            raise CannotKeep(f"{type(place.optimizer).__name__} keeps {key!r} as {type(value).__name__}")
    return {f"{place.name}/{key}": value for key, value in found.items()}


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


def _placed(key: str, value: Any, place: _Place) -> Any:
    """Where torch's own optimizers expect it: counters stay on the host unless a kernel reads them."""
    if not isinstance(value, Tensor):
        return value
    on_device = place.group.get("capturable") or place.group.get("fused")
    if key == "step" and not on_device:
        return value
    if value.shape != place.parameter.shape:
        return value.to(place.parameter.device)
    # In the parameter's own order in memory, which kernels for many tensors at once rely on.
    return torch.empty_like(place.parameter, dtype=value.dtype, requires_grad=False).copy_(value)
