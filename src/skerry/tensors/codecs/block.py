"""Block codecs: a few bits per element and one scale per block of elements.

Bytes: the scales of all blocks as bf16, then the elements of all blocks. A block with a non-finite element has the scale NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
SLICE = 1 << 20
"""Elements to encode at a time. Encoding a whole fragment at once would need several times its memory."""
NOTHING = 1e-30
"""A block whose largest element is smaller is encoded as zeros, because its scale could be subnormal."""


class TwoWays:
    """A codec with a fused GPU kernel, used where it is known to produce the same bytes as the portable path."""

    name: str

    def encode(self, vector: Tensor) -> Tensor:
        if vector.is_cuda and vector.numel():
            from skerry.tensors.codecs import fused  # lazily, because importing Triton is slow

            if fused.trusted(self.name, vector.device, self.encode_in_one_pass, self.encode_in_parts):
                return self.encode_in_one_pass(vector)
        return self.encode_in_parts(vector)

    def encode_in_one_pass(self, vector: Tensor) -> Tensor:
        """Encode with the fused kernel."""
        raise NotImplementedError

    def encode_in_parts(self, vector: Tensor) -> Tensor:
        """Encode with plain torch operations, SLICE elements at a time."""
        raise NotImplementedError


class Blocks(TwoWays):
    """Base of the block codecs. A subclass defines how scaled elements are packed."""

    exact = False
    needs_feedback = False
    unit = BLOCK
    bits: int
    largest: float
    """The magnitude to which a block's largest element is scaled."""

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
        # Multiplication rounds the same everywhere; compilers may approximate a division.
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
        """Pack blocks (one per row) of values in [-largest, largest] into bytes."""
        raise NotImplementedError

    def _unpack(self, packed: Tensor) -> Tensor:
        """Invert `_pack`."""
        raise NotImplementedError


class Int8(Blocks):
    name, bits, largest = "int8", 8, 127.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return scaled.round_().to(torch.int8)

    def _unpack(self, packed: Tensor) -> Tensor:
        return packed.view(torch.int8).float()


class Fp8(Blocks):
    """Four exponent bits, three mantissa bits (e4m3)."""

    name, bits, largest = "fp8", 8, 448.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn)

    def _unpack(self, packed: Tensor) -> Tensor:
        return packed.view(torch.float8_e4m3fn).float()


class Int4(Blocks):
    """-7 to 7, stored as 1 to 15. A byte's low half is an element of the block's first half, its high half one of the
    second."""

    name, bits, largest = "int4", 4, 7.0

    def _pack(self, scaled: Tensor) -> Tensor:
        return _nibbles(scaled.round_().add_(8.0).to(torch.uint8))

    def _unpack(self, packed: Tensor) -> Tensor:
        return _from_nibbles(packed).float().sub_(8.0)


class E3M0(Blocks):
    """Zero or a signed power of two, from the block's largest element down to 1/64 of it, as in Streaming DiLoCo. Packed like
    int4."""

    name, bits, largest = "e3m0", 4, 1.0

    _borders = torch.tensor([2.0**-7, *(0.75 * 2.0**-power for power in range(5, -1, -1))], dtype=torch.float32)
    """The midpoints between neighbouring levels."""
    _levels = torch.tensor([0.0, *(2.0**-power for power in range(6, -1, -1))], dtype=torch.float32)
    _signed = torch.cat([_levels, -_levels])

    def _pack(self, scaled: Tensor) -> Tensor:
        codes = torch.bucketize(scaled.abs(), self._borders.to(scaled.device), out_int32=True, right=True)
        return _nibbles(codes.add_((scaled < 0).int(), alpha=8).to(torch.uint8))

    def _unpack(self, packed: Tensor) -> Tensor:
        return self._signed.to(packed.device)[_from_nibbles(packed).int()]


def _is_plain(reach: Tensor) -> bool:
    """Whether all blocks are finite and none counts as zeros. False on a GPU, where looking would mean to synchronize."""
    if reach.is_cuda or not reach.numel():
        return False
    least, most = torch.aminmax(reach)
    return float(least) >= NOTHING and float(most) < float("inf")


def in_rows(vector: Tensor, width: int) -> Tensor:
    """The vector as fp32 rows of this width, the last one padded with zeros."""
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
