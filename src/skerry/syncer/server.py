"""The syncer: gRPC in front, the state machine in the middle, merging and storage in threads behind.

Everything that touches the core runs on the event loop. A few threads compute merges and write their files. One thread commits
them to the tape; all merges that are ready share a transaction. This file wires the parts together and carries out the core's
actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc

from skerry.clock import Clock, SystemClock
from skerry.core import messages as m
from skerry.core import records
from skerry.core.schema import TapeRecord
from skerry.core.standing import Standing
from skerry.core.state import FragmentProgress
from skerry.core.syncer import SyncerCore
from skerry.errors import SkerryError
from skerry.syncer.decisions import Decisions
from skerry.syncer.extensions import check_extensions
from skerry.syncer.merging import LocalPlane, Merger
from skerry.syncer.metrics_log import MetricsLog
from skerry.syncer.rescue import Rescue
from skerry.syncer.rpc.admission import LocalAdmission
from skerry.syncer.rpc.bulk import BulkService
from skerry.syncer.rpc.control import ControlService
from skerry.syncer.rpc.fragments import ServedFragments
from skerry.syncer.rpc.journals import Journals
from skerry.syncer.rpc.operator import OperatorService
from skerry.syncer.rpc.outgoing import lease_message, messages_of
from skerry.syncer.rpc.probe import Probes
from skerry.syncer.rpc.roster import Roster
from skerry.syncer.rpc.state_relay import StateRelay
from skerry.syncer.rpc.uploads import Contributions
from skerry.syncer.sharding.shards import Shards, spread
from skerry.syncer.sinks import SinkFeeder
from skerry.syncer.snapshots import Snapshots
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.tape import Tape
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import SERVER_OPTIONS, TLS, bind
from skerry.wire.service import add_to_server

log = logging.getLogger("skerry.syncer")

PULSE_S = 0.25
PROGRESS_EVERY_S = 1.0
"""Every learner gets the run's progress within twice this, sooner if `silence_s` is short. A message costs it a millisecond."""
METRICS_EVERY_S = 1.0
RETRY_FLUSH_S = 0.5
COMPLAIN_EVERY_S = 60.0
"""How often the log says again that merging pauses."""
"""Pause before the tape is flushed again after the disk rejected a write."""


class SyncerServer:
    def __init__(self, store: RunStore, *, clock: Clock | None = None, shards: int = 0) -> None:
        self.store, self.clock = store, clock or SystemClock()
        self.layout, self.sync = store.identity.layout, store.identity.sync
        check_extensions(self.sync, str(store.folder))
        count = len(self.layout.fragments)
        progress, standing = self._load_progress()
        places = spread(self.layout, shards) if shards else ()
        self.core = SyncerCore(self.sync, count, now=self.clock.now(), progress=progress, standing=standing, places=places)
        self.ended = asyncio.Event()
        self._sinks = SinkFeeder(store.folder, self.sync) if self.sync.sinks else None
        self._log = MetricsLog(store.folder, self.clock)
        self._tape = Tape(store, self.core.standing)
        self.decisions = Decisions(self.core, self.clock, self._tape, self._log)
        self.decisions.perform = self._perform
        self._roster = Roster()
        journals = Journals(self.decisions)
        admission = LocalAdmission(self.decisions, self._roster, journals)
        self._relay = StateRelay(self.layout, self.decisions, self._roster, journals)
        served = ServedFragments(self.layout, self.sync)
        served.serve_fixed(store.fixed_bytes())
        contributions = Contributions(self.layout, self.sync, served, admission)
        self._bulk = BulkService(served, contributions, admission, self._relay)
        self._plane = LocalPlane(self.layout, self.sync, served, contributions, store.write)
        self._rescue = Rescue(store, self.decisions, self._relay, self._serve_rescued)
        self._shards = Shards(shards, store, admission, self.decisions, self._roster, self._rescue) if shards else None
        lost = tuple(store.fallbacks)
        if self._shards is None:
            for fragment in set(range(count)) - set(lost):
                self._plane.serve(fragment, progress[fragment].version, store.load_state(fragment))
        self._merger = Merger(store, self._shards or self._plane, self._tape)
        self._snapshots = Snapshots(store, self.core, self._tape, self._relay)
        self._control = ControlService(store.identity, self._roster, self.decisions, self._rescue.joined)
        operator = OperatorService(store.identity, self.decisions, self.take_snapshot)
        self.describe, self.close_run, self.tell = operator.describe, operator.close_run, operator.tell
        self.snapshot, self.control = operator.snapshot, self._control.serve
        self.bulk, self.probe = self._bulk.serve, Probes().serve
        self._dismissed: set[str] = set()
        self._working: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._closing = False
        self._end_is_written = self.core.phase in ("closing", "ended")
        self._held: dict[tuple[object, ...], m.Action] | None = None
        """Actions held back until the end of the run is durable: the newest per key (see `_tells_the_end`)."""
        self._leases: list[m.Lease] = []
        """Leases that are not durable yet, and therefore not sent."""
        self._sending_leases = False
        self._flushing = False
        self._complain_at: float | None = None
        """While merging pauses: when to log it again."""
        self._snapshot_at = self.clock.now() + self.sync.snapshot_every_s
        self.decisions.record(records.SyncerStarted(self.core.step, self.core.phase))
        for line in store.problems:
            self.decisions.record(records.Repaired(line))
        if self._shards is not None or lost:
            self.decisions.dispatch(m.FragmentsAway(tuple(range(count)) if self._shards is not None else lost))
        if lost:
            self._begin(self._rescue.run())
        if self.core.phase == "ended":
            self.ended.set()

    def _load_progress(self) -> tuple[list[FragmentProgress], Standing]:
        """Load the progress. Damaged fragments fall back at once if no island is expected back that could deliver them."""
        progress, standing = self.store.load_progress()
        expected = standing.phase != "ended" and set(standing.sessions) - set(standing.gone)
        if self.store.fallbacks and not expected:
            for fragment in list(self.store.fallbacks):
                self.store.fall_back(fragment)
            progress, standing = self.store.load_progress()
        return progress, standing

    async def _serve_rescued(self, fragment: int) -> None:
        if self._shards is None:
            state = await self._tape.between_commits(self.store.load_state, fragment)
            self._plane.serve(fragment, self.core.fragments[fragment].version, state)
            self.decisions.dispatch(m.FragmentsBack((fragment,)))

    @property
    def failed(self) -> asyncio.Future[None]:
        return self.decisions.failed

    # ------------------------------------------------------------ actions

    def _perform(self, actions: list[m.Action]) -> None:
        for action in self._may_be_told(actions):
            if isinstance(action, m.Welcome):
                self._dismissed.discard(action.learner)
            for learner, message in messages_of(action, self.store.identity.run_id, self.core):
                if isinstance(action, m.Welcome) and self._shards is not None:
                    message.welcome.places.CopyFrom(self._shards.places)
                self._roster.send(learner, message)
            if isinstance(action, TapeRecord):
                self.decisions.record(action)
            elif isinstance(action, m.Lease):
                self._leases.append(action)
                if not self._sending_leases:
                    self._sending_leases = True
                    self._begin(self._send_leases())
            elif isinstance(action, m.Merge):
                self._begin(self._merge(action))
            elif isinstance(action, m.Restore):
                self._begin(self._restore(action))
            elif isinstance(action, m.KeepGood):
                self._begin(self._keep_good(action.step))
            elif isinstance(action, m.Goodbye):
                if action.final:
                    self._dismissed = {name for name in self._dismissed if name in self.core.learners} | {action.learner}
                self._roster.end(action.learner)
            elif isinstance(action, m.WakeAt):
                self._wake_at(action.at)
            elif isinstance(action, m.RunEnded):
                self._write_summary()
                self.ended.set()

    def _may_be_told(self, actions: list[m.Action]) -> list[m.Action]:
        """Actions to perform now. Those that tell learners about the end of the run are held until the end is durable."""
        if self._end_is_written:
            return actions
        if self._held is None and any(isinstance(action, m.StopTraining) for action in actions):
            self._held = {}
            self._begin(self._write_the_end())
        now = []
        for action in actions:
            key = _tells_the_end(action)
            if self._held is None or key is None:
                now.append(action)
            else:
                self._held.pop(key, None)
                self._held[key] = action
        return now

    async def _write_the_end(self) -> None:
        """Make the end of the run durable, then release the held actions. Learners that are told to stop do so for good, so a
        restarted syncer must know of the end."""
        while not await self._tape.flush():
            if self._closing:
                return
            await asyncio.sleep(RETRY_FLUSH_S)
        held, self._held, self._end_is_written = self._held or {}, None, True
        self._perform([action for action in held.values() if not isinstance(action, m.Ask) or self.core.is_asked(action)])

    async def _send_leases(self) -> None:
        """Send leases once they are durable. Otherwise a restarted syncer could give the same samples to another learner."""
        while self._leases:
            batch, self._leases = self._leases, []
            while not await self._tape.flush():
                if self._closing:
                    return
                await asyncio.sleep(RETRY_FLUSH_S)
            for lease in batch:
                if self._roster.is_connected(lease.learner, lease.session):
                    self._roster.send(lease.learner, lease_message(lease))
        self._sending_leases = False

    async def _merge(self, order: m.Merge) -> None:
        started = self.clock.now()
        async with self._occupied(order.fragment):
            outcome = await self._merger.merge(order)
            self.decisions.dispatch(outcome)
        if isinstance(outcome, m.Stored):
            self._log.merged(order, self.clock.now() - started)
            if self._complain_at is not None:
                self._complain_at = None
                log.warning("merging has resumed")
        elif self._complain_at is None or self.clock.now() >= self._complain_at:
            self._complain_at = self.clock.now() + COMPLAIN_EVERY_S
            log.warning("merging pauses, islands train on: %s", outcome.reason)

    async def _restore(self, order: m.Restore) -> None:
        async with self._occupied(order.fragment):
            outcome = await self._merger.restore(order)
            if isinstance(outcome, m.Stored):
                self.decisions.record(records.Restored(order.fragment, order.version, order.good_step))
            self.decisions.dispatch(outcome)

    def _occupied(self, fragment: int) -> contextlib.AbstractAsyncContextManager[None]:
        return self._shards.occupied(fragment) if self._shards is not None else contextlib.nullcontext()

    async def _keep_good(self, step: int) -> None:
        self.decisions.dispatch(await self._merger.keep_good(step))

    def _wake_at(self, at: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        delay = max(0.0, at - self.clock.now())
        self._wake = asyncio.get_running_loop().call_later(delay, self.decisions.dispatch, m.Tick())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._work_done)

    def _work_done(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.decisions.defect(error)

    @property
    def missed_the_end(self) -> bool:
        """Whether a learner may still come back because it was not told that the run is over."""
        return any(learner.began and name not in self._dismissed for name, learner in self.core.learners.items())

    # ------------------------------------------------------------ RPC

    async def shard(self, messages: AsyncIterator[pb.FromShard | None], context: Any) -> AsyncIterator[pb.ToShard]:
        if self._shards is None:
            yield pb.ToShard(goodbye=pb.ShardGoodbye(reason="this syncer has no shards; start it with --shards"))
            return
        async for message in self._shards.serve(messages):
            yield message

    async def take_snapshot(self) -> dict[str, Any]:
        """Take a snapshot. It continues if the caller is cancelled. Raises SkerryError."""
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._begin(self._take_snapshot(done))
        return await asyncio.shield(done)

    async def _take_snapshot(self, done: asyncio.Future[dict[str, Any]] | None = None) -> None:
        started = self.clock.now()
        try:
            facts = await self._snapshots.take()
        except SkerryError as error:
            self.decisions.record(records.SnapshotFailed(str(error)))
            if done is not None and not done.done():
                done.set_exception(error)
        else:
            about = (facts["number"], facts["step"], facts["tokens"], tuple(facts["islands"].items()))
            self.decisions.record(records.SnapshotTaken(*about, round(self.clock.now() - started, 3)))
            if done is not None and not done.done():
                done.set_result(facts)
        self._snapshot_at = self.clock.now() + self.sync.snapshot_every_s

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
        """Until cancelled: send progress to learners, write metrics, flush the tape, and take periodic snapshots."""
        metrics_at = 0.0
        pulses = max(1, int(min(PROGRESS_EVERY_S, self.sync.silence_s / 8) / PULSE_S))
        for pulse in itertools.count():
            if pulse % pulses == 0:
                self._roster.tell_progress(self.core)
            if self.clock.now() >= metrics_at:
                metrics_at = self.clock.now() + METRICS_EVERY_S
                self._write_summary()
                if not self._flushing:
                    # Not awaited: the tape may be busy for long, and learners must keep hearing from the syncer.
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
        """End every stream of a shard or learner, and wait until the control handlers have returned."""
        if self._shards is not None:
            self._shards.dismiss("the run is over", over=self.core.phase == "ended")
        await self._control.hang_up()

    async def close(self) -> None:
        """Finish merges in flight, flush the tape and close the run folder."""
        self._closing = True
        self._snapshots.close()
        self._rescue.close()
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
            self._log.close()
            self.store.close()
            if self._sinks is not None:
                self._sinks.close()

    def _write_summary(self) -> None:
        self._log.summary(self.core, self._roster.vitals)


def _tells_the_end(action: m.Action) -> tuple[object, ...] | None:
    """A key for actions that must follow the durable end of the run, one per learner and subject; None for other actions. Asks
    are included: to a learner that has not been told to stop, an Ask would mean an ordinary round."""
    if isinstance(action, m.Ask):
        return action.learner, m.Ask, action.fragment
    if isinstance(action, m.StopTraining) or (isinstance(action, m.Goodbye) and action.reason == m.OVER):
        return action.learner, type(action)
    return None
