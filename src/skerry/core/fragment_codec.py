"""The codec of one fragment. Running statistics always travel exactly: a variance that is a little wrong may be negative."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skerry.core.codec import FP32, Codec, codec
from skerry.core.fragment import Fragment, Layout


class BesideExact:
    """A codec for all but some elements, which come first, as they are."""

    exact = False

    def __init__(self, rest: Codec, sizes: Sequence[int], is_exact: Sequence[bool]) -> None:
        self._rest = rest
        self._sizes, self._is_exact = list(sizes), list(is_exact)
        self._exact_bytes = FP32.size_bytes(self._sum(True))
        self.name = rest.name
        self.needs_feedback = rest.needs_feedback

    def _sum(self, exact: bool) -> int:
        return sum(size for size, is_exact in zip(self._sizes, self._is_exact, strict=True) if is_exact is exact)

    def size_bytes(self, numel: int) -> int:
        return self._exact_bytes + self._rest.size_bytes(self._sum(False))

    def encode(self, vector: Tensor) -> Tensor:
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for part, is_exact in zip(torch.split(vector, self._sizes), self._is_exact, strict=True):
            parts[is_exact].append(part)
        exact = FP32.encode(torch.cat(parts[True]))
        return torch.cat([exact, self._rest.encode(torch.cat(parts[False]))]) if parts[False] else exact

    def decode(self, data: Tensor, numel: int) -> Tensor:
        exact, rest = data[: self._exact_bytes], data[self._exact_bytes :]
        decoded = {True: FP32.decode(exact, self._sum(True)), False: self._rest.decode(rest, self._sum(False))}
        taken = {True: 0, False: 0}
        parts = []
        for size, is_exact in zip(self._sizes, self._is_exact, strict=True):
            start = taken[is_exact]
            parts.append(decoded[is_exact][start : start + size])
            taken[is_exact] = start + size
        return torch.cat(parts)


def fragment_codec(name: str, layout: Layout, fragment: Fragment) -> Codec:
    chosen = codec(name)
    is_statistic = [layout.tensors[piece.tensor].rule == "average" for piece in fragment.pieces]
    if chosen.exact or not any(is_statistic):
        return chosen
    return BesideExact(chosen, [piece.numel for piece in fragment.pieces], is_statistic)
