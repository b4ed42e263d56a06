"""Learners' bulk streams: contributions in, published versions out, and optimizer state both ways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import grpc

from skerry.errors import WireError
from skerry.syncer.rpc.admission import Admission, NotTaken
from skerry.syncer.rpc.fragments import ServedFragments
from skerry.syncer.rpc.limits import MAX_NAME, first_message
from skerry.syncer.rpc.state_relay import NOTHING, StateRelay
from skerry.syncer.rpc.uploads import Contributions, Receiving
from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import Assembly, Parcel, chunk, count_chunks

log = logging.getLogger("skerry.syncer")

STREAM_QUEUE = 256
"""Pending answers per stream. While the queue is full, the stream is not read (back-pressure)."""
REPLIES = 64
"""Pending replies to contributions, which are sent before other answers."""

Outgoing = pb.Fetch | tuple[pb.State, memoryview] | Literal["reply"] | None
"""A queued answer. "reply" wakes the sender to drain the replies; None ends the stream."""


class BulkService:
    """The bulk streams of one process. `relay` is None in shards, which carry no optimizer state."""

    def __init__(
        self,
        served: ServedFragments,
        contributions: Contributions,
        admission: Admission,
        relay: StateRelay | None = None,
    ) -> None:
        self.served, self.contributions, self.admission, self.relay = served, contributions, admission, relay
        self.taking: set[asyncio.Task[None]] = set()
        """Complete contributions being judged. They outlive the stream that carried them."""

    async def serve(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None], context: Any) -> None:
        """Serve one gRPC call."""

        try:
            first = await first_message(messages)
            if first is None or first.message.WhichOneof("message") != "hello":
                raise WireError("the first message of a bulk stream must be a hello")
            stream = BulkStream(self, first.message.hello.name, first.message.hello.session)
            loop = asyncio.get_running_loop()
            reader, sender = loop.create_task(stream.read(messages)), loop.create_task(stream.send(context))
            try:
                await reader
                await sender
            finally:
                reader.cancel()
                sender.cancel()
        except WireError as error:
            self.admission.refused("", None, str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


class BulkStream:
    """One learner's bulk stream."""

    def __init__(self, service: BulkService, learner: str, session: str) -> None:
        self.learner, self.session = learner, session
        self._served, self._contributions = service.served, service.contributions
        self._admission, self._state_relay = service.admission, service.relay
        self._outbox: asyncio.Queue[Outgoing] = asyncio.Queue(STREAM_QUEUE)
        self._replies: asyncio.Queue[pb.UploadReply] = asyncio.Queue(REPLIES)
        self._ended = False
        self._receiving: Receiving | None = None
        self._state: tuple[pb.State, Assembly] | None = None
        self._header_seen = False
        """A header has arrived, so chunks belong to something, wanted or not."""
        self._next_chunk = 0
        self._taking: set[asyncio.Task[None]] = set()
        self._all_taking = service.taking

    # ------------------------------------------------------------ reading

    async def read(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None]) -> None:
        try:
            async for parcel in messages:
                if parcel is None:
                    raise WireError("a damaged message on the bulk stream")
                if not await self._begins(parcel.message):
                    continue
                # The chunk belongs to the transfer whose header came last.
                receiving, state = self._receiving, self._state
                if receiving is not None and receiving.given_up is not None:
                    self._detach()
                    if receiving.given_up:
                        await self._refuse(receiving.header, NotTaken(receiving.given_up))
                    continue
                assembly = receiving.assembly if receiving is not None else state[1] if state is not None else None
                if assembly is None or assembly.complete or (not parcel.chunk and assembly.size_bytes):
                    continue  # unwanted, or a header without a chunk
                number, self._next_chunk = self._next_chunk, self._next_chunk + 1
                if receiving is None:
                    assert state is not None
                    self._add_to_state(*state, number, parcel.chunk)
                    continue
                try:
                    assembly.add(number, parcel.chunk)
                except WireError as error:
                    self._detach()
                    self._contributions.done(self.learner, receiving)
                    await self._refuse(receiving.header, NotTaken(str(error), retry=True))
                    continue
                self._admission.bytes_moved(self.learner)
                if receiving.complete:
                    self._detach()
                    self._begin_to_take(receiving)
            if self._taking:  # stay open for the replies
                await asyncio.wait(self._taking)
            await self._outbox.put(None)
        finally:
            # An unfinished contribution may continue on another stream. A complete one is still judged.
            self._detach()
            self._ended = True
            while not self._replies.empty():  # release tasks that wait for room in the queue
                self._replies.get_nowait()

    async def _begins(self, message: pb.BulkToSyncer) -> bool:
        """Handle the header in a message, if any. Returns whether the message may carry a chunk."""
        kind = message.WhichOneof("message")
        if kind == "hello":
            raise WireError("a second hello on one bulk stream")
        if kind == "fetch":
            await self._outbox.put(message.fetch)
        elif kind == "fetch_state":
            self._fetch_state(message.fetch_state.part)
        elif kind == "upload":
            self._detach()
            await self._begin(message.upload)
            return not message.upload.resume
        elif kind == "state":
            self._detach()
            self._begin_state(message.state)
            return True
        elif not self._header_seen:
            await self._refuse(None, NotTaken("an upload must start with its header"))
        else:
            return True
        return False

    async def _begin(self, header: pb.Upload) -> None:
        self._header_seen = True
        try:
            receiving = await self._contributions.begin(self.learner, self.session, header)
        except NotTaken as error:
            await self._refuse(header, error)
            return
        if header.resume:
            if receiving.complete:
                busy = NotTaken(f"fragment {header.fragment} has arrived and is being judged", retry=True)
                await self._reply(_reply_to(header, busy))
                return
            missing = [number for run in receiving.assembly.missing for number in run]
            await self._reply(pb.UploadReply(fragment=header.fragment, round=header.round, missing=missing))
            return
        self._receiving, self._next_chunk = receiving, header.first_chunk

    def _begin_to_take(self, receiving: Receiving) -> None:
        """Judge a complete contribution in a task that outlives the stream."""
        task = asyncio.get_running_loop().create_task(self._take(receiving))
        for holder in (self._taking, self._all_taking):
            holder.add(task)
            task.add_done_callback(holder.discard)

    async def _take(self, receiving: Receiving) -> None:
        header = receiving.header
        try:
            verdict = await self._contributions.take(self.learner, receiving)
            reply = pb.UploadReply(
                fragment=header.fragment, round=header.round, accepted=verdict.accepted, reason=verdict.reason
            )
        except NotTaken as error:
            self._admission.refused(self.learner, header, str(error))
            reply = _reply_to(header, error)
        except Exception as error:  # out of memory, for instance: the learner must still get a reply
            log.exception("failed to process a contribution of %s to fragment %d", self.learner, header.fragment)
            self._admission.refused(self.learner, header, repr(error))
            reply = _reply_to(header, NotTaken(f"failed to process the contribution: {error!r}", retry=True))
        finally:
            self._contributions.done(self.learner, receiving)
        await self._reply(reply)

    def _detach(self) -> None:
        """End the current transfer on this stream. Further chunks are ignored until the next header."""
        if self._state is not None:
            self._relay.failed(self._state[0], "the peer's stream broke")
        self._receiving = self._state = None

    # ------------------------------------------------------------ optimizer state

    @property
    def _relay(self) -> StateRelay:
        if self._state_relay is None:
            raise WireError("optimizer state goes through the syncer itself, not through a shard")
        return self._state_relay

    def _fetch_state(self, part: int) -> None:
        def deliver(header: pb.State, data: memoryview) -> None:
            # If the queue is full or the stream has ended, the learner retries or goes without.
            with contextlib.suppress(asyncio.QueueFull):
                self._outbox.put_nowait((header, data))

        self._relay.want(self.learner, self.session, part, deliver)

    def _begin_state(self, header: pb.State) -> None:
        self._header_seen = True
        try:
            self._relay.begins(self.learner, self.session, header)
        except WireError as error:
            self._admission.refused(self.learner, None, str(error))
            return
        if header.reason:
            self._relay.given(header, NOTHING)
        else:
            self._state, self._next_chunk = (header, Assembly(header.size_bytes, header.checksum)), 0

    def _add_to_state(self, header: pb.State, assembly: Assembly, number: int, data: bytes | memoryview) -> None:
        try:
            assembly.add(number, data)
            if not assembly.complete:
                return
            received = assembly.finish()
        except WireError as error:
            self._relay.failed(header, str(error))
        else:
            self._relay.given(header, received)
        self._state = None

    # ------------------------------------------------------------ sending

    async def _refuse(self, header: pb.Upload | None, error: NotTaken) -> None:
        self._admission.refused(self.learner, header, str(error))
        await self._reply(_reply_to(header, error))

    async def _reply(self, reply: pb.UploadReply) -> None:
        if self._ended:
            return
        await self._replies.put(reply)
        with contextlib.suppress(asyncio.QueueFull):  # a full queue wakes the sender anyway
            self._outbox.put_nowait("reply")

    async def send(self, context: Any) -> None:
        while (item := await self._outbox.get()) is not None:
            for parcel in self._parcels(item):
                try:
                    await context.write(parcel)
                except grpc.aio.InternalError:
                    raise asyncio.CancelledError from None  # the learner disconnected; reading ends as well

    def _parcels(self, item: Outgoing) -> Iterator[Parcel[pb.BulkToLearner]]:
        """An answer, chunk by chunk. Pending replies to contributions go first, and between chunks."""
        yield from self._waiting_replies()
        start = 0
        if isinstance(item, pb.Fetch):
            if self._admission.may_fetch(self.learner, self.session):
                header, data = self._served.find(item, self._admission.floor)
            else:
                reason = f"{self.learner[:MAX_NAME]!r} is not connected with this session"
                header, data = pb.Fetched(fragment=item.fragment, version=item.version, reason=reason), NOTHING
            message, stop = pb.BulkToLearner(fetched=header), count_chunks(len(data))
            if not header.reason:
                start = item.first_chunk
                stop = min(stop, start + item.chunks) if item.chunks else stop
        elif isinstance(item, tuple):
            message, data = pb.BulkToLearner(state=item[0]), item[1]
            stop = count_chunks(len(data))
        else:
            return
        for number in range(start, max(stop, start + 1)):
            yield Parcel(message, chunk(data, number))
            self._admission.bytes_moved(self.learner)
            message = pb.BulkToLearner()
            yield from self._waiting_replies()

    def _waiting_replies(self) -> Iterator[Parcel[pb.BulkToLearner]]:
        while not self._replies.empty():
            yield Parcel(pb.BulkToLearner(reply=self._replies.get_nowait()))


def _reply_to(header: pb.Upload | None, error: NotTaken) -> pb.UploadReply:
    fragment, number = (header.fragment, header.round) if header is not None else (0, 0)
    return pb.UploadReply(fragment=fragment, round=number, reason=str(error), damaged=error.retry)
