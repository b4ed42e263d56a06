"""Progress that is carried over an adoption; memory, threads and locks that must not leak or block."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from islands import (
    assert_same,
    batches,
    learner_threads,
    poll,
    small_model,
    tape,
    tensors_of,
    train,
    versions,
)
from learner_runs import DECOUPLED, EXACT, JOINED, NOTHING_UNSEEN, adamw, join, muon_and_adamw, sgd, train_until
from torch import Tensor, nn

import skerry
from skerry.admin import close_run
from skerry.config import SyncConfig
from skerry.core.exchange import Question
from skerry.errors import ConfigError
from skerry.learner import connection as connections
from skerry.learner.replica import Replica
from skerry.learner.seams import Seams
from skerry.syncer.storage.run_folder import read_model, read_standing
from skerry.tensors.fragments import split
from skerry.tensors.model import model_tensors

pytestmark = NOTHING_UNSEEN


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
