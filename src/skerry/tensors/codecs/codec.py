"""How a flat fp32 vector becomes bytes and back. The wire declares codec, size and checksum; this module knows which there are.

A codec works on the device the vector is on, and gives the same bytes of finite values on every device: it is made of
operations that IEEE 754 rounds in one way only, and of sums that do not depend on their order.
"""

from __future__ import annotations

import sys
from typing import Protocol

import torch
from torch import Tensor

from skerry.errors import WireError
from skerry.tensors.codecs.block import E3M0, Fp8, Int4, Int8
from skerry.tensors.codecs.topk import TopK
from skerry.tensors.memory import empty_like

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported by torch wheels
    raise ImportError("Skerry's wire format is little-endian and this machine is not")


QUICK_NUMEL = 1 << 19


def is_quick(name: str, numel: int) -> bool:
    """Whether to encode or decode a vector takes less time than to have another thread do it: that thread, too, needs the
    interpreter. Codecs that do more than a cast take about eight times as long."""
    return numel <= (QUICK_NUMEL if name in ("fp32", "bf16") else QUICK_NUMEL // 8)


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool:
        """Nothing is lost, so values can be sent as they are. With any other codec differences are sent, which are small."""
        ...

    @property
    def needs_feedback(self) -> bool:
        """It leaves out so much that what it left out has to be sent later."""
        ...

    @property
    def unit(self) -> int:
        """Elements that share something, such as a scale."""
        ...

    def size_bytes(self, numel: int) -> int:
        """Bytes of a vector with that many elements."""
        ...

    def encode(self, vector: Tensor) -> Tensor:
        """Bytes, as a flat uint8 tensor on the vector's device. Those of an exact codec may share the vector's memory."""
        ...

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """The vector again, on the device of the bytes, in fp32 or a type whose values fp32 holds. It may share the memory of
        the bytes. What was not finite when it was encoded is not finite now, though its neighbours may not be either."""
        ...


class Cast:
    """Elements in another type."""

    needs_feedback = False
    unit = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.exact = dtype == torch.float32
        self._dtype = dtype

    def size_bytes(self, numel: int) -> int:
        return self._dtype.itemsize * numel

    def encode(self, vector: Tensor) -> Tensor:
        same = vector.dtype == self._dtype and vector.is_contiguous()
        return (vector if same else empty_like(vector, self._dtype).copy_(vector)).view(torch.uint8)

    def decode(self, data: Tensor, numel: int) -> Tensor:
        return data.view(self._dtype)


FP32 = Cast("fp32", torch.float32)
_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (FP32, Cast("bf16", torch.bfloat16), Fp8(), Int8(), Int4(), E3M0(), TopK("topk1", 40), TopK("topk3", 120))
}


def codec(name: str) -> Codec:
    found = _CODECS.get(name)
    if found is None:
        raise WireError(f"codec must be one of {', '.join(_CODECS)}, got {name!r}")
    return found


def raw_bytes(vector: Tensor) -> memoryview:
    """A contiguous vector's memory, not copied."""
    view: memoryview = vector.view(torch.uint8).numpy().data
    return view.cast("B")


def byte_tensor(data: memoryview) -> Tensor:
    """Bytes as a tensor, not copied if they may be written to."""
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
