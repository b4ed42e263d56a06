"""Codecs: flat fp32 vectors to bytes and back. Also the registry of codecs by name.

A codec works on the vector's device and produces the same bytes for finite values on every device: it uses only operations
whose rounding IEEE 754 defines, and sums that do not depend on their order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from skerry.errors import ConfigError
from skerry.registry import Registry
from skerry.tensors.codecs.block import E3M0, Fp8, Int4, Int8
from skerry.tensors.codecs.topk import TopK
from skerry.tensors.memory import empty_like

if sys.byteorder != "little":  # pragma: no cover - no such machine is supported by torch wheels
    raise ImportError("Skerry's wire format is little-endian and this machine is not")


QUICK_NUMEL = 1 << 19
"""Elements that a cast converts faster than another thread could be handed the work."""


def is_quick(name: str, numel: int) -> bool:
    """Whether encoding or decoding in place beats handing the work to another thread, which would contend for the GIL.
    Codecs other than casts take about eight times as long."""
    return numel <= (QUICK_NUMEL if name in ("fp32", "bf16") else QUICK_NUMEL // 8)


class Codec(Protocol):
    """Encodes flat vectors as bytes.

    Made once in each process, without arguments. Called in any thread, several at a time, so it keeps no state. Equal vectors
    must give equal bytes, in every process and on every device: the syncer and all islands work out what learners hold.
    """

    @property
    def name(self) -> str:
        """The name it is registered under."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the codec is lossless, so that values can be sent. Lossy codecs send differences, which are small."""
        ...

    @property
    def needs_feedback(self) -> bool:
        """Whether the codec is so lossy that the error must be fed back into later contributions."""
        ...

    @property
    def unit(self) -> int:
        """Number of elements that are encoded together, such as those that share a scale."""
        ...

    def size_bytes(self, numel: int) -> int:
        """Encoded size of a vector with `numel` elements."""
        ...

    def encode(self, vector: Tensor) -> Tensor:
        """Encode as a flat uint8 tensor on the vector's device. An exact codec may share the vector's memory."""
        ...

    def decode(self, data: Tensor, numel: int) -> Tensor:
        """Decode on the device of the bytes, to fp32 or a type whose values fp32 can hold. May share the memory of the bytes.
        Non-finite elements stay non-finite, and elements of the same unit may become so."""
        ...


class Cast:
    """Converts the elements to another floating-point type."""

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
CODECS: Registry[Callable[[], Codec]] = Registry("codec")
CODECS.add("fp32", lambda: FP32)
CODECS.add("bf16", lambda: Cast("bf16", torch.bfloat16))
CODECS.add("fp8", Fp8)
CODECS.add("int8", Int8)
CODECS.add("int4", Int4)
CODECS.add("e3m0", E3M0)
CODECS.add("topk1", lambda: TopK("topk1", 40))
CODECS.add("topk3", lambda: TopK("topk3", 120))


@functools.cache
def codec(name: str) -> Codec:
    """The codec with this name. Raises ConfigError."""
    found = CODECS.get(name)()
    if found.name != name:
        raise ConfigError(f"the codec registered as {name!r} calls itself {found.name!r}; both names must be the same")
    return found


def raw_bytes(vector: Tensor) -> memoryview:
    """The memory of a contiguous vector, without a copy."""
    view: memoryview = vector.view(torch.uint8).numpy().data
    return view.cast("B")


def byte_tensor(data: memoryview) -> Tensor:
    """The bytes as a tensor, without a copy if they are writable."""
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
