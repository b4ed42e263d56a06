"""Splitting a model into fragments.

The split depends only on the tensors' names, shapes, rules and order, so that every rank and the syncer compute the same one.
A fragment is a list of pieces; a piece is a run of whole rows of one tensor. On the wire and at the syncer a fragment is one
flat vector, the concatenation of its pieces.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skerry.errors import ConfigError, JoinRefused

Rule = Literal["radial", "mean", "average", "fixed"]
"""How a tensor is merged.

radial   a trained parameter: radial-directional averaging (or the plain mean, by configuration), then the outer step
mean     an embedding: plain weighted mean, then the outer step
average  a running statistic (floating-point buffer): plain weighted mean of the values, no outer step
fixed    a frozen parameter or integer buffer: sent to a learner when it joins, never exchanged
"""

SET_ASIDE_SHARE = 4
"""Pinned host memory is reserved for 1/SET_ASIDE_SHARE of the fragments to be in flight at once."""


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: Rule

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Number of elements that are never split: the last dimension of a matrix, one element of a vector."""
        return self.shape[-1] if len(self.shape) >= 2 else 1


@dataclass(frozen=True)
class Piece:
    """Elements start..stop of a tensor, counted in its flattened form."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fragment:
    index: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model and their split. `fixed` holds the tensors that are sent once and never trained."""

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    fixed: Fragment

    @property
    def numel(self) -> int:
        return sum(fragment.numel for fragment in self.fragments)

    def digest(self) -> str:
        """A hash that is equal for layouts that exchange the same bytes."""
        content = [[t.name, list(t.shape), t.rule] for t in self.tensors]
        pieces = [[[p.tensor, p.start, p.stop] for p in f.pieces] for f in (*self.fragments, self.fixed)]
        return hashlib.sha256(json.dumps([content, pieces]).encode()).hexdigest()


def split(tensors: Sequence[TensorSpec], count: int) -> Layout:
    """Split the tensors into `count` fragments by greedy bin-packing, largest first.

    Tensors up to the mean size stay whole, because merging works on each piece's direction. If the largest fragment
    exceeds 4/3 of the mean, tensors are cut into smaller and smaller pieces until it does not.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"tensor names must be unique, got {twice!r} twice")
    exchanged = [(index, tensor) for index, tensor in enumerate(tensors) if tensor.rule != "fixed" and tensor.numel]
    if not exchanged:
        raise ConfigError("the model has no trainable parameters, so there is nothing to exchange")
    count = min(count, sum(tensor.numel // tensor.row for _, tensor in exchanged))
    mean = sum(tensor.numel for _, tensor in exchanged) / count
    for cut in (1, 2, 3, 4, 6, 8):
        bins = _pack(_cut(exchanged, mean / cut), count)
        if max(sum(p.numel for p in pieces) for pieces in bins) * 3 <= mean * 4:
            break
    # A model with few rows may leave bins empty.
    bins = [pieces for pieces in bins if pieces]
    fragments = tuple(Fragment(index, tuple(sorted(pieces, key=_place))) for index, pieces in enumerate(bins))
    fixed = tuple(Piece(i, 0, t.numel) for i, t in enumerate(tensors) if t.rule == "fixed" and t.numel)
    return Layout(tuple(tensors), fragments, Fragment(len(fragments), fixed))


def _place(piece: Piece) -> tuple[int, int]:
    return piece.tensor, piece.start


def _cut(tensors: list[tuple[int, TensorSpec]], limit: float) -> list[Piece]:
    """Cut each tensor into equal pieces of whole rows, of about `limit` elements at most."""
    pieces = []
    for index, tensor in tensors:
        rows = tensor.numel // tensor.row
        parts = min(rows, math.ceil(tensor.numel / limit))
        edges = [part * rows // parts * tensor.row for part in range(parts + 1)]
        pieces += [Piece(index, start, stop) for start, stop in itertools.pairwise(edges)]
    return pieces


def _pack(pieces: list[Piece], count: int) -> list[list[Piece]]:
    """Put each piece, largest first, into the bin with the least load."""
    heap = [(0, index) for index in range(count)]
    bins: list[list[Piece]] = [[] for _ in range(count)]
    for piece in sorted(pieces, key=lambda p: (-p.numel, p.tensor, p.start)):
        load, index = heapq.heappop(heap)
        bins[index].append(piece)
        heapq.heappush(heap, (load + piece.numel, index))
    return bins


def check_same_model(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> None:
    """Raise JoinRefused naming the first difference between the run's model and a learner's.

    Floating-point types may differ: an island may train in bf16 while the run's weights are fp32.
    """
    mine = {tensor.name: tensor for tensor in ours}
    other = {tensor.name: tensor for tensor in theirs}
    for name, tensor in mine.items():
        if name not in other:
            raise JoinRefused(f"model mismatch: the run has tensor {name!r} {list(tensor.shape)}, this learner does not")
        theirs_here = other[name]
        if tensor.shape != theirs_here.shape:
            raise JoinRefused(f"model mismatch: {name!r} is {list(tensor.shape)} in the run and {list(theirs_here.shape)} here")
        if tensor.rule != theirs_here.rule:
            raise JoinRefused(f"model mismatch: {name!r} is {tensor.rule!r} in the run and {theirs_here.rule!r} here")
        if _family(tensor.dtype) != _family(theirs_here.dtype):
            raise JoinRefused(f"model mismatch: {name!r} is {tensor.dtype} in the run and {theirs_here.dtype} here")
    for name, tensor in other.items():
        if name not in mine:
            raise JoinRefused(f"model mismatch: this learner has tensor {name!r} {list(tensor.shape)}, the run does not")
    if list(mine) != list(other):
        place = next(i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b)
        raise JoinRefused(f"model mismatch: tensor {place} is {list(mine)[place]!r} in the run and {list(other)[place]!r} here")


def _family(dtype: str) -> str:
    return "float" if "float" in dtype else dtype
