"""Fetches optimizer state from learners, part by part: for a peer that lost its own, or for a snapshot.

Also fetches the values of a version that is damaged on disk (syncer/rescue.py). Stores nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from skerry.core import records
from skerry.errors import WireError
from skerry.syncer.decisions import Decisions
from skerry.syncer.rpc.journals import Journals
from skerry.syncer.rpc.roster import Roster
from skerry.tensors.fragments import Layout
from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import state_limit_bytes

WAIT_S = 20.0
"""How long a peer may take to send one part."""
AT_ONCE = 4
"""Parts in flight at a time, to bound memory."""

Deliver = Callable[[pb.State, memoryview], None]
NOTHING = memoryview(b"")


@dataclass
class _Wanted:
    part: int
    donor: str
    deliver: Deliver
    timer: asyncio.TimerHandle
    limit_bytes: int


class StateRelay:
    def __init__(self, layout: Layout, decisions: Decisions, roster: Roster, journals: Journals) -> None:
        self._layout, self._decisions, self._roster, self._journals = layout, decisions, roster, journals
        self._tickets = itertools.count(1)
        self._wanted: dict[int, _Wanted] = {}
        self._limit_bytes = state_limit_bytes(layout)
        self._closed = False

    def want(self, learner: str, session: str, part: int, deliver: Deliver) -> None:
        """Fetch a part for a learner that lost its state. `deliver` gets the part, or a header with a reason and no data."""
        if not self._roster.is_connected(learner, session):
            deliver(pb.State(part=part, reason="not connected with this session"), NOTHING)
            return
        donor = self._decisions.core.donor_for(learner)
        if donor is None:
            deliver(pb.State(part=part, reason="no healthy peer is connected"), NOTHING)
            return
        if self._ask(donor, pb.GiveState(part=part), deliver, WAIT_S) and part == 0:
            self._decisions.record(records.StateRelayed(learner, donor))

    async def ask(self, donor: str, part: int, wait_s: float) -> tuple[pb.State, memoryview]:
        """Fetch a part of a learner's optimizer state for the syncer. A header with a reason means failure, without data."""
        return await self._ask_for_syncer(donor, pb.GiveState(part=part), wait_s)

    async def ask_held(self, donor: str, fragment: int, version: int, wait_s: float) -> tuple[pb.State, memoryview]:
        """Fetch the values of a version that a learner holds."""
        held = pb.HeldVersion(fragment=fragment, version=version)
        return await self._ask_for_syncer(donor, pb.GiveState(held=held), wait_s)

    async def _ask_for_syncer(self, donor: str, question: pb.GiveState, wait_s: float) -> tuple[pb.State, memoryview]:
        found: asyncio.Future[tuple[pb.State, memoryview]] = asyncio.get_running_loop().create_future()

        def deliver(header: pb.State, data: memoryview) -> None:
            if not found.done():
                found.set_result((header, data))

        learner = self._decisions.core.learners.get(donor)
        if learner is None or learner.phase != "training":
            return pb.State(part=question.part, reason=f"{donor} is away"), NOTHING
        self._ask(donor, question, deliver, wait_s, again=False)
        return await found

    def _ask(self, donor: str, question: pb.GiveState, deliver: Deliver, wait_s: float, again: bool = True) -> bool:
        part, limit_bytes = question.part, self._limit_bytes
        if question.HasField("held"):
            limit_bytes = 4 * self._layout.fragments[question.held.fragment].numel
        if self._closed:
            deliver(pb.State(part=part, reason="the syncer is stopping"), NOTHING)
            return False
        if len(self._wanted) >= AT_ONCE:
            deliver(pb.State(part=part, reason="too many state transfers in flight", again=True), NOTHING)
            return False
        ticket = next(self._tickets)
        timer = asyncio.get_running_loop().call_later(wait_s, self._timed_out, ticket, wait_s, again)
        self._wanted[ticket] = _Wanted(part, donor, deliver, timer, limit_bytes)
        question.ticket = ticket
        self._roster.send(donor, pb.ToLearner(give_state=question))
        return True

    def _timed_out(self, ticket: int, wait_s: float, again: bool) -> None:
        wanted = self._wanted.pop(ticket, None)
        if wanted is not None:
            reason = f"{wanted.donor} did not send its state within {wait_s:.0f} s"
            wanted.deliver(pb.State(part=wanted.part, reason=reason, again=again), NOTHING)

    def begins(self, learner: str, session: str, header: pb.State) -> None:
        """Check a header before memory is allocated for its data. Raises WireError if the part was not requested."""
        if not self._roster.is_connected(learner, session):
            raise WireError("not connected with this session")
        wanted = self._wanted.get(header.ticket)
        if wanted is None or wanted.donor != learner or wanted.part != header.part:
            raise WireError(f"{learner} was not asked for part {header.part} of its state")
        if header.size_bytes > wanted.limit_bytes:
            raise WireError(f"a part of optimizer state has at most {wanted.limit_bytes} bytes, {header.size_bytes} declared")
        if header.journal_json:
            self._journals.take(learner, session, header.journal_json)

    def given(self, header: pb.State, data: memoryview) -> None:
        wanted = self._wanted.pop(header.ticket, None)
        if wanted is not None:
            wanted.timer.cancel()
            wanted.deliver(header, data)

    def failed(self, header: pb.State, reason: str) -> None:
        self.given(pb.State(ticket=header.ticket, part=header.part, reason=reason, again=True), NOTHING)

    def close(self) -> None:
        self._closed = True
        for wanted in list(self._wanted.values()):
            wanted.timer.cancel()
            wanted.deliver(pb.State(part=wanted.part, reason="the syncer is stopping"), NOTHING)
        self._wanted.clear()
