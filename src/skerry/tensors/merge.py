"""The arithmetic of a merge: contributions in, the next version of a fragment out. In fp32, on flat vectors.

Vectors are processed in blocks that fit into the CPU cache, so each contribution is read from memory once for its norms and
once for the mean. A contribution may have any type whose values fp32 can hold, and is never copied as a whole.

A contribution is progress: the version the learner adopted minus its current values. If every learner is on the current
version, that is the paper's Θ − θ. A learner one version behind adds what it learned, and does not pull the global model back
to its older base.
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
    """The syncer's state of one fragment."""

    values: Tensor
    momentum: Tensor
    shown: Tensor | None = None
    """The values that learners have, if the publishing codec is lossy (see `publish`)."""

    @staticmethod
    def fresh(values: Tensor) -> FragmentState:
        return FragmentState(values, torch.zeros_like(values))

    @property
    def public(self) -> Tensor:
        """The values that learners have."""
        return self.values if self.shown is None else self.shown


def publish(before: FragmentState, after: FragmentState, codec: Codec) -> tuple[FragmentState, Tensor]:
    """Encode the next version for learners. Returns its state and the bytes to send to learners with the previous version.

    An exact codec sends values. A lossy codec sends the difference to the values learners have, so that the next version
    corrects the error of this one.
    """
    if codec.exact:
        return FragmentState(after.values, after.momentum), codec.encode(after.values)
    difference = torch.sub(after.values, before.public, out=empty_like(after.values))
    data = codec.encode(difference)
    # Reuses the memory of `difference`.
    shown = difference.copy_(codec.decode(data, after.values.numel())).add_(before.public)
    return FragmentState(after.values, after.momentum, shown), data


BLOCK = 1 << 19
"""Elements per block: few enough for the CPU cache, but many, because threads contend for the GIL between operations."""
ROW = 1 << 14
"""Elements per partial sum. torch computes it in one thread, so the result does not depend on the number of threads."""


def _blocks(vector: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the vector, each with an fp32 scratch buffer of the same length.

    All slices share one buffer, because allocating one per block would fragment the heap. On a GPU the whole vector is one
    block, because launching many small kernels costs more.
    """
    numel = vector.numel()
    size = BLOCK if vector.device.type == "cpu" else max(numel, 1)
    room = empty_like(vector[:size])
    for start in range(0, numel, size):
        here = slice(start, min(start + size, numel))
        yield here, room[: here.stop - start]


def norms_of(fragment: Fragment, delta: Tensor) -> list[float]:
    """The norm of each piece of a contribution."""
    return [norm(part) for part in torch.split(delta, [piece.numel for piece in fragment.pieces])]


def norm(vector: Tensor) -> float:
    """The Euclidean norm to at least five digits; not finite if any element is not."""
    return math.sqrt(sum(_square_norm(_in_fp32(vector[here], room)) for here, room in _blocks(vector)))


def _in_fp32(block: Tensor, room: Tensor) -> Tensor:
    return block if block.dtype == torch.float32 else room.copy_(block)


_SMALL, _LARGE = 1e-15, 1e15
"""Outside this range the squares of some elements may underflow or overflow in fp32."""


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
    """Weighted mean. Sums in the given order, so that equal inputs give equal bits."""
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
"""Shorter progress has no direction that fp32 can represent."""
CANCELLED = 1e-4
"""If the mean direction is shorter than this, the directions cancel out and only rounding error is left."""


def radial_mean(
    deltas: Sequence[Tensor], weights: Sequence[float], norms: Sequence[float] | None = None, out: Tensor | None = None
) -> Tensor:
    """Radial-directional averaging: the mean length times the normalized mean direction.

    Progress vectors of different learners are nearly orthogonal, so their plain mean shrinks with 1/√M. This keeps the length.
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
    """One step of SGD with Nesterov momentum; equal to torch.optim.SGD(nesterov=True) when momentum > 0. Overwrites the
    gradient with the new momentum."""
    after = FragmentState(empty_like(state.values), gradient)
    for here, room in _blocks(gradient):
        # The same operations in the same order as torch.optim.SGD, so that the result is bit for bit identical.
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
    """Compute the next version of a fragment.

    `presence` scales the progress when asked learners are missing. `norms` are the contributions' norms from `norms_of`, if
    already computed. `fresh` marks contributions that count from `state` and not from an older version; by default all do.

    Running statistics become the mean of the learners' own values. Only fresh contributions reveal those: applying the change
    since an older version could make a variance negative. Without a fresh contribution the statistics stay unchanged.
    """
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
