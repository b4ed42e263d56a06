"""The arithmetic of a merge: contributions in, the next version of a fragment out. In fp32, on flat vectors.

Vectors are processed in blocks that fit into the CPU cache, so each contribution is read from memory once for its norms and
once for the mean. A contribution may have any type whose values fp32 can hold, and is never copied as a whole.

A contribution is progress: the version the learner adopted minus its current values. If every learner is on the current
version, that is the paper's Θ − θ. A learner one version behind adds what it learned, and does not pull the global model back
to its older base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from skerry.config import SyncConfig
from skerry.errors import ConfigError
from skerry.registry import Registry
from skerry.tensors.codecs.codec import Codec
from skerry.tensors.fragments import Fragment, Layout
from skerry.tensors.memory import empty_like


@dataclass
class FragmentState:
    """The syncer's state of one fragment."""

    values: Tensor
    state: Mapping[str, Tensor]
    """The outer optimizer's own tensors by name, stored with every version."""
    shown: Tensor | None = None
    """The values that learners have, if the publishing codec is lossy (see `publish`)."""

    @staticmethod
    def fresh(values: Tensor, outer: OuterOptimizer | None = None) -> FragmentState:
        """Before the first outer step."""
        return FragmentState(values, (outer or Nesterov()).fresh(values))

    @property
    def momentum(self) -> Tensor:
        """The state of the `nesterov` optimizer."""
        return self.state["momentum"]

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
        return FragmentState(after.values, after.state), codec.encode(after.values)
    difference = torch.sub(after.values, before.public, out=empty_like(after.values))
    data = codec.encode(difference)
    # Reuses the memory of `difference`.
    shown = difference.copy_(codec.decode(data, after.values.numel())).add_(before.public)
    return FragmentState(after.values, after.state, shown), data


class MergeRule(Protocol):
    """Combines the contributions of several learners to one tensor of the model into one.

    Made once in each process that merges, from the run's settings. Called for every trained tensor but embeddings, on one of
    several merge threads, so it keeps no state. Equal arguments must give equal bits, or `skerry replay` fails.
    """

    def __call__(
        self, deltas: Sequence[Tensor], weights: Sequence[float], norms: Sequence[float] | None, out: Tensor
    ) -> object:
        """Write the combined progress into `out`, flat fp32. `deltas` are flat, in fp32 or bf16, at least one, and not to be
        changed. `norms` are their Euclidean norms, where these are known."""
        ...


class OuterOptimizer(Protocol):
    """Applies merged progress to a fragment.

    Made once in each process that merges, from the run's settings. Called on one of several merge threads, one call at a time
    for one fragment. All that it remembers is in the fragment's state, which is stored with each version. Equal arguments must
    give equal bits, or `skerry replay` fails.
    """

    def fresh(self, values: Tensor) -> dict[str, Tensor]:
        """The state before the first step: flat contiguous fp32 tensors on the host, by name. A tensor as long as `values`
        belongs to its elements: it is set to 0 where these are running statistics, which no optimizer moves."""
        ...

    def step(self, before: FragmentState, progress: Tensor, lr: float, momentum: float) -> FragmentState:
        """The values and the state after this step, in new tensors; `progress` may be used up. `lr` and `momentum` are what
        `sync.outer_lr` and `sync.outer_momentum` come to at this point of the run."""
        ...


MERGE_RULES: Registry[Callable[[SyncConfig], MergeRule]] = Registry("merge rule")
OUTER_OPTIMIZERS: Registry[Callable[[SyncConfig], OuterOptimizer]] = Registry("outer optimizer")


def merge_rule(sync: SyncConfig, run: str = "") -> MergeRule:
    return MERGE_RULES.get(sync.merge, "sync.merge", run)(sync)


def outer_optimizer(sync: SyncConfig, run: str = "") -> OuterOptimizer:
    found = OUTER_OPTIMIZERS.get(sync.outer, "sync.outer", run)(sync)
    if taken := {"values", "shown"} & found.fresh(torch.zeros(1)).keys():
        raise ConfigError(
            f"outer optimizer {sync.outer!r} must not call its state {taken.pop()!r}: version files use that name"
        )
    return found


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


def mean(
    deltas: Sequence[Tensor], weights: Sequence[float], norms: Sequence[float] | None = None, out: Tensor | None = None
) -> Tensor:
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
        return mean(deltas, weights, out=result)
    radius = sum(share * of for share, of in zip(weights, norms, strict=True)) / total
    return result.mul_(radius / length)


def nesterov(state: FragmentState, gradient: Tensor, lr: float, momentum: float) -> FragmentState:
    """One step of SGD with Nesterov momentum; equal to torch.optim.SGD(nesterov=True) when momentum > 0. Overwrites the
    gradient with the new momentum."""
    after = FragmentState(empty_like(state.values), {"momentum": gradient})
    for here, room in _blocks(gradient):
        # The same operations in the same order as torch.optim.SGD, so that the result is bit for bit identical.
        step = room.copy_(gradient[here])
        buffer = torch.mul(state.momentum[here], momentum, out=gradient[here]).add_(step)
        torch.add(state.values[here], step.add_(buffer, alpha=momentum), alpha=-lr, out=after.values[here])
    return after


class Nesterov:
    """The outer optimizer of the paper."""

    def fresh(self, values: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(values)}

    def step(self, before: FragmentState, progress: Tensor, lr: float, momentum: float) -> FragmentState:
        return nesterov(before, progress, lr, momentum)


MERGE_RULES.add("radial", lambda sync: radial_mean)
MERGE_RULES.add("mean", lambda sync: mean)
OUTER_OPTIMIZERS.add("nesterov", lambda sync: Nesterov())


def merge(
    layout: Layout,
    fragment: Fragment,
    state: FragmentState,
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    *,
    lr: float,
    momentum: float,
    rule: MergeRule = radial_mean,
    outer: OuterOptimizer | None = None,
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
        kind = layout.tensors[piece.tensor].rule
        parts = [delta[here] for delta in deltas]
        if kind == "average" and statistics is not None:
            statistics[here] = True
            known = [n for n in range(len(deltas)) if fresh is None or fresh[n]]
            if known:
                mean([parts[n] for n in known], [weights[n] for n in known], out=progress[here])
            else:
                progress[here] = 0.0
        elif kind == "radial":
            rule(parts, weights, [of[number] for of in norms] if norms is not None else None, progress[here])
        else:
            mean(parts, weights, out=progress[here])
    averages = (state.values - progress)[statistics] if statistics is not None else None
    if presence != 1.0:
        progress.mul_(presence)
    merged = (outer or Nesterov()).step(state, progress, lr, momentum)
    if averages is not None:
        merged.values[statistics] = averages
        for tensor in merged.state.values():
            if tensor.shape == merged.values.shape:
                tensor[statistics] = 0.0
    return merged


def _has_statistics(layout: Layout, fragment: Fragment) -> bool:
    return any(layout.tensors[piece.tensor].rule == "average" for piece in fragment.pieces)
