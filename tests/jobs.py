"""A tiny training job for tests with real processes. A step takes a few milliseconds."""

from __future__ import annotations

import json
from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "width": 32, "heads": 2, "context": 32},
    "train": {"batch": 4},
    "sync": {"fragments": 4, "every": 6},
    "islands": {"count": 3},
    "eval": {"every_tokens": 10**12, "tokens": 2048, "final_tokens": 2048, "sample_tokens": 0},
}


def tiny_job(tokens: int, *, begin_share: float = 0.0, **changes: dict[str, Any]) -> str:
    """The job as TOML, with changed settings by table."""
    lines = [f"begin_share = {begin_share}"]
    for table, defaults in DEFAULTS.items():
        settings = {**defaults, **({"tokens": tokens} if table == "train" else {}), **changes.get(table, {})}
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    return "\n".join(lines) + "\n"
