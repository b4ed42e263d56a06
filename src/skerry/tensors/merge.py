"""The numerics of one merge: contributions in, the next version of a fragment out. All in fp32, on flat vectors.

Vectors are worked through in blocks that stay in the processor's cache, so each contribution is read from memory once for its
norms and once for its share of the mean. It may come in any type that holds its values; no copy of a whole one is made.

A contribution is progress: the version the learner had adopted minus what it has now. With every learner on the current
version that is the paper's Θ − θ; a learner one version behind then adds what it learned instead of pulling the global
model back to the version it started from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skerry.tensors.codecs.codec import Codec
from skerry.tensors.fragments import Fragment, Layout
from skerry.tensors.memory import empty_like


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
    difference = torch.sub(after.values, before.public, out=empty_like(after.values))
    data = codec.encode(difference)
    # The difference is not needed any more, and its memory is.
    shown = difference.copy_(codec.decode(data, after.values.numel())).add_(before.public)
    return FragmentState(after.values, after.momentum, shown), data


BLOCK = 1 << 19
"""Elements at a time: few enough for the processor's caches, and many, because threads contend for the interpreter between
any two operations."""
ROW = 1 << 14
"""Elements that are summed up at a time. torch does that in one thread, so a sum does not depend on how many there are."""


def _blocks(vector: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Each with room for as many elements, the same for all of them: torch's own allocations, made and freed for block after
    block, would leave holes. A vector on a GPU is one block: there a pass costs less than to start many small ones."""
    numel = vector.numel()
    size = BLOCK if vector.device.type == "cpu" else max(numel, 1)
    room = empty_like(vector[:size])
    for start in range(0, numel, size):
        here = slice(start, min(start + size, numel))
        yield here, room[: here.stop - start]


def norms_of(fragment: Fragment, delta: Tensor) -> list[float]:
    """Of each tensor's part of a contribution."""
    return [norm(part) for part in torch.split(delta, [piece.numel for piece in fragment.pieces])]


def norm(vector: Tensor) -> float:
    """The Euclidean norm to five digits or more; not finite if an element is not."""
    return math.sqrt(sum(_square_norm(_in_fp32(vector[here], room)) for here, room in _blocks(vector)))


def _in_fp32(block: Tensor, room: Tensor) -> Tensor:
    return block if block.dtype == torch.float32 else room.copy_(block)


_SMALL, _LARGE = 1e-15, 1e15
"""Outside of these the squares of some elements may be too small or too large for fp32."""


def _square_norm(block: Tensor) -> float:
    whole_rows = block.numel() // ROW * ROW
    found = 0.0
    for rows in (block[:whole_rows].view(-1, ROW), block[whole_rows:].view(1, -1)):
        if rows.numel():
            lengths = torch.linalg.vector_norm(rows, dim=1).tolist()
            inexact = [number for number, length in enumerate(lengths) if not _SMALL < length < _LARGE]
            if inexact:
                exact = torch.linalg.vector_norm(rows[inexact], dim=1, dtype=torch.float64).tolist()
                for number, length in zip(inexact, exact, strict=True):
                    lengths[number] = length
            found += sum(length * length for length in lengths)
    return found


def mean(deltas: Sequence[Tensor], weights: Sequence[float], out: Tensor | None = None) -> Tensor:
    """Weighted mean. The order of summation is the order given, so equal inputs give equal bits."""
    result = empty_like(deltas[0]) if out is None else out
    total = sum(weights)
    for here, room in _blocks(result):
        _sum([delta[here] for delta in deltas], [share / total for share in weights], room, result[here])
    return result


def _sum(blocks: Sequence[Tensor], shares: Sequence[float], room: Tensor, result: Tensor) -> None:
    result.copy_(blocks[0]).mul_(shares[0])
    for block, share in zip(blocks[1:], shares[1:], strict=True):
        result.add_(_in_fp32(block, room), alpha=share)


NOTHING = 1e-30
"""Progress shorter than this has no direction that fp32 could express."""
CANCELLED = 1e-4
"""Directions whose mean is shorter than this cancel out. What is left is rounding, and has no direction to keep."""


def radial_mean(
    deltas: Sequence[Tensor], weights: Sequence[float], norms: Sequence[float] | None = None, out: Tensor | None = None
) -> Tensor:
    """Radial-directional averaging: the mean length times the mean direction.

    Progress vectors of different learners are nearly orthogonal, so their plain mean shrinks as 1/√M; this keeps the length.
    """
    result = empty_like(deltas[0]) if out is None else out
    if len(deltas) == 1:
        return result.copy_(deltas[0])
    total = sum(weights)
    norms = [norm(delta) for delta in deltas] if norms is None else norms
    pointing = [number for number, length in enumerate(norms) if length > NOTHING]
    vectors, shares = [deltas[n] for n in pointing], [weights[n] / total / norms[n] for n in pointing]
    square_length = 0.0
    for here, room in _blocks(result) if pointing else ():
        _sum([vector[here] for vector in vectors], shares, room, result[here])
        square_length += _square_norm(result[here])
    length = math.sqrt(square_length)
    if length < CANCELLED:
        return mean(deltas, weights, result)
    radius = sum(share * of for share, of in zip(weights, norms, strict=True)) / total
    return result.mul_(radius / length)


def nesterov(state: FragmentState, gradient: Tensor, lr: float, momentum: float) -> FragmentState:
    """One step of SGD with Nesterov momentum; equal to torch.optim.SGD(nesterov=True) when momentum > 0. The gradient is used
    up: its memory holds the new momentum."""
    after = FragmentState(empty_like(state.values), gradient)
    for here, room in _blocks(gradient):
        # The same operations in the same order as torch's, so that the result is the same to the bit.
        step = room.copy_(gradient[here])
        buffer = torch.mul(state.momentum[here], momentum, out=after.momentum[here]).add_(step)
        torch.add(state.values[here], step.add_(buffer, alpha=momentum), alpha=-lr, out=after.values[here])
    return after


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
    norms: Sequence[Sequence[float]] | None = None,
    fresh: Sequence[bool] | None = None,
) -> FragmentState:
    """The next version of a fragment. `presence` scales the progress when live learners are missing from the merge. `norms` are
    those of each contribution, as `norms_of` gives them, if somebody has worked them out. `fresh` says which contributions are
    progress since `state`, and not since a version before it; all are if it is not given.

    Running statistics become the mean of the members' own values, which only a fresh contribution tells: to add what moved
    since an older version could make a variance negative. Without a fresh one they stay as they are."""
    progress = empty_like(state.values)
    statistics = torch.zeros(fragment.numel, dtype=torch.bool) if _has_statistics(layout, fragment) else None
    at = 0
    for number, piece in enumerate(fragment.pieces):
        here = slice(at, at + piece.numel)
        at += piece.numel
        rule = layout.tensors[piece.tensor].rule
        parts = [delta[here] for delta in deltas]
        if rule == "average" and statistics is not None:
            statistics[here] = True
            known = [n for n in range(len(deltas)) if fresh is None or fresh[n]]
            if known:
                mean([parts[n] for n in known], [weights[n] for n in known], progress[here])
            else:
                progress[here] = 0.0
        elif radial and rule == "radial":
            radial_mean(parts, weights, [of[number] for of in norms] if norms is not None else None, progress[here])
        else:
            mean(parts, weights, progress[here])
    averages = (state.values - progress)[statistics] if statistics is not None else None
    if presence != 1.0:
        progress.mul_(presence)
    merged = nesterov(state, progress, lr, momentum)
    if averages is not None:
        merged.values[statistics] = averages
        merged.momentum[statistics] = 0.0
    return merged


def _has_statistics(layout: Layout, fragment: Fragment) -> bool:
    return any(layout.tensors[piece.tensor].rule == "average" for piece in fragment.pieces)
