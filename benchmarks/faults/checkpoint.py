"""Checkpoints of plain data-parallel training: weights, optimizer state and step in one file, written atomically."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from skerry.train.job import Job


def state_of(job: Job) -> dict[str, Tensor]:
    """All tensors needed to resume training, by name. These are not copies: the next step changes them."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in job.model.named_parameters()}
    for number, optimizer in enumerate(job.optimizers):
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{number}.{index}.{key}"] = value
    return tensors


def save(path: Path, tensors: dict[str, Tensor], step: int) -> None:
    partial = path.with_suffix(".new")
    save_file(tensors, partial, metadata={"step": str(step)})
    partial.rename(path)


def restore(path: Path, job: Job) -> int:
    """Load the last checkpoint into the job. Returns its step, or 0 if there is none."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as saved:
        for name, parameter in job.model.named_parameters():
            parameter.detach().copy_(saved.get_tensor(f"model.{name}"))
        for number, optimizer in enumerate(job.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for key in saved.keys():  # noqa: SIM118 (not a dict)
                kind, *where = key.split(".")
                if kind == "optimizer" and int(where[0]) == number:
                    optimizer.state[parameters[int(where[1])]][where[2]] = saved.get_tensor(key)
        return int(saved.metadata()["step"])


def weights_in(path: Path) -> tuple[dict[str, Tensor], int]:
    """The weights of a checkpoint by name, and its step."""
    with safe_open(path, framework="pt") as saved:
        names = [key for key in saved.keys() if key.startswith("model.")]  # noqa: SIM118 (not a dict)
        return {name.removeprefix("model."): saved.get_tensor(name) for name in names}, int(saved.metadata()["step"])
