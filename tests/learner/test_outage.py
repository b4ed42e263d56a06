"""Learners train on while the syncer is away."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import (
    assert_same,
    batches,
    poll,
    small_model,
    tape,
    tensors_of,
    together,
    train,
    versions,
)
from learner_runs import DECOUPLED, LOCK_STEP, NOTHING_UNSEEN, OVERLAPPING, Killed, join, sgd, train_until, two_islands

import skerry
from skerry.config import SyncConfig
from skerry.syncer.storage.run_folder import read_model
from skerry.syncer.storage.store import RunStore

pytestmark = NOTHING_UNSEEN


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


# Merged at 4 and 8, adopted at 6 and 10. After 11 steps nothing is on its way, so the end does not depend on timing either.


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
