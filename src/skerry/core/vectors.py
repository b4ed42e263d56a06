"""Memory for flat vectors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def empty_like(vector: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As torch.empty_like. On a CPU it comes from malloc as it is: torch asks for aligned memory, and what was freed of that
    glibc (2.36, for one) does not find large enough when the same is asked for again. A process in which vectors come and go
    all the time would get half as large again."""
    if vector.device.type != "cpu" or not vector.numel():
        return torch.empty_like(vector, dtype=dtype)
    size_bytes = vector.numel() * dtype.itemsize
    return torch.from_numpy(np.empty(size_bytes, dtype=np.uint8)).view(dtype).view(vector.shape)
