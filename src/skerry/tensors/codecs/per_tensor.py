"""The codec of a fragment, which applies a vector codec to each of its tensors.

Running statistics are always sent exactly, because a variance with a small error may be negative. Every other tensor starts its
own block, because elements much smaller than those of a neighbouring tensor would be rounded to zero every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skerry.tensors.codecs.codec import FP32, Codec, codec
from skerry.tensors.fragments import Fragment, Layout


class ByTensor:
    """Sends the exact tensors first, in fp32, then the others, each padded with zeros to whole units of the codec."""

    exact = False

    def __init__(self, rest: Codec, sizes: Sequence[int], is_exact: Sequence[bool]) -> None:
        self._rest = rest
        self._sizes, self._is_exact = list(sizes), list(is_exact)
        self._exact = sum(size for size, exact in zip(sizes, is_exact, strict=True) if exact)
        self._filled = [-(-size // rest.unit) * rest.unit for size in sizes]
        self._others = sum(filled for filled, exact in zip(self._filled, is_exact, strict=True) if not exact)
        self.name, self.unit = rest.name, 1
        self.needs_feedback = rest.needs_feedback

    def size_bytes(self, numel: int) -> int:
        return FP32.size_bytes(self._exact) + self._rest.size_bytes(self._others)

    def encode(self, vector: Tensor) -> Tensor:
        exact, others = [], vector.new_zeros(self._others, dtype=torch.float32)
        at = 0
        for part, filled, is_exact in zip(torch.split(vector, self._sizes), self._filled, self._is_exact, strict=True):
            if is_exact:
                exact.append(part)
            else:
                others[at : at + part.numel()] = part
                at += filled
        encoded = self._rest.encode(others)
        return torch.cat([FP32.encode(torch.cat(exact)), encoded]) if exact else encoded

    def decode(self, data: Tensor, numel: int) -> Tensor:
        border = FP32.size_bytes(self._exact)
        # A copy, because the data may not be aligned for fp32.
        exact = FP32.decode(data[:border].clone(), self._exact)
        others = self._rest.decode(data[border:], self._others)
        parts, taken_exact, taken = [], 0, 0
        for size, filled, is_exact in zip(self._sizes, self._filled, self._is_exact, strict=True):
            if is_exact:
                parts.append(exact[taken_exact : taken_exact + size])
                taken_exact += size
            else:
                parts.append(others[taken : taken + size])
                taken += filled
        return torch.cat(parts)


def fragment_codec(name: str, layout: Layout, fragment: Fragment) -> Codec:
    """The codec of this name for a fragment. Plain if all of its tensors are whole units and none is a running statistic."""
    chosen = codec(name)
    is_statistic = [layout.tensors[piece.tensor].rule == "average" for piece in fragment.pieces]
    fits = all(piece.numel % chosen.unit == 0 for piece in fragment.pieces[:-1])
    if chosen.exact or (fits and not any(is_statistic)):
        return chosen
    return ByTensor(chosen, [piece.numel for piece in fragment.pieces], is_statistic)
