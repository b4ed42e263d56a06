"""Tensors as a safetensors file, in parts that nothing is copied into: the library would copy all of them into one, and hold
the interpreter meanwhile, which a training loop beside it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skerry.tensors.codecs.codec import raw_bytes

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class NoSuchType(Exception):
    """A tensor of a type that the format, or this file, does not know."""


def as_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[bytes | memoryview]:
    """Of contiguous tensors on the host. What is given refers to their memory."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    parts: list[bytes | memoryview] = []
    end = 0
    # Those with the largest elements first, so that each begins at a multiple of its elements' size.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        if tensor.dtype not in _NAMES:
            raise NoSuchType(f"{name} is {tensor.dtype}")
        if tensor.numel():
            parts.append(raw_bytes(tensor.view(-1)))
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *parts]


def in_one(parts: Sequence[bytes | memoryview]) -> memoryview:
    """All of it in one piece of memory. Torch copies, because it lets go of the interpreter while it does."""
    whole = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
    start = 0
    for part in parts:
        data = bytearray(part) if isinstance(part, bytes) else part
        whole[start : start + len(part)].copy_(torch.frombuffer(data, dtype=torch.uint8))
        start += len(part)
    return raw_bytes(whole)
