"""Models people train: tied, frozen, shared and odd tensors, and what join refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from islands import (
    assert_same,
    batches,
    loss_of,
    small_model,
    tensors_of,
    together,
    train,
    versions,
)
from learner_runs import DECOUPLED, EXACT, NOTHING_UNSEEN, adamw, join, sgd, train_until
from torch import Tensor, nn

import skerry
from skerry.config import SyncConfig
from skerry.syncer.storage.run_folder import read_identity, read_model
from skerry.tensors.model import model_tensors

pytestmark = NOTHING_UNSEEN


def test_a_bf16_island_without_progress_gives_exactly_nothing(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    before = read_model(folder)
    model = small_model(seed=8).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with join(start_syncer(folder).address, model, optimizer):
        train_until(lambda: min(versions(folder)) >= 2, model, optimizer)
    # The island holds rounded weights; the run's own are not rounded by that.
    assert_same(read_model(folder), before)
    assert_same(tensors_of(model), {name: tensor.to(torch.bfloat16) for name, tensor in before.items()})


def test_bf16_parameters_train(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model().to(torch.bfloat16), DECOUPLED)
    model = small_model(seed=8).to(torch.bfloat16)
    optimizer = sgd(model)
    with join(start_syncer(folder).address, model, optimizer):
        train_until(lambda: min(versions(folder)) >= 4, model, optimizer)
    found = read_model(folder)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    test = batches(9, 1)[0]
    assert loss_of(model, test) < loss_of(small_model().to(torch.bfloat16), test)


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(12, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x))))


def train_tied(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(12, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 12).backward()
        optimizer.step()


def test_tied_weights_are_exchanged_once_and_stay_tied(folder: Path, start_syncer) -> None:
    skerry.create(folder, Tied(), EXACT)
    assert read_identity(folder).layout.numel == 12 * 6 + 6 * 6 + 6
    model = Tied(seed=1)
    optimizer = adamw(model)
    with join(start_syncer(folder).address, model, optimizer):
        train_tied(model, optimizer, 9)
        assert model.head.weight is model.embedding.weight
    plain = Tied()
    train_tied(plain, adamw(plain), 9)
    assert_same(read_model(folder), tensors_of(plain), 1e-5)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def frozen_first_layer(seed: int = 3) -> nn.Module:
    model = small_model(seed)
    model[0].requires_grad_(False)
    return model


def test_frozen_parameters_are_the_creators_and_never_move(folder: Path, start_syncer) -> None:
    skerry.create(folder, frozen_first_layer(), DECOUPLED)
    model = frozen_first_layer(seed=8)
    optimizer = adamw(model)
    with join(start_syncer(folder).address, model, optimizer):
        assert torch.equal(model[0].weight, frozen_first_layer()[0].weight)
        train_until(lambda: min(versions(folder)) >= 3, model, optimizer)
    found = read_model(folder)
    for name in ("0.weight", "0.bias"):
        assert torch.equal(model.get_parameter(name), frozen_first_layer().get_parameter(name))
        assert torch.equal(found[name], frozen_first_layer().get_parameter(name))
    assert not torch.equal(found["2.weight"], frozen_first_layer()[2].weight)


def with_batch_norm(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


def test_running_statistics_are_averaged_by_their_own_rule(folder: Path, start_syncer) -> None:
    """Two islands in lock-step, each sees its own data. An outer step with momentum would overshoot the statistics."""
    sync = SyncConfig(
        fragments=1, every=2, overlap=0, wait=True, quorum=0, outer_lr=0.5, outer_momentum=0.9, send="fp32", start_with=2
    )
    skerry.create(folder, with_batch_norm(), sync)
    address = start_syncer(folder).address
    models = [with_batch_norm(), with_batch_norm()]

    def island(index: int) -> None:
        optimizer = torch.optim.SGD(models[index].parameters(), lr=0.0)
        learner = join(address, models[index], optimizer, f"island-{index}", tokens_per_step=4)
        train(models[index], optimizer, batches(index, 4))
        learner.leave(timeout_s=30)

    together(lambda: island(0), lambda: island(1))
    # With a learning rate of zero the weights stand still, so the statistics depend on data alone.
    reference = [with_batch_norm(), with_batch_norm()]
    for turn in range(2):
        for index, model in enumerate(reference):
            for batch in batches(index, 4)[2 * turn : 2 * turn + 2]:
                loss_of(model, batch)
        for name in ("running_mean", "running_var"):
            mean = sum(getattr(model[1], name) for model in reference) / 2
            for model in reference:
                getattr(model[1], name).copy_(mean)
    found = read_model(folder)
    expected = tensors_of(reference[0])
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
        for model in models:
            torch.testing.assert_close(model.get_buffer(name), expected[name], rtol=1e-5, atol=1e-6)
    # How many batches an island has seen is its own business.
    assert [int(model[1].num_batches_tracked) for model in models] == [4, 4]
    assert int(found["1.num_batches_tracked"]) == 0
    assert torch.equal(found["0.weight"], with_batch_norm()[0].weight)


def test_batches_tracked_start_from_the_creators_count(folder: Path, start_syncer) -> None:
    creator = with_batch_norm()
    for batch in batches(5, 7):
        loss_of(creator, batch)
    skerry.create(folder, creator, DECOUPLED)
    model = with_batch_norm(seed=8)
    optimizer = sgd(model)
    with join(start_syncer(folder).address, model, optimizer):
        assert_same(tensors_of(model), tensors_of(creator))
        train(model, optimizer, batches(0, 3))
    assert int(model[1].num_batches_tracked) == 10


class Wrapped(nn.Module):
    """A module with a compiled part."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        self.inner = small_model(seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def compiled_inside(seed: int = 3) -> nn.Module:
    model = Wrapped(seed)
    model.inner = torch.compile(model.inner, backend="eager")
    return model


@pytest.mark.parametrize(
    "plain, compiled",
    [
        (small_model, lambda seed: torch.compile(small_model(seed), backend="eager")),
        (Wrapped, compiled_inside),
        (Wrapped, lambda seed: torch.compile(compiled_inside(seed), backend="eager")),
    ],
    ids=["whole", "a part", "nested"],
)
def test_a_compiled_model_takes_part_under_its_plain_names(folder: Path, start_syncer, plain, compiled) -> None:
    skerry.create(folder, plain(), EXACT)
    model = compiled(8)
    assert [spec.name for spec, _ in model_tensors(model)] == [name for name, _ in plain().named_parameters()]
    optimizer = adamw(model)
    with join(start_syncer(folder).address, model, optimizer):
        train(model, optimizer, batches(0, 6))
    expected = plain()
    train(expected, adamw(expected), batches(0, 6))
    assert_same(read_model(folder), tensors_of(expected), 1e-5)


def test_parameters_that_are_not_contiguous_are_read_and_written_in_place(folder: Path, start_syncer) -> None:
    def transposed(seed: int = 3) -> nn.Module:
        model = small_model(seed)
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        assert not model[0].weight.is_contiguous()
        return model

    skerry.create(folder, transposed(), EXACT)
    assert_same(read_model(folder), tensors_of(small_model()))
    model = transposed(seed=8)
    optimizer = adamw(model)
    where = model[0].weight.data_ptr()
    with join(start_syncer(folder).address, model, optimizer):
        train(model, optimizer, batches(0, 9))
    assert model[0].weight.data_ptr() == where and not model[0].weight.is_contiguous()
    plain = small_model()
    train(plain, adamw(plain), batches(0, 9))
    assert_same(read_model(folder), tensors_of(plain), 1e-5)
    assert_same(tensors_of(model), tensors_of(plain), 1e-5)
