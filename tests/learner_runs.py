"""Small real runs for tests of learners: models, optimizers and loops people write."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from islands import batches, poll, small_model, together, train
from torch import nn

import skerry
from skerry.config import SyncConfig

# One island, merged at every turn with an outer step that takes its weights over: the run must equal plain training.
EXACT = SyncConfig(
    fragments=3, every=3, overlap=0, wait=True, quorum=0, outer_lr=1.0, outer_momentum=0.0, send="fp32", merge="mean"
)
# Nobody waits.
DECOUPLED = SyncConfig(fragments=2, every=4, overlap=1, quorum=1, outer_lr=1.0, outer_momentum=0.0, send="fp32", merge="mean")

NOTHING_UNSEEN = [
    pytest.mark.usefixtures("nothing_is_left_behind"),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::ResourceWarning"),
]
"""What nobody catches in a thread, a task or a finalizer fails the test, and so does a thread that is left running."""

MakeOptimizer = Callable[[nn.Module], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": adamw,
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "Muon and AdamW": muon_and_adamw,
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
}


JOINED: list[skerry.Learner] = []


def join(address: str, model: nn.Module, optimizer: Any, name: str = "island-0", **more: Any) -> skerry.Learner:
    learner = skerry.join(address, model, optimizer, name=name, timeout_s=30, **more)
    JOINED.append(learner)
    return learner


def train_until(done: Callable[[], Any], model: nn.Module, optimizers: Any, island: int = 0) -> int:
    """Train on and on until something has come about. Returns the steps taken."""
    data = batches(island, 50)
    steps = 0

    def more() -> bool:
        nonlocal steps
        steps += train(model, optimizers, [data[steps % 50]])
        return bool(done())

    poll(more, "training to get somewhere")
    return steps


class Killed(Exception):
    """Nothing Skerry knows how to handle: it ends the syncer where it stands."""


def two_islands(address: str, steps: int, pause: Callable[[int], None] = lambda step: None) -> None:
    """The same data, weights and order whenever this is called."""

    def island(index: int) -> None:
        model = small_model()
        optimizer = sgd(model)
        learner = join(address, model, optimizer, f"island-{index}", tokens_per_step=2 + index)
        for number, batch in enumerate(batches(index, steps)):
            pause(number)
            train(model, optimizer, [batch])
        learner.leave(timeout_s=30)

    together(lambda: island(0), lambda: island(1))


LOCK_STEP = SyncConfig(fragments=2, every=4, overlap=0, wait=True, quorum=0, start_with=2)


OVERLAPPING = dataclasses.replace(LOCK_STEP, fragments=1, overlap=2)
