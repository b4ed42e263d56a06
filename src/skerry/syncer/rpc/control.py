"""Learners' control streams. Checks incoming messages and turns them into events for the state machine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

from skerry.core import messages as m
from skerry.core import records
from skerry.core.leases.ranges import MOST_POOLS, Need, Pool
from skerry.errors import JoinRefused
from skerry.syncer.decisions import Decisions
from skerry.syncer.rpc.limits import MAX_COUNT, MAX_NAME, first_message
from skerry.syncer.rpc.roster import LearnerStream, Roster
from skerry.syncer.storage.run_folder import RunIdentity
from skerry.tensors.fragments import TensorSpec, check_same_model
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL

MAX_LEAST = 1 << 20
"""Samples a learner may ask to hold beyond those it has taken, at the end of an epoch."""
MAX_STEPS_AT_ONCE = 1_000_000
"""Largest plausible number of steps between two reports."""
HANG_UP_S = 5.0
"""How long `hang_up` waits for handlers to return."""


class ControlService:
    def __init__(
        self,
        identity: RunIdentity,
        roster: Roster,
        decisions: Decisions,
        on_joined: Callable[[str, tuple[int, ...]], None] = lambda learner, held: None,
    ) -> None:
        """`on_joined` is called for each admitted learner, with the versions it holds."""
        self._identity, self._roster, self._decisions, self._on_joined = identity, roster, decisions, on_joined
        self._handlers: set[asyncio.Future[None]] = set()

    async def serve(self, messages: AsyncIterator[pb.ToSyncer | None], context: Any) -> AsyncIterator[pb.ToLearner]:
        first = await first_message(messages)
        if first is None:
            self._decisions.record(records.Refused("a control stream without a hello"))
            return  # without a refusal, so that the learner retries
        try:
            hello = self._check_hello(first)
        except JoinRefused as refusal:
            self._refuse(first.hello.name[:MAX_NAME], str(refusal))
            yield pb.ToLearner(refusal=pb.Refusal(reason=str(refusal)))
            return
        stream = LearnerStream(hello.session)
        verdict = self._admit(hello, stream)
        if not verdict.accepted:
            yield pb.ToLearner(refusal=pb.Refusal(reason=f"{hello.name} cannot rejoin: {verdict.reason}"))
            return
        reader = asyncio.get_running_loop().create_task(self._listen(hello.name, stream, messages))
        reader.add_done_callback(lambda _: self._stopped_listening(hello.name, stream))
        returned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handlers.add(returned)
        try:
            while (message := await stream.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            if self._roster.remove(hello.name, stream):
                self._decisions.dispatch(m.StreamEnded(hello.name, hello.session))
            self._handlers.discard(returned)
            if not returned.done():
                returned.set_result(None)

    async def hang_up(self) -> None:
        """End every stream and wait until its handler has returned."""
        self._roster.end_all()
        clock = self._decisions.clock
        deadline = clock.now() + HANG_UP_S
        while self._handlers and clock.now() < deadline:
            await asyncio.wait(self._handlers, timeout=HANG_UP_S / 10)

    # ------------------------------------------------------------ joining

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

    def _admit(self, hello: pb.Hello, stream: LearnerStream) -> m.Verdict:
        old = self._roster.get(hello.name)
        if old is not None and old.session == hello.session:
            old.outbox.end()
        event = m.Hello(
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
        verdict = self._decisions.join(event, lambda: self._roster.add(hello.name, stream))
        if verdict.accepted:
            self._on_joined(event.learner, event.held)
        return verdict

    # ------------------------------------------------------------ messages from a learner

    async def _listen(self, learner: str, stream: LearnerStream, messages: AsyncIterator[pb.ToSyncer | None]) -> None:
        dispatch = self._decisions.dispatch
        async for message in messages:
            if self._roster.get(learner) is not stream:
                return
            if message is None:
                self._refuse(learner, "a damaged message")
                return
            kind = message.WhichOneof("message")
            if kind == "report":
                report = message.report
                if not _plausible(report, self._decisions.core.learners[learner].step):
                    self._refuse(learner, "a report with impossible numbers")
                    continue
                stream.reported(report)
                loss = report.loss if report.HasField("loss") else None
                need = _need(report.need) if report.HasField("need") else None
                dispatch(m.Reported(learner, report.step, report.tokens, report.step_time_s, loss, need))
            elif kind == "ready":
                dispatch(m.Ready(learner))
            elif kind == "nothing":
                dispatch(m.NothingToGive(learner, message.nothing.fragment, message.nothing.round))
            elif kind == "leaving":
                dispatch(m.LeaveRequested(learner))
            elif kind == "data":
                self._data_declared(learner, message.data)
            elif kind == "restored":
                self._decisions.record(records.OptimizerRestored(learner, message.restored.source[:MAX_NAME]))
            else:
                self._refuse(learner, f"unexpected {kind or 'empty'} message")

    def _stopped_listening(self, learner: str, stream: LearnerStream) -> None:
        """End the stream: it is useless once reading has ended, for whatever reason."""
        if self._roster.get(learner) is stream:
            stream.outbox.end()

    def _data_declared(self, learner: str, data: pb.Data) -> None:
        if not 0 < len(data.pools) <= MOST_POOLS or any(len(p.name) > MAX_NAME or p.size > MAX_COUNT for p in data.pools):
            reason = f"a learner must declare 1 to {MOST_POOLS} data sets, with names of at most {MAX_NAME} characters"
            self._refuse(learner, reason)
            self._roster.send(learner, pb.ToLearner(no_lease=pb.NoLease(reason=reason)))
            return
        pools = tuple(Pool(pool.name, pool.size, pool.fingerprint) for pool in data.pools)
        self._decisions.dispatch(m.DataDeclared(learner, pools))

    def _refuse(self, learner: str, reason: str) -> None:
        self._decisions.record(records.Refused(reason, learner))


def _need(need: pb.DataNeed) -> Need:
    return Need(need.given, need.taken, need.wanted, min(need.least, need.taken + MAX_LEAST), need.settled)


def _plausible(report: pb.Report, step_before: int) -> bool:
    times = (report.step_time_s, report.stall_s, report.stalled_s)
    sane_time = all(math.isfinite(time) and 0 <= time < 1e9 for time in times)
    sane_need = max(report.need.given, report.need.taken) <= MAX_COUNT
    return sane_time and sane_need and report.tokens <= MAX_COUNT and report.step <= step_before + MAX_STEPS_AT_ONCE
