"""Answers the syncer's questions: takes a snapshot between two steps, encodes it, and sends it until it is delivered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from skerry.checksum import checksum
from skerry.core.exchange import Give, GiveNothing, Question
from skerry.errors import WireError
from skerry.learner.background import Background
from skerry.learner.replica import Snapshot
from skerry.learner.session import Session
from skerry.learner.transport.reachability import Reachability
from skerry.learner.transport.routes import Routes
from skerry.tensors.codecs.codec import raw_bytes
from skerry.wire import skerry_pb2 as pb

log = logging.getLogger("skerry.learner")

RETRY_S = 0.5
ENCODED_AT_ONCE = 2
"""Contributions encoded at a time. Two keep the GPU busy; each needs a few times its own size in GPU memory."""


@dataclass(frozen=True)
class Encoded:
    """An answer, ready to be sent."""

    data: memoryview
    checksum: int


class Answers(NamedTuple):
    """Answers to all questions that can be answered now."""

    given: list[tuple[Give, Snapshot | Encoded]]
    """Each with a new snapshot, or with the bytes encoded before if it is sent again."""
    nothings: list[Question]
    """Questions to which this learner has nothing to give."""


class Contributor:
    """Sends contributions. Runs on the event loop; background threads copy and encode."""

    def __init__(self, session: Session, background: Background, reachability: Reachability) -> None:
        self._session, self._background, self._reachability = session, background, reachability
        self.send: Callable[[pb.ToSyncer], None] = lambda message: None
        """Sends a control message; replaced on each connection."""
        self._answering = False
        self._encoders = asyncio.Semaphore(ENCODED_AT_ONCE)
        self._encoding: set[int] = set()
        """Fragments whose last answer is still being encoded. If asked again after a reconnect, the same answer is sent."""
        self._encoded: dict[int, Encoded] = {}
        """By fragment: the last answer, until it is delivered."""
        self._sending: set[tuple[Routes, int, int]] = set()

    def answer(self) -> None:
        """Answer every open question that can be answered, unless answering is already in progress."""
        replica = self._session.replica
        if self._answering:
            return
        if replica.quick and replica.gate.acquire(blocking=False):
            if replica.between_steps:
                self._give(self._take_snapshots())
                return
            replica.gate.release()
        self._answering = True
        self._background.spawn(self._answer_between_steps())

    async def _answer_between_steps(self) -> None:
        try:
            found = await self._background.in_thread(self._wait_for_snapshots)
        finally:
            self._answering = False
        self._give(found)
        if any(found):
            self._session.wake()  # more questions may have arrived in the meantime

    def _wait_for_snapshots(self) -> Answers:
        session = self._session
        if not session.replica.acquire_between_steps(lambda: session.closing):
            return Answers([], [])
        return self._take_snapshots()

    def _take_snapshots(self) -> Answers:
        """Take snapshots for every question that can be answered, all between the same two steps. The caller holds the gate;
        this releases it."""
        session, found = self._session, Answers([], [])
        try:
            with session.lock:
                for answer in session.exchange.answers(self._encoding):
                    if isinstance(answer, GiveNothing):
                        found.nothings.append(answer.question)
                        continue
                    fragment = answer.question.fragment
                    if answer.again:
                        found.given.append((answer, self._encoded[fragment]))
                        continue
                    snapshot = session.staged.get(fragment) if answer.staged else None
                    found.given.append((answer, snapshot or session.replica.snapshot(fragment, answer.at.steps)))
                    session.exchange.given(answer)
                    self._encoding.add(fragment)
        finally:
            session.replica.gate.release()
        return found

    def _give(self, found: Answers) -> None:
        for question in found.nothings:
            self.send(pb.ToSyncer(nothing=pb.NothingToGive(fragment=question.fragment, round=question.round)))
        for give, source in found.given:
            self._background.spawn(self._contribute(give, source))

    async def _contribute(self, give: Give, source: Snapshot | Encoded) -> None:
        """Encode an answer and send it until it is delivered, no longer wanted, or the connection is replaced."""
        session, routes, question = self._session, self._session.routes, give.question
        assert routes is not None
        if isinstance(source, Encoded):
            encoded = source
        elif session.replica.quick:
            encoded = self._encode(give, source)
        else:
            async with self._encoders:
                encoded = await self._background.in_thread(self._encode, give, source)
        if session.exchange.has_questions():
            session.wake()  # questions about this fragment waited for the encoder
        del source  # a snapshot holds device memory, and sending may take long
        sending = (routes, question.fragment, question.round)
        if sending in self._sending:
            return  # the question was repeated while this answer was being encoded
        self._sending.add(sending)
        header, resume = self._header(give, encoded), give.again
        try:
            while True:
                shard = routes.shard_of(question.fragment)  # looked up first: it may change during the transfer
                try:
                    reply = await routes.to_send(question.fragment, encoded.data).upload(header, encoded.data, resume)
                except WireError as error:
                    log.debug("%s: fragment %d was not sent: %s", session.name, question.fragment, error)
                    self._reachability.failed(shard, error)
                else:
                    self._reachability.went_through(shard)
                    if not reply.accepted:
                        log.debug("%s: fragment %d was refused: %s", session.name, question.fragment, reply.reason)
                    if not reply.damaged:
                        break
                resume = True
                await asyncio.sleep(RETRY_S)
                if session.routes is not routes or session.closing:
                    return  # after a reconnect the syncer asks again if it still wants the answer
                with session.lock:
                    wanted = session.exchange.still_wanted(question)
                if not wanted:
                    break
            self._delivered(question, encoded)
        finally:
            self._sending.discard(sending)

    def _encode(self, give: Give, snapshot: Snapshot) -> Encoded:
        """Encode a snapshot. On a GPU this waits for the step before the snapshot."""
        session = self._session
        data = raw_bytes(session.replica.encode(snapshot))
        encoded = Encoded(data, checksum(data))
        with session.lock:
            self._encoded[give.question.fragment] = encoded
            self._encoding.discard(give.question.fragment)
            session.exchange.encoded(give)
        return encoded

    def _header(self, give: Give, encoded: Encoded) -> pb.Upload:
        session, question = self._session, give.question
        with session.lock:
            journal = session.journal.upto(give.at.steps)
        return pb.Upload(
            fragment=question.fragment,
            round=question.round,
            base=give.base,
            steps=give.steps,
            tokens=give.tokens,
            codec=session.sync.send,
            size_bytes=len(encoded.data),
            checksum=encoded.checksum,
            at_step=give.at.steps,
            samples_from=give.samples[0],
            samples_to=give.samples[1],
            at_tokens=give.at.tokens,
            journal_json=journal,
        )

    def _delivered(self, question: Question, encoded: Encoded) -> None:
        with self._session.lock:
            self._session.exchange.delivered(question)
            if self._encoded.get(question.fragment) is encoded:
                del self._encoded[question.fragment]

    def forget_all(self) -> None:
        self._encoded.clear()
