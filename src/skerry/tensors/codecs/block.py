"""Codecs that give a few bits to each element and a scale to each block of elements.

Bytes: the scales of all blocks as bf16, then the elements of all blocks. A block that holds something that is not finite gets
NaN for its scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
SLICE = 1 << 20
"""Elements that are encoded at a time: a whole fragment would need several times its own memory."""
NOTHING = 1e-30
"""A block whose largest element is smaller counts as zeros: its scale might not be a normal number."""


class TwoWays:
    """A codec that encodes in one pass on a GPU, where that is known to give the same bytes, and in parts elsewhere."""

    name: str

    def encode(self, vector: Tensor) -> Tensor:
        if vector.is_cuda and vector.numel():
            from skerry.tensors.codecs import fused  # which needs a library that takes its time

            if fused.trusted(self.name, vector.device, self.encode_in_one_pass, self.encode_in_parts):
                return self.encode_in_one_pass(vector)
        return self.encode_in_parts(vector)

    def encode_in_one_pass(self, vector: Tensor) -> Tensor:
        raise NotImplementedError

    def encode_in_parts(self, vector: Tensor) -> Tensor:
        raise NotImplementedError


class Blocks(TwoWays):
    exact = False
    needs_feedback = False
    unit = BLOCK
    bits: int
    largest: float
    """What the largest element of a block is scaled to."""

    def size_bytes(self, numel: int) -> int:
        return _blocks(numel) * (2 + BLOCK * self.bits // 8)

    def encode_in_one_pass(self, vector: Tensor) -> Tensor:
        from skerry.tensors.codecs import fused

        return fused.encode_blocks(vector, self.name, BLOCK, self.bits, self.largest)

    def encode_in_parts(self, vector: Tensor) -> Tensor:
        parts = [self._encode(part) for part in torch.split(vector, SLICE)]
        return torch.cat([*(scales for scales, _ in parts), *(elements for _, elements in parts)])

    def _encode(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        blocks = in_rows(vector, BLOCK)
        reach = blocks.abs().amax(dim=1)
        # To multiply by a number is rounded the same way everywhere; what compilers make of a division is not.
        scales = (reach * (1.0 / self.largest)).to(torch.bfloat16)
        if _is_plain(reach):
            scaled = blocks * (1.0 / scales.float())[:, None]
        else:
            scales.masked_fill_(reach < NOTHING, 0.0).masked_fill_(~torch.isfinite(reach), float("nan"))
            wide = scales.float()
            inverse = (1.0 / wide).masked_fill_(~(wide > 0), 0.0)
            scaled = (blocks * inverse[:, None]).nan_to_num_(nan=0.0)
        return scales.view(torch.uint8), self._pack(scaled.clamp_(-self.largest, self.largest)).reshape(-1).view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        count = _blocks(numel)
        scales = data[: 2 * count].view(torch.bfloat16).float()
        blocks = self._unpack(data[2 * count :].view(count, BLOCK * self.bits // 8)).mul_(scales[:, None])
        return blocks.view(-1)[:numel]

    def _pack(self, scaled: Tensor) -> Tensor:
        """One block a row, in [-largest, largest], to bytes."""
        raise NotImplementedError

    def _unpack(self, packed: Tensor) -> Tensor:
        raise NotImplementedError


class Int8(Blocks):
    name, bits, largest = "int8", 8, 127.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8)

    def _unpack(self, packed: Tensor) -> Tensor:
        return packed.view(torch.int8).float()


class Fp8(Blocks):
    """Four bits of exponent, three of mantissa."""

    name, bits, largest = "fp8", 8, 448.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn)

    def _unpack(self, packed: Tensor) -> Tensor:
        return packed.view(torch.float8_e4m3fn).float()


class Int4(Blocks):
    """-7 to 7, as 1 to 15. A byte holds one element of the block's first half, low, and one of its second half, high."""

    name, bits, largest = "int4", 4, 7.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return _nibbles(scaled.round_().add_(8.0).to(torch.uint8))

    def _unpack(self, packed: Tensor) -> Tensor:
        return _from_nibbles(packed).float().sub_(8.0)


class E3M0(Blocks):
    """A sign and seven powers of two below the block's largest element, or zero: as Streaming DiLoCo sends differences. Packed
    as int4 is."""

    name, bits, largest = "e3m0", 4, 1.0

    _borders = torch.tensor([2.0**-7, *(0.75 * 2.0**-power for power in range(5, -1, -1))], dtype=torch.float32)
    """Half way between neighbours."""
    _levels = torch.tensor([0.0, *(2.0**-power for power in range(6, -1, -1))], dtype=torch.float32)
    _signed = torch.cat([_levels, -_levels])

    def _pack(self, scaled: Tensor) -> Tensor:
        codes = torch.bucketize(scaled.abs(), self._borders.to(scaled.device), out_int32=True, right=True)
        return _nibbles(codes.add_((scaled < 0).int(), alpha=8).to(torch.uint8))

    def _unpack(self, packed: Tensor) -> Tensor:
        return self._signed.to(packed.device)[_from_nibbles(packed).int()]


def _is_plain(reach: Tensor) -> bool:
    """Whether no block is special, as far as it costs nothing to look: on a GPU it would mean to wait."""
    if reach.is_cuda or not reach.numel():
        return False
    least, most = torch.aminmax(reach)
    return float(least) >= NOTHING and float(most) < float("inf")


def in_rows(vector: Tensor, width: int) -> Tensor:
    """As fp32, the last row filled up with zeros."""
    numel = vector.numel()
    rows = -(-numel // width)
    flat = vector.float()
    if rows * width != numel:
        flat = torch.nn.functional.pad(flat, (0, rows * width - numel))
    return flat.reshape(rows, width)


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _nibbles(codes: Tensor) -> Tensor:
    return codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)


def _from_nibbles(packed: Tensor) -> Tensor:
    return torch.cat([packed & 15, packed >> 4], dim=1)
