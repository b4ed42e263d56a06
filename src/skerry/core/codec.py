"""How a flat fp32 vector becomes bytes and back. The wire declares codec, size and checksum; this module makes the bytes."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skerry.errors import WireError

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported by torch wheels
    raise ImportError("Skerry's wire format is little-endian and this machine is not")


@dataclass(frozen=True)
class Codec:
    name: str
    size_bytes: Callable[[int], int]
    """Bytes of a vector with that many elements."""
    encode: Callable[[Tensor], memoryview]
    decode: Callable[[memoryview, int], Tensor]


def raw_bytes(vector: Tensor) -> memoryview:
    """A contiguous vector's memory, not copied."""
    view: memoryview = vector.view(torch.uint8).numpy().data
    return view.cast("B")


def _raw(vector: Tensor) -> memoryview:
    return raw_bytes(vector.contiguous())


def _from_raw(data: memoryview, numel: int, dtype: torch.dtype) -> Tensor:
    if numel == 0:
        return torch.empty(0, dtype=torch.float32)
    # A copy, because the received buffer may be read-only or reused.
    return torch.frombuffer(bytearray(data), dtype=dtype, count=numel).float()


_CODECS = {
    "fp32": Codec(
        "fp32",
        lambda numel: 4 * numel,
        lambda vector: _raw(vector.float()),
        lambda data, numel: _from_raw(data, numel, torch.float32),
    ),
    "bf16": Codec(
        "bf16",
        lambda numel: 2 * numel,
        lambda vector: _raw(vector.to(torch.bfloat16)),
        lambda data, numel: _from_raw(data, numel, torch.bfloat16),
    ),
}


def codec(name: str) -> Codec:
    found = _CODECS.get(name)
    if found is None:
        raise WireError(f"codec must be one of {', '.join(_CODECS)}, got {name!r}")
    return found


def checksum(data: memoryview | bytes | bytearray, before: int = 0) -> int:
    return zlib.crc32(data, before)
