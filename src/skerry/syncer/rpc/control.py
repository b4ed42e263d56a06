"""Learners' control streams, from the hello to the goodbye: who is let in, what each of them says, and how it is told things.

What learners say is checked here and becomes events; what to do about it is for the state machine. Messages to a learner wait
in a bounded queue; one that does not drain it is cut off rather than held for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from skerry.clock import Clock
from skerry.core import messages as m
from skerry.core.leases.ranges import MOST_POOLS, Need, Pool
from skerry.core.syncer import SyncerCore
from skerry.errors import JoinRefused
from skerry.syncer.metrics_log import Vitals
from skerry.syncer.rpc.admission import MAX_COUNT
from skerry.syncer.rpc.outbox import Outbox
from skerry.syncer.rpc.outgoing import progress_of
from skerry.syncer.rpc.uploads import MAX_NAME, first_message
from skerry.syncer.storage.run_folder import RunIdentity
from skerry.tensors.fragments import TensorSpec, check_same_model
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL

CONTROL_QUEUE = 4096
MAX_LEAST = 1 << 20
"""Samples a learner may hold at the end of an epoch, whatever its share."""
MAX_STEPS_AT_ONCE = 1_000_000
"""A learner cannot have taken more steps than this between two reports."""
HANG_UP_S = 5.0


class Host(Protocol):
    """Whoever has the state machine."""

    core: SyncerCore

    def join(self, event: m.Joined, connect: Callable[[], None]) -> None:
        """Raises JoinRefused. What is for the process whose place it takes is sent before `connect`, the rest after it."""
        ...

    def dispatch(self, event: m.Event) -> None: ...
    def record(self, kind: str, data: dict[str, Any]) -> None: ...


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

    def reported(self, report: pb.Report) -> None:
        loss = report.loss if report.HasField("loss") else self.vitals.loss
        stall_s = max(self.vitals.stall_s, report.stall_s)
        link = self.vitals.link
        if report.HasField("link"):
            link = _link_account(report.link)
            if not self.outbox.half_full:
                self.send(pb.ToLearner(pong=pb.Pong(ping=report.link.ping)))
        moved = (report.sent_bytes, report.received_bytes)
        self.vitals = Vitals(loss, *moved, report.steps, stall_s, report.stalled_s, link)


class ControlStreams:
    def __init__(self, identity: RunIdentity, host: Host) -> None:
        self._identity, self._host = identity, host
        self._connections: dict[str, Connection] = {}
        self._handlers: set[asyncio.Future[None]] = set()

    @property
    def vitals(self) -> dict[str, Vitals]:
        """Of those that are connected."""
        return {name: connection.vitals for name, connection in self._connections.items()}

    def is_connected(self, name: str, session: str) -> bool:
        connection = self._connections.get(name)
        return connection is not None and connection.session == session

    def send(self, name: str, message: pb.ToLearner) -> None:
        connection = self._connections.get(name)
        if connection is not None:
            connection.send(message)

    def send_to_all(self, message: pb.ToLearner) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def tell_progress(self) -> None:
        """To those who have not heard it since they were last told."""
        progress = progress_of(self._host.core)
        for connection in self._connections.values():
            if not connection.told and not connection.outbox.half_full:
                connection.send(progress)
            connection.told = False

    def end(self, name: str) -> None:
        """Once what is queued for it has been sent."""
        connection = self._connections.pop(name, None)
        if connection is not None:
            connection.end()

    async def hang_up(self, clock: Clock) -> None:
        """End every stream and wait until its handler has seen to it."""
        for connection in self._connections.values():
            connection.end()
        deadline = clock.now() + HANG_UP_S
        while self._handlers and clock.now() < deadline:
            await asyncio.wait(self._handlers, timeout=HANG_UP_S / 10)

    # ------------------------------------------------------------ one stream

    async def serve(self, messages: AsyncIterator[pb.ToSyncer | None], context: Any) -> AsyncIterator[pb.ToLearner]:
        first = await first_message(messages)
        if first is None:
            self._host.record("refused", {"reason": "a control stream without a hello"})
            return  # it may try again
        try:
            hello = self._check_hello(first)
            connection = self._admit(hello)
        except JoinRefused as refusal:
            self._refuse(first.hello.name[:MAX_NAME], str(refusal))
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
                self._host.dispatch(m.Disconnected(hello.name, hello.session))
            self._handlers.discard(over)
            if not over.done():
                over.set_result(None)

    def _check_hello(self, first: pb.ToSyncer) -> pb.Hello:
        if first.WhichOneof("message") != "hello":
            raise JoinRefused("the first message must be a hello")
        hello, run_id = first.hello, self._identity.run_id
        if hello.protocol != PROTOCOL:
            raise JoinRefused(f"protocol mismatch: the syncer speaks version {PROTOCOL}, this learner {hello.protocol}")
        if not 0 < len(hello.name) <= MAX_NAME or not 0 < len(hello.session) <= MAX_NAME:
            raise JoinRefused(f"a learner needs a name and a session of 1 to {MAX_NAME} characters")
        if max(hello.step, hello.tokens, hello.leased) > MAX_COUNT:
            raise JoinRefused(f"step, tokens and samples must be at most {MAX_COUNT}")
        if hello.run_id and hello.run_id != run_id:
            raise JoinRefused(f"this syncer serves run {run_id}, the learner belongs to {hello.run_id}")
        specs = [TensorSpec(t.name, tuple(t.shape), t.dtype, t.rule) for t in hello.tensors]  # type: ignore[arg-type]
        check_same_model(self._identity.layout.tensors, specs)
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

        def connect() -> None:
            self._connections[hello.name] = connection

        self._host.join(joined, connect)
        return connection

    async def _read(self, name: str, connection: Connection, messages: AsyncIterator[pb.ToSyncer | None]) -> None:
        try:
            async for message in messages:
                if self._connections.get(name) is not connection:
                    return
                if message is None:
                    self._refuse(name, "a damaged message")
                    return
                self._heard(name, connection, message)
        finally:
            # Whatever ended the reading, the stream is of no more use.
            if self._connections.get(name) is connection:
                connection.end()

    def _heard(self, name: str, connection: Connection, message: pb.ToSyncer) -> None:
        kind = message.WhichOneof("message")
        if kind == "report":
            self._reported(name, connection, message.report)
        elif kind == "ready":
            self._host.dispatch(m.Ready(name))
        elif kind == "nothing":
            self._host.dispatch(m.NothingToGive(name, message.nothing.fragment, message.nothing.step))
        elif kind == "leaving":
            self._host.dispatch(m.Leaving(name))
        elif kind == "data":
            self._declared(name, message.data)
        elif kind == "restored":
            self._host.record("optimizer_state", {"learner": name, "source": message.restored.source[:MAX_NAME]})
        else:
            self._refuse(name, f"unexpected {kind or 'empty'} message")

    def _reported(self, name: str, connection: Connection, report: pb.Report) -> None:
        if not _plausible(report, self._host.core.learners[name].step):
            self._refuse(name, "a report with impossible numbers")
            return
        connection.reported(report)
        loss = report.loss if report.HasField("loss") else None
        need = _need(report.need) if report.HasField("need") else None
        self._host.dispatch(m.Reported(name, report.step, report.tokens, report.step_time_s, loss, need))

    def _declared(self, name: str, data: pb.Data) -> None:
        if not 0 < len(data.pools) <= MOST_POOLS or any(len(p.name) > MAX_NAME or p.size > MAX_COUNT for p in data.pools):
            reason = f"data sets must be 1 to {MOST_POOLS}, with names of at most {MAX_NAME} characters"
            self._refuse(name, reason)
            self.send(name, pb.ToLearner(no_lease=pb.NoLease(reason=reason)))
            return
        self._host.dispatch(m.Declared(name, tuple(Pool(pool.name, pool.size, pool.fingerprint) for pool in data.pools)))

    def _refuse(self, name: str, reason: str) -> None:
        self._host.record("refused", {"learner": name, "reason": reason})


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
