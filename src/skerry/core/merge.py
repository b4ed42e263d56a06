"""The numerics of one merge: contributions in, the next version of a fragment out. All in fp32, on flat vectors.

A contribution is progress: the version the learner had adopted minus what it has now. With every learner on the current
version that is the paper's Θ − θ; a learner one version behind then adds what it learned instead of pulling the global
model back to the version it started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skerry.core.codec import Codec
from skerry.core.fragment import Fragment, Layout


@dataclass
class FragmentState:
    """What the syncer holds of one fragment."""

    values: Tensor
    momentum: Tensor
    shown: Tensor | None = None
    """The values as learners have them, if what is published is not exact: see `publish`."""

    @staticmethod
    def fresh(values: Tensor) -> FragmentState:
        return FragmentState(values, torch.zeros_like(values))

    @property
    def public(self) -> Tensor:
        return self.values if self.shown is None else self.shown


def publish(before: FragmentState, after: FragmentState, codec: Codec) -> tuple[FragmentState, Tensor]:
    """The next version as learners get it, and the bytes that take those who hold the one before there.

    An exact codec sends values. Any other sends the difference to what learners have, and so what one version could not
    express comes with the next.
    """
    if codec.exact:
        return FragmentState(after.values, after.momentum), codec.encode(after.values)
    data = codec.encode(after.values - before.public)
    shown = before.public + codec.decode(data, after.values.numel())
    return FragmentState(after.values, after.momentum, shown), data


def weight(tokens: int, steps: int) -> float:
    """A learner's weight: tokens × tokens per step, so that more data and larger batches count for more."""
    return tokens * tokens / steps if steps > 0 else 0.0


def mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted mean. The order of summation is the order given, so equal inputs give equal bits."""
    total = sum(weights)
    result = deltas[0] * (weights[0] / total)
    for delta, share in zip(deltas[1:], weights[1:], strict=True):
        result.add_(delta, alpha=share / total)
    return result


NOTHING = 1e-30
"""Progress shorter than this has no direction that fp32 could express."""
CANCELLED = 1e-4
"""Directions whose mean is shorter than this cancel out. What is left is rounding, and has no direction to keep."""


def radial_mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Radial-directional averaging: the mean length times the mean direction.

    Progress vectors of different learners are nearly orthogonal, so their plain mean shrinks as 1/√M; this keeps the length.
    """
    if len(deltas) == 1:
        return deltas[0].clone()
    total = sum(weights)
    norms = [_norm(delta) for delta in deltas]
    direction = torch.zeros_like(deltas[0])
    for delta, share, norm in zip(deltas, weights, norms, strict=True):
        if norm > NOTHING:
            direction.add_(delta, alpha=share / total / norm)
    length = _norm(direction)
    if length < CANCELLED:
        return mean(deltas, weights)
    radius = sum(share * norm for share, norm in zip(weights, norms, strict=True)) / total
    return direction.mul_(radius / length)


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


def nesterov(state: FragmentState, gradient: Tensor, lr: float, momentum: float) -> FragmentState:
    """One step of SGD with Nesterov momentum; equal to torch.optim.SGD(nesterov=True) when momentum > 0."""
    # The same operations in the same order as torch's, so that the result is the same to the bit.
    buffer = state.momentum.mul(momentum).add_(gradient)
    values = state.values.add(gradient.add(buffer, alpha=momentum), alpha=-lr)
    return FragmentState(values, buffer)


def merge(
    layout: Layout,
    fragment: Fragment,
    state: FragmentState,
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    *,
    radial: bool,
    lr: float,
    momentum: float,
    presence: float = 1.0,
) -> FragmentState:
    """The next version of a fragment. `presence` scales the progress when live learners are missing from the merge."""
    progress = torch.empty_like(state.values)
    statistics = torch.zeros(fragment.numel, dtype=torch.bool) if _has_statistics(layout, fragment) else None
    at = 0
    for piece in fragment.pieces:
        here = slice(at, at + piece.numel)
        at += piece.numel
        rule = layout.tensors[piece.tensor].rule
        average = radial_mean if radial and rule == "radial" else mean
        progress[here] = average([delta[here] for delta in deltas], weights)
        if rule == "average" and statistics is not None:
            statistics[here] = True
    if presence != 1.0:
        progress.mul_(presence)
    merged = nesterov(state, progress, lr, momentum)
    if statistics is not None:
        merged.values[statistics] = (state.values - progress)[statistics]
        merged.momentum[statistics] = 0.0
    return merged


def _has_statistics(layout: Layout, fragment: Fragment) -> bool:
    return any(layout.tensors[piece.tensor].rule == "average" for piece in fragment.pieces)
