"""The tensors of a model that take part in the exchange, with their names and merge rules, in the model's own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from skerry.errors import ConfigError
from skerry.tensors.fragments import Rule, TensorSpec


class TensorSlot(NamedTuple):
    """An entry in a module's table of parameters or buffers."""

    table: Mapping[str, Tensor | None]
    key: str

    @property
    def tensor(self) -> Tensor | None:
        return self.table.get(self.key)


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """A tensor's name without the prefixes that torch.compile and activation checkpointing add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_tensors(model: nn.Module) -> list[tuple[TensorSpec, Tensor]]:
    """Every parameter once (tied ones under their first name), then every persistent buffer."""
    model = _unwrapped(model)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    found: list[tuple[TensorSpec, Tensor]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.is_floating_point():
            raise ConfigError(f"trainable parameters must be real floating-point tensors, {name!r} is {parameter.dtype}")
        rule: Rule = "radial"
        if not parameter.requires_grad:
            rule = "fixed"
        elif id(parameter) in embeddings:
            rule = "mean"
        found.append((_spec(name, parameter, rule), parameter))
    kept = {plain_name(key) for key in model.state_dict(keep_vars=True)}
    for name, buffer in model.named_buffers():
        if plain_name(name) in kept:
            found.append((_spec(name, buffer, "average" if buffer.is_floating_point() else "fixed"), buffer))
    return found


def slots_of(model: nn.Module, tensors: Sequence[Tensor]) -> list[TensorSlot]:
    """The slot of each tensor in the model. A slot survives the replacement of its tensor."""
    found: dict[int, TensorSlot] = {}
    for module in _unwrapped(model).modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                found.setdefault(id(tensor), TensorSlot(table, key))
    return [found[id(tensor)] for tensor in tensors]


def _spec(name: str, tensor: Tensor, rule: Rule) -> TensorSpec:
    return TensorSpec(plain_name(name), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), rule)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile wrappers, in any order."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner, nn.Module):
            model = inner
        else:
            return model
