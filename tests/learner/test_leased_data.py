"""Data leased by real learners from a real syncer: shared out without overlap, finished by others, pinned to regions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from islands import loss_of, poll, small_model, tape, together
from torch.utils.data import DataLoader, Dataset

import skerry
from skerry.config import SyncConfig
from skerry.errors import ConfigError
from skerry.observe.ledger import audit_run

SIZE = 64
STEP_TOKENS = 4


class Items(Dataset):
    """Items that say which they are."""

    def __getitem__(self, item: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(item)
        x = torch.randn(6, generator=generator)
        return item, x, x.square().mean(0, keepdim=True)


def make_run(folder: Path, **sync: Any) -> Path:
    settings = {"fragments": 2, "every": 4, "silence_s": 3.0, "ahead_s": 1.0, **sync}
    return skerry.create(folder / "run", small_model(), SyncConfig(**settings))


class Island:
    def __init__(self, address: str, name: str, **join: Any) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.learner = skerry.join(address, self.model, self.optimizer, name=name, tokens_per_step=STEP_TOKENS, **join)
        self.seen: list[int] = []

    def loader(self, **sampler: Any) -> DataLoader:
        batches = self.learner.sampler(SIZE, batch=STEP_TOKENS, **sampler)
        return DataLoader(Items(), batch_sampler=batches)

    def train(self, until: Callable[[], bool] | None = None, **sampler: Any) -> None:
        for items, *batch in self.loader(**sampler):
            self.optimizer.zero_grad()
            loss_of(self.model, batch).backward()
            self.optimizer.step()
            self.seen += items.tolist()
            if until is not None and until():
                break

    def finish(self, **sampler: Any) -> list[int]:
        self.train(**sampler)
        self.learner.leave()
        return self.seen


def test_islands_share_one_shuffle_and_the_ledger_adds_up(tmp_path: Path, start_syncer) -> None:
    syncer = start_syncer(make_run(tmp_path, start_with=2, budget_tokens=6 * SIZE, wait=True, quorum=0, overlap=0))
    both = together(*[lambda name=name: Island(syncer.address, name).finish() for name in ("a", "b")])
    assert syncer.wait()
    ledger = audit_run(syncer.folder)
    assert ledger.adds_up, ledger.discrepancies
    assert ledger.applied >= 6 * SIZE and ledger.trained == sum(map(len, both))
    assert all(account.applied == ledger.trained for account in ledger.tokens), "in lock-step nothing is lost"
    counts = Counter(item for seen in both for item in seen)
    assert max(counts.values()) - min(counts.values()) <= 2, "every item about as often as any other"


def test_what_a_dead_island_had_not_finished_goes_to_another(tmp_path: Path, start_syncer) -> None:
    syncer = start_syncer(make_run(tmp_path, lease_s=3.0))
    first = Island(syncer.address, "a")
    first.train(until=lambda: len(first.seen) >= 8)
    poll(lambda: tape(syncer.folder, "leased"), "its leases to be written")
    first.learner.detach()
    second = Island(syncer.address, "a")
    second.train(until=lambda: len(tape(syncer.folder, "leased")) > 3)
    second.learner.leave()
    poll(lambda: len(tape(syncer.folder, "returned")) == 2, "its leases to be given back")
    syncer.stop()
    died, left = tape(syncer.folder, "returned")
    assert (died["why"], left["why"]) == ("another process has taken its place", "it has left")
    again = [entry for entry in tape(syncer.folder, "leased") if entry["session"] == left["session"]]
    assert again[0]["start"] == died["ranges"][0][1], "what the first had not finished comes first"
    ledger = audit_run(syncer.folder)
    assert ledger.adds_up, ledger.discrepancies
    assert ledger.open == 0


def test_an_island_trains_on_through_an_outage_longer_than_its_leases(tmp_path: Path, start_syncer, free_port: int) -> None:
    folder = make_run(tmp_path, ahead_s=0.2)
    syncer = start_syncer(folder, free_port)
    island = Island(syncer.address, "a")
    island.train(until=lambda: len(island.seen) >= 8)
    syncer.stop()
    book = island.learner._session.leases
    island.train(until=lambda: book.repeats > 40)
    assert book.used <= book.given
    syncer = start_syncer(folder, free_port)
    used = book.used
    island.train(until=lambda: book.used > used)
    island.learner.leave()
    syncer.stop()
    ledger = audit_run(folder)
    assert ledger.adds_up, ledger.discrepancies
    assert ledger.trained == len(island.seen) > ledger.applied


def test_read_ahead_of_a_loader_with_workers_is_not_taken_for_trained(tmp_path: Path, start_syncer) -> None:
    syncer = start_syncer(make_run(tmp_path))
    island = Island(syncer.address, "a")
    batches = island.learner.sampler(SIZE, batch=STEP_TOKENS)
    loader = iter(DataLoader(Items(), batch_sampler=batches, num_workers=1, prefetch_factor=4))
    book = island.learner._session.leases
    for _ in range(3):
        items, *batch = next(loader)
        loss_of(island.model, batch).backward()
        island.optimizer.step()
        island.seen += items.tolist()
    assert (book.used, book.taken > book.used) == (12, True)
    island.learner.leave()
    poll(lambda: tape(syncer.folder, "returned"), "what was read ahead to be given back")
    syncer.stop()
    ledger = audit_run(syncer.folder)
    assert ledger.adds_up and ledger.applied + ledger.dropped == 12


def test_data_of_another_region_is_refused_by_the_syncer_and_on_the_tape(tmp_path: Path, start_syncer) -> None:
    syncer = start_syncer(make_run(tmp_path, pins=("eu-text=eu",)))
    sizes = {"eu-text": 20, "common": 40}
    stranger = Island(syncer.address, "in-us", region="us")
    with pytest.raises(ConfigError, match="pool 'eu-text' is pinned to region 'eu', and in-us is in region 'us'"):
        next(iter(stranger.learner.sampler(sizes, batch=4)))
    found = next(iter(stranger.learner.sampler({"common": 40}, batch=4)))
    assert {pool for pool, _ in found} == {"common"}, "what is common it may read"
    local = Island(syncer.address, "in-eu", region="eu")
    batches = iter(local.learner.sampler(sizes, batch=4))
    seen: set[str] = set()
    poll(lambda: seen.update(pool for pool, _ in next(batches)) or seen == {"eu-text", "common"}, "both pools")
    for island in (stranger, local):
        island.learner.detach()
    syncer.stop()
    (refused,) = tape(syncer.folder, "refused")
    assert refused["learner"] == "in-us" and "pool 'eu-text' is pinned to region 'eu'" in refused["reason"]
    leased = [entry for entry in tape(syncer.folder, "leased") if entry["pool"] == "eu-text"]
    assert leased and {entry["learner"] for entry in leased} == {"in-eu"}


def test_islands_with_other_data_get_none(tmp_path: Path, start_syncer) -> None:
    syncer = start_syncer(make_run(tmp_path))
    one, other = Island(syncer.address, "a"), Island(syncer.address, "b")
    next(iter(one.learner.sampler(50, batch=4)))
    with pytest.raises(ConfigError, match="pool '' has 50 samples in this run, b reads 51 samples"):
        next(iter(other.learner.sampler(51, batch=4)))
    with pytest.raises(ConfigError, match="b reads data of different content or order"):
        next(iter(other.learner.sampler(50, batch=4, seed=1)))
    for island in (one, other):
        island.learner.detach()


def test_a_sampler_ends_when_the_run_closes_even_if_it_waits(tmp_path: Path, start_syncer) -> None:
    syncer = start_syncer(make_run(tmp_path, start_with=1))
    island = Island(syncer.address, "a")
    batches = island.learner.sampler(SIZE, batch=STEP_TOKENS)
    with island.learner._session.lock:
        island.learner._session.leases.void(0)
    stopper = threading.Timer(0.1, island.learner.stop)
    stopper.start()
    assert len(list(batches)) >= 0
    assert island.learner.finished
    island.learner.detach()


def test_an_island_whose_leases_ran_out_of_time_starts_over(tmp_path: Path, start_syncer, free_port: int) -> None:
    folder = make_run(tmp_path, silence_s=0.5, lease_s=0.5)
    syncer = start_syncer(folder, free_port)
    island = Island(syncer.address, "a")
    island.train(until=lambda: len(island.seen) >= 8)
    syncer.stop()
    island.train(until=lambda: len(island.seen) >= 80)
    connection = island.learner._connection
    # It does not find the way to the syncer that is started again.
    address, connection.address = connection.address, "127.0.0.1:1"
    syncer = start_syncer(folder, free_port)
    poll(lambda: tape(folder, "returned"), "its leases to run out")
    connection.address = address
    poll(lambda: island.learner.connected, "it to come back")
    before = len(island.seen)
    island.train(until=lambda: len(island.seen) >= before + 40)
    island.learner.leave()
    syncer.stop()
    assert [entry["resumed"] for entry in tape(folder, "joined")] == [False, False]
    ledger = audit_run(folder)
    assert ledger.adds_up, ledger.discrepancies
