"""The faults of a seed and their times."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

from faulty_disk import CUTS

from simulation.net import NOTICED_S
from simulation.world import World
from skerry.config import SyncConfig


def settings(chance: random.Random) -> SyncConfig:
    """Random settings for one run."""
    silence_s = chance.choice([2.0, 5.0])
    return SyncConfig(
        fragments=chance.randint(1, 4),
        every=chance.choice([4, 6, 9]),
        overlap=chance.choice([0, 1, 2]),
        quorum=chance.randint(1, 3),
        staleness=chance.randint(0, 2),
        grace=chance.choice([0.0, 0.9]),
        adopt=chance.choice(["overwrite", "carry"]),
        merge="mean",
        outer_lr=chance.choice([0.7, 1.0]),
        outer_momentum=0.0,
        start_with=chance.randint(1, 2),
        silence_s=silence_s,
        budget_tokens=chance.choice([600, 1500]),
        outlier=0.0,
        ahead_s=chance.choice([1.0, 20.0]),
        lease_s=chance.choice([silence_s, silence_s, 60.0]),
    )


def simulate(seed: int, root: Path, storm: bool = False) -> World:
    """Simulate a short run with a few faults, or (`storm`) a longer one with about a dozen per second."""
    chance = random.Random(f"{'storm' if storm else 'settings'} {seed}")
    sync = settings(chance)
    codecs = random.Random(f"codecs {seed}")
    sync = dataclasses.replace(
        sync,
        send=codecs.choice(["fp32", "fp32", "int8", "topk3"]),
        publish=codecs.choice(["fp32", "fp32", "bf16", "int4"]),
    )
    if storm:
        sync = dataclasses.replace(sync, budget_tokens=3000)
    shards = random.Random(f"shards {seed}")
    shard_count = shards.choice([0, 0, 1, 2])
    world = World(seed, sync, chance.randint(2, 4), root, shard_count)
    for _ in range(chance.randint(200, 300) if storm else chance.randint(4, 12)):
        world.loop.call_at(chance.uniform(0.3, 20.0 if storm else 7.0), _happen, chance.choice(KINDS), world)
    for _ in range(shards.randint(40, 60) if storm else shards.randint(2, 8) if shard_count else 0):
        world.loop.call_at(shards.uniform(0.3, 20.0 if storm else 7.0), _happen, shards.choice([kill_shard, cut_shard]), world)
    return world.run()


def _happen(kind: Callable[[World, random.Random], None], world: World) -> None:
    if not world.ended:
        kind(world, world.chance)


# A fault counts (`world.fault`) only if its target exists.


def _someone(world: World) -> str:
    return world.chance.choice(sorted(world.islands) or ["nobody"])


def cut(world: World, chance: random.Random) -> None:
    name, method = _someone(world), chance.choice(["control", "bulk", None])
    if not world.net.of(name, method):
        return
    island_s, syncer_s = chance.choice(NOTICED_S), chance.choice(NOTICED_S)
    world.fault(f"{name} is cut off ({method or 'all'}); noticed after {island_s} s there, {syncer_s} s at the syncer")
    for call in world.net.of(name, method):
        call.break_off(island_s, syncer_s)


def freeze(world: World, chance: random.Random) -> None:
    name, seconds = _someone(world), chance.choice([0.5, 3.0, 8.0, 16.0])
    world.fault(f"{name} freezes for {seconds} s")
    world.net.held_until[name] = world.loop.time() + seconds


def oversleep(world: World, chance: random.Random) -> None:
    """Freeze an island until its leases expire, unless that takes too long for a run."""
    name, seconds = _someone(world), world.sync.silence_s + world.sync.lease_s + 0.5
    if seconds < 12.0:
        world.fault(f"{name} freezes for {seconds} s, and its leases are given to others")
        world.net.held_until[name] = world.loop.time() + seconds


def slow_link(world: World, chance: random.Random) -> None:
    name, times = _someone(world), chance.choice([3.0, 20.0])
    world.fault(f"the link of {name} is {times} times as slow")
    world.net.delay_s[name] = times
    world.loop.call_later(5.0, lambda: world.net.delay_s.pop(name, None))


def damage(world: World, chance: random.Random) -> None:
    world.fault("messages are damaged for a second")
    world.net.damage = chance.choice([0.02, 0.3])
    world.loop.call_later(1.0, lambda: setattr(world.net, "damage", 0.0))


def kill_island(world: World, chance: random.Random) -> None:
    name, away_s = _someone(world), chance.choice([0.1, 1.0, 6.0])
    if name not in world.islands or not world.islands[name].alive:
        return
    world.fault(f"{name} is killed and comes back after {away_s} s")
    world.kill_island(name, away_s)


def leave(world: World, chance: random.Random) -> None:
    name = _someone(world)
    if name in world.islands and len(world.islands) > 1:
        world.fault(f"{name} leaves, and another one comes")
        world.islands[name].wants_to_leave = True
        world.loop.call_later(2.0, world.start_island, f"island-{len(world.net.hosts)}")


def kill_syncer(world: World, chance: random.Random) -> None:
    if world.life is None or not world.life.alive or world.life.server is None:
        return
    what_stays = chance.choice(["kept", "kept", *CUTS])
    at_call, away_s = chance.choice([0, chance.randint(1, 40)]), chance.choice([0.1, 1.0, 7.0])
    world.fault(f"the syncer is killed after {at_call} disk calls for {away_s} s; unsynced data: {what_stays}")
    world.kill_syncer(what_stays, at_call, away_s)


def _to_a_shard(world: World, chance: random.Random, text: str, harm: Callable[[int], None]) -> None:
    """Harm a random shard at once, or at the next critical message: a verdict, a finished version or its publication."""
    number = chance.choice(sorted(world.shards) or [0])
    moment = chance.choice(["", "verdict", "verdict", "made", "publish", "publish"])
    if number not in world.shards:
        return

    def happen() -> None:
        if not world.ended and world.shards[number].alive:
            world.fault(f"shard {number} {text} {f'at: {moment}' if moment else ''}")
            harm(number)

    if moment:
        world.at_message[f"shard-{number}"] = moment, happen
    else:
        happen()


def kill_shard(world: World, chance: random.Random) -> None:
    away_s = chance.choice([0.1, 1.0, 6.0])
    _to_a_shard(world, chance, f"is killed for {away_s} s", lambda number: world.kill_shard(number, away_s))


def cut_shard(world: World, chance: random.Random) -> None:
    shard_s, syncer_s = chance.choice(NOTICED_S), chance.choice(NOTICED_S)

    def cut(number: int) -> None:
        for call in world.net.of(f"shard-{number}"):
            call.break_off(shard_s, syncer_s)

    _to_a_shard(world, chance, f"is cut off; noticed after {shard_s} s there, {syncer_s} s at the syncer", cut)


def full_disk(world: World, chance: random.Random) -> None:
    seconds = chance.choice([0.3, 2.0, 6.0])
    world.fault(f"the disk is full for {seconds} s")
    world.disk_full_until = world.loop.time() + seconds


def clock_jump(world: World, chance: random.Random) -> None:
    name, offset_s = chance.choice(["syncer", _someone(world)]), chance.choice([1.0, 20.0])
    world.fault(f"the clock of {name} jumps by {offset_s} s")
    island = world.islands.get(name)
    (island.clock if island is not None else world.syncer_clock).offset_s += offset_s


KINDS: list[Callable[[World, random.Random], None]] = [
    cut, cut, freeze, oversleep, slow_link, damage, kill_island, leave, kill_syncer, kill_syncer, full_disk, clock_jump,
]  # fmt: skip
