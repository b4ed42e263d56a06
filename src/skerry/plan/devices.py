"""Peak speeds of devices, to estimate step times that have not been measured."""

from __future__ import annotations

DENSE_TFLOPS = {
    "b200": 2250.0,
    "h200": 989.0,
    "h100": 989.0,
    "h100-pcie": 756.0,
    "a100": 312.0,
    "l40s": 362.0,
    "l4": 121.0,
    "a10": 125.0,
    "a6000": 155.0,
    "rtx5090": 210.0,
    "rtx4090": 165.0,
    "rtx3090": 71.0,
    "v100": 125.0,
    "t4": 65.0,
    "mi300x": 1307.0,
    "mi250x": 383.0,
    "tpu-v4": 275.0,
    "tpu-v5e": 197.0,
    "tpu-v5p": 459.0,
    "tpu-v6e": 918.0,
}
"""Peak TFLOP/s of dense 16-bit matrix products, by the vendors' data sheets."""
USED = 0.4
"""Share of the peak that well-tuned training reaches."""


def step_time_s(device: str, count: int, parameters: float, tokens: float) -> float:
    """Estimated step time: six operations per parameter and token, forward and backward."""
    return 6.0 * parameters * tokens / (count * DENSE_TFLOPS[device] * 1e12 * USED)
