"""Top-k codecs: the largest few of every 4,096 elements, with two bits each (a sign and one of two sizes). Error feedback sends
the rest later.

Bytes: the two sizes of every chunk as bf16; then the indices of every chunk, twelve bits each, two in three bytes; then the
two-bit values of every chunk, four per byte, smallest index first and in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skerry.tensors.codecs.block import SLICE, TwoWays, in_rows

CHUNK = 4096
FINE = 1 << 20
"""Magnitudes are quantized to this fraction of the chunk's largest, so that their integer sums are exact in any order."""


class TopK(TwoWays):
    exact = False
    needs_feedback = True
    unit = CHUNK

    def __init__(self, name: str, kept: int) -> None:
        assert kept % 4 == 0 and kept <= CHUNK
        self.name = name
        self._kept = kept
        self._chunk_bytes = (4, kept * 3 // 2, kept // 4)

    def size_bytes(self, numel: int) -> int:
        return _chunks(numel) * sum(self._chunk_bytes)

    def encode_in_one_pass(self, vector: Tensor) -> Tensor:
        """Find the largest elements with the fused kernel; torch encodes the few that are left."""
        from skerry.tensors.codecs import fused

        return torch.cat(self._encode(vector, lambda chunks: fused.largest_places(chunks, self._kept)))

    def encode_in_parts(self, vector: Tensor) -> Tensor:
        if vector.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=vector.device)
        parts = [self._encode(part, self._largest) for part in torch.split(vector, SLICE)]
        return torch.cat([part for kind in zip(*parts, strict=True) for part in kind])

    def _encode(self, vector: Tensor, largest: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        chunks = in_rows(vector, CHUNK)
        places = largest(chunks)
        values = chunks.gather(1, places)
        sizes, large = _two_sizes(values.abs())
        codes = (values < 0).int() + 2 * large.int()
        return sizes.reshape(-1), _pack_places(places.int()).reshape(-1), _pack_codes(codes).reshape(-1)

    def _largest(self, chunks: Tensor) -> Tensor:
        """The sorted indices of the largest elements. The index is part of the key, so among equal ones the first win."""
        place = torch.arange(CHUNK, device=chunks.device)
        keys = (chunks.abs().view(torch.int32).long() << 12) | (CHUNK - 1 - place)
        return keys.topk(self._kept, dim=1, sorted=False).indices.sort(dim=1).values

    def decode(self, data: Tensor, numel: int) -> Tensor:
        count, kept = _chunks(numel), self._kept
        if count == 0:
            return torch.empty(0, dtype=torch.float32, device=data.device)
        sizes, places, codes = torch.split(data, [count * width for width in self._chunk_bytes])
        values = _unpack_codes(codes.view(count, kept // 4)).long()
        found = sizes.view(torch.bfloat16).float().view(count, 2).gather(1, values >> 1)
        found = torch.where((values & 1).bool(), -found, found)
        chunks = torch.zeros(count, CHUNK, dtype=torch.float32, device=data.device)
        chunks.scatter_(1, _unpack_places(places.view(count, kept * 3 // 2)).long(), found)
        return chunks.view(-1)[:numel]


def _chunks(numel: int) -> int:
    return -(-numel // CHUNK)


def _two_sizes(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Per row: the mean of the magnitudes up to the overall mean and the mean of those above, as bf16 bytes; and which are
    above.

    If a row contains zeros, the sizes are zero and the mean of the other elements.
    """
    largest = magnitudes.amax(dim=1, keepdim=True).double()
    unit = torch.where(largest > 0, FINE / largest, torch.zeros_like(largest))
    parts = (magnitudes.double() * unit).nan_to_num_(nan=0.0).round_().long()
    with_zeros = (magnitudes == 0).any(dim=1, keepdim=True)
    large = torch.where(with_zeros, magnitudes > 0, parts * parts.shape[1] > parts.sum(dim=1, keepdim=True))
    means = []
    for chosen in (~large, large):
        number = chosen.sum(dim=1, keepdim=True)
        means.append((parts * chosen).sum(dim=1, keepdim=True).double() / number.clamp(min=1) * (largest / FINE))
    sizes = torch.cat(means, dim=1)
    sizes = torch.where(torch.isfinite(largest), sizes, torch.full_like(sizes, float("nan")))
    return sizes.float().to(torch.bfloat16).view(torch.uint8), large


def _pack_places(places: Tensor) -> Tensor:
    first, second = places[:, 0::2], places[:, 1::2]
    three = torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=2)
    return three.to(torch.uint8)


def _unpack_places(packed: Tensor) -> Tensor:
    low, middle, high = packed.view(packed.shape[0], -1, 3).int().unbind(dim=2)
    both = torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=2)
    return both.view(packed.shape[0], -1)


def _pack_codes(codes: Tensor) -> Tensor:
    four = codes.view(codes.shape[0], -1, 4)
    return (four << (2 * torch.arange(4, device=codes.device, dtype=torch.int32))).sum(dim=2).to(torch.uint8)


def _unpack_codes(packed: Tensor) -> Tensor:
    four = (packed.int()[:, :, None] >> (2 * torch.arange(4, device=packed.device, dtype=torch.int32))) & 3
    return four.view(packed.shape[0], -1)
