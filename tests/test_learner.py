"""Learners attached to the training loops people write, each in a small real run: sockets, files, threads."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from islands import (
    RawLearner,
    assert_same,
    batches,
    learner_threads,
    loss_of,
    poll,
    small_model,
    tape,
    tensors_of,
    together,
    train,
    versions,
)
from torch import Tensor, nn

import skerry
from skerry.admin import close_run
from skerry.config import SyncConfig
from skerry.core.exchange import Question
from skerry.errors import ConfigError, JoinRefused, WireError
from skerry.learner import connection as connections
from skerry.learner.background import DaemonWorkers
from skerry.learner.replica import Replica
from skerry.learner.seams import Seams
from skerry.syncer.storage.run_folder import read_identity, read_model, read_standing
from skerry.syncer.storage.store import RunStore
from skerry.tensors.fragments import split
from skerry.tensors.model import model_tensors

# One island, merged at every turn with an outer step that takes its weights over: the run must equal plain training.
EXACT = SyncConfig(
    fragments=3, every=3, overlap=0, wait=True, quorum=0, outer_lr=1.0, outer_momentum=0.0, send="fp32", merge="mean"
)
# Nobody waits.
DECOUPLED = SyncConfig(fragments=2, every=4, overlap=1, quorum=1, outer_lr=1.0, outer_momentum=0.0, send="fp32", merge="mean")

# What nobody catches in a thread, a task or a finalizer fails the test.
pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.filterwarnings("error::ResourceWarning"),
]

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


JOINED: list[skerry.Learner] = []


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """A test that passes leaves none of our threads running; one that fails must not take others with it."""
    yield
    running = learner_threads()
    for learner in JOINED:
        learner.detach()
    JOINED.clear()
    assert not running


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


# ---------------------------------------------------------------- optimizers


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_island_in_lock_step_equals_plain_training_with(folder: Path, start_syncer, make: MakeOptimizer) -> None:
    skerry.create(folder, small_model(), EXACT)
    model = small_model(seed=8)  # other weights than the run's: joining replaces them
    optimizers = make(model)
    learner = join(start_syncer(folder).address, model, optimizers)
    assert train(model, optimizers, batches(0, 12)) == learner.step == 12
    learner.leave(timeout_s=30)
    plain = small_model()
    train(plain, make(plain), batches(0, 12))
    assert_same(read_model(folder), tensors_of(plain), 1e-5)
    assert_same(tensors_of(model), tensors_of(plain), 1e-5)
    assert sum(versions(folder)) >= 12


def test_what_was_set_aside_in_lock_step_is_given_up_with_the_merge_that_has_it(folder: Path, start_syncer) -> None:
    """It keeps a copy of a fragment on the device, and the version before."""
    skerry.create(folder, small_model(), EXACT)
    model = small_model()
    optimizers = adamw(model)
    learner = join(start_syncer(folder).address, model, optimizers)
    held: list[int] = []
    for batch in batches(0, 12):
        train(model, optimizers, [batch])
        held.append(len(learner._session.staged))
    learner.leave(timeout_s=30)
    assert held == [0] * 12


def test_an_idle_worker_holds_nothing_of_what_it_did() -> None:
    workers = DaemonWorkers(1, "worker")
    given, found = nn.Linear(1, 1), nn.Linear(1, 1)
    gone = [weakref.ref(given), weakref.ref(found)]
    workers.submit(lambda given, found: found, given, found).result()
    del given, found
    poll(lambda: all(reference() is None for reference in gone), "the worker to let go")
    workers.shutdown()


@pytest.mark.parametrize("make", [adamw, muon_and_adamw], ids=["AdamW", "Muon and AdamW"])
def test_decoupled_islands_learn_together_with(folder: Path, start_syncer, make: MakeOptimizer) -> None:
    sync = SyncConfig(fragments=3, every=6, overlap=1, quorum=1, start_with=2, outer_lr=0.9, outer_momentum=0.0)
    skerry.create(folder, small_model(), sync)
    address = start_syncer(folder).address

    def island(index: int) -> None:
        model = small_model()
        optimizers = make(model)
        learner = join(address, model, optimizers, f"island-{index}")
        train(model, optimizers, batches(index, 60))
        train_until(lambda: min(versions(folder)) >= 3, model, optimizers, index)
        learner.leave(timeout_s=30)

    together(lambda: island(0), lambda: island(1))
    test = batches(9, 1)[0]
    trained = small_model()
    trained.load_state_dict(read_model(folder))
    assert loss_of(trained, test) < 0.8 * loss_of(small_model(), test)
    names = {share["learner"] for merged in tape(folder, "merged") for share in merged["shares"]}
    assert names == {"island-0", "island-1"}


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_what_one_island_has_when_it_leaves_is_what_the_run_has(folder: Path, start_syncer, steps: int) -> None:
    skerry.create(folder, small_model(), EXACT)
    model = small_model(seed=8)
    optimizer = adamw(model)
    learner = join(start_syncer(folder).address, model, optimizer)
    assert_same(tensors_of(model), tensors_of(small_model()))
    train(model, optimizer, batches(0, steps))
    learner.leave(timeout_s=30)
    assert_same(read_model(folder), tensors_of(model), 1e-6)
    assert not torch.equal(read_model(folder)["0.weight"], small_model()[0].weight)


# ---------------------------------------------------------------- loops


def test_a_step_is_one_optimizer_step_however_many_backward_passes_it_takes(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    optimizer = adamw(model)
    with join(start_syncer(folder).address, model, optimizer, tokens_per_step=8) as learner:
        for pair in pairs(batches(0, 12)):
            optimizer.zero_grad()
            for batch in pair:
                (loss_of(model, batch) / 2).backward()
            optimizer.step()
        assert learner.step == 6
    assert sum(share["tokens"] for share in last_shares(folder)) <= 8 * 6


def pairs(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), 2):
        yield items[start : start + 2]


def last_shares(folder: Path) -> list[dict[str, Any]]:
    return tape(folder, "merged")[-1]["shares"]


def test_a_step_the_grad_scaler_skips_is_not_counted(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    taken = skipped = 0
    with join(start_syncer(folder).address, model, optimizer) as learner:
        for number, batch in enumerate(batches(0, 12)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if number % 3 == 1:
                next(model.parameters()).grad.view(-1)[0] = float("inf")
                skipped += 1
            else:
                taken += 1
            scaler.step(optimizer)
            scaler.update()
            assert learner.step == taken
    assert skipped == 4 and taken == 8
    assert all(bool(tensor.isfinite().all()) for tensor in read_model(folder).values())
    assert max(share["steps"] for merged in tape(folder, "merged") for share in merged["shares"]) <= taken


@pytest.mark.parametrize("first", ["scheduler", "join"])
def test_a_scheduler_keeps_its_pace(folder: Path, start_syncer, first: str) -> None:
    skerry.create(folder, small_model(), EXACT)
    address = start_syncer(folder).address
    model = small_model()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner = join(address, model, optimizer) if first == "join" else None
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        learner = learner or join(address, model, optimizer)
        rates = []
        for batch in batches(0, 10):
            train(model, optimizer, [batch])
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    assert learner.step == 10
    learner.leave(timeout_s=30)
    plain = small_model()
    optimizer = sgd(plain)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    expected = []
    for batch in batches(0, 10):
        train(plain, optimizer, [batch])
        scheduler.step()
        expected.append(scheduler.get_last_lr()[0])
    assert rates == expected
    assert_same(read_model(folder), tensors_of(plain), 1e-5)


def test_a_step_that_raises_deadlocks_neither_later_steps_nor_leaving(folder: Path, start_syncer) -> None:
    def stumble() -> Tensor:
        raise ArithmeticError("out of memory, say")

    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    optimizer = sgd(model)
    learner = join(start_syncer(folder).address, model, optimizer)
    train(model, optimizer, batches(0, 5))
    for _ in range(2):
        before = learner.step
        with pytest.raises(ArithmeticError):
            optimizer.step(stumble)
        assert learner.step == before
        at_least = min(versions(folder)) + 2
        steps = train_until(lambda n=at_least: min(versions(folder)) >= n, model, optimizer)
        assert learner.step == before + steps
    with pytest.raises(ArithmeticError):
        optimizer.step(stumble)
    learner.leave(timeout_s=30)
    optimizer.step()


DIES_IN_A_STEP = """
import sys, torch, skerry
from islands import batches, small_model, train

model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
learner = skerry.join(sys.argv[1], model, optimizer, name="dying", timeout_s=30)
train(model, optimizer, batches(0, 3))

def closure():
    print("in the step", flush=True)
    sys.stdin.readline()
    raise ArithmeticError("out of memory, say")

optimizer.step(closure)
"""


def test_a_script_that_dies_in_a_step_ends(folder: Path, start_syncer) -> None:
    """Nothing of ours keeps the interpreter, not even an exchange that waits for the step to be over."""
    skerry.create(folder, small_model(), DECOUPLED)
    address = start_syncer(folder).address
    process = subprocess.Popen(
        [sys.executable, "-c", DIES_IN_A_STEP, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])},
    )
    model = small_model()
    optimizer = sgd(model)
    learner = join(address, model, optimizer, "healthy")
    try:
        assert process.stdout.readline() == "in the step\n"
        # The other one goes on, so the one in its step is asked for fragments.
        train_until(lambda: min(versions(folder)) >= 3, model, optimizer)
        _, errors = process.communicate("die\n", timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1 and errors.endswith("ArithmeticError: out of memory, say\n")
    learner.leave(timeout_s=30)


def test_several_optimizers_may_step_in_any_rhythm(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), EXACT)
    model = small_model()
    first, second = muon_and_adamw(model)
    learner = join(start_syncer(folder).address, model, [first, second])
    loss_of(model, batches(0, 1)[0]).backward()
    first.step()
    assert learner.step == 0  # the other one has not stepped
    second.step()
    assert learner.step == 1
    first.step()
    first.step()  # again before the other: the step before was one of its own
    assert learner.step == 2
    second.step()
    assert learner.step == 3
    learner.leave(timeout_s=30)
    assert_same(read_model(folder), tensors_of(model), 1e-5)


def test_an_optimizer_that_extends_another_counts_one_step(folder: Path, start_syncer) -> None:
    """torch hooks the step of the class and that of its base."""

    class Extended(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    sgd(model).step()
    optimizer = Extended(model.parameters(), lr=0.05)
    with join(start_syncer(folder).address, model, optimizer) as learner:
        train(model, optimizer, batches(0, 4))
        assert learner.step == 4


def test_one_optimizer_of_two_may_be_skipped(folder: Path, start_syncer) -> None:
    """A scaler skips optimizers one by one. Later steps are whole again, and the exchange gets its snapshots."""
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    first = torch.optim.SGD(model[0].parameters(), lr=0.01)
    second = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.01)
    learner = join(start_syncer(folder).address, model, [first, second])
    for skipped in (first, second):
        train(model, [o for o in (first, second) if o is not skipped], batches(0, 1))
        before = learner.step
        at_least = min(versions(folder)) + 2
        steps = train_until(lambda n=at_least: min(versions(folder)) >= n, model, [first, second])
        assert before + steps <= learner.step <= before + steps + 1
    learner.leave(timeout_s=30)


# ---------------------------------------------------------------- models


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


# ---------------------------------------------------------------- joining and leaving


def test_without_a_syncer_joining_gives_up_after_its_timeout(free_port: int) -> None:
    model = small_model()
    before = tensors_of(model)
    with pytest.raises(WireError, match=f"no syncer answered at 127.0.0.1:{free_port} within 1 s: unavailable"):
        skerry.join(f"127.0.0.1:{free_port}", model, adamw(model), timeout_s=1.0)
    assert_same(tensors_of(model), before)
    assert not learner_threads()


def test_a_syncer_that_comes_late_is_found(folder: Path, start_syncer, free_port: int) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model(seed=8)

    def island() -> None:
        join(f"127.0.0.1:{free_port}", model, adamw(model)).leave(timeout_s=30)

    def syncer() -> None:
        poll(learner_threads, "the learner to look for its syncer")
        start_syncer(folder, free_port)

    together(island, syncer)
    assert_same(tensors_of(model), tensors_of(small_model()))


def test_another_model_is_refused(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = nn.Linear(3, 3)
    before = tensors_of(model)
    with pytest.raises(JoinRefused, match="model mismatch: the run has tensor '0.weight' \\[16, 6\\], this learner does not"):
        join(start_syncer(folder).address, model, sgd(model))
    assert_same(tensors_of(model), before)
    poll(lambda: not learner_threads(), "threads to end")


def test_a_run_that_is_closing_takes_nobody_in(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), dataclasses.replace(DECOUPLED, budget_tokens=10))
    syncer = start_syncer(folder)

    def late() -> None:
        model = small_model()
        with pytest.raises(WireError, match="turned late away: the run is over"):
            join(syncer.address, model, sgd(model), "late")

    async def last_questions_open() -> None:
        async with RawLearner(syncer.address, small_model(), 2, name="slow") as raw:
            await raw.join()
            raw.report(1, tokens=20)
            await raw.receive("stop")
            await asyncio.get_running_loop().run_in_executor(None, late)

    asyncio.run(last_questions_open())


@pytest.mark.parametrize(
    "optimizer", [[], None, "scheduler", [None]], ids=["none given", "None", "a scheduler", "a list of None"]
)
def test_what_is_no_optimizer_is_refused_at_once(optimizer: Any, free_port: int) -> None:
    model = small_model()
    if optimizer == "scheduler":
        optimizer = torch.optim.lr_scheduler.ConstantLR(sgd(model))
    with pytest.raises((ValueError, TypeError)):
        skerry.join(f"127.0.0.1:{free_port}", model, optimizer, timeout_s=30)
    assert not learner_threads()


@pytest.mark.parametrize("tokens", [-1, 2.5, float("nan"), None])
def test_a_count_that_is_no_count_is_refused_where_it_is_given(folder: Path, start_syncer, tokens: Any) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    with join(start_syncer(folder).address, model, sgd(model)) as learner:
        with pytest.raises(ValueError, match="tokens must be a whole number >= 0"):
            learner.count(tokens)


def test_dropping_out_is_quick_and_whatever_was_not_given_is_lost(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), dataclasses.replace(DECOUPLED, every=1000))
    syncer = start_syncer(folder)
    model = small_model()
    optimizer = sgd(model)
    learner = join(syncer.address, model, optimizer)
    train(model, optimizer, batches(0, 3))
    with pytest.raises(ArithmeticError), learner:
        raise ArithmeticError
    poll(lambda: not learner_threads(), "threads to end", timeout_s=5)
    learner.detach()
    train(model, optimizer, batches(0, 3))
    assert learner.step == 3
    syncer.stop()
    assert [entry["learner"] for entry in tape(folder, "disconnected")] == ["island-0"]
    assert not tape(folder, "left")
    assert_same(read_model(folder), tensors_of(small_model()))


def test_another_thread_may_leave_after_a_step_raised(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    optimizer = sgd(model)
    learner = join(start_syncer(folder).address, model, optimizer)

    def stumble() -> Tensor:
        raise ArithmeticError

    def training() -> None:
        train(model, optimizer, batches(0, 3))
        with pytest.raises(ArithmeticError):
            optimizer.step(stumble)

    together(training)
    learner.leave(timeout_s=30)


def test_a_second_process_of_the_same_name_ends_the_first(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    address = start_syncer(folder).address
    models = [small_model(), small_model()]
    optimizers = [sgd(model) for model in models]
    first = join(address, models[0], optimizers[0])
    second = join(address, models[1], optimizers[1])
    poll(lambda: first.finished, "the first to be told")
    assert first.slot == second.slot and not second.finished
    train(models[0], optimizers[0], batches(0, 3))  # its loop may go on, but nothing of it counts
    with pytest.raises(JoinRefused, match="another process joined as island-0"):
        first.leave(timeout_s=30)
    assert isinstance(first.failure, JoinRefused)
    train_until(lambda: min(versions(folder)) >= 1, models[1], optimizers[1])
    second.leave(timeout_s=30)


def test_leaving_twice_is_leaving_once_and_the_optimizer_is_free_again(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder)
    model = small_model()
    optimizer = adamw(model)
    learner = join(syncer.address, model, optimizer)
    train(model, optimizer, batches(0, 5))
    learner.leave(timeout_s=30)
    learner.leave(timeout_s=30)
    poll(lambda: not learner_threads(), "threads to end")
    assert learner.finished and learner.failure is None
    train(model, optimizer, batches(0, 3))
    assert learner.step == 5
    # It may come back, under the same name.
    again = join(syncer.address, model, optimizer)
    train(model, optimizer, batches(0, 3))
    again.leave(timeout_s=30)
    syncer.stop()
    assert [entry["learner"] for entry in tape(folder, "left")] == ["island-0", "island-0"]


def test_the_context_leaves_at_its_end(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), EXACT)
    syncer = start_syncer(folder)
    model = small_model()
    optimizer = adamw(model)
    with join(syncer.address, model, optimizer) as learner:
        train(model, optimizer, batches(0, 5))
        assert learner.connected and not learner.finished
    assert_same(read_model(folder), tensors_of(model), 1e-6)
    syncer.stop()
    assert [entry["learner"] for entry in tape(folder, "left")] == ["island-0"]


def test_counted_tokens_are_the_weights_of_a_merge(folder: Path, start_syncer) -> None:
    sync = SyncConfig(fragments=1, every=4, overlap=0, wait=True, quorum=0, start_with=3, send="fp32")
    skerry.create(folder, small_model(), sync)
    syncer = start_syncer(folder)

    def island(index: int, tokens_per_step: int, counted: list[int]) -> None:
        model = small_model()
        optimizer = sgd(model)
        learner = join(syncer.address, model, optimizer, f"island-{index}", tokens_per_step=tokens_per_step)
        for number, batch in enumerate(batches(index, 4)):
            for tokens in counted[number : number + 1]:
                learner.count(tokens - 1)
                learner.count(1)
            learner.report(0.5)
            train(model, optimizer, [batch])
        assert learner.run_tokens >= 0 and learner.progress == 0.0
        learner.leave(timeout_s=30)

    together(lambda: island(0, 10, []), lambda: island(1, 1, [5, 7, 9, 11]), lambda: island(2, 10, [100]))
    shares = {
        share["learner"]: (share["steps"], share["tokens"], share["weight"]) for share in tape(folder, "merged")[0]["shares"]
    }
    # The weight is tokens × tokens per step.
    assert shares == {
        "island-0": (4, 40, 40 * 10.0),
        "island-1": (4, 32, 32 * 8.0),
        "island-2": (4, 130, 130 * 32.5),
    }


def test_a_spent_budget_ends_the_run_and_every_island_is_told(folder: Path, start_syncer) -> None:
    sync = SyncConfig(fragments=2, every=4, overlap=1, quorum=1, start_with=2, budget_tokens=400)
    skerry.create(folder, small_model(), sync)
    syncer = start_syncer(folder)

    def island(index: int) -> float:
        model = small_model()
        optimizer = sgd(model)
        learner = join(syncer.address, model, optimizer, f"island-{index}", tokens_per_step=4)
        train_until(lambda: learner.finished, model, optimizer, index)
        learner.leave(timeout_s=30)
        return learner.progress

    assert together(lambda: island(0), lambda: island(1)) == [1.0, 1.0]
    assert syncer.wait()
    assert tape(folder, "ended")[0]["tokens"] >= 400


# ---------------------------------------------------------------- the syncer goes away


def test_training_goes_on_without_the_syncer_and_merging_when_it_is_back(folder: Path, start_syncer, caplog) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder)
    model = small_model()
    optimizer = sgd(model)
    learner = join(syncer.address, model, optimizer)
    train_until(lambda: min(versions(folder)) >= 2, model, optimizer)
    syncer.stop()
    before = versions(folder)
    with caplog.at_level(logging.WARNING, "skerry.learner"):
        poll(lambda: not learner.connected, "the learner to notice")
    assert "training goes on" in caplog.text
    at = learner.step
    weights = tensors_of(model)
    assert train(model, optimizer, batches(0, 25)) == 25
    assert learner.step == at + 25 and not learner.connected and learner.failure is None
    assert any(not torch.equal(weights[name], tensor) for name, tensor in tensors_of(model).items())
    assert versions(folder) == before

    start_syncer(folder, syncer.port)
    train_until(lambda: all(now > then for now, then in zip(versions(folder), before, strict=True)), model, optimizer)
    assert learner.connected
    learner.leave(timeout_s=30)


class Killed(Exception):
    """Nothing Skerry knows how to handle: it ends the syncer where it stands."""


def die_in_commit(monkeypatch: pytest.MonkeyPatch, number: int, when: str) -> None:
    """The syncer dies in that merge of the run, before or after the version is durable. Either way nobody is told."""
    real = RunStore.commit
    done = 0

    def commit(self: RunStore, merges: Any, *rest: Any) -> None:
        nonlocal done
        dies = done < number <= done + len(merges)
        done += len(merges)
        if dies and when == "before":
            raise Killed
        real(self, merges, *rest)
        if dies:
            raise Killed

    monkeypatch.setattr(RunStore, "commit", commit)


def test_lock_step_does_not_wait_for_an_island_whose_weights_are_no_numbers(folder: Path, start_syncer) -> None:
    """Its answers cannot be used, and that is an answer too. The merges it gets make it whole again."""
    skerry.create(folder, small_model(), dataclasses.replace(LOCK_STEP, fragments=1, every=2))
    address = start_syncer(folder).address
    models = [small_model(), small_model()]

    def island(index: int) -> None:
        model = models[index]
        optimizer = sgd(model)
        learner = join(address, model, optimizer, f"island-{index}")
        train(model, optimizer, batches(index, 2))
        if index == 1:
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))
        train(model, optimizer, batches(index, 4))
        learner.leave(timeout_s=30)

    together(lambda: island(0), lambda: island(1))
    assert all(bool(tensor.isfinite().all()) for tensor in [*read_model(folder).values(), *models[1].parameters()])
    assert [len(merged["shares"]) for merged in tape(folder, "merged")][:3] == [2, 1, 2]


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
# Merged at 4 and 8, adopted at 6 and 10. After 11 steps nothing is on its way, so the end does not depend on timing either.
OVERLAPPING = dataclasses.replace(LOCK_STEP, fragments=1, overlap=2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "number, sync, steps",
    [
        (1, LOCK_STEP, 10),  # before anything but who takes part was written down
        (2, LOCK_STEP, 10),
        (5, LOCK_STEP, 10),
        (6, LOCK_STEP, 10),  # the last, of what is handed over when they leave
        (2, OVERLAPPING, 11),
        (3, OVERLAPPING, 11),
    ],
    ids=["1 of 6", "2 of 6", "5 of 6", "6 of 6", "2 of 3, overlapping", "3 of 3, overlapping"],
)
def test_lock_step_with_a_syncer_that_dies_equals_an_uninterrupted_run_bit_for_bit(
    tmp_path: Path, folder: Path, start_syncer, monkeypatch, number: int, sync: SyncConfig, steps: int, when: str
) -> None:
    skerry.create(tmp_path / "uninterrupted", small_model(), sync)
    two_islands(start_syncer(tmp_path / "uninterrupted").address, steps)
    skerry.create(folder, small_model(), sync)
    syncer = start_syncer(folder)
    die_in_commit(monkeypatch, number, when)

    def bring_back() -> None:
        with pytest.raises(Killed):
            syncer.wait()
        assert sum(versions(folder)) == (number if when == "after" else number - 1)
        start_syncer(folder, syncer.port)

    together(lambda: two_islands(syncer.address, steps), bring_back)
    assert len(tape(folder, "syncer_started")) == 2
    assert versions(folder) == versions(tmp_path / "uninterrupted")
    assert_same(read_model(folder), read_model(tmp_path / "uninterrupted"))


@pytest.mark.parametrize("step", [0, 5])
def test_lock_step_with_a_syncer_that_is_stopped_equals_an_uninterrupted_run_bit_for_bit(
    tmp_path: Path, folder: Path, start_syncer, step: int
) -> None:
    skerry.create(tmp_path / "uninterrupted", small_model(), LOCK_STEP)
    two_islands(start_syncer(tmp_path / "uninterrupted").address, 10)
    skerry.create(folder, small_model(), LOCK_STEP)
    syncer = start_syncer(folder)
    paused, stopped = threading.Barrier(3), threading.Event()

    def pause(number: int) -> None:
        if number == step:
            paused.wait(30)
            assert stopped.wait(30)

    def stop() -> None:
        paused.wait(30)
        syncer.stop()
        stopped.set()
        start_syncer(folder, syncer.port)

    together(lambda: two_islands(syncer.address, 10, pause), stop)
    assert versions(folder) == versions(tmp_path / "uninterrupted")
    assert_same(read_model(folder), read_model(tmp_path / "uninterrupted"))


# ---------------------------------------------------------------- carry


def countdown() -> nn.Module:
    """Every step takes exactly 1/1024 off every weight, without rounding: weights tell how many steps are in them."""
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 1024).round() / 1024)
    return model


def count_down(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()


@pytest.mark.parametrize("interrupted", [False, True], ids=["one syncer", "two syncers"])
@pytest.mark.parametrize("every, overlap, wait", [(1, 0, False), (3, 1, False), (6, 4, True)])
def test_carry_loses_no_step_and_counts_none_twice(
    folder: Path, start_syncer, every: int, overlap: int, wait: bool, interrupted: bool
) -> None:
    sync = dataclasses.replace(DECOUPLED, adopt="carry", every=every, overlap=overlap, wait=wait, quorum=0 if wait else 1)
    skerry.create(folder, countdown(), sync)
    syncer = start_syncer(folder)
    model = countdown()
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 1024)
    learner = join(syncer.address, model, optimizer)
    steps = 0

    def more() -> None:
        nonlocal steps
        count_down(model, optimizer)
        steps += 1

    def until_merged() -> None:
        at_least = min(versions(folder)) + 3
        poll(lambda: more() or min(versions(folder)) >= at_least, "merges")

    until_merged()
    if interrupted:
        syncer.stop()
        for _ in range(0 if wait else 5):
            more()
        start_syncer(folder, syncer.port)
        until_merged()
    learner.leave(timeout_s=30)
    expected = {name: tensor - steps / 1024 for name, tensor in tensors_of(countdown()).items()}
    assert_same(read_model(folder), expected)


# ---------------------------------------------------------------- nothing leaks


def test_leaving_ends_every_thread_and_task(folder: Path, start_syncer, recwarn, caplog) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder)
    for _ in range(3):
        model = small_model()
        optimizer = adamw(model)
        learner = join(syncer.address, model, optimizer)
        train(model, optimizer, batches(0, 5))
        learner.leave(timeout_s=30)
        poll(lambda: not learner_threads(), "threads to end")
    syncer.stop()
    JOINED.clear()
    del learner
    gc.collect()
    assert not [str(w.message) for w in recwarn if issubclass(w.category, (ResourceWarning, RuntimeWarning))]
    # gRPC's queue is one for all event loops of a process, and reports events of loops that have ended to those that have
    # not. Only a test has more than one loop.
    complaints = [r.getMessage() for r in caplog.records if r.name == "asyncio" and r.levelno >= logging.ERROR]
    assert not [text for text in complaints if "PollerCompletionQueue" not in text]


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    first = torch.optim.SGD(model[0].parameters(), lr=0.01)
    second = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.01)
    return [first, second]


def test_leaving_after_a_step_of_some_optimizers_hands_over_what_there_is(folder: Path, start_syncer) -> None:
    skerry.create(
        folder, small_model(), SyncConfig(fragments=2, every=1000, overlap=1, quorum=1, outer_lr=1.0, outer_momentum=0.0)
    )
    model = small_model()
    first, second = two_optimizers(model)
    learner = join(start_syncer(folder).address, model, [first, second])
    train(model, [first, second], batches(0, 3))
    first.step()
    learner.leave(timeout_s=8)
    assert versions(folder) == [1, 1]


def test_optimizers_may_step_in_another_order_than_they_were_given(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    first, second = two_optimizers(model)
    learner = join(start_syncer(folder).address, model, [first, second])
    try:
        train(model, [second, first], batches(0, 4))
        assert learner.step == 4
        # A long forward pass: four steps are done, both fragments are due and asked for.
        poll(lambda: min(versions(folder)) >= 1, "the merges of steps 2 and 4", 5)
    finally:
        learner.leave(timeout_s=1)


@pytest.mark.parametrize("critic_starts_late", [False, True])
def test_two_networks_that_are_trained_against_each_other(
    folder: Path, start_syncer, critic_starts_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """While one steps the graph of the other is alive: nothing may be written into it, also if one was skipped at first."""

    def adversaries() -> nn.ModuleDict:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8))
        return nn.ModuleDict({"generator": generator, "critic": nn.Linear(8, 1)})

    skerry.create(folder, adversaries(), SyncConfig(fragments=2, every=2, overlap=1, silence_s=30.0))
    nets = adversaries()
    generator, critic = nets["generator"], nets["critic"]
    of_generator, of_critic = (torch.optim.SGD(net.parameters(), lr=1e-3) for net in (generator, critic))
    with join(start_syncer(folder).address, nets, [of_critic, of_generator]) as learner:
        iterations = 0
        while min(versions(folder)) < 8:
            made = generator(torch.randn(2, 4))
            of_critic.zero_grad()
            (critic(made.detach()) - critic(torch.randn(2, 8))).mean().backward()
            if iterations or not critic_starts_late:
                of_critic.step()
            of_generator.zero_grad()
            critic(made).mean().backward()
            of_generator.step()
            iterations += 1
        assert learner.step == iterations
    assert ("the first optimizer to step is number 2 of 2" in caplog.text) is critic_starts_late


def test_weights_that_were_given_other_memory_end_training_with_a_word(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    optimizer = sgd(model)
    learner = join(start_syncer(folder).address, model, optimizer)
    train_until(lambda: min(versions(folder)) >= 1, model, optimizer)
    model[2].weight.data = model[2].weight.data.clone()
    said = r"2\.weight was moved to other memory after join"
    with pytest.raises(ConfigError, match=said):
        train_until(lambda: min(versions(folder)) >= 100, model, optimizer)
    assert learner.finished and isinstance(learner.failure, ConfigError)
    with pytest.raises(ConfigError, match=said):
        learner.leave(timeout_s=60)


class Smoothed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(6, 1)
        self.register_buffer("level", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.level


def reassigned(model: nn.Module) -> None:
    model.level = model.level * 0.9 + 0.1


def loaded_anew(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("replace", [reassigned, loaded_anew])
def test_tensors_that_were_replaced_end_training_with_a_word(folder: Path, start_syncer, replace) -> None:
    """What stands in the model's place of them would be neither sent nor changed."""
    skerry.create(folder, Smoothed(), DECOUPLED)
    model = Smoothed()
    optimizer = sgd(model)
    learner = join(start_syncer(folder).address, model, optimizer)
    train_until(lambda: min(versions(folder)) >= 1, model, optimizer)
    replace(model)
    with pytest.raises(ConfigError, match="(level|inner.weight|inner.bias) was replaced by another tensor after join"):
        train_until(lambda: min(versions(folder)) >= 100, model, optimizer)
    with pytest.raises(ConfigError, match="replaced"):
        learner.leave(timeout_s=60)


def test_what_is_trained_and_not_exchanged_is_told(folder: Path, start_syncer, caplog: pytest.LogCaptureFixture) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model, beside = small_model(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *beside.parameters()], lr=0.01)
    with join(start_syncer(folder).address, model, optimizer):
        assert "2 of 8 trained tensors are not in the model that joined" in caplog.text


def test_a_model_of_several_ranks_cannot_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(small_model())
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
        with pytest.raises(ConfigError, match="an island is one process"):
            skerry.join("127.0.0.1:1", torch.compile(wrapped, backend="eager"), sgd(wrapped), timeout_s=0.1)
    finally:
        monkeypatch.undo()
        torch.distributed.destroy_process_group()


def test_leaving_comes_before_the_optimizers_state_is_kept(folder: Path, start_syncer, tmp_path: Path, monkeypatch) -> None:
    """To write it may take longer than there is time for a goodbye."""
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    optimizer = adamw(model)
    learner = join(start_syncer(folder).address, model, optimizer, keep=tmp_path)
    train_until(lambda: min(versions(folder)) >= 1, model, optimizer)
    real, heard = learner._courier.keep_now, []

    def keep_now() -> None:
        heard.append(learner._session.goodbye)
        real()

    monkeypatch.setattr(learner._courier, "keep_now", keep_now)
    learner.leave(timeout_s=60)
    assert len(heard) == 1 and heard[0], "the goodbye had come"
    assert list(tmp_path.glob("*.safetensors"))


def test_tensors_nobody_trains_are_put_in_place_once(folder: Path, start_syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that was begun twice may end when training has begun, which then has these tensors in its graphs."""
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    with join(start_syncer(folder).address, model, sgd(model)) as learner:
        loaded: list[object] = []
        monkeypatch.setattr(learner._replica, "load_fixed", loaded.append)
        connection = learner._connection
        fetching = connection.transfers.fetcher.fetch_fixed(DECOUPLED.fragments)
        asyncio.run_coroutine_threadsafe(fetching, connection.background.loop).result(30)
        assert not loaded


def test_certificates_that_cannot_be_read_for_a_moment_do_not_end_an_island(
    folder: Path, start_syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder)
    model = small_model()
    optimizer = sgd(model)
    learner = join(syncer.address, model, optimizer)
    real, failures = connections.open_channel, iter(range(3))

    def open_channel(*arguments: Any) -> Any:
        if next(failures, None) is not None:
            raise ConfigError("TLS cert file island.pem cannot be read: Permission denied")
        return real(*arguments)

    monkeypatch.setattr(connections, "open_channel", open_channel)
    syncer.stop()
    start_syncer(folder, syncer.port)
    merged = min(versions(folder))
    train_until(lambda: min(versions(folder)) >= merged + 2, model, optimizer)
    assert next(failures, None) is None and learner.failure is None
    learner.leave(timeout_s=60)


def test_an_island_whose_link_is_too_thin_for_the_run_says_so(
    folder: Path, start_syncer, caplog: pytest.LogCaptureFixture
) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    with join(start_syncer(folder).address, model, sgd(model)) as learner:
        for _ in range(12):
            learner._connection.transfers.fetcher._came_too_late(1)
    assert caplog.text.count("5 versions of fragment 1 in a row were replaced before they arrived") == 1


def test_nothing_is_read_while_weights_are_held(folder: Path, start_syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    optimizer = sgd(model)
    learner = join(start_syncer(folder).address, model, optimizer)
    connection, real, read = learner._connection, learner._replica.snapshot, []

    def snapshot(fragment: int, at_step: int) -> Any:
        taken = real(fragment, at_step)
        read.append(bool(taken.progress().isfinite().all()))
        return taken

    def asked() -> None:
        with learner._session.lock:
            learner._exchange.asked(Question(0, 1000, 0), False)
        connection.transfers.pump()

    train(model, optimizer, batches(0, 1))
    monkeypatch.setattr(learner._replica, "snapshot", snapshot)
    with learner.hold(), torch.no_grad():
        lent = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        connection.background.call(asked)
        poll(lambda: connection.transfers.contributor._answering, "somebody to want a snapshot")
        assert not read
        for parameter, values in zip(model.parameters(), lent, strict=True):
            parameter.copy_(values)
    poll(lambda: read, "the snapshot")
    with pytest.raises(RuntimeError, match="not inside"), learner.hold(), learner.hold():
        pass
    train_until(lambda: min(versions(folder)) >= 2, model, optimizer)
    learner.leave(timeout_s=30)
    assert all(read) and not tape(folder, "unhealthy")


def test_a_loop_waits_for_a_slow_device_where_a_snapshot_can_still_be_taken(
    folder: Path, start_syncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first optimizer of an inner step, with the gate open: what is asked for meanwhile is the step before, which is
    as good as done, and not one that the device will come to later."""
    skerry.create(folder, small_model(), EXACT)
    model = small_model()
    optimizers = muon_and_adamw(model)
    learner = join(start_syncer(folder).address, model, optimizers)
    replica, waits = learner._replica, []

    def keep_up() -> None:
        waits.append((learner.step, replica.between_steps, learner._in_step))

    monkeypatch.setattr(replica.model_device, "keep_up", keep_up)
    assert train(model, optimizers, batches(0, 3)) == 3
    assert waits == [(0, True, False), (1, True, False), (2, True, False)]
    optimizers[0].step()
    optimizers[0].step()  # the other one was skipped: the step before is found to be done when this one begins
    assert [step for step, *_ in waits[3:]] == [3, 3], "and is waited for before anything of this one counts as done"
    learner.leave(timeout_s=30)


def test_what_is_waited_for_is_the_end_of_a_step_and_nothing_that_came_after() -> None:
    class Event:
        waited = False

        def synchronize(self) -> None:
            self.waited = True

    model = small_model()
    replica = Replica(model, split([spec for spec, _ in model_tensors(model)], 2), DECOUPLED)
    replica.model_device.keep_up()  # before the first step there is nothing to wait for
    replica.model_device._written = end = Event()
    replica.model_device.step_done()
    replica.model_device._written = later = Event()  # weights were changed by hand while gradients are computed
    replica.model_device.keep_up()
    assert end.waited and not later.waited


def test_layers_that_thaw_while_training_do_not_keep_an_island_from_coming_back(
    folder: Path, start_syncer, caplog: pytest.LogCaptureFixture
) -> None:
    def frozen() -> nn.Sequential:
        model = small_model()
        model[0].requires_grad_(False)
        return model

    skerry.create(folder, frozen(), DECOUPLED)
    model = frozen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncer = start_syncer(folder)
    learner = join(syncer.address, model, optimizer)
    train_until(lambda: min(versions(folder)) >= 1, model, optimizer)
    model[0].requires_grad_(True)
    syncer.stop()
    start_syncer(folder, syncer.port)
    merged = min(versions(folder))
    train_until(lambda: min(versions(folder)) >= merged + 2, model, optimizer)
    assert learner.failure is None
    learner.leave(timeout_s=30)
    assert caplog.text.count("only this island trains 0.weight and 1 more: frozen at join") == 1


def test_a_count_may_be_any_integer(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    model = small_model()
    with join(start_syncer(folder).address, model, sgd(model)) as learner:
        learner.count(np.int64(5))


def test_a_compiled_data_parallel_model_has_plain_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(small_model())
        plain = [spec.name for spec, _ in model_tensors(small_model())]
        assert [spec.name for spec, _ in model_tensors(wrapped)] == plain
        assert [spec.name for spec, _ in model_tensors(torch.compile(wrapped, backend="eager"))] == plain
    finally:
        torch.distributed.destroy_process_group()


def test_a_run_without_a_budget_can_be_closed_from_outside(folder: Path, start_syncer) -> None:
    skerry.create(folder, small_model(), DECOUPLED)
    syncer = start_syncer(folder)
    model = small_model()
    optimizer = sgd(model)
    learner = join(syncer.address, model, optimizer)
    train(model, optimizer, batches(0, 3))
    close_run(syncer.address, None)
    poll(lambda: learner.finished, "the learner to hear of it")
    learner.leave(timeout_s=30)
    assert syncer.wait(), "the run has ended"
    assert read_standing(folder).phase == "ended"
    assert min(versions(folder)) >= 1, "what the island had was merged once more"


def test_an_island_that_leaves_has_told_of_its_last_step(folder: Path, start_syncer) -> None:
    """Also when it has nothing to hand over, so that its goodbye comes at once."""
    skerry.create(folder, small_model(), SyncConfig(fragments=2, every=1000))
    syncer = start_syncer(folder)
    model = small_model()
    optimizer = sgd(model)
    learner = join(syncer.address, model, optimizer, "a", tokens_per_step=4)
    train_until(lambda: learner.step >= 3, model, optimizer, 0)
    sent: list[str] = []
    transfers = learner._connection.transfers
    send = transfers.send

    def watch(message: object) -> None:
        sent.append(message.WhichOneof("message"))  # type: ignore[attr-defined]
        send(message)

    transfers.connected(watch)
    learner.leave(timeout_s=30)
    assert sent[: sent.index("leaving")].count("report") >= 1
    syncer.stop()
    assert read_standing(folder).tokens == 4 * learner._exchange.totals.steps


def test_an_island_whose_clock_is_put_back_is_not_silent_until_it_has_caught_up(folder: Path, start_syncer) -> None:
    class PutBack:
        by = 0.0

        def now(self) -> float:
            return time.monotonic() - self.by

    clock = PutBack()
    model = small_model()
    optimizer = adamw(model)
    address = start_syncer(skerry.create(folder, model, SyncConfig(fragments=2, every=4))).address
    learner = join(address, model, optimizer, seams=Seams(clock=clock))
    train_until(lambda: len(tape(folder, "merged")) >= 4, model, optimizer)
    clock.by = 10_000.0
    before = len(tape(folder, "merged"))
    train_until(lambda: len(tape(folder, "merged")) >= before + 4, model, optimizer)
    assert not tape(folder, "lost") and len(tape(folder, "joined")) == 1
    learner.detach()
