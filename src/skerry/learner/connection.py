"""The learner's connection to the syncer. Runs on a background event loop while training goes on.

It never writes the model: finished downloads wait in the session for the training thread. When the syncer is away, the
connection is retried with back-off for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Sequence

import torch
from torch import nn

from skerry.config import SyncConfig, from_json
from skerry.core.leases.ranges import Pool
from skerry.errors import ConfigError, JoinRefused, SkerryError, WireError
from skerry.learner.background import Background
from skerry.learner.contribute import Contributor
from skerry.learner.fetch import Fetcher
from skerry.learner.inbox import Inbox
from skerry.learner.replica import Replica
from skerry.learner.reporter import HEARTBEAT_S, Reporter
from skerry.learner.seams import Seams
from skerry.learner.session import Session
from skerry.learner.state.courier import StateCourier
from skerry.learner.transfers import Transfers
from skerry.learner.transport.control import ControlStream
from skerry.learner.transport.meter import Meter
from skerry.learner.transport.reachability import Reachability
from skerry.learner.transport.routes import Routes
from skerry.learner.transport.sidecar import Sidecar
from skerry.learner.transport.striped import StripedStreams
from skerry.tensors.codecs.codec import CODECS
from skerry.tensors.fragments import split
from skerry.tensors.memory import give_back
from skerry.tensors.model import model_tensors
from skerry.wire import calls
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL, TLS, check_reachable, open_channel
from skerry.wire.service import SyncerStub

log = logging.getLogger("skerry.learner")

CONNECTIONS = 4
"""TCP connections for bulk data. Opened lazily; small models never need more than one."""
BACK_OFF_S = (0.2, 5.0)
"""First and longest pause between two attempts to connect."""
WARN_AGAIN_S = (60.0, 3600.0)
"""Warn that the syncer is still away after this long, then each time the absence doubles, but at least once an hour."""


class Connection:
    """Owns the background work of one learner: connects, reconnects, and creates the session on first contact."""

    def __init__(
        self,
        address: str,
        model: nn.Module,
        name: str,
        tls: TLS | None,
        seams: Seams,
        region: str = "",
        connections: int = CONNECTIONS,
        cap_mbit: float = 0.0,
    ) -> None:
        check_reachable(address, tls)
        self.address, self.name = address, name
        self._model, self._tls, self._seams, self._region = model, tls, seams, region
        device = next((tensor.device for _, tensor in model_tensors(model)), None)
        self._platform = f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads"
        """Everything that bitwise reproducible arithmetic depends on."""
        self._connections, self._capped = connections, cap_mbit > 0
        self.sent, self.received = Meter(cap_mbit), Meter(cap_mbit)
        self.background = Background(self._stop_on_bug)
        self.news = threading.Condition()
        """Notified when the session exists or the attempt has failed. After that, `session.lock` is notified."""
        self.session: Session | None = None
        self.failure: SkerryError | None = None
        self.last_error = "no attempt yet"
        self.courier: StateCourier | None = None
        self._inbox: Inbox | None = None
        self._transfers: Transfers | None = None
        self._sidecar: Sidecar | None = None
        self._closing = False
        self._main: asyncio.Task[None] | None = None
        self._over = threading.Event()

    # ------------------------------------------------------------ called by the training thread

    def start(self) -> None:
        def begin() -> None:
            self._main = self.background.loop.create_task(self._run())

        self.background.call(begin)

    @property
    def inbox(self) -> Inbox:
        assert self._inbox is not None, "no session yet"
        return self._inbox

    @property
    def transfers(self) -> Transfers:
        assert self._transfers is not None, "no session yet"
        return self._transfers

    def keep_state(self, courier: StateCourier) -> None:
        """From now on, serve the optimizer state to peers that ask for it and save it periodically."""
        self.courier = courier
        self.inbox.give_state = lambda asked: self.background.spawn(courier.answer(asked))

    def want_leases(self, pools: tuple[Pool, ...], batch: int, batches_per_step: int = 1) -> None:
        session = self.session
        assert session is not None
        with session.lock:
            session.pools, session.no_lease = pools, None
            session.leases.set_batch(batch, batches_per_step)
        self.background.call(self.inbox.declare_data)

    def want_report(self) -> None:
        """Send a report soon, even if none is due."""
        self.transfers.reporter.wanted = True
        self.transfers.wake()

    def leave(self) -> None:
        session = self.session
        assert session is not None
        with session.lock:
            session.leaving = True
            self.transfers.reporter.wanted = True
        self.background.call(self.inbox.say_leaving)

    def send(self, message: pb.ToSyncer) -> None:
        self.background.call(lambda: self.transfers.send(message))

    def close(self) -> None:
        def cancel() -> None:
            self._set_closing()
            if self._main is not None:
                self._main.cancel()

        self.background.call(cancel)
        self._over.wait(timeout=10.0)
        self.background.shut_down()
        if self.session is not None:
            self.session.release()
            self.transfers.forget_all()
        give_back()  # the process may go on for long without the run

    # ------------------------------------------------------------ on the event loop

    async def _run(self) -> None:
        try:
            await self._stay_connected()
        except asyncio.CancelledError:
            pass
        except Exception as error:  # a bug in the exchange must neither crash nor block the training loop
            log.exception("the exchange stopped")
            self._fail(WireError(f"the exchange stopped: {error!r}"))
        finally:
            ending = self.background.loop.create_task(self._end())
            try:
                while not ending.done():
                    with contextlib.suppress(asyncio.CancelledError):  # cancelled a second time
                        await asyncio.shield(ending)
            finally:
                self._over.set()

    async def _end(self) -> None:
        await self.background.cancel_all()
        if self._sidecar is not None:
            await self._sidecar.close()
            self._sidecar = None  # it refers to the pinned memory

    def _set_closing(self) -> None:
        self._closing = True
        if self.session is not None:
            self.session.closing = True

    def _fail(self, error: SkerryError) -> None:
        with self.news:
            self.failure = error
            self.news.notify_all()
        if self.session is not None:
            self.session.fail(error)
        else:
            log.error("%s is no longer part of the run: %s", self.name, error)

    def _stop_on_bug(self, error: BaseException) -> None:
        """Stop the exchange after an unexpected exception, which is a bug. The training loop sees it as `failure`."""
        log.error("the exchange stopped", exc_info=error)
        self._fail(WireError(f"the exchange stopped: {error!r}"))
        self._set_closing()
        if self._main is not None:
            self._main.cancel()

    async def _stay_connected(self) -> None:
        pause, loop = BACK_OFF_S[0], self.background.loop
        alone_since = warn_at = 0.0
        while not self._dismissed and not self._closing:
            try:
                await self._one_connection()
                self.last_error = "the syncer ended the stream"
            except JoinRefused as error:
                self._fail(error)
                return
            except (WireError, ConfigError) as error:
                if isinstance(error, ConfigError) and self.session is None:
                    self._fail(error)
                    return
                self.last_error = str(error)  # after the first join, a ConfigError is a certificate file being replaced
            if self._dismissed or self._closing:
                return
            pause = min(pause * 1.6, BACK_OFF_S[1])
            if self._lost_syncer():
                pause, alone_since, warn_at = BACK_OFF_S[0], loop.time(), WARN_AGAIN_S[0]
            if alone_since and loop.time() - alone_since >= warn_at:
                warn_at = min(2 * warn_at, warn_at + WARN_AGAIN_S[1])
                alone_s = loop.time() - alone_since
                log.warning("%s has had no syncer for %.0f s (%s); training goes on", self.name, alone_s, self.last_error)
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))

    @property
    def _dismissed(self) -> bool:
        return self.session is not None and self.session.goodbye is not None

    def _lost_syncer(self) -> bool:
        """Mark the session disconnected. Returns whether it was connected before."""
        session = self.session
        if session is None:
            return False
        with session.lock:
            lost, session.connected = session.connected, False
            if lost:
                log.warning("%s lost the syncer (%s); training goes on", self.name, self.last_error)
                self.inbox.lost_at_step = session.exchange.step
        return lost

    async def _one_connection(self) -> None:
        """Connect, and handle messages until the stream ends."""
        async with contextlib.AsyncExitStack() as opened:
            channels = [
                await opened.enter_async_context(open_channel(self.address, self._tls)) for _ in range(1 + self._connections)
            ]
            stub, *bulk = map(SyncerStub, channels)
            session = await self._prepare_for(await calls.describe(stub))
            routes = session.routes = Routes(
                self._streams(bulk), self.address, self._connections, self._tls, self._streams, lambda: self._sidecar
            )
            stream = ControlStream(stub, self.sent, self.received)
            self.transfers.connected(stream.send)
            stream.send(pb.ToSyncer(hello=self._hello(session)))
            loop = asyncio.get_running_loop()
            reader = loop.create_task(self.inbox.listen(stream))
            beat = loop.create_task(self._heartbeat(session, stream, routes))
            beat.add_done_callback(self._heartbeat_ended)
            try:
                await reader
            finally:
                reader.cancel()
                beat.cancel()
                await stream.close()
                await routes.close()

    async def _prepare_for(self, description: pb.RunDescription) -> Session:
        """The session, created on first contact. Raises JoinRefused if the syncer serves another run than before."""
        if self.session is not None:
            if description.run_id != self.session.run_id:
                raise JoinRefused(f"the syncer at {self.address} now serves another run ({description.run_id})")
            return self.session
        sync: SyncConfig = from_json(SyncConfig, description.sync_json)
        for setting, name in (("sync.send", sync.send), ("sync.publish", sync.publish)):
            CODECS.get(name, setting, f"run {description.run_id} at {self.address}")
        layout = split([spec for spec, _ in model_tensors(self._model)], sync.fragments)
        # In a thread, because it may allocate gigabytes.
        replica = await self.background.in_thread(Replica, self._model, layout, sync, self._seams.snapshot)
        session = Session(self.name, description.run_id, sync, replica)
        reachability = Reachability(self.name)
        self._transfers = Transfers(
            session,
            self.background,
            Contributor(session, self.background, reachability),
            Fetcher(session, self.background, reachability, lambda: self._sidecar),
            Reporter(session, self.background, self._seams.clock, self.sent, self.received),
        )
        self._inbox = Inbox(session, self._transfers, self.background, self._tls)
        with self.news:
            self.session = session
            self.news.notify_all()
        if (shared := replica.model_device.shared) is not None and not self._capped:  # a capped link never needs a sidecar
            self._sidecar = Sidecar(shared[0], shared[1], self.sent, self.received)
            self.background.spawn(self._start_sidecar(self._sidecar, session))
        return session

    async def _start_sidecar(self, sidecar: Sidecar, session: Session) -> None:
        try:
            await sidecar.start(self.name, session.id, self._connections, self._tls)
        except Exception as error:  # the sidecar is optional
            log.warning("%s carries bulk data in the training process: %s", self.name, error)

    def _hello(self, session: Session) -> pb.Hello:
        specs = session.replica.layout.tensors
        tensors = [pb.Tensor(name=spec.name, shape=spec.shape, dtype=spec.dtype, rule=spec.rule) for spec in specs]
        with session.lock:
            exchange = session.exchange
            return pb.Hello(
                protocol=PROTOCOL,
                name=self.name,
                session=session.id,
                tensors=tensors,
                run_id=session.run_id,
                step=exchange.step,
                tokens=exchange.totals.tokens,
                held=exchange.versions if session.fixed_loaded else (),
                region=self._region,
                platform=self._platform,
                leased=session.leases.given,
                lease_floor=session.leases.floor,
            )

    def _streams(self, stubs: Sequence[SyncerStub]) -> StripedStreams:
        assert self.session is not None
        return StripedStreams(stubs, self.name, self.session.id, self.sent, self.received)

    async def _heartbeat(self, session: Session, stream: ControlStream, routes: Routes) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            stream.drop_if_silent(session.sync.silence_s)
            routes.drop_if_stuck()
            if self._sidecar is not None:
                self._sidecar.check_alive()
            self.transfers.reporter.beat()
            if self.courier is not None and self.courier.time_to_keep(self._seams.clock.now()):
                self.background.spawn(self.background.in_thread(self.courier.keep_beside))

    def _heartbeat_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop_on_bug(error)
