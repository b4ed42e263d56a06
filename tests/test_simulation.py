"""Whole runs from seeds, with faults of every kind (tests/simulation); and that broken rules would be found."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulation.faults import simulate
from simulation.world import World

from skerry.core import rounds
from skerry.core.exchange import Exchange, Mark, Version
from skerry.core.leases.policy import LeasePolicy
from skerry.core.leases.ranges import Leases
from skerry.core.membership import Membership
from skerry.core.rounds import Rounds
from skerry.durable import Disk
from skerry.learner.fetch import Fetcher
from skerry.syncer.server import SyncerServer
from skerry.syncer.sharding.shard import Shard
from skerry.syncer.storage import version_file
from skerry.syncer.storage.tape import Tape
from skerry.tensors import merge as mergers
from skerry.wire import skerry_pb2 as pb

SEEDS = 60
"""CI runs a thousand: make dst."""
PLANTED_SEEDS = 200
"""The rarest is found at the sixty-first."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that is fast to write, where there is one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def run_seed(seed: int, place: Path) -> World:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        return simulate(seed, Path(folder))


def test_no_rule_is_broken_whatever_happens(place: Path) -> None:
    worlds = [run_seed(seed, place) for seed in range(SEEDS)]
    assert sum(world.faults for world in worlds) > 5 * SEEDS and sum(world.checks.merges for world in worlds) > 8 * SEEDS


def test_a_seed_gives_the_same_run_again(place: Path) -> None:
    for seed in range(5):
        first, second = run_seed(seed, place), run_seed(seed, place)
        assert (first.notes, first.checks.history) == (second.notes, second.checks.history)
        assert first.clock.now() == second.clock.now() and first.checks.history


# ---------------------------------------------------------------- faults planted on purpose


def announced_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    commit = Tape.commit

    async def later(tape: Tape, written: Any) -> None:
        asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(commit(tape, written)))

    patch.setattr(Tape, "commit", later)


def written_without_being_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "write_durably", lambda disk, path, *parts: Path(path).write_bytes(b"".join(parts)))


def a_counter_is_not_reset(patch: pytest.MonkeyPatch) -> None:
    adopted = Exchange.adopted

    def forgetful(exchange: Exchange, version: Version) -> None:
        before: Mark = exchange.held[version.fragment].since
        adopted(exchange, version)
        exchange.held[version.fragment].since = before

    patch.setattr(Exchange, "adopted", forgetful)


def contributions_count_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rounds, "_min_base", lambda core, name, fragment: max(0, fragment.version - core._run.sync.staleness))


def a_wrong_weight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rounds, "weight", lambda tokens, steps: float(tokens))


def a_share_is_left_out(patch: pytest.MonkeyPatch) -> None:
    mean = mergers.mean
    patch.setattr(mergers, "mean", lambda deltas, weights, norms=None, out=None: mean(deltas[:1], weights[:1], out=out))


def a_lease_is_told_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    async def at_once(server: SyncerServer) -> None:
        told, server._leases, server._sending_leases = server._leases, [], False
        for lease in told:
            found = pb.Lease(pool=lease.pool, start=lease.start, count=lease.count, position=lease.position)
            server._roster.send(lease.learner, pb.ToLearner(lease=found))

    patch.setattr(SyncerServer, "_send_leases", at_once)


def a_lease_is_given_twice(patch: pytest.MonkeyPatch) -> None:
    """One that is away is taken for dead."""
    settle = Membership.stream_ended

    def hasty(members: Membership, event: Any, now: float, actions: list[Any]) -> None:
        settle(members, event, now, actions)
        leases = members._leases.leases
        holding = leases.holdings.get(event.learner)
        if holding is not None:
            for held in holding.behind(holding.merged):
                leases.pools[held.pool].give_back([(held.start, held.stop)])

    patch.setattr(Membership, "stream_ended", hasty)


def what_is_merged_is_forgotten_in_a_restart(patch: pytest.MonkeyPatch) -> None:
    merged = Leases.merged
    begun: list[Leases] = []

    def forgetful(leases: Leases, name: str, session: str, position: int) -> None:
        if any(leases is other for other in begun) or not leases.holdings:
            merged(leases, name, session, position)

    give = Leases.give

    def giving(leases: Leases, *arguments: Any) -> Any:
        begun.append(leases)
        return give(leases, *arguments)

    patch.setattr(Leases, "merged", forgetful)
    patch.setattr(Leases, "give", giving)


def what_learners_see_is_forgotten_in_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(version_file, "_tensors", lambda state: {"values": state.values, "momentum": state.momentum})


def a_difference_is_added_to_the_version_in_the_model(patch: pytest.MonkeyPatch) -> None:
    """Though a newer one is waiting there to be adopted."""
    newest = Fetcher._newest_here

    def careless(fetcher: Fetcher, fragment: int) -> Any:
        return newest(fetcher, fragment)[0], fetcher._session.replica.held(fragment)

    patch.setattr(Fetcher, "_newest_here", careless)


def an_expired_lease_is_used_on(patch: pytest.MonkeyPatch) -> None:
    settle = LeasePolicy.settle

    def trusting(policy: LeasePolicy, event: Any, resumed: bool, actions: list[Any]) -> bool:
        settle(policy, event, resumed, actions)
        return resumed

    patch.setattr(LeasePolicy, "settle", trusting)
    patch.setattr(Leases, "why_refused", lambda leases, name, session, samples: None)


def a_shard_goes_on_from_what_it_had(patch: pytest.MonkeyPatch) -> None:
    """Though a version that it made before its stream broke has counted since."""
    serve = Shard._serve

    async def once(shard: Shard, stored: pb.StoredVersion) -> None:
        if stored.fragment not in shard._serving:
            await serve(shard, stored)

    patch.setattr(Shard, "_serve", once)


def lost_answers_are_not_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    ask = Rounds.ask

    def plain(core: Rounds, *arguments: Any) -> Any:
        return dataclasses.replace(ask(core, *arguments), anew=False)

    patch.setattr(Rounds, "ask", plain)


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    announced_before_it_is_stored: "was announced",
    written_without_being_synced: "has not ended|lost|has changed|the tape refers to it|on the tape after",
    a_counter_is_not_reset: "twice",
    contributions_count_again: "twice",
    a_wrong_weight: "a wrong weight",
    a_share_is_left_out: "is not what was merged",
    a_lease_is_told_before_it_is_written: "is not on the tape",
    a_lease_is_given_twice: "were held by|given back twice",
    what_is_merged_is_forgotten_in_a_restart: "returned are also in its own merged",
    an_expired_lease_is_used_on: "are also in its own merged contributions",
    what_learners_see_is_forgotten_in_a_restart: "has changed|holds wrong values",
    a_difference_is_added_to_the_version_in_the_model: "holds wrong values",
    a_shard_goes_on_from_what_it_had: "is not what was merged|has not ended",
    lost_answers_are_not_asked_for_again: "waits for a second answer",
}


@pytest.mark.parametrize("plant", PLANTED, ids=[plant.__name__ for plant in PLANTED])
def test_a_fault_that_was_planted_is_found(plant: Callable[[pytest.MonkeyPatch], None], place: Path, monkeypatch) -> None:
    plant(monkeypatch)

    def runs() -> None:
        for seed in range(PLANTED_SEEDS):
            run_seed(seed, place)

    with pytest.raises(AssertionError, match=PLANTED[plant]):
        runs()
