"""Fused GPU encoders, compiled by Triton if it is available. They produce the same bytes as block.py and topk.py; each kernel
is compared with the portable code before its first use on a device.

To be bit-exact, the kernels use the same operations in the same order: no fused multiply-add, division with IEEE rounding, and
rounding to integers by adding and subtracting 1.5 · 2²³, where fp32 has no fraction bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch, or an unsupported platform
    triton = None

log = logging.getLogger("skerry.learner")

ROWS = 32
"""Blocks per kernel program."""
KINDS = ("int8", "int4", "fp8", "e3m0")
OPTIONS = {"enable_fp_fusion": False}
"""Disables fused multiply-add, which rounds differently."""

if triton is not None:

    @triton.jit
    def _whole(scaled, largest):
        return tl.minimum(tl.maximum((scaled + 12582912.0) - 12582912.0, -largest), largest)

    @triton.jit
    def _e4m3(scaled):
        """Round to e4m3, ties to even. Below the smallest exponent the step is 1/512."""
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
        steps = ((tl.abs(scaled) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
        return tl.where(size < 0x3C800000, steps, rounded - (120 << 3)) | ((bits >> 24) & 0x80)

    @triton.jit
    def _power_of_two(scaled):
        """The e3m0 code: the number of midpoints at or below the magnitude, plus 8 if negative."""
        size = tl.abs(scaled)
        code = (size >= 0.0078125).to(tl.int32)
        code += (size >= 0.0234375).to(tl.int32)
        code += (size >= 0.046875).to(tl.int32)
        code += (size >= 0.09375).to(tl.int32)
        code += (size >= 0.1875).to(tl.int32)
        code += (size >= 0.375).to(tl.int32)
        code += (size >= 0.75).to(tl.int32)
        return code + (scaled < 0.0).to(tl.int32) * 8

    @triton.jit
    def _code(scaled, largest, KIND: tl.constexpr):
        """The element's code as an integer."""
        if KIND == 0:
            return _whole(scaled, largest).to(tl.int32) & 255
        elif KIND == 1:
            return (_whole(scaled, largest) + 8.0).to(tl.int32)
        elif KIND == 2:
            return _e4m3(tl.minimum(tl.maximum(scaled, -largest), largest))
        else:
            return _power_of_two(tl.minimum(tl.maximum(scaled, -largest), largest))

    @triton.jit
    def _encode_kernel(
        values, scales_out, bytes_out, numel, count, share, largest,
        BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    ):  # fmt: skip
        half: tl.constexpr = BLOCK // 2
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, half)
        first_at = rows[:, None].to(tl.int64) * BLOCK + columns[None, :]
        second_at = first_at + half
        first = tl.load(values + first_at, mask=first_at < numel, other=0.0)
        second = tl.load(values + second_at, mask=second_at < numel, other=0.0)
        # Only a non-finite number times zero is not zero.
        bad = tl.sum(((first * 0.0) != 0.0).to(tl.int32) + ((second * 0.0) != 0.0).to(tl.int32), axis=1) > 0
        reach = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        # Round to bf16 and back by hand: the upper half of the float, ties to even.
        exact = (reach * share).to(tl.int32, bitcast=True)
        upper = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
        upper = tl.where((reach < 1e-30) | bad, 0, upper)
        wide = (upper << 16).to(tl.float32, bitcast=True)
        inverse = tl.where(wide > 0.0, tl.math.div_rn(1.0, tl.where(wide > 0.0, wide, 1.0)), 0.0)
        low = _code(tl.where(bad[:, None], 0.0, first * inverse[:, None]), largest, KIND)
        high = _code(tl.where(bad[:, None], 0.0, second * inverse[:, None]), largest, KIND)
        there = rows < count
        tl.store(scales_out + rows, tl.where(bad, 0x7FC0, upper).to(tl.int16), mask=there)
        if KIND == 1 or KIND == 3:
            at = rows[:, None].to(tl.int64) * half + columns[None, :]
            tl.store(bytes_out + at, (low | (high << 4)).to(tl.uint8), mask=there[:, None])
        else:
            at = rows[:, None].to(tl.int64) * BLOCK + columns[None, :]
            tl.store(bytes_out + at, low.to(tl.uint8), mask=there[:, None])
            tl.store(bytes_out + at + half, high.to(tl.uint8), mask=there[:, None])

    @triton.jit
    def _largest_kernel(values, places_out, KEPT: tl.constexpr, CHUNK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, CHUNK)
        # Non-negative floats sort like their bits.
        size = tl.load(values + row * CHUNK + place).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # Find the threshold bit by bit: the largest value that at least KEPT elements reach.
        least = tl.zeros([1], dtype=tl.int32)
        for bit in tl.static_range(31):
            more = least + (1 << (30 - bit))
            reached = tl.sum((size >= more).to(tl.int32), axis=0)
            least = tl.where(reached >= KEPT, more, least)
        above = size > least
        equal = size == least
        room = KEPT - tl.sum(above.to(tl.int32), axis=0)
        kept = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= room))
        tl.store(places_out + row * KEPT + tl.cumsum(kept.to(tl.int32), axis=0) - 1, place, mask=kept)


_trusted: dict[tuple[str, torch.device], bool] = {}


def trusted(name: str, device: torch.device, kernel: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor]) -> bool:
    """Whether the kernel compiles for this device and produces the right bytes. Tested once per codec and device."""
    if triton is None:
        return False
    key = name, device
    if key not in _trusted:
        try:
            sample = trial(device)
            _trusted[key] = torch.equal(kernel(sample), plain(sample))
            why = "its output differs"
        except Exception as error:  # no compiler, a device that is too old, an incompatible Triton version
            _trusted[key], why = False, str(error)
        if not _trusted[key]:
            log.warning("no fused GPU kernel for codec %s, encoding will be slower: %s", name, why)
    return _trusted[key]


def trial(device: torch.device) -> Tensor:
    """A test vector for the kernels: all magnitudes, equal elements, zeros, elements that count as zeros, midpoints between
    levels, and elements so close to them that a fused multiply-add would show. The last block is partial."""
    generator = torch.Generator().manual_seed(0)
    fp32: Any = {"dtype": torch.float32}  # the training loop may have changed the default type
    anything = torch.randn(96, 128, generator=generator, **fp32) * 10.0 ** (torch.arange(96, **fp32) % 75 - 37)[:, None]
    equal = torch.randint(-3, 4, (32, 128), generator=generator).float()
    sparse = torch.randn(32, 128, generator=generator, **fp32) * torch.arange(128).remainder(50).eq(0)
    halves = []
    for largest in (7, 127):
        scales = (torch.rand(64, 1, generator=generator, **fp32) + 0.5).to(torch.bfloat16).float()
        middle = (torch.randint(-largest, largest, (64, 128), generator=generator) + 0.5) * scales
        middle[:, 0] = largest * scales[:, 0]
        halves.append(middle)
    eight_bits = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = torch.cat([eight_bits[-1:], (eight_bits[1:] + eight_bits[:-1]) / 2, eight_bits[:1]])
    edges = torch.tensor([2.0**-7, *(0.75 * 2.0**-power for power in range(6))], **fp32)
    around = torch.cat([edges, edges.nextafter(torch.zeros((), **fp32)), edges.nextafter(torch.ones((), **fp32))])
    powers = torch.cat([torch.ones(1, **fp32), around, -around, torch.zeros(85, **fp32)])
    last = torch.randn(1, generator=generator, **fp32)
    parts = (anything, equal, sparse, *halves, between, -between, powers, last)
    return torch.cat([part.flatten() for part in parts]).to(device)


def encode_blocks(vector: Tensor, name: str, block: int, bits: int, largest: float) -> Tensor:
    """Encode like the block codec of this name."""
    vector = vector.float().contiguous()
    count = -(-vector.numel() // block)
    data = torch.empty(count * (2 + block * bits // 8), dtype=torch.uint8, device=vector.device)
    scales, elements = data[: 2 * count].view(torch.int16), data[2 * count :]
    # Rounded to fp32, as in the portable code.
    share = float(torch.tensor(1.0 / largest, dtype=torch.float32))
    grid: Any = (-(-count // ROWS),)
    _encode_kernel[grid](
        vector, scales, elements, vector.numel(), count, share, largest,
        BLOCK=block, ROWS=ROWS, KIND=KINDS.index(name), **OPTIONS,
    )  # fmt: skip
    return data


def largest_places(chunks: Tensor, kept: int) -> Tensor:
    """Per row: the sorted indices of the `kept` largest magnitudes. Among equal ones the first win."""
    rows, width = chunks.shape
    places = torch.empty(rows, kept, dtype=torch.int32, device=chunks.device)
    grid: Any = (rows,)
    _largest_kernel[grid](chunks, places, KEPT=kept, CHUNK=width, num_warps=8)
    return places.long()
