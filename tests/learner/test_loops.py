"""Learners attached to the training loops people write, each in a small real run: sockets, files, threads."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import (
    assert_same,
    batches,
    loss_of,
    poll,
    small_model,
    tape,
    tensors_of,
    together,
    train,
    versions,
)
from learner_runs import (
    DECOUPLED,
    EXACT,
    NOTHING_UNSEEN,
    OPTIMIZERS,
    MakeOptimizer,
    adamw,
    join,
    muon_and_adamw,
    sgd,
    train_until,
)
from torch import Tensor, nn

import skerry
from skerry.config import SyncConfig
from skerry.learner.background import DaemonWorkers
from skerry.syncer.storage.run_folder import read_model

pytestmark = NOTHING_UNSEEN


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
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])},
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
