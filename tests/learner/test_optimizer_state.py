"""An island that is started again in the middle of a run: where its optimizer's state comes from, and what may go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import RawLearner, batches, learner_threads, poll, small_model, tape, train
from torch import nn
from torch.optim import Optimizer

import skerry
from skerry.config import SyncConfig
from skerry.errors import WireError
from skerry.learner import device as devices
from skerry.learner import learner as learner_module
from skerry.learner.learner import Learner, is_recent
from skerry.learner.replica import Replica
from skerry.learner.state import optimizer_state as module
from skerry.learner.state.courier import StateCourier
from skerry.learner.state.optimizer_state import CannotKeep, OptimizerState
from skerry.syncer.rpc import state_relay as relay
from skerry.tensors.fragments import split
from skerry.tensors.model import model_tensors
from skerry.wire import skerry_pb2 as pb

SYNC = SyncConfig(fragments=2, every=4, overlap=1, quorum=1, outer_lr=1.0, outer_momentum=0.0, merge="mean")

MAKERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adamw": lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-2)],
    "fused adamw": lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)],
    "amsgrad": lambda model: [torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)],
    "sgd with momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)],
    "adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-2)],
    "muon and adamw": lambda model: [
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-2),
    ],
}


def state_of(model: nn.Module, optimizers: list[Optimizer]) -> OptimizerState:
    replica = Replica(model, split([spec for spec, _ in model_tensors(model)], 2), SYNC)
    return OptimizerState(optimizers, replica)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def moments(optimizer: Optimizer) -> list[torch.Tensor]:
    return [state[key] for state in optimizer.state.values() for key in sorted(state)]


# ---------------------------------------------------------------- packing


@pytest.mark.parametrize("passing_bytes", [0, 100, 1 << 20], ids=["at once", "bit by bit", "as beside a GPU"])
@pytest.mark.parametrize("part_bytes", [1, 16 << 20], ids=["a part for each parameter", "one part"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_training_goes_on_with_restored_state_as_if_nothing_had_happened(
    make, part_bytes: int, passing_bytes: int, monkeypatch
) -> None:
    monkeypatch.setattr(module, "STATE_PART_BYTES", part_bytes)
    if passing_bytes:
        monkeypatch.setattr(devices, "SETS_ASIDE", ("cuda", "cpu"))
        monkeypatch.setattr(devices, "PASSING_BYTES", passing_bytes)
    model = small_model()
    optimizers = make(model)
    train(model, optimizers, batches(0, 5))
    packed = [state_of(model, optimizers).pack(part)[0] for part in range(state_of(model, optimizers).parts)]
    assert (len(packed) > 1) == (part_bytes == 1)
    other = copy.deepcopy(model)
    restored = make(other)
    state_of(other, restored).restore(packed)
    for trained, optimizer in ((model, optimizers), (other, restored)):
        train(trained, optimizer, batches(1, 5))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_restored_state_lies_in_memory_as_the_parameters_do() -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    state_of(model, [fresh]).restore([state_of(model, [optimizer]).pack_all()])
    for parameter in model.parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[parameter][key], value)
            assert fresh.state[parameter][key].stride() == value.stride()


class Running(torch.optim.SGD):
    """Keeps a number in its parameter group, as some optimizers that find their own rate do."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        for group in self.param_groups:
            group["distance"] = group.get("distance", 0.0) * 0.5 + 1.0
        return super().step(closure)


def running(model: nn.Module) -> Running:
    optimizer = Running(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer.param_groups[0]["distance"] = 0.0
    return optimizer


def test_running_numbers_of_a_parameter_group_come_along_and_those_of_the_loop_do_not() -> None:
    model = small_model()
    optimizer = running(model)
    state = state_of(model, [optimizer])
    train(model, [optimizer], batches(0, 3))
    optimizer.param_groups[0]["lr"] = 7e-3  # by a schedule
    fresh = running(model)
    state_of(model, [fresh]).restore([state.pack_all()])
    [group] = fresh.param_groups
    assert group["distance"] == optimizer.param_groups[0]["distance"] == 1.75
    assert (group["lr"], group["momentum"]) == (1e-2, 0.9)
    with pytest.raises(WireError, match="another optimizer: 0/group-0 has distance"):
        state_of(model, [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)]).restore([state.pack_all()])


def test_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, batches(0, 3))
    good = state_of(model, [optimizer]).pack(0)[0]
    other = small_model()
    fresh = adamw(other)
    state = state_of(other, [fresh])
    with pytest.raises(WireError, match="not an optimizer state"):
        state.restore([good[: len(good) // 2]])
    with pytest.raises(WireError, match="not an optimizer state"):
        state.restore([b"nonsense that is long enough"])
    wide = nn.Linear(3, 70)
    with pytest.raises(WireError, match="shape|another optimizer"):
        state_of(wide, [torch.optim.AdamW(wide.parameters())]).restore([good])
    moments(optimizer)[0][0] = torch.nan
    with pytest.raises(WireError, match="not finite"):
        state.restore([state_of(model, [optimizer]).pack(0)[0]])
    assert not fresh.state


def test_state_that_is_no_tensor_or_number_is_not_kept() -> None:
    model = small_model()
    with pytest.raises(CannotKeep, match="no state yet"):
        state_of(model, [adamw(model)]).pack(0)
    optimizer = torch.optim.LBFGS(model.parameters())
    train(model, optimizer, batches(0, 2))
    with pytest.raises(CannotKeep, match="LBFGS keeps"):
        state_of(model, [optimizer]).pack(0)


def test_a_moment_at_which_copies_are_taken_is_between_two_steps() -> None:
    """Bit by bit or at once: what is told of the last of them holds for that moment, with the gate closed."""
    model = small_model()
    optimizer = adamw(model)
    train(model, optimizer, batches(0, 2))
    state = state_of(model, [optimizer])
    seen: list[bool] = []
    state._steps = lambda: seen.append(state._replica.gate.locked()) or 7
    assert state.pack(0)[1] == 7 and seen == [True]
    assert not state._replica.gate.locked()


def test_state_is_not_kept_twice_at_a_time(tmp_path: Path) -> None:
    begun, goes_on, steps = threading.Event(), threading.Event(), iter(range(1, 10))
    saved: list[int] = []

    def save(path: Path, run_id: str, step: int, *_: Any) -> None:
        begun.set()
        assert goes_on.wait(10)
        saved.append(step)

    exchange = types.SimpleNamespace(totals=types.SimpleNamespace(steps=1))
    session: Any = types.SimpleNamespace(exchange=exchange, name="a", run_id="run", id="s")
    courier = StateCourier(session, None, types.SimpleNamespace(save_to=save))  # type: ignore[arg-type]
    courier.keep, exchange.step = tmp_path / "kept", next(steps)
    beside = threading.Thread(target=courier.keep_beside)
    beside.start()
    assert begun.wait(10)
    exchange.step = next(steps)
    courier.keep_beside()
    assert saved == [], "the one before is still being written"
    goes_on.set()
    courier.keep_now()
    beside.join()
    assert saved == [1, 2], "the last one waits for it and is written"


@pytest.mark.parametrize(
    ("kept", "step", "recent"), [(0, 240, True), (0, 241, False), (9000, 10_000, True), (8990, 10_000, False)]
)
def test_kept_state_is_recent_within_ten_rounds_or_a_tenth_of_the_run(kept: int, step: int, recent: bool) -> None:
    assert is_recent(kept, step, every=24) == recent


# ---------------------------------------------------------------- in a run


JOINED: list[Learner] = []


def join(address: str, model: nn.Module, optimizer: Optimizer, **options: Any) -> Learner:
    JOINED.append(skerry.join(address, model, optimizer, **options))
    return JOINED[-1]


class Island:
    """Trains in a thread until it is told to stop; then leaves, or drops out as a crash would."""

    def __init__(self, address: str, name: str, keep: Path | None = None) -> None:
        self.model = small_model(seed=8)
        self.optimizer = adamw(self.model)
        self.learner = join(address, self.model, self.optimizer, name=name, keep=keep, timeout_s=30)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        data = batches(0, 20)
        while not self._stop.is_set() and not self.learner.finished:
            train(self.model, self.optimizer, [data[self.learner.step % 20]])
            self._stop.wait(0.001)

    def halt(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def leave(self) -> None:
        self.halt()
        self.learner.leave(timeout_s=30)

    def crash(self) -> None:
        self.halt()
        self.learner.detach()


@pytest.fixture
def run(tmp_path: Path, start_syncer) -> Iterator[tuple[Path, str]]:
    folder = skerry.create(tmp_path / "run", small_model(), SYNC)
    yield folder, start_syncer(folder).address
    running = learner_threads()
    for learner in JOINED:  # a test that fails must not take others with it
        learner.stop()
        learner.detach()
    JOINED.clear()
    assert not running


def merged(folder: Path, name: str) -> bool:
    return any(share["learner"] == name for entry in tape(folder, "merged") for share in entry["shares"])


def sources(folder: Path) -> list[tuple[str, str]]:
    return [(entry["learner"], entry["source"]) for entry in tape(folder, "optimizer_restored")]


def test_the_own_state_that_was_kept_is_taken_first(run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(learner_module, "OWN_STATE_ROUNDS", 1000)  # the peer takes a step in a millisecond
    folder, address = run
    peer = Island(address, "peer")
    first = Island(address, "island", keep=tmp_path / "kept")
    poll(lambda: merged(folder, "island") and merged(folder, "peer"), "both to be merged")
    first.leave()
    before = [moment.clone() for moment in moments(first.optimizer)]
    second_model = small_model(seed=9)
    second = adamw(second_model)
    learner = join(address, second_model, second, name="island", keep=tmp_path / "kept", timeout_s=30)
    assert learner.optimizer_state == "own"
    assert all(torch.equal(a, b) for a, b in zip(moments(second), before, strict=True))
    learner.detach()
    peer.leave()
    poll(lambda: ("island", "own") in sources(folder), "the tape to say so")


@pytest.mark.parametrize("kept", ["none", "damaged", "of another run", "old"])
def test_without_its_own_a_healthy_peers_state_is_taken(run, tmp_path: Path, kept: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "STATE_PART_BYTES", 64)
    folder, address = run
    keep = tmp_path / "kept"
    peer = Island(address, "peer")
    poll(lambda: merged(folder, "peer"), "the peer to be merged")
    path = keep / "island.optimizer.safetensors"
    run_id = peer.learner._session.run_id
    if kept != "none":
        old = kept == "old"
        peer.learner._courier.state.save_to(path, "another" if kept == "of another run" else run_id, -100_000 if old else 10)
    if kept == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    late = Island(address, "island", keep=keep)
    assert late.learner.optimizer_state == "peer"
    assert all(bool(moment.isfinite().all()) for moment in moments(late.optimizer))
    poll(lambda: merged(folder, "island"), "it to be merged")
    late.leave()
    peer.leave()
    poll(lambda: ("island", "peer") in sources(folder), "the tape to say so")
    assert tape(folder, "state_relayed")[0] == {"learner": "island", "donor": "peer"}


def test_the_peers_state_is_the_peers(run) -> None:
    folder, address = run
    peer = Island(address, "peer")
    poll(lambda: merged(folder, "peer"), "the peer to be merged")
    peer.halt()
    model = small_model(seed=9)
    optimizer = adamw(model)
    learner = join(address, model, optimizer, name="late", timeout_s=30)
    assert learner.optimizer_state == "peer"
    for mine, theirs in zip(moments(optimizer), moments(peer.optimizer), strict=True):
        assert torch.equal(mine, theirs)
    learner.detach()
    peer.learner.detach()


def test_alone_it_starts_cold(run) -> None:
    folder, address = run
    first = Island(address, "island")
    poll(lambda: merged(folder, "island"), "it to be merged")
    first.crash()
    second = Island(address, "island")
    assert second.learner.optimizer_state == "cold"
    second.leave()
    poll(lambda: ("island", "cold") in sources(folder), "the tape to say so")


def test_a_peer_whose_state_is_not_finite_is_no_help(run) -> None:
    folder, address = run
    peer = Island(address, "peer")
    poll(lambda: merged(folder, "peer"), "the peer to be merged")
    peer.halt()
    for moment in moments(peer.optimizer):
        moment.fill_(torch.nan)
    late = Island(address, "late")
    assert late.learner.optimizer_state == "cold"
    late.crash()
    peer.learner.detach()


# ---------------------------------------------------------------- peers that do not behave


async def donor(raw: RawLearner) -> None:
    await raw.join()
    raw.report(2)
    ask = (await raw.receive("ask")).ask
    assert (await raw.give(ask)).accepted
    await raw.receive("announce")


def fetch_from(address: str, answer: Callable[[RawLearner, pb.GiveState], Any]) -> str:
    """A learner joins while the only peer answers like this. Gives what it got."""

    async def main() -> str:
        async with RawLearner(address, small_model(), 2, name="odd") as raw:
            await donor(raw)
            joined = asyncio.ensure_future(asyncio.to_thread(late))
            while not joined.done():
                receive = asyncio.ensure_future(raw.receive("give_state"))
                await asyncio.wait({receive, joined}, return_when=asyncio.FIRST_COMPLETED)
                if receive.done():
                    await answer(raw, receive.result().give_state)
                else:
                    receive.cancel()
            return joined.result()

    def late() -> str:
        model = small_model()
        learner = join(address, model, adamw(model), name="late", timeout_s=30)
        learner.detach()
        return learner.optimizer_state

    return asyncio.run(main())


async def says_nothing(raw: RawLearner, wanted: pb.GiveState) -> None:
    pass


async def sends_damaged_bytes(raw: RawLearner, wanted: pb.GiveState) -> None:
    async with raw.lane() as lane:
        state = pb.State(ticket=wanted.ticket, part=wanted.part, parts=1, size_bytes=4, checksum=1)
        await lane.write(pb.BulkToSyncer(state=state, chunk=b"abcd"))
        await lane.done_writing()
        await lane.read()


async def sends_half_and_goes(raw: RawLearner, wanted: pb.GiveState) -> None:
    async with raw.lane() as lane:
        state = pb.State(ticket=wanted.ticket, part=wanted.part, parts=1, size_bytes=400, checksum=1)
        await lane.write(pb.BulkToSyncer(state=state, chunk=b"abcd"))


async def declares_too_much(raw: RawLearner, wanted: pb.GiveState) -> None:
    async with raw.lane() as lane:
        state = pb.State(ticket=wanted.ticket, part=wanted.part, parts=1, size_bytes=1 << 40, checksum=1)
        await lane.write(pb.BulkToSyncer(state=state, chunk=b"abcd"))
        await lane.done_writing()
        await lane.read()


async def has_none(raw: RawLearner, wanted: pb.GiveState) -> None:
    async with raw.lane() as lane:
        await lane.write(pb.BulkToSyncer(state=pb.State(ticket=wanted.ticket, part=wanted.part, reason="none yet")))
        await lane.done_writing()
        await lane.read()


@pytest.mark.parametrize("answer", [says_nothing, sends_damaged_bytes, sends_half_and_goes, declares_too_much, has_none])
def test_a_peer_that_does_not_deliver_costs_no_more_than_a_cold_start(run, answer, monkeypatch) -> None:
    monkeypatch.setattr(relay, "WAIT_S", 0.2)
    _, address = run
    assert fetch_from(address, answer) == "cold"


def test_state_nobody_asked_for_is_refused(run) -> None:
    folder, address = run

    async def main() -> None:
        async with RawLearner(address, small_model(), 2, name="odd") as raw:
            await donor(raw)
            async with raw.lane() as lane:
                await lane.write(pb.BulkToSyncer(state=pb.State(ticket=7, size_bytes=4), chunk=b"abcd"))
                # The lane goes on.
                await lane.write(pb.BulkToSyncer(fetch=pb.Fetch(fragment=9)))
                assert (await lane.read()).fetched.reason == "there is no fragment 9"

    asyncio.run(main())
    poll(lambda: tape(folder, "refused"), "the tape to say so")
    assert tape(folder, "refused")[0]["reason"] == "odd was not asked for part 0 of its state"


def test_a_join_that_is_interrupted_while_it_recovers_leaves_nothing_behind(run, monkeypatch) -> None:
    folder, address = run
    first = Island(address, "island")
    poll(lambda: merged(folder, "island"), "it to be merged")

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("skerry.learner.state.courier.StateCourier.fetch", interrupted)
    model = small_model()
    with contextlib.suppress(KeyboardInterrupt):
        join(address, model, adamw(model), name="late", timeout_s=30)
    first.leave()
