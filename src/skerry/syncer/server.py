"""The syncer process: gRPC in front, the state machine in the middle, merging and the store in threads behind.

Everything that touches the core runs on the event loop. A few threads compute merges and write their files; one commits them
to the tape, all that are ready in one transaction. Control messages wait in a bounded queue for each learner; one that does not
drain it is cut off rather than held for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from skerry.clock import Clock, SystemClock
from skerry.config import to_json
from skerry.core import messages as m
from skerry.core.fragment import TensorSpec, check_same_model
from skerry.core.leases import MOST_POOLS, Need, Pool
from skerry.core.syncer import SyncerCore
from skerry.errors import JoinRefused, SkerryError
from skerry.syncer.bulk import Bulk
from skerry.syncer.desk import MAX_COUNT, CoreDesk
from skerry.syncer.diary import Diary, Vitals
from skerry.syncer.journals import Journals
from skerry.syncer.lane import MAX_NAME, first_message
from skerry.syncer.merging import LocalPlane, Merger
from skerry.syncer.outbox import Outbox
from skerry.syncer.relay import Relay
from skerry.syncer.shards import Shards
from skerry.syncer.snapshots import Snapshots
from skerry.syncer.store import RunStore
from skerry.syncer.tape import Tape
from skerry.syncer.telling import lease_message, messages_of, progress_of
from skerry.wire import skerry_pb2 as pb
from skerry.wire.chunks import CHUNK_BYTES
from skerry.wire.connection import PROTOCOL, SERVER_OPTIONS, TLS, bind
from skerry.wire.parcel import Parcel
from skerry.wire.service import add_to_server

CONTROL_QUEUE = 4096
PULSE_S = 0.25
PROGRESS_EVERY_S = 1.0
"""A learner hears how far the run is within twice this; sooner if `silence_s` is short. A message costs it a millisecond."""
METRICS_EVERY_S = 1.0
RETRY_FLUSH_S = 0.5
MAX_LEAST = 1 << 20
"""Samples a learner may hold at the end of an epoch, whatever its share."""
LINGER_S = (0.5, 10.0)
"""How long an ended run is still served: if everyone has heard of the end, and if somebody may come back."""
TOLD = ("fault", "healed", "restarted")
"""What may be put on the tape from outside."""
MAX_TOLD = 4096
TOLD_S = 2.0
"""Longer than this nobody waits for it to be durable: who told it would take it for lost, and tell it again."""
MOST_PROBES = 16
MAX_PROBE = 4 << 30
"""Bytes of one call, each way."""
MAX_STEPS_AT_ONCE = 1_000_000
"""A learner cannot have taken more steps than this between two reports."""


@dataclass
class Connection:
    """A learner's control stream, as seen from here."""

    session: str
    outbox: Outbox[pb.ToLearner] = field(default_factory=lambda: Outbox(CONTROL_QUEUE))
    vitals: Vitals = field(default_factory=Vitals)
    told: bool = False
    """It has heard lately how far the run is."""

    def send(self, message: pb.ToLearner) -> None:
        if message.WhichOneof("message") in ("announce", "progress"):
            self.told = True
        self.outbox.send(message)

    def end(self) -> None:
        self.outbox.end()


class SyncerServer:
    def __init__(self, store: RunStore, *, clock: Clock | None = None, shards: int = 0) -> None:
        self._probes = 0
        self.store = store
        self.layout = store.identity.layout
        self.sync = store.identity.sync
        self.clock = clock or SystemClock()
        progress, standing = store.load_progress()
        self.core = SyncerCore(
            self.sync, len(self.layout.fragments), now=self.clock.now(), progress=progress, standing=standing
        )
        self.ended = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A defect of ours: the process must not go on as if nothing had happened."""
        self._tape = Tape(store, self.core.standing)
        desk, self._relay = CoreDesk(self), Relay(self.layout, self)
        self._bulk = Bulk(self.layout, self.sync, desk, self._relay)
        self._bulk.publish_fixed(store.fixed_bytes())
        self._shards = Shards(shards, store, self._tape, desk, self) if shards else None
        self._plane = LocalPlane(self.layout, self.sync.merge == "radial", self._bulk, store.write)
        if self._shards is None:
            for fragment, state in enumerate(store.load_states()):
                self._plane.serve(fragment, progress[fragment].version, state)
        self._merger = Merger(store, self._shards or self._plane, self._tape)
        self._snapshots = Snapshots(store, self.core, self._tape, self._relay)
        self._diary = Diary(store.folder, self.clock)
        self._connections: dict[str, Connection] = {}
        self._dismissed: set[str] = set()
        self._handlers: set[asyncio.Future[None]] = set()
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
        if self._shards is not None:
            self.dispatch(m.FragmentsAway(tuple(range(len(self.layout.fragments)))))
        if self.core.phase == "ended":
            self.ended.set()

    # ------------------------------------------------------------ the state machine and its actions

    def dispatch(self, event: m.Event) -> None:
        with self._no_half_change():
            self._perform_all(self.core.handle(event, self.clock.now()))

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
            connection = self._connections.pop(action.name, None)
            if connection is not None:
                connection.end()
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
        connection = self._connections.get(name)
        if connection is not None:
            connection.send(message)

    def record(self, kind: str, data: dict[str, Any]) -> None:
        self._tape.record(kind, data)
        self._diary.event(kind, data)

    def journal(self, name: str, session: str, text: str) -> None:
        if not self._journals.take(name, session, text):
            self.record("refused", {"learner": name, "reason": "a journal that cannot be"})

    def is_connected(self, name: str, session: str) -> bool:
        connection = self._connections.get(name)
        return connection is not None and connection.session == session

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
        for connection in self._connections.values():
            connection.send(pb.ToLearner(places=self._shards.places))

    async def shard(self, messages: AsyncIterator[pb.FromShard | None], context: Any) -> AsyncIterator[pb.ToShard]:
        if self._shards is None:
            yield pb.ToShard(goodbye=pb.ShardGoodbye(reason="this syncer has no shards; start it with --shards"))
            return
        async for message in self._shards.serve(messages):
            yield message

    async def probe(self, messages: AsyncIterator[pb.ProbeUp | None], context: Any) -> AsyncIterator[pb.ProbeDown]:
        if self._probes >= MOST_PROBES:
            return
        self._probes += 1
        received = sent = 0
        noise = os.urandom(CHUNK_BYTES)
        try:
            async for message in messages:
                received += len(message.chunk) if message is not None else MAX_PROBE
                for _ in range(message.wanted if message is not None else 0):
                    if max(sent, received) >= MAX_PROBE:
                        return
                    sent += len(noise)
                    yield pb.ProbeDown(chunk=noise)
                if received >= MAX_PROBE:
                    return
                yield pb.ProbeDown(received_bytes=received)
        finally:
            self._probes -= 1

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

    async def control(self, messages: AsyncIterator[pb.ToSyncer | None], context: Any) -> AsyncIterator[pb.ToLearner]:
        first = await first_message(messages)
        if first is None:
            self.record("refused", {"reason": "a control stream without a hello"})
            return  # it may try again
        try:
            hello = self._check_hello(first)
            connection = self._admit(hello)
        except JoinRefused as refusal:
            self.record("refused", {"learner": first.hello.name[:MAX_NAME], "reason": str(refusal)})
            yield pb.ToLearner(refusal=pb.Refusal(reason=str(refusal)))
            return
        reader = asyncio.get_running_loop().create_task(self._read(hello.name, connection, messages))
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handlers.add(over)
        try:
            while (message := await connection.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            if self._connections.get(hello.name) is connection:
                del self._connections[hello.name]
                self.dispatch(m.Disconnected(hello.name, hello.session))
            self._handlers.discard(over)
            if not over.done():
                over.set_result(None)

    def _check_hello(self, first: pb.ToSyncer) -> pb.Hello:
        if first.WhichOneof("message") != "hello":
            raise JoinRefused("the first message must be a hello")
        hello = first.hello
        if hello.protocol != PROTOCOL:
            raise JoinRefused(f"protocol mismatch: the syncer speaks version {PROTOCOL}, this learner {hello.protocol}")
        if not 0 < len(hello.name) <= MAX_NAME or not 0 < len(hello.session) <= MAX_NAME:
            raise JoinRefused(f"a learner needs a name and a session of 1 to {MAX_NAME} characters")
        if max(hello.step, hello.tokens, hello.leased) > MAX_COUNT:
            raise JoinRefused(f"step, tokens and samples must be at most {MAX_COUNT}")
        if hello.run_id and hello.run_id != self.store.identity.run_id:
            raise JoinRefused(f"this syncer serves run {self.store.identity.run_id}, the learner belongs to {hello.run_id}")
        specs = [TensorSpec(t.name, tuple(t.shape), t.dtype, t.rule) for t in hello.tensors]  # type: ignore[arg-type]
        check_same_model(self.layout.tensors, specs)
        return hello

    def _admit(self, hello: pb.Hello) -> Connection:
        connection = Connection(hello.session)
        old = self._connections.get(hello.name)
        if old is not None and old.session == hello.session:
            old.end()
        joined = m.Joined(
            hello.name,
            hello.session,
            hello.step,
            hello.tokens,
            tuple(hello.held),
            hello.region[:MAX_NAME],
            hello.leased,
            hello.lease_floor,
            hello.platform[:MAX_NAME],
        )
        with self._no_half_change():
            actions = self.core.handle(joined, self.clock.now())
            if not any(isinstance(action, m.Welcome) for action in actions):
                self._perform_all(actions)
                reason = next(a.data["reason"] for a in actions if isinstance(a, m.Record) and a.kind == "refused")
                raise JoinRefused(f"{hello.name} cannot come back: {reason}")
            # What comes before the welcome is for the process whose place it takes.
            place = next(n for n, action in enumerate(actions) if isinstance(action, m.Welcome))
            self._perform_all(actions[:place])
            self._connections[hello.name] = connection
            self._perform_all(actions[place:])
        return connection

    async def _read(self, name: str, connection: Connection, messages: AsyncIterator[pb.ToSyncer | None]) -> None:
        try:
            async for message in messages:
                if self._connections.get(name) is not connection:
                    return
                if message is None:
                    self.record("refused", {"learner": name, "reason": "a damaged message"})
                    return
                kind = message.WhichOneof("message")
                if kind == "report":
                    report = message.report
                    learner = self.core.learners[name]
                    if not _plausible(report, learner.step):
                        self.record("refused", {"learner": name, "reason": "a report with impossible numbers"})
                        continue
                    loss = report.loss if report.HasField("loss") else connection.vitals.loss
                    stall_s = max(connection.vitals.stall_s, report.stall_s)
                    moved = (report.sent_bytes, report.received_bytes)
                    link = connection.vitals.link
                    if report.HasField("link"):
                        link = _link_account(report.link)
                        if not connection.outbox.half_full:
                            connection.send(pb.ToLearner(pong=pb.Pong(ping=report.link.ping)))
                    connection.vitals = Vitals(loss, *moved, report.steps, stall_s, report.stalled_s, link)
                    said = report.loss if report.HasField("loss") else None
                    need = _need(report.need) if report.HasField("need") else None
                    self.dispatch(m.Reported(name, report.step, report.tokens, report.step_time_s, said, need))
                elif kind == "ready":
                    self.dispatch(m.Ready(name))
                elif kind == "nothing":
                    self.dispatch(m.NothingToGive(name, message.nothing.fragment, message.nothing.step))
                elif kind == "leaving":
                    self.dispatch(m.Leaving(name))
                elif kind == "data":
                    pools = message.data.pools
                    if not 0 < len(pools) <= MOST_POOLS or any(len(p.name) > MAX_NAME or p.size > MAX_COUNT for p in pools):
                        reason = f"data sets must be 1 to {MOST_POOLS}, with names of at most {MAX_NAME} characters"
                        self.record("refused", {"learner": name, "reason": reason})
                        self.send(name, pb.ToLearner(no_lease=pb.NoLease(reason=reason)))
                        continue
                    found = tuple(Pool(pool.name, pool.size, pool.fingerprint) for pool in pools)
                    self.dispatch(m.Declared(name, found))
                elif kind == "restored":
                    self.record("optimizer_state", {"learner": name, "source": message.restored.source[:MAX_NAME]})
                else:
                    self.record("refused", {"learner": name, "reason": f"unexpected {kind or 'empty'} message"})
        finally:
            # Whatever ended the reading, the stream is of no more use.
            if self._connections.get(name) is connection:
                connection.end()

    async def bulk(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None], context: Any) -> None:
        await self._bulk.serve(messages, context)

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
                self._tell_progress()
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

    def _tell_progress(self) -> None:
        progress = progress_of(self.core)
        for connection in list(self._connections.values()):
            if not connection.told and not connection.outbox.half_full:
                connection.send(progress)
            connection.told = False

    async def _flush(self) -> None:
        await self._tape.flush()
        self._flushing = False

    async def hang_up(self) -> None:
        """End every control stream and wait until its handler has seen to it."""
        for connection in list(self._connections.values()):
            connection.end()
        if self._shards is not None:
            self._shards.dismiss("the run is over", over=self.core.phase == "ended")
        deadline = self.clock.now() + 5.0
        while self._handlers and self.clock.now() < deadline:
            await asyncio.wait(self._handlers, timeout=0.5)

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
        self._diary.summary(self.core, {name: connection.vitals for name, connection in self._connections.items()})


def _told_of_the_end(action: m.Action) -> tuple[object, ...] | None:
    """Whom this tells what of the end of the run; None if it does not. A question does as well: what is asked of one that
    trains on is another thing."""
    if isinstance(action, m.Ask):
        return action.name, m.Ask, action.fragment
    if isinstance(action, m.StopTraining) or (isinstance(action, m.Goodbye) and action.reason == m.OVER):
        return action.name, type(action)
    return None


def _need(need: pb.DataNeed) -> Need:
    return Need(need.given, need.taken, need.wanted, min(need.least, need.taken + MAX_LEAST), need.settled)


def _link_account(said: pb.LinkAccount) -> dict[str, float]:
    values = {field.name: value for field, value in said.ListFields() if field.name != "ping"}
    return {name: round(value, 6) for name, value in values.items() if math.isfinite(value) and 0 <= value <= MAX_COUNT}


def _plausible(report: pb.Report, step_before: int) -> bool:
    times = (report.step_time_s, report.stall_s, report.stalled_s)
    sane_time = all(math.isfinite(time) and 0 <= time < 1e9 for time in times)
    sane_need = max(report.need.given, report.need.taken) <= MAX_COUNT
    return sane_time and sane_need and report.tokens <= MAX_COUNT and report.step <= step_before + MAX_STEPS_AT_ONCE


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
    on_listening(port)
    syncer.dispatch(m.Tick())  # a run restored while it closes may have nobody left to wait for
    pulse = asyncio.create_task(syncer.pulse())
    ended = asyncio.create_task(syncer.ended.wait())
    stopped = asyncio.create_task((stop or asyncio.Event()).wait())
    waits: set[asyncio.Future[Any]] = {pulse, ended, stopped, syncer.failed}
    try:
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
