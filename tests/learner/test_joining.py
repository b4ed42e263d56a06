"""Joining a run and leaving it, and what a loop is told."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import (
    RawLearner,
    assert_same,
    batches,
    learner_threads,
    poll,
    small_model,
    tape,
    tensors_of,
    together,
    train,
    versions,
)
from learner_runs import DECOUPLED, EXACT, NOTHING_UNSEEN, adamw, join, sgd, train_until
from torch import Tensor, nn

import skerry
from skerry.config import SyncConfig
from skerry.errors import JoinRefused, WireError
from skerry.syncer.storage.run_folder import read_model

pytestmark = NOTHING_UNSEEN


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
