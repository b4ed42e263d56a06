"""Encoding on a GPU in one pass, where Triton is there to make the kernel: the same bytes as those of block_codecs.py.

The operations are those of block_codecs.py, one by one. Division is asked for with IEEE rounding, and numbers are rounded to
whole ones by adding and subtracting one so large that nothing smaller than a whole is left beside it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # another kind of torch, or another platform
    triton = None

log = logging.getLogger("skerry.learner")

ROWS = 32
"""Blocks that one program encodes."""

if triton is not None:

    @triton.jit
    def _encode_kernel(
        values, scales_out, bytes_out, numel, count, share, largest,
        BLOCK: tl.constexpr, ROWS: tl.constexpr, NIBBLES: tl.constexpr,
    ):  # fmt: skip
        half: tl.constexpr = BLOCK // 2
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, half)
        first_at = rows[:, None].to(tl.int64) * BLOCK + columns[None, :]
        second_at = first_at + half
        first = tl.load(values + first_at, mask=first_at < numel, other=0.0)
        second = tl.load(values + second_at, mask=second_at < numel, other=0.0)
        # What is not finite gives NaN when it is multiplied by nothing.
        bad = tl.sum(((first * 0.0) != 0.0).to(tl.int32) + ((second * 0.0) != 0.0).to(tl.int32), axis=1) > 0
        reach = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        # To bf16 and back by hand: the upper half of the float, rounded to the nearest even one.
        exact = (reach * share).to(tl.int32, bitcast=True)
        upper = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
        upper = tl.where((reach < 1e-30) | bad, 0, upper)
        wide = (upper << 16).to(tl.float32, bitcast=True)
        inverse = tl.where(wide > 0.0, tl.math.div_rn(1.0, tl.where(wide > 0.0, wide, 1.0)), 0.0)
        first = tl.where(bad[:, None], 0.0, first * inverse[:, None])
        second = tl.where(bad[:, None], 0.0, second * inverse[:, None])
        first = tl.minimum(tl.maximum((first + 12582912.0) - 12582912.0, -largest), largest)
        second = tl.minimum(tl.maximum((second + 12582912.0) - 12582912.0, -largest), largest)
        there = rows < count
        tl.store(scales_out + rows, tl.where(bad, 0x7FC0, upper).to(tl.int16), mask=there)
        if NIBBLES:
            low = (first + 8.0).to(tl.int32)
            high = (second + 8.0).to(tl.int32)
            at = rows[:, None].to(tl.int64) * half + columns[None, :]
            tl.store(bytes_out + at, (low | (high << 4)).to(tl.uint8), mask=there[:, None])
        else:
            at = rows[:, None].to(tl.int64) * BLOCK + columns[None, :]
            tl.store(bytes_out + at, first.to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True), mask=there[:, None])
            tl.store(bytes_out + at + half, second.to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True), mask=there[:, None])


_usable = triton is not None


def encode(vector: Tensor, block: int, bits: int, largest: float) -> Tensor | None:
    """The bytes of int8 or int4, or None where no kernel can be made."""
    global _usable
    if not _usable:
        return None
    try:
        return encode_whole_numbers(vector, block, bits, largest)
    except Exception as error:  # no compiler, a device that is too old, a Triton that knows other words
        _usable = False
        log.warning("contributions are encoded in several passes: Triton made no kernel (%s)", error)
        return None


def encode_whole_numbers(vector: Tensor, block: int, bits: int, largest: float) -> Tensor:
    vector = vector.float().contiguous()
    count = -(-vector.numel() // block)
    data = torch.empty(count * (2 + block * bits // 8), dtype=torch.uint8, device=vector.device)
    scales, elements = data[: 2 * count].view(torch.int16), data[2 * count :]
    # As fp32, which is what the other path multiplies by.
    share = float(torch.tensor(1.0 / largest, dtype=torch.float32))
    grid: Any = (-(-count // ROWS),)
    _encode_kernel[grid](
        vector, scales, elements, vector.numel(), count, share, largest, BLOCK=block, ROWS=ROWS, NIBBLES=bits == 4
    )
    return data
