"""The simulated run: successive syncer processes on what the disk kept, shards, and islands that join, train, leave and die."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from uuid import UUID

import torch
from faulty_disk import Cut, FaultyDisk, Folder, scan
from torch import nn

import skerry
from simulation.checks import TOKENS, Checks
from simulation.loop import Stuck, VirtualLoop
from simulation.net import NOTICED_S, Network, Stub
from skerry.clock import VirtualClock
from skerry.config import SyncConfig
from skerry.core.leases.ranges import Pool
from skerry.errors import SkerryError, WireError
from skerry.learner import background as backgrounds
from skerry.learner import connection as connections
from skerry.learner import session as sessions
from skerry.learner.learner import Learner
from skerry.learner.sampler import ALONE_S
from skerry.learner.seams import Seams
from skerry.learner.state.courier import StateCourier
from skerry.learner.transport import routes
from skerry.learner.transport.stream import Download
from skerry.syncer import process as processes
from skerry.syncer import server as servers
from skerry.syncer.rpc.uploads import Contributions, Receiving
from skerry.syncer.sharding import shard as shards
from skerry.syncer.storage.store import RunStore
from skerry.tensors.fragments import split
from skerry.tensors.model import model_tensors
from skerry.wire import framing as chunks
from skerry.wire import skerry_pb2 as pb

LR = 1e-2
START_UP_S = 0.4
END_S = 600.0
"""An island that trains this long after the end of the run fails the simulation."""
TIME_S = 2_000.0
"""A run that takes longer fails the simulation."""


CHUNK_BYTES = (1 << 20, 200, 48)
"""Chunk sizes to choose from, so that a fragment of a few hundred bytes is one chunk or many."""


class OffsetClock:
    """The clock of one process, which can jump."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.offset_s = 0.0

    def now(self) -> float:
        return self._clock.now() + self.offset_s


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


class SyncerLife:
    """A syncer process, from its start to its death or to the end of the run."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.server: Any = None
        self.alive = True
        self.task = world.loop.create_task(self._run())

    async def _run(self) -> None:
        world = self.world
        await asyncio.sleep(START_UP_S)
        if not self.alive:
            return
        try:
            store = RunStore(self.folder)
            ended = await processes.run_syncer(
                store,
                "127.0.0.1:1",
                None,
                on_listening=lambda port: None,
                shards=world.shard_count,
                clock=world.syncer_clock,
            )
        except SkerryError as error:
            if self.alive:  # for example a full disk; the syncer is restarted
                world.note(f"the syncer gave up: {error}")
                world.syncer_died(self, "kept")
            return
        except asyncio.CancelledError:
            return
        except Exception as error:
            world.errors.append(f"the syncer broke: {error!r}")
            return
        if self.alive and ended:
            world.ended = True

    def die(self) -> None:
        """Die as by kill -9: nothing the process does afterwards has any effect."""
        self.alive = False
        if self.server is not None:
            self.world.net.gone(self.server)
        self.world.loop.call_soon(self.task.cancel)


class ShardLife:
    """A shard process. Every process listens at a new address."""

    def __init__(self, world: World, folder: Path, number: int) -> None:
        self.world, self.folder, self.number = world, folder, number
        self.name = f"shard-{number}"
        self._syncer = f"127.0.0.1:{60_000 + number}"
        world.net.hosts[self._syncer] = self.name
        self._shard: Any = None
        self.alive = True
        self.task = world.loop.create_task(self._run())

    async def _run(self) -> None:
        world = self.world
        await asyncio.sleep(START_UP_S)
        if not self.alive:
            return
        try:
            shard = self._shard = shards.Shard(self.folder, self.number)
            address = f"127.0.0.1:{next(world.ports)}"
            world.net.shards[address] = shard
            follow = world.loop.create_task(shard.follow(self._syncer, address, None))
            try:
                await asyncio.wait({follow, shard.failed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                follow.cancel()
            if shard.failed.done():
                shard.failed.result()
            await follow
        except SkerryError as error:
            world.note(f"{self.name} gave up: {error}")
            if "has replaced shard" not in str(error):
                world.errors.append(f"{self.name} gave up: {error}")
            if self.alive:
                world.kill_shard(self.number, 0.5)
        except asyncio.CancelledError:
            return
        except Exception as error:
            if self.alive:
                world.errors.append(f"{self.name} broke: {error!r}")

    def moves_to(self, folder: Path) -> None:
        """Follow the run folder, which the simulation renames after each death of the syncer."""
        self.folder = folder
        if self._shard is not None:
            self._shard._folder = folder

    def die(self) -> None:
        self.alive = False
        for call in self.world.net.of(self.name):
            call.break_off(0.0, self.world.chance.choice(NOTICED_S))
        if self._shard is not None:
            self.world.net.gone(self._shard)
        self.world.loop.call_soon(self.task.cancel)


class Island:
    """A learner's process."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name = world, name
        self.address = f"127.0.0.1:{number + 1}"
        world.net.hosts[self.address] = name
        self.clock = OffsetClock(world.clock)
        self.step_s = world.chance.choice([0.08, 0.12, 0.2, 0.6])
        self.learner: Learner | None = None
        self.connection: Any = None
        self.wants_to_leave = False
        self.alive = True
        self.task = world.loop.create_task(self._live())

    async def _live(self) -> None:
        world = self.world
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        seams = Seams(clock=self.clock)
        connection = self.connection = connections.Connection(self.address, model, self.name, None, seams)
        try:
            connection.start()
            while (session := connection.session) is None:
                if connection.failure is not None:
                    return
                await asyncio.sleep(0.1)
            while not (session.fixed_loaded and session.exchange.phase == "training"):
                if session.failure is not None or session.goodbye is not None:
                    return
                session.adopt_ready()
                await asyncio.sleep(0.1)
            learner = self.learner = Learner(connection, session, [optimizer], TOKENS, seams)
            learner.recover(None)
            if world.pool is not None:
                connection.want_leases((world.pool,), world.batch)
            alone_since = world.loop.time()
            while not learner.finished and not self.wants_to_leave:
                await asyncio.sleep(self.step_s * world.chance.uniform(0.9, 1.1))
                await self._thawed()
                if session.connected:
                    alone_since = world.loop.time()
                if world.pool is not None and not session.leases.take():
                    if world.loop.time() - alone_since >= ALONE_S:
                        learner.stop()  # a user's loop ends with an error here
                        break
                    continue  # the first lease has not arrived
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, world.chance.choice([-1.0, 1.0]))
                optimizer.step()
            await self._leave(learner)
            if session.failure is not None:
                world.note(f"{self.name} was put out: {session.failure}")
        except Exception as error:
            world.errors.append(f"{self.name} broke: {error!r}")
        finally:
            if connection._main is not None:
                connection._main.cancel()

    async def _leave(self, learner: Learner) -> None:
        """Leave like Learner.leave, but without blocking this thread."""
        session = learner._session
        learner._hooks.remove()
        with session.lock:
            learner._exchange.stop()
        await asyncio.sleep(self.world.chance.choice([0.0, 0.01, 0.3]))  # stands for writing the optimizer state
        self.connection.leave()
        while session.goodbye is None and session.failure is None:
            learner._adopt_ready()
            session.wake()
            await asyncio.sleep(0.1)
            await self._thawed()

    async def _thawed(self) -> None:
        while (left := self.world.net.held_until.get(self.name, 0.0) - self.world.loop.time()) > 0:
            await asyncio.sleep(left)

    def die(self) -> None:
        self.alive = False
        for call in self.world.net.of(self.name):
            call.break_off(0.0, self.world.chance.choice(NOTICED_S))
        if self.connection is not None:
            self.connection._set_closing()
        self.task.cancel()


class World:
    def __init__(self, seed: int, sync: SyncConfig, islands: int, root: Path, shard_count: int = 0) -> None:
        self.seed, self.sync, self.root = seed, sync, root
        self.shard_count = shard_count
        self.shards: dict[int, ShardLife] = {}
        self.ports = itertools.count(9_000)
        self.at_message: dict[str, tuple[str, Callable[[], None]]] = {}
        """Shard → (kind of message, what to do when the next such message is sent)."""
        self.chance = random.Random(seed)
        self.clock = VirtualClock()
        self.syncer_clock = OffsetClock(self.clock)
        self.loop = VirtualLoop(self.clock, self.chance)
        self.net = Network(self.loop, self.chance)
        self.notes: list[str] = []
        self.faults = 0
        self.ended = False
        self.errors: list[str] = []
        self.loop.set_exception_handler(self._unhandled)
        skerry.create(root / "life-0", small(), sync)
        self.layout = split([spec for spec, _ in model_tensors(small())], sync.fragments)
        self.disk = FaultyDisk(root)
        self.disk.leave = lambda status: None
        self.disk.full = self._refuses
        self.disk_full_until = 0.0
        self._lives = 0
        self._dead: set[str] = set()
        self.checks = Checks(self)
        self.net.on_down = self.checks.told
        self.net.on_up = self.checks.given
        self.net.on_shard = self._shard_message
        self.pool = self.chance.choice([None, Pool("", 30), Pool("", 400)])
        """The data pool, or None without leases. The run reads more than one epoch of it, or a part of one."""
        self.batch = self.chance.choice([1, 3])
        self._count = islands
        self.islands: dict[str, Island] = {}
        self.life: SyncerLife | None = None
        self._processes: list[SyncerLife | ShardLife | Island] = []
        """Strong references to all processes, because a loop keeps only weak ones to its tasks."""

    def note(self, text: str) -> None:
        self.notes.append(f"{self.clock.now():9.3f} {text}")

    def fault(self, text: str) -> None:
        self.faults += 1
        self.note(text)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context['message']}: {context.get('exception')!r}")

    # ------------------------------------------------------------ the syncer and its disk

    def _refuses(self, what: str, path: str) -> bool:
        name = Path(path).relative_to(self.disk.root).parts
        if name and name[0] in self._dead:
            return True
        return self.clock.now() < self.disk_full_until and "write" in what

    def start_syncer(self) -> None:
        self.life = SyncerLife(self, self.root / f"life-{self._lives}")
        self._processes.append(self.life)
        for number in range(self.shard_count):
            self.start_shard(number)

    def start_shard(self, number: int) -> None:
        old = self.shards.get(number)
        if not self.ended and (old is None or not old.alive):
            self.shards[number] = ShardLife(self, self.root / f"life-{self._lives}", number)
            self._processes.append(self.shards[number])

    def _shard_message(self, shard: str, kind: str) -> None:
        if shard in self.at_message and self.at_message[shard][0] == kind:
            self.loop.call_soon(self.at_message.pop(shard)[1])

    def kill_shard(self, number: int, away_s: float) -> None:
        shard = self.shards.get(number)
        if shard is not None and shard.alive:
            shard.die()
            self.loop.call_later(away_s, self.start_shard, number)

    def syncer_died(self, life: SyncerLife, what_stays: Literal["kept"] | Cut, away_s: float = 0.5) -> None:
        """End a syncer process and schedule the next. After a power cut unsynced data may be lost."""
        if not life.alive:
            return
        self.disk.at, self.disk.until = 0, -1
        name = life.folder.name
        self._dead.add(name)
        life.die()
        self._lives += 1
        target = self.root / f"life-{self._lives}"
        survive = what_stays == "kept" and self.chance.random() < 0.5
        for shard in self.shards.values():
            if not survive:  # the shards are on the syncer's machine
                shard.die()
            shard.moves_to(target)
        model = self.disk.state.now[name]
        assert isinstance(model, Folder)
        if what_stays == "kept":
            ignored = shutil.ignore_patterns("*-shm", "lock")
            with self.real_calls():
                shutil.copytree(life.folder, target, ignore=ignored)
            copied: Folder = copy.deepcopy(model)
            copied.synced = {each: what for each, what in copied.synced.items() if not _of_a_process(each)}
            copied.changes = [(each, what) for each, what in copied.changes if not _of_a_process(each)]
        else:
            with self.real_calls():
                model.write_out(target, what_stays, self.chance)
                copied = scan(target)
        self.disk.state.synced[target.name] = copied
        self.loop.call_later(away_s, self.start_syncer)

    @contextlib.contextmanager
    def real_calls(self) -> Iterator[None]:
        """Bypass the simulated disk, for the simulation's own file operations."""
        mine = {name: getattr(os, name) for name in self.disk._real}
        for name, real in self.disk._real.items():
            setattr(os, name, real)
        try:
            yield
        finally:
            for name, patched in mine.items():
                setattr(os, name, patched)

    def kill_syncer(self, what_stays: Literal["kept"] | Cut, at_call: int, away_s: float) -> None:
        """Kill the syncer at once, or at one of its next disk calls."""
        life = self.life
        if life is None or not life.alive or life.server is None:
            return
        if at_call == 0:
            self.syncer_died(life, what_stays, away_s)
            return

        def last_words() -> None:
            self._dead.add(life.folder.name)
            self.loop.call_soon(self.syncer_died, life, what_stays, away_s)

        self.disk.die_at(self.disk.calls + at_call, last_words)

    # ------------------------------------------------------------ islands

    def start_island(self, name: str) -> None:
        if not self.ended:
            self.islands[name] = Island(self, name, len(self.net.hosts))
            self._processes.append(self.islands[name])

    def kill_island(self, name: str, away_s: float) -> None:
        island = self.islands.get(name)
        if island is not None and island.alive:
            island.die()
            self.loop.call_later(away_s, self.start_island, name)

    # ------------------------------------------------------------ the run

    async def _main(self) -> None:
        self.start_syncer()
        for number in range(self._count):
            self.loop.call_later(self.chance.uniform(0.0, 1.0), self.start_island, f"island-{number}")
        while not self.ended:
            await asyncio.sleep(0.5)
            self.checks.held()
            if self.islands and all(island.alive and island.task.done() for island in self.islands.values()):
                # All islands gave up after a long silence. A new one continues the run.
                self.start_island(f"island-{len(self.net.hosts)}")
            if self.loop.time() > TIME_S:
                raise Stuck(f"the run has not ended after {TIME_S:.0f} s")
            if self.errors:
                return
        # The remaining islands learn of the end, or stop by themselves.
        deadline = self.loop.time() + END_S
        while any(island.alive and island.learner and not island.learner.finished for island in self.islands.values()):
            await asyncio.sleep(1.0)
            if self.loop.time() > deadline:
                raise Stuck(f"an island still trains {END_S:.0f} s after the end of the run")

    def run(self) -> World:
        try:
            with _in_place_of_the_real(self), self.disk.installed():
                asyncio.set_event_loop(self.loop)
                try:
                    self.loop.run_until_complete(self._main())
                    self.disk.at, self.disk.until, self.disk_full_until = 0, -1, 0.0
                    self.checks.at_the_end(self.root / f"life-{self._lives}")
                finally:
                    self._cancel_all()
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
        assert not self.errors, "\n".join(self.errors)
        return self

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _of_a_process(name: str) -> bool:
    """Whether this file has no meaning after its process is gone."""
    return name == "lock" or name.endswith("-shm")


class _NoWorkers:
    """Replaces the learner's threads; the loop does their work."""

    def __init__(self, count: int, name: str) -> None:
        pass

    def shutdown(self) -> None:
        pass


class _Listening:
    def __init__(self, net: Network, server: Any) -> None:
        self._net, self._server = net, server

    async def stop(self, grace: float) -> None:
        self._net.gone(self._server)


@contextlib.contextmanager
def _in_place_of_the_real(world: World) -> Iterator[None]:
    """Replace only what touches the network, threads, time and randomness."""

    async def serve(server: Any, address: str, tls: object) -> tuple[_Listening, int]:
        assert world.life is not None
        world.life.server = server
        world.checks.started(server)
        world.net.listen(server)
        return _Listening(world.net, server), 1

    def nobody_gives(courier: StateCourier) -> list[bytes]:
        raise WireError("not in a simulation: it would block this thread")

    take, finish, commit = Contributions.take, Download.finish, RunStore.commit

    def committed(store: RunStore, merges: Any, standing: Any, entries: Any) -> None:
        commit(store, merges, standing, entries)
        for written in merges:
            world.checks.stored(written, store.folder)

    async def taken(contributions: Contributions, learner: str, receiving: Receiving) -> Any:
        world.checks.taken(receiving.session, receiving.header, bytes(receiving.assembly.finish()))
        return await take(contributions, learner, receiving)

    def fetched(download: Download) -> tuple[pb.Fetched, memoryview]:
        header, data = finish(download)
        world.checks.fetched(header, bytes(data))
        return header, data

    numbers = random.Random(world.seed)
    random_state = random.getstate()
    random.seed(world.seed)
    replaced: list[tuple[Any, str, Any]] = [
        (connections, "open_channel", world.net.open_channel),
        (connections, "SyncerStub", Stub),
        (routes, "open_channel", world.net.open_channel),
        (routes, "SyncerStub", Stub),
        (shards, "open_channel", world.net.open_channel),
        (shards, "SyncerStub", Stub),
        (shards, "uuid", SimpleNamespace(uuid4=lambda: UUID(int=numbers.getrandbits(128)))),
        (backgrounds, "shared_loop", lambda: world.loop),
        (backgrounds, "DaemonWorkers", _NoWorkers),
        (StateCourier, "fetch", nobody_gives),
        (servers.SyncerServer, "serve", serve),
        (Contributions, "take", taken),
        (Download, "finish", fetched),
        (RunStore, "commit", committed),
        (chunks, "CHUNK_BYTES", CHUNK_BYTES[world.seed % len(CHUNK_BYTES)]),
        (sessions, "uuid", SimpleNamespace(uuid4=lambda: UUID(int=numbers.getrandbits(128)))),
    ]
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    quiet = logging.getLogger("skerry")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    for owner, name, mine in replaced:
        setattr(owner, name, mine)
    try:
        yield
    finally:
        for owner, name, real in saved:
            setattr(owner, name, real)
        quiet.setLevel(level)
        random.setstate(random_state)
