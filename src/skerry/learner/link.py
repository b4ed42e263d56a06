"""The learner's connection: what talks to the syncer, on an event loop in the background, while training goes on.

It turns messages into events of the Exchange and its decisions into transfers. It never writes the model: finished
downloads wait in `prepared` for the training thread. When the syncer goes away it tries again, with back-off, for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch
from torch import nn

from skerry.clock import Clock, SystemClock
from skerry.config import SyncConfig, from_json
from skerry.core.exchange import Exchange, Question, Version
from skerry.core.leases.cursor import LeaseBook
from skerry.core.leases.ranges import Pool, Range
from skerry.errors import ConfigError, JoinRefused, SkerryError, WireError
from skerry.learner.journal import Journal
from skerry.learner.pace import Pace
from skerry.learner.replica import Prepared, Replica, Snapshot
from skerry.learner.state.courier import StateCourier
from skerry.learner.transfers import Transfers
from skerry.learner.transport.control import ControlStream
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.routes import Routes
from skerry.learner.transport.sidecar import Ferry
from skerry.learner.transport.striped import Lanes
from skerry.learner.workers import DaemonWorkers
from skerry.tensors.fragments import split
from skerry.tensors.memory import give_back
from skerry.tensors.model import model_tensors
from skerry.wire import calls
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL, TLS, check_reachable, open_channel
from skerry.wire.loop import shared_loop
from skerry.wire.service import SyncerStub

log = logging.getLogger("skerry.learner")

CONNECTIONS = 4
"""For bulk data. They are made when they are needed, which what is small never does."""
HEARTBEAT_S = 1.0
REPORT_EVERY_S = 0.2
LOW_REPORT_S = 0.05
"""The same when leases are about to run out."""
WORKERS = 4
"""Threads that copy, encode and decode; beside a GPU they mostly wait for it."""
REPORT_PAUSE_S = 0.01
SOON_S = 1e-6
"""Less is not waited for: it may be nothing but rounding."""
ACCOUNT_EVERY_S = 1.0
ROUND_TRIP_NEWEST = 0.3
BACK_OFF_S = (0.2, 5.0)
SAY_AGAIN_S = (60.0, 3600.0)
"""How soon an island that is on its own says so again, at first, and later."""


class Link:
    def __init__(
        self,
        address: str,
        model: nn.Module,
        name: str,
        tls: TLS | None,
        clock: Clock | None = None,
        region: str = "",
        connections: int = CONNECTIONS,
        cap_mbit: float = 0.0,
    ) -> None:
        check_reachable(address, tls)
        self.address = address
        self.name = name
        self.region = region
        device = next((tensor.device for _, tensor in model_tensors(model)), None)
        self.platform = f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads"
        """What arithmetic to the bit depends on."""
        self.session = uuid.uuid4().hex
        self.changed = threading.Condition()
        """Guards the exchange and everything below that both threads touch; notified when there is news for training."""
        self.exchange: Exchange | None = None
        self.replica: Replica | None = None
        self.prepared: dict[int, Prepared] = {}
        self.staged: dict[int, Snapshot] = {}
        """In lock-step: snapshots the training thread took when fragments were due."""
        self.slot = 0
        self.run_tokens = 0
        self.loss: float | None = None
        self.pace = Pace()
        self._capped = cap_mbit > 0
        self.sent = Meter(cap_mbit)
        self.received = Meter(cap_mbit)
        self.connected = False
        self.goodbye: str | None = None
        self.failure: SkerryError | None = None
        self.last_error = "no attempt yet"
        self.leaving = False
        self.quarantined = False
        self.routes: Routes | None = None
        self.ferry: Ferry | None = None
        """The process that carries bulk data, beside a GPU."""
        self.courier: StateCourier | None = None
        self.fixed_loaded = False
        self.leases = LeaseBook()
        self.journal = Journal()
        self.pools: tuple[Pool, ...] = ()
        """Data this learner can read; none if it does not take part in leases."""
        self.no_lease: str | None = None
        """Why the syncer gives us no data."""
        self._model = model
        self._tls = tls
        self._connections = connections
        self._clock = clock or SystemClock()
        self._run_id = ""
        self._closing = False
        self._ready_sent = False
        self._lost_at_step: int | None = None
        self._told_at = 0
        self._pump_pending = False
        self._transfers = Transfers(self)
        self._reported_at = -1.0
        self.round_trip_s = 0.0
        self._accounted_at = -ACCOUNT_EVERY_S
        self._pings = 0
        self._to_report = False
        self._stream: ControlStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pool = DaemonWorkers(WORKERS, "skerry-exchange")
        self._loop = shared_loop()
        self._main: asyncio.Task[None] | None = None
        self._over = threading.Event()

    # ------------------------------------------------------------ called by the training thread

    def start(self) -> None:
        def begin() -> None:
            self._main = self._loop.create_task(self._run())

        self._call(begin)

    def wake(self) -> None:
        """There may be something to send: a step was done or a fragment adopted."""
        if not self._pump_pending:
            self._pump_pending = True
            self._call(self.pump)

    def step_done(self) -> None:
        """After each step. Waking the other thread takes the interpreter from this one, so only when there is a reason."""
        exchange = self.exchange
        assert exchange is not None
        budget = exchange.sync.budget_tokens
        if not self.connected and budget and self.run_tokens + exchange.totals.tokens - self._told_at >= budget:
            # The run may have ended without us. Even alone this island has now done all that was left of it.
            with self.changed:
                exchange.stop()
        limit_s = LOW_REPORT_S if self.pools and self.leases.low else REPORT_EVERY_S
        if self._since_report() >= limit_s or exchange.schedule.due(exchange.step):
            self._to_report = True
            self.wake()
        elif exchange.has_questions():
            self.wake()

    def want_leases(self, pools: tuple[Pool, ...], batch: int, batches_per_step: int = 1) -> None:
        with self.changed:
            self.pools, self.no_lease = pools, None
            self.leases.set_batch(batch, batches_per_step)
        self._call(self._declare)

    @property
    def closing(self) -> bool:
        return self._closing

    def now(self) -> float:
        return self._clock.now()

    def want_more(self) -> None:
        """The leases are used up."""
        self._to_report = True
        self.wake()

    def leave(self) -> None:
        with self.changed:
            self.leaving = True
            self._to_report = True
        self._call(self._say_leaving)

    def close(self) -> None:
        def cancel() -> None:
            self._closing = True
            if self._main is not None:
                self._main.cancel()

        self._call(cancel)
        self._over.wait(timeout=10.0)
        self._pool.shutdown()
        with self.changed:
            self.prepared.clear()
            self.staged.clear()
            self._transfers.forget_all()
            if self.replica is not None:
                self.replica.release()
        give_back()  # the loop may train on for long without us

    def _call(self, act: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._guarded, act)

    # ------------------------------------------------------------ on the event loop

    async def _run(self) -> None:
        try:
            await self._stay_connected()
        except asyncio.CancelledError:
            pass
        except Exception as error:  # the training loop must not die of a defect in the exchange, nor wait for it
            log.exception("the exchange stopped")
            self.fail(WireError(f"the exchange stopped: {error!r}"))
        finally:
            ending = self._loop.create_task(self._end())
            try:
                while not ending.done():
                    with contextlib.suppress(asyncio.CancelledError):  # told to end once more
                        await asyncio.shield(ending)
            finally:
                self._over.set()

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.ferry is not None:
            await self.ferry.close()
            self.ferry = None  # it holds memory

    def _guarded(self, act: Callable[[], None]) -> None:
        """For callbacks of the loop, whose exceptions nobody would see."""
        if self._over.is_set():
            return  # the run is over, or the link failed and said so
        try:
            act()
        except Exception as error:
            self._broken(error)

    def fail(self, error: SkerryError) -> None:
        log.error("%s is no longer part of the run: %s", self.name, error)
        with self.changed:
            self.failure = error
            if self.exchange is not None:
                self.exchange.stop()
            self.changed.notify_all()

    async def _stay_connected(self) -> None:
        pause = BACK_OFF_S[0]
        alone_since = say_at = 0.0
        while self.goodbye is None and not self._closing:
            welcomed = False
            try:
                welcomed = await self._one_connection()
            except JoinRefused as error:
                self.fail(error)
                return
            except (WireError, ConfigError) as error:
                if isinstance(error, ConfigError) and self.exchange is None:
                    self.fail(error)
                    return
                self.last_error = str(error)  # of one that has joined it is a certificate that is just being replaced
            if self.goodbye is not None or self._closing:
                return
            with self.changed:
                if self.connected and self.exchange is not None:
                    log.warning("%s lost the syncer (%s); training goes on", self.name, self.last_error)
                    self._lost_at_step, alone_since, say_at = self.exchange.step, self._loop.time(), SAY_AGAIN_S[0]
                self.connected = False
            if self._lost_at_step is not None and self._loop.time() - alone_since >= say_at:
                say_at = min(2 * say_at, say_at + SAY_AGAIN_S[1])
                alone_s = self._loop.time() - alone_since
                log.warning("%s is without the syncer for %.0f s (%s); training goes on", self.name, alone_s, self.last_error)
            pause = BACK_OFF_S[0] if welcomed else min(pause * 1.6, BACK_OFF_S[1])
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))

    async def _one_connection(self) -> bool:
        """Connect, talk until the stream ends. True if the syncer welcomed us."""
        async with contextlib.AsyncExitStack() as opened:
            channels = [
                await opened.enter_async_context(open_channel(self.address, self._tls)) for _ in range(1 + self._connections)
            ]
            stub, *bulk = map(SyncerStub, channels)
            await self._prepare_for(await calls.describe(stub))
            routes = self.routes = Routes(
                self._lanes(bulk), self.address, self._connections, self._tls, self._lanes, lambda: self.ferry
            )
            stream = self._stream = ControlStream(stub, self.sent, self.received)
            self._stream.send(pb.ToSyncer(hello=self._hello()))
            beat = asyncio.get_running_loop().create_task(self._heartbeat(stream, routes))
            beat.add_done_callback(self._task_done)
            welcomed = False
            try:
                async for message in stream.messages():
                    welcomed = True
                    self._received(message)
                    if self.goodbye is not None:
                        break
                self.last_error = "the syncer ended the stream"
            except WireError as error:
                self.last_error = str(error)
            finally:
                beat.cancel()
                await stream.close()
                await routes.close()
            return welcomed

    async def _prepare_for(self, description: pb.RunDescription) -> None:
        if self.exchange is not None:
            if description.run_id != self._run_id:
                raise JoinRefused(f"the syncer at {self.address} now serves another run ({description.run_id})")
            return
        sync: SyncConfig = from_json(SyncConfig, description.sync_json)
        layout = split([spec for spec, _ in model_tensors(self._model)], sync.fragments)
        replica: Replica = await self.off_loop(Replica, self._model, layout, sync)  # may set gigabytes of memory aside
        with self.changed:
            self._run_id = description.run_id
            self.replica = replica
            self.exchange = Exchange(sync, len(layout.fragments))
        if (shared := replica.shared) is not None and not self._capped:  # under a cap there is never much to carry
            self.ferry = Ferry(shared[0], shared[1], self.sent, self.received)
            self.spawn(self._start_ferry(self.ferry))

    async def _start_ferry(self, ferry: Ferry) -> None:
        try:
            await ferry.start(self.name, self.session, self._connections, self._tls)
        except Exception as error:  # nothing depends on it
            log.warning("%s carries bulk data in the training process: %s", self.name, error)

    def _hello(self) -> pb.Hello:
        assert self.exchange is not None and self.replica is not None
        tensors = [
            pb.Tensor(name=spec.name, shape=spec.shape, dtype=spec.dtype, rule=spec.rule)
            for spec in self.replica.layout.tensors
        ]
        with self.changed:
            exchange = self.exchange
            return pb.Hello(
                protocol=PROTOCOL,
                name=self.name,
                session=self.session,
                tensors=tensors,
                run_id=self._run_id,
                step=exchange.step,
                tokens=exchange.totals.tokens,
                held=exchange.versions if self.fixed_loaded else (),
                region=self.region,
                platform=self.platform,
                leased=self.leases.given,
                lease_floor=self.leases.floor,
            )

    def _lanes(self, stubs: Sequence[SyncerStub]) -> Lanes:
        return Lanes(stubs, self.name, self.session, self.sent, self.received)

    async def _heartbeat(self, stream: ControlStream, routes: Routes) -> None:
        assert self.exchange is not None
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            stream.drop_if_silent(self.exchange.sync.silence_s)
            routes.drop_if_stuck()
            if self.ferry is not None:
                self.ferry.look_after()
            if self._since_report() >= HEARTBEAT_S / 2:
                self._report()
            if self.courier is not None and self.courier.time_to_keep(self._clock.now()):
                self.spawn(self.off_loop(self.courier.keep_beside))

    # ------------------------------------------------------------ messages

    def _received(self, message: pb.ToLearner) -> None:
        exchange = self.exchange
        assert exchange is not None
        kind = message.WhichOneof("message")
        _check_fragments(message, len(exchange.held))
        if kind in ("welcome", "places"):
            self._place(message.welcome.places if kind == "welcome" else message.places)
        with self.changed:
            if kind == "welcome":
                welcome = message.welcome
                if not welcome.resumed:
                    self.leases.void(welcome.leased)
                    exchange.void_samples(welcome.leased)
                    if exchange.phase != "joining":
                        assert self.replica is not None
                        exchange.start_over()
                        self.replica.start_over()
                        self.prepared.clear()
                self.slot, self.run_tokens = welcome.slot, max(self.run_tokens, welcome.run_tokens)
                self.connected = True
                if self._lost_at_step is not None:
                    alone = exchange.step - self._lost_at_step
                    log.warning("%s is back with the syncer after %d steps on its own", self.name, alone)
                    self._lost_at_step = None
                self._ready_sent = welcome.resumed
                self.quarantined = welcome.quarantined
                exchange.welcomed(tuple(welcome.versions), tuple(welcome.merged_steps), tuple(welcome.counted), welcome.step)
                self.journal.durable(max(welcome.counted, default=0))
                if not self.fixed_loaded:
                    self.spawn(self._transfers.fetch_fixed(len(welcome.versions)))
                self._declare()
                if self.leaving:
                    self._say_leaving()
            elif kind == "refusal":
                raise JoinRefused(message.refusal.reason)
            elif kind == "begin":
                exchange.begin(message.begin.step)
            elif kind == "ask":
                exchange.asked(Question(message.ask.fragment, message.ask.step, message.ask.min_base), message.ask.anew)
            elif kind == "announce":
                note = message.announce
                exchange.announced(Version(note.fragment, note.version, note.step, note.counted))
                self.journal.durable(note.counted)
                self._told(note.run_tokens)
            elif kind == "stop":
                exchange.stop()
                self._to_report = True
            elif kind == "progress":
                self._told(message.progress.run_tokens)
            elif kind == "pong":
                if message.pong.ping == self._pings:  # one that was overtaken says nothing
                    took = self._loop.time() - self._accounted_at
                    self.round_trip_s += (ROUND_TRIP_NEWEST if self.round_trip_s else 1.0) * (took - self.round_trip_s)
            elif kind == "lease":
                lease = message.lease
                self.leases.granted(lease.position, Range(lease.pool, lease.start, lease.count))
            elif kind == "no_lease":
                self.no_lease = message.no_lease.reason
            elif kind == "give_state":
                self.spawn(self._give_state(message.give_state))
            elif kind == "caution":
                self.quarantined = message.caution.quarantined
                state = "not merged any more" if self.quarantined else "merged again"
                log.warning("%s: its contributions are %s: %s", self.name, state, message.caution.reason)
            elif kind == "goodbye" and message.goodbye.final:
                self.goodbye = message.goodbye.reason
                if message.goodbye.expected:
                    exchange.stop()
                else:
                    self.fail(JoinRefused(message.goodbye.reason))
            self.changed.notify_all()
        if kind in ("welcome", "ask", "announce", "stop", "begin"):
            self.pump()

    def _place(self, places: pb.Places) -> None:
        assert self.routes is not None and self.exchange is not None
        fragments, shards = len(self.exchange.held), len(places.addresses)
        if shards and (len(places.of_fragment) != fragments or max(places.of_fragment, default=0) >= shards):
            raise WireError(f"the syncer does not say for each of {fragments} fragments at which of {shards} places it is")
        self.routes.place([address if self._usable(address) else "" for address in places.addresses], places.of_fragment)

    def _usable(self, address: str) -> bool:
        if not address:
            return False
        try:
            check_reachable(address, self._tls)
        except ConfigError as error:
            log.warning("%s cannot reach a shard: %s", self.name, error)
            return False
        return True

    def _told(self, run_tokens: int) -> None:
        assert self.exchange is not None
        self.run_tokens = max(self.run_tokens, run_tokens)
        self._told_at = self.exchange.totals.tokens

    def send(self, message: pb.ToSyncer) -> None:
        if self._stream is not None:
            self._stream.send(message)

    def _declare(self) -> None:
        if self.connected and self.pools and not self.leaving:
            pools = [pb.Pool(name=pool.name, size=pool.size, fingerprint=pool.fingerprint) for pool in self.pools]
            self.send(pb.ToSyncer(data=pb.Data(pools=pools)))
            self._report()

    def _say_leaving(self) -> None:
        if self.connected:
            self._report()  # first: if there is nothing to hand over, the goodbye may come before another is due
            self.send(pb.ToSyncer(leaving=pb.Leaving()))

    def pump(self) -> None:
        """Do whatever can be done now."""
        self._pump_pending = False
        exchange = self.exchange
        if exchange is None or not self.connected or self.goodbye is not None:
            return
        with self.changed:
            fetches = exchange.to_fetch()
            answerable = exchange.can_answer()
            ready = not self._ready_sent and self.fixed_loaded and bool(exchange.versions)
        if ready:
            self._ready_sent = True
            self.send(pb.ToSyncer(ready=pb.Ready()))
        for version in fetches:
            self.spawn(self._transfers.fetch(version))
        if answerable:
            self._transfers.answer()
        wait = REPORT_PAUSE_S - self._since_report()
        if not self._to_report:
            return
        if wait <= SOON_S:
            self._report()
        elif not self._pump_pending:
            self._pump_pending = True
            self._loop.call_later(wait, self._guarded, self.pump)

    def _since_report(self) -> float:
        passed = self._clock.now() - self._reported_at
        return passed if passed >= 0 else math.inf  # a clock that was put back is no reason for silence

    def _report(self) -> None:
        exchange = self.exchange
        if exchange is None or not self.connected:
            return
        with self.changed:
            self._to_report = False
            report = pb.Report(
                step=exchange.step,
                tokens=exchange.totals.tokens,
                step_time_s=self.pace.step_time_s,
                loss=self.loss,
                sent_bytes=self.sent.total_bytes,
                received_bytes=self.received.total_bytes,
                steps=exchange.totals.steps,
                stall_s=self.pace.longest_s,
                stalled_s=self.pace.stalled_s,
            )
            if self.pools and self.no_lease is None:
                need = self.leases.need(self.pace.step_time_s, exchange.sync.ahead_s)
                wanted = {"taken": need.taken, "wanted": need.wanted, "least": need.least}
                report.need.CopyFrom(pb.DataNeed(given=need.given, settled=exchange.settled_samples, **wanted))
            self.pace.longest_s = 0.0
        if self._loop.time() - self._accounted_at >= ACCOUNT_EVERY_S:
            self._accounted_at = self._loop.time()
            self._pings += 1
            report.link.CopyFrom(self._account())
        self._reported_at = self._clock.now()
        self.send(pb.ToSyncer(report=report))

    def _account(self) -> pb.LinkAccount:
        sent, received = self.sent.by_kind, self.received.by_kind
        return pb.LinkAccount(
            contributions_bytes=sent["contributions"],
            versions_bytes=received["versions"],
            state_sent_bytes=sent["state"],
            state_received_bytes=received["state"],
            control_sent_bytes=sent["control"],
            control_received_bytes=received["control"],
            send_bytes_per_s=self.sent.bytes_per_s,
            receive_bytes_per_s=self.received.bytes_per_s,
            round_trip_s=self.round_trip_s,
            queue_s=self.routes.queue_s if self.routes is not None else 0.0,
            waited_s=self.pace.waited_s,
            ping=self._pings,
        )

    @property
    def run_id(self) -> str:
        return self._run_id

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(error)

    def _broken(self, error: BaseException) -> None:
        """A defect of ours. The training loop must not die of it, but it must hear of it."""
        log.error("the exchange stopped", exc_info=error)
        self.fail(WireError(f"the exchange stopped: {error!r}"))
        self._closing = True
        if self._main is not None:
            self._main.cancel()

    async def off_loop(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await self._loop.run_in_executor(self._pool, work, *arguments)

    def again(self, seconds: float, act: Callable[[], None]) -> None:
        """A transfer broke. If the stream still stands, try again shortly; if not, the next welcome starts afresh."""

        def retry() -> None:
            with self.changed:
                act()
            self.pump()

        self._loop.call_later(seconds, self._guarded, retry)

    # ------------------------------------------------------------ the optimizer's state

    async def _give_state(self, asked: pb.GiveState) -> None:
        if self.courier is None:
            return  # it has not joined, and is asked only then
        if asked.HasField("held"):
            await self.courier.give_held(asked.ticket, asked.held.fragment, asked.held.version)
        else:
            await self.courier.give(asked.ticket, asked.part)

    def fetch_state(self) -> tuple[list[bytes], list[tuple[str, int]]]:
        """Every part of a healthy peer's optimizer state, and whose it was when. Called by the training thread; raises
        WireError."""
        assert self.courier is not None
        return asyncio.run_coroutine_threadsafe(self.courier.fetch(), self._loop).result()

    def restored(self, source: str, origin: Sequence[tuple[str, int]] = (), inherited: str = "") -> None:
        """Where the optimizer's state came from: of each part whose it was, after how many steps; and what its owner had not
        been able to hand over of its journal."""
        with self.changed:
            self.journal.restored(source, origin, inherited)
        self._call(lambda: self.send(pb.ToSyncer(restored=pb.Restored(source=source))))


def _check_fragments(message: pb.ToLearner, fragments: int) -> None:
    """A syncer of this run speaks of its fragments only."""
    kind = message.WhichOneof("message")
    if kind == "welcome" and len(message.welcome.versions) != fragments:
        raise WireError(f"the syncer has {len(message.welcome.versions)} fragments, this learner {fragments}")
    named = message.ask.fragment if kind == "ask" else message.announce.fragment if kind == "announce" else 0
    if named >= fragments:
        raise WireError(f"the syncer speaks of fragment {named}, but there are {fragments}")
