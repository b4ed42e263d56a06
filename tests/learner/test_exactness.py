"""The cases in which decoupled training must equal something simpler, with real sockets and files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import skerry
from skerry.config import SyncConfig
from skerry.syncer.storage.run_folder import read_model
from skerry.tensors.merge import FragmentState, nesterov


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(island: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + island)
    xs = [torch.randn(4, 6, generator=generator) for _ in range(steps)]
    return [(x, x.square().mean(1, keepdim=True)) for x in xs]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def run_islands(address: str, count: int, steps: int, make_optimizer) -> list[nn.Module]:
    """`count` islands as threads of this process, each with its own model and data."""
    models = [small_model() for _ in range(count)]
    errors: list[BaseException] = []

    def island(index: int) -> None:
        try:
            model = models[index]
            optimizer = make_optimizer(model)
            learner = skerry.join(address, model, optimizer, name=f"island-{index}", timeout_s=30)
            train(model, optimizer, batches(index, steps))
            learner.leave(timeout_s=30)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=island, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return models


def assert_same(actual: dict[str, Tensor], expected: nn.Module, tolerance: float = 1e-6) -> None:
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fragments, every", [(1, 1), (3, 3), (2, 5)])
def test_one_learner_without_overlap_equals_plain_training(tmp_path: Path, start_syncer, fragments: int, every: int) -> None:
    sync = SyncConfig(
        fragments=fragments, every=every, overlap=0, wait=True, quorum=0, outer_lr=1.0, outer_momentum=0.0, send="fp32"
    )
    skerry.create(tmp_path / "run", small_model(), sync)
    syncer = start_syncer(tmp_path / "run")
    make = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)  # noqa: E731
    [island] = run_islands(syncer.address, 1, 30, make)
    plain = small_model()
    train(plain, make(plain), batches(0, 30))
    assert_same(read_model(tmp_path / "run"), plain)
    assert_same(island.state_dict(), plain)


def test_learners_that_merge_every_step_equal_data_parallel_sgd(tmp_path: Path, start_syncer) -> None:
    islands, steps = 3, 25
    sync = SyncConfig(
        fragments=1, every=1, overlap=0, wait=True, quorum=0, merge="mean", outer_lr=1.0, outer_momentum=0.0,
        send="fp32", start_with=islands,
    )  # fmt: skip
    skerry.create(tmp_path / "run", small_model(), sync)
    syncer = start_syncer(tmp_path / "run")
    make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    models = run_islands(syncer.address, islands, steps, make)

    reference = small_model()
    optimizer = make(reference)
    data = [batches(index, steps) for index in range(islands)]
    for step in range(steps):
        optimizer.zero_grad()
        for island in range(islands):
            x, y = data[island][step]
            ((reference(x) - y).square().mean() / islands).backward()
        optimizer.step()
    assert_same(read_model(tmp_path / "run"), reference)
    for model in models:
        assert_same(model.state_dict(), reference)


@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (1.0, 0.6), (0.3, 0.5)])
def test_outer_step_equals_torch_nesterov_sgd(lr: float, momentum: float) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=True)
    state = FragmentState.fresh(parameter.detach().clone())
    for _ in range(20):
        gradient = torch.randn(1000)
        parameter.grad = gradient.clone()
        optimizer.step()
        state = nesterov(state, gradient, lr, momentum)
        assert torch.equal(state.values, parameter.detach())
