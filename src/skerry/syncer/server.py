"""The syncer process: gRPC in front, the state machine in the middle, merging and the store in threads behind.

Everything that touches the core runs on the event loop. A few threads compute merges and write their files; one commits them
to the tape, all that are ready in one transaction. Learners' control streams are in control.py, bulk data in bulk.py, shards
in shards.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc

from skerry.clock import Clock, SystemClock
from skerry.config import to_json
from skerry.core import messages as m
from skerry.core.standing import FragmentProgress, Standing
from skerry.core.syncer import SyncerCore
from skerry.errors import JoinRefused, SkerryError
from skerry.syncer.merging import LocalPlane, Merger
from skerry.syncer.metrics_log import Diary
from skerry.syncer.rescue import Rescue
from skerry.syncer.rpc.admission import CoreDesk
from skerry.syncer.rpc.control import ControlStreams
from skerry.syncer.rpc.fragments import Bulk
from skerry.syncer.rpc.journals import Journals
from skerry.syncer.rpc.outgoing import lease_message, messages_of
from skerry.syncer.rpc.probe import Probes
from skerry.syncer.rpc.state_relay import Relay
from skerry.syncer.sharding.shards import Shards, spread
from skerry.syncer.storage.snapshots import Snapshots
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.tape import Tape
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL, SERVER_OPTIONS, TLS, bind
from skerry.wire.service import add_to_server

PULSE_S = 0.25
PROGRESS_EVERY_S = 1.0
"""A learner hears how far the run is within twice this; sooner if `silence_s` is short. A message costs it a millisecond."""
METRICS_EVERY_S = 1.0
RETRY_FLUSH_S = 0.5
LINGER_S = (0.5, 10.0)
"""How long an ended run is still served: if everyone has heard of the end, and if somebody may come back."""
TOLD = ("fault", "healed", "restarted")
"""What may be put on the tape from outside."""
MAX_TOLD = 4096
TOLD_S = 2.0
"""Longer than this nobody waits for it to be durable: who told it would take it for lost, and tell it again."""


class SyncerServer:
    def __init__(self, store: RunStore, *, clock: Clock | None = None, shards: int = 0) -> None:
        self.store = store
        self.layout = store.identity.layout
        self.sync = store.identity.sync
        self.clock = clock or SystemClock()
        progress, standing = self._load_progress()
        places = spread(self.layout, shards) if shards else ()
        count = len(self.layout.fragments)
        self.core = SyncerCore(self.sync, count, now=self.clock.now(), progress=progress, standing=standing, places=places)
        self.ended = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A defect of ours: the process must not go on as if nothing had happened."""
        self._tape = Tape(store, self.core.standing)
        desk, self._relay = CoreDesk(self), Relay(self.layout, self)
        self._bulk = Bulk(self.layout, self.sync, desk, self._relay)
        self._bulk.publish_fixed(store.fixed_bytes())
        self._shards = Shards(shards, store, self._tape, desk, self) if shards else None
        self._plane = LocalPlane(self.layout, self.sync.merge == "radial", self._bulk, store.write)
        lost = tuple(store.fallbacks)
        self._rescue = Rescue(store, self._tape, self._relay, self, self._serve_rescued)
        if self._shards is None:
            for fragment in set(range(count)) - set(lost):
                self._plane.serve(fragment, progress[fragment].version, store.load_state(fragment))
        self._merger = Merger(store, self._shards or self._plane, self._tape)
        self._snapshots = Snapshots(store, self.core, self._tape, self._relay)
        self._diary = Diary(store.folder, self.clock)
        self._streams = ControlStreams(store.identity, self)
        self.control, self.bulk, self.probe = self._streams.serve, self._bulk.serve, Probes().serve
        self._dismissed: set[str] = set()
        self._working: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._closing = False
        self._end_is_written = self.core.phase in ("closing", "ended")
        self._held: dict[tuple[object, ...], m.Action] | None = None
        """What waits until it is written that the run closes: of each kind the newest for each learner and fragment."""
        self._leases: list[m.Lease] = []
        """What waits to be durable before it is told."""
        self._telling_leases = False
        self._flushing = False
        self._journals = Journals(self.core.retired, self._tape.record)
        self._snapshot_at = self.clock.now() + self.sync.snapshot_every_s
        self.record("syncer_started", {"step": self.core.step, "phase": self.core.phase})
        for line in store.said:
            self.record("repaired", {"what": line})
        if self._shards is not None or lost:
            self.dispatch(m.FragmentsAway(tuple(range(count)) if self._shards is not None else lost))
        if lost:
            self._begin(self._rescue.run())
        if self.core.phase == "ended":
            self.ended.set()

    def _load_progress(self) -> tuple[list[FragmentProgress], Standing]:
        """Fragments whose newest version is damaged go on from an older one at once if no island can be expected back."""
        progress, standing = self.store.load_progress()
        expected = standing.phase != "ended" and set(standing.sessions) - set(standing.gone)
        if self.store.fallbacks and not expected:
            self.store.fall_back(list(self.store.fallbacks))
            progress, standing = self.store.load_progress()
        return progress, standing

    async def rescued(self) -> None:
        """Until the newest version of every fragment has a whole file."""
        await self._rescue.over.wait()

    def _serve_rescued(self, fragment: int) -> None:
        if self._shards is None:
            self._plane.serve(fragment, self.core.fragments[fragment].version, self.store.load_state(fragment))
            self.dispatch(m.FragmentsBack((fragment,)))

    # ------------------------------------------------------------ the state machine and its actions

    def dispatch(self, event: m.Event) -> None:
        with self._no_half_change():
            self._perform_all(self.core.handle(event, self.clock.now()))

    def join(self, event: m.Joined, connect: Callable[[], None]) -> None:
        """Raises JoinRefused. What is for the process whose place it takes is sent before `connect`, the rest after it."""
        with self._no_half_change():
            actions = self.core.handle(event, self.clock.now())
            place = next((n for n, action in enumerate(actions) if isinstance(action, m.Welcome)), None)
            self._perform_all(actions[:place])
            if place is None:
                reason = next(a.data["reason"] for a in actions if isinstance(a, m.Record) and a.kind == "refused")
                raise JoinRefused(f"{event.name} cannot come back: {reason}")
            connect()
            self._perform_all(actions[place:])
        self._rescue.joined(event.name, event.held)

    @contextlib.contextmanager
    def _no_half_change(self) -> Iterator[None]:
        """Whoever called may not notice an error, but a state half changed must not go on."""
        try:
            yield
        except JoinRefused:
            raise
        except Exception as error:
            self.defect(error)
            raise

    def _perform_all(self, actions: list[m.Action]) -> None:
        if any(isinstance(action, m.StopTraining) for action in actions) and not self._end_is_written and self._held is None:
            self._held = {}
            self._begin(self._write_the_end())
        for action in actions:
            told = _told_of_the_end(action)
            if self._held is None or told is None:
                self._perform(action)
            else:
                self._held.pop(told, None)
                self._held[told] = action

    async def _write_the_end(self) -> None:
        """That the run closes is told to learners once it is written down: they stop for good, and a syncer that is started
        again must know why. What they would be told meanwhile waits, in its order."""
        while not await self._tape.flush():
            if self._closing:
                return
            await asyncio.sleep(RETRY_FLUSH_S)
        held, self._held, self._end_is_written = self._held or {}, None, True
        for action in held.values():
            if not isinstance(action, m.Ask) or self.core.is_asked(action):
                self._perform(action)

    async def _tell_leases(self) -> None:
        """A lease is told once it is written down, or a syncer that is started again could give the same samples to another."""
        while self._leases:
            told, self._leases = self._leases, []
            while not await self._tape.flush():
                if self._closing:
                    return
                await asyncio.sleep(RETRY_FLUSH_S)
            for lease in told:
                if self.is_connected(lease.name, lease.session):
                    self.send(lease.name, lease_message(lease))
        self._telling_leases = False

    def _perform(self, action: m.Action) -> None:
        if isinstance(action, m.Welcome):
            self._dismissed.discard(action.name)
        for name, message in messages_of(action, self.store.identity.run_id, self.core):
            if isinstance(action, m.Welcome) and self._shards is not None:
                message.welcome.places.CopyFrom(self._shards.places)
            self.send(name, message)
        if isinstance(action, m.Record):
            self.record(action.kind, action.data)
        elif isinstance(action, m.Lease):
            self._leases.append(action)
            if not self._telling_leases:
                self._telling_leases = True
                self._begin(self._tell_leases())
        elif isinstance(action, m.Merge):
            self._begin(self._merge(action))
        elif isinstance(action, m.Restore):
            self._begin(self._restore(action))
        elif isinstance(action, m.KeepGood):
            self._begin(self._keep_good(action.step))
        elif isinstance(action, m.Goodbye):
            if action.final:
                self._dismissed = {name for name in self._dismissed if name in self.core.learners} | {action.name}
            self._streams.end(action.name)
        elif isinstance(action, m.WakeAt):
            self._wake_at(action.at)
        elif isinstance(action, m.Ended):
            self._write_summary()
            self.ended.set()

    @property
    def missed_the_end(self) -> bool:
        """Is there a learner that was given up and has not been told that it need not come back?"""
        return any(learner.began and name not in self._dismissed for name, learner in self.core.learners.items())

    def send(self, name: str, message: pb.ToLearner) -> None:
        self._streams.send(name, message)

    def record(self, kind: str, data: dict[str, Any]) -> None:
        self._tape.record(kind, data)
        self._diary.event(kind, data)

    def journal(self, name: str, session: str, text: str) -> None:
        if not self._journals.take(name, session, text):
            self.record("refused", {"learner": name, "reason": "a journal that cannot be"})

    def is_connected(self, name: str, session: str) -> bool:
        return self._streams.is_connected(name, session)

    def bytes_moved(self, name: str) -> None:
        self.core.bytes_moved(name, self.clock.now())

    def _wake_at(self, at: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay = max(0.0, at - self.clock.now())
        self._wake = asyncio.get_running_loop().call_later(delay, self.dispatch, m.Tick())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._work_done)

    def _work_done(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.defect(error)

    def defect(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _merge(self, order: m.Merge) -> None:
        started = self.clock.now()
        async with self._occupied(order.fragment):
            outcome = await self._merger.merge(order)
            self.dispatch(outcome)
        if isinstance(outcome, m.Stored):
            self._diary.merged(order, self.clock.now() - started)

    async def _restore(self, order: m.Restore) -> None:
        async with self._occupied(order.fragment):
            outcome = await self._merger.restore(order)
            if isinstance(outcome, m.Stored):
                told = {"fragment": order.fragment, "version": order.version, "good_step": order.good_step}
                self.record("restored", told)
            self.dispatch(outcome)

    def _occupied(self, fragment: int) -> contextlib.AbstractAsyncContextManager[None]:
        return self._shards.occupied(fragment) if self._shards is not None else contextlib.nullcontext()

    async def _keep_good(self, step: int) -> None:
        self.dispatch(await self._merger.keep_good(step))

    # ------------------------------------------------------------ the service

    async def describe(self, request: pb.DescribeRequest, context: Any) -> pb.RunDescription:
        identity = self.store.identity
        return pb.RunDescription(
            protocol=PROTOCOL,
            run_id=identity.run_id,
            sync_json=to_json(self.sync),
            job_json=identity.job_json,
            now=time.time(),
        )

    def places_changed(self) -> None:
        assert self._shards is not None
        self._streams.send_to_all(pb.ToLearner(places=self._shards.places))

    async def shard(self, messages: AsyncIterator[pb.FromShard | None], context: Any) -> AsyncIterator[pb.ToShard]:
        if self._shards is None:
            yield pb.ToShard(goodbye=pb.ShardGoodbye(reason="this syncer has no shards; start it with --shards"))
            return
        async for message in self._shards.serve(messages):
            yield message

    async def close_run(self, request: pb.CloseRequest, context: Any) -> pb.CloseReply:
        await self._check_run(request.run_id, context)
        self.dispatch(m.CloseRequested())
        return pb.CloseReply()

    async def tell(self, request: pb.TellRequest, context: Any) -> pb.TellReply:
        await self._check_run(request.run_id, context)
        try:
            data = json.loads(request.data_json[:MAX_TOLD])
        except ValueError:
            data = None
        if request.kind not in TOLD or not isinstance(data, dict):
            reason = f"told must be one of {', '.join(TOLD)}, with a JSON object of at most {MAX_TOLD} bytes"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        self.record(request.kind, data)
        # Who told it may be about to kill this process. While the disk takes nothing it waits in memory, like all decisions.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._tape.flush(), TOLD_S)
        return pb.TellReply()

    async def snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotReply:
        await self._check_run(request.run_id, context)
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._begin(self._take_snapshot(done))
        try:
            facts = await asyncio.shield(done)
        except SkerryError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        return pb.SnapshotReply(facts_json=json.dumps(facts))

    async def _take_snapshot(self, done: asyncio.Future[dict[str, Any]] | None = None) -> None:
        started = self.clock.now()
        try:
            facts = await self._snapshots.take()
        except SkerryError as error:
            self.record("snapshot_failed", {"reason": str(error)})
            if done is not None and not done.done():
                done.set_exception(error)
        else:
            self.record("snapshot", {**facts, "seconds": round(self.clock.now() - started, 3)})
            if done is not None and not done.done():
                done.set_result(facts)
        self._snapshot_at = self.clock.now() + self.sync.snapshot_every_s

    async def _check_run(self, run_id: str, context: Any) -> None:
        if run_id != self.store.identity.run_id:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this syncer serves another run")

    # ------------------------------------------------------------ running

    async def serve(self, address: str, tls: TLS | None = None) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=SERVER_OPTIONS, compression=grpc.Compression.NoCompression)
        add_to_server(self, server)
        port = bind(server, address, tls)
        if self._shards is not None:
            self._shards.secure = tls is not None
        await server.start()
        return server, port

    async def pulse(self) -> None:
        """Tell learners how far the run is, write metrics and flush the tape, until cancelled."""
        metrics_at = 0.0
        pulses = max(1, int(min(PROGRESS_EVERY_S, self.sync.silence_s / 8) / PULSE_S))
        for pulse in itertools.count():
            if pulse % pulses == 0:
                self._streams.tell_progress()
            if self.clock.now() >= metrics_at:
                metrics_at = self.clock.now() + METRICS_EVERY_S
                self._write_summary()
                if not self._flushing:
                    # Not waited for: the tape may be busy for long, and learners must hear of us.
                    self._flushing = True
                    self._begin(self._flush())
            if self.sync.snapshot_every_s and self.core.phase == "running" and self.clock.now() >= self._snapshot_at:
                self._snapshot_at = math.inf
                self._begin(self._take_snapshot())
            await asyncio.sleep(PULSE_S)

    async def _flush(self) -> None:
        await self._tape.flush()
        self._flushing = False

    async def hang_up(self) -> None:
        """End every control stream and wait until its handler has seen to it."""
        if self._shards is not None:
            self._shards.dismiss("the run is over", over=self.core.phase == "ended")
        await self._streams.hang_up(self.clock)

    async def close(self) -> None:
        """Let merges in flight finish, write the last of the tape, and let go of the run folder."""
        self._closing = True
        self._snapshots.close()
        if self._wake is not None:
            self._wake.cancel()
        self._relay.close()
        while self._working:
            await asyncio.gather(*self._working, return_exceptions=True)
        self._write_summary()
        self._merger.close()
        self._plane.close()
        try:
            await self._tape.close()
        finally:
            self._diary.close()
            self.store.close()

    def _write_summary(self) -> None:
        self._diary.summary(self.core, self._streams.vitals)


def _told_of_the_end(action: m.Action) -> tuple[object, ...] | None:
    """Whom this tells what of the end of the run; None if it does not. A question does as well: what is asked of one that
    trains on is another thing."""
    if isinstance(action, m.Ask):
        return action.name, m.Ask, action.fragment
    if isinstance(action, m.StopTraining) or (isinstance(action, m.Goodbye) and action.reason == m.OVER):
        return action.name, type(action)
    return None


async def run_syncer(
    store: RunStore,
    address: str,
    tls: TLS | None,
    *,
    on_listening: Callable[[int], None],
    stop: asyncio.Event | None = None,
    shards: int = 0,
) -> bool:
    """Serve until the run has ended (True) or `stop` is set (False). With `shards` the data of fragments is in as many other
    processes, which dial in."""
    try:
        syncer = SyncerServer(store, shards=shards)
    except BaseException:
        store.close()
        raise
    try:
        server, port = await syncer.serve(address, tls)
    except BaseException:
        await syncer.close()
        raise
    syncer.dispatch(m.Tick())  # a run restored while it closes may have nobody left to wait for
    pulse = asyncio.create_task(syncer.pulse())
    ended = asyncio.create_task(syncer.ended.wait())
    stopped = asyncio.create_task((stop or asyncio.Event()).wait())
    waits: set[asyncio.Future[Any]] = {pulse, ended, stopped, syncer.failed}
    try:
        on_listening(port)
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for broken in done & {pulse, syncer.failed}:
            broken.result()
        if syncer.ended.is_set():
            await asyncio.sleep(LINGER_S[syncer.missed_the_end])
    finally:
        for task in (pulse, ended, stopped):
            task.cancel()
        await asyncio.gather(pulse, ended, stopped, return_exceptions=True)
        await syncer.hang_up()
        await server.stop(grace=1.0)
        await syncer.close()
    return syncer.ended.is_set()
