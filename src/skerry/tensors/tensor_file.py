"""Writing safetensors files without copying the tensors. The safetensors library copies everything into one buffer and holds
the GIL meanwhile, which would stall the training loop."""

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
    """A tensor has a type that the format or this module does not support."""


def as_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[bytes | memoryview]:
    """The file's content as a list of parts. The tensors must be contiguous and in host memory; the parts share their memory.
    Raises NoSuchType."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    parts: list[bytes | memoryview] = []
    end = 0
    # The largest element size first keeps every tensor aligned.
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
    """The concatenated parts. torch does the copying, because it releases the GIL."""
    whole = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
    start = 0
    for part in parts:
        data = bytearray(part) if isinstance(part, bytes) else part
        whole[start : start + len(part)].copy_(torch.frombuffer(data, dtype=torch.uint8))
        start += len(part)
    return raw_bytes(whole)
