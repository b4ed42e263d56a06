"""One learner's bulk stream, as the syncer reads it: parts are put together, and what is not wanted is passed over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Literal, TypeVar

from skerry.errors import WireError
from skerry.syncer.rpc.state_relay import NOTHING, Relay
from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import Assembly, Parcel

if TYPE_CHECKING:
    from skerry.syncer.rpc.fragments import Bulk

log = logging.getLogger("skerry.syncer")

MAX_NAME = 200
HELLO_S = 30.0
LANE_QUEUE = 256
"""Answers that wait to be sent on one lane. While there are as many, nothing more is read from it."""
REPLIES = 64
"""The same of answers to contributions, which go before all others."""

Message = TypeVar("Message")
Outgoing = pb.Fetch | tuple[pb.State, memoryview] | Literal["reply"] | None
"""What is to be sent: `reply` says to look at the replies."""


class Damaged(WireError):
    """What arrived is not what was sent; it may be sent again."""


class Busy(Damaged):
    """It cannot be taken just now."""


class Unhealthy(WireError):
    """A contribution that arrived as it was sent and cannot be merged. The state machine has written it down."""


class Receiving:
    """A contribution that is on its way, on one lane or several. What has come stays when a lane breaks."""

    def __init__(self, session: str, header: pb.Upload) -> None:
        self.session, self.header = session, header
        self.assembly = Assembly(header.size_bytes, header.checksum)
        self.given_up: str | None = None
        """Why the rest of it is not wanted any more."""

    def is_of(self, session: str, header: pb.Upload) -> bool:
        of = self.header
        same = (header.step, header.upto, header.size_bytes, header.checksum)
        return session == self.session and same == (of.step, of.upto, of.size_bytes, of.checksum)

    def give_up(self, reason: str) -> None:
        """Its memory is free, whichever lanes still name it."""
        self.given_up = reason
        self.assembly = Assembly(self.header.size_bytes, self.header.checksum)

    @property
    def complete(self) -> bool:
        return self.assembly.complete


class Lane:
    """One bulk stream, from a learner's first word to its last."""

    def __init__(self, bulk: Bulk, name: str, session: str) -> None:
        self.name, self.session = name, session
        self.outbox: asyncio.Queue[Outgoing] = asyncio.Queue(LANE_QUEUE)
        self.replies: asyncio.Queue[pb.UploadReply] = asyncio.Queue(REPLIES)
        self._ended = False
        self._bulk = bulk
        self._receiving: Receiving | None = None
        self._state: tuple[pb.State, Assembly] | None = None
        self._named = False
        """What comes belongs to something, wanted or not."""
        self._following = 0
        """The number of the chunk that comes next."""
        self._taking: set[asyncio.Task[None]] = set()

    async def read(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None]) -> None:
        try:
            async for parcel in messages:
                if parcel is None:
                    raise WireError("a damaged message on the bulk stream")
                message = parcel.message
                kind = message.WhichOneof("message")
                if kind == "hello":
                    raise WireError("a second hello on one bulk stream")
                if kind == "fetch":
                    await self.outbox.put(message.fetch)
                    continue
                if kind == "fetch_state":
                    self._fetch_state(message.fetch_state.part)
                    continue
                if kind == "upload":
                    self._put_down()
                    await self._begin(message.upload)
                elif kind == "state":
                    self._put_down()
                    self._begin_state(message.state)
                elif not self._named:
                    await self._refuse(None, WireError("an upload must start with its header"))
                if not message.upload.resume:
                    await self._add(parcel.chunk)
            if self._taking:
                # Not by gather, which would cancel them along with this: what has come whole counts, with or without a lane.
                await asyncio.wait(self._taking)
            await self.outbox.put(None)
        finally:
            # What is half here may be finished on another lane. What is being decoded has arrived, and counts.
            self._put_down()
            self._ended = True
            while not self.replies.empty():  # whoever waits to put something there need not wait any more
                self.replies.get_nowait()

    def _fetch_state(self, part: int) -> None:
        def deliver(header: pb.State, data: memoryview) -> None:
            # If it is full or nobody reads it any more, the learner asks again or does without.
            with contextlib.suppress(asyncio.QueueFull):
                self.outbox.put_nowait((header, data))

        self._relay.want(self.name, self.session, part, deliver)

    @property
    def _relay(self) -> Relay:
        if self._bulk.relay is None:
            raise WireError("optimizer state goes through the syncer itself, not through a shard")
        return self._bulk.relay

    def _begin_state(self, header: pb.State) -> None:
        self._named = True
        try:
            self._relay.begins(self.name, self.session, header)
        except WireError as error:
            self._bulk.desk.refused(self.name, None, str(error))
            return
        if header.reason:
            self._relay.given(header, NOTHING)
        else:
            self._state, self._following = (header, Assembly(header.size_bytes, header.checksum)), 0

    async def _refuse(self, header: pb.Upload | None, error: WireError) -> None:
        self._bulk.desk.refused(self.name, header, str(error))
        await self._reply(header, error)

    async def _reply(self, header: pb.Upload | None, error: WireError) -> None:
        fragment, step = (header.fragment, header.step) if header is not None else (0, 0)
        reply = pb.UploadReply(fragment=fragment, step=step, reason=str(error), damaged=isinstance(error, Damaged))
        await self._say(reply)

    async def _say(self, reply: pb.UploadReply) -> None:
        if self._ended:
            return
        await self.replies.put(reply)
        with contextlib.suppress(asyncio.QueueFull):  # then there is enough to wake the sender
            self.outbox.put_nowait("reply")

    def _put_down(self) -> None:
        """Chunks that come now belong to nothing, until something is named."""
        if self._state is not None:
            self._relay.failed(self._state[0], "the peer's stream broke")
        self._receiving = self._state = None

    async def _begin(self, header: pb.Upload) -> None:
        self._named = True
        try:
            await self._bulk.check(self.name, self.session, header)
            receiving = self._bulk.receiving(self.name, self.session, header)
        except WireError as error:
            await self._refuse(header, error)
            return
        if header.resume:
            if receiving.complete:
                await self._reply(header, Busy(f"fragment {header.fragment} has come and is being looked at"))
                return
            missing = [number for run in receiving.assembly.missing for number in run]
            await self._say(pb.UploadReply(fragment=header.fragment, step=header.step, missing=missing))
            return
        self._receiving, self._following = receiving, header.first_chunk

    async def _add(self, chunk: bytes | memoryview) -> None:
        receiving, state = self._receiving, self._state
        if receiving is not None and receiving.given_up is not None:
            self._put_down()
            if receiving.given_up:
                await self._refuse(receiving.header, WireError(receiving.given_up))
            return
        assembly = receiving.assembly if receiving is not None else state[1] if state is not None else None
        if assembly is None or assembly.complete or (not chunk and assembly.size_bytes):
            return  # not wanted, or a header alone
        number, self._following = self._following, self._following + 1
        if state is not None:
            self._add_to_state(*state, number, chunk)
        if receiving is None:
            return
        try:
            receiving.assembly.add(number, chunk)
        except WireError as error:
            self._put_down()
            self._bulk.received(self.name, receiving)
            await self._refuse(receiving.header, Damaged(str(error)))
            return
        self._bulk.desk.bytes_moved(self.name)
        if receiving.complete:
            self._put_down()
            task = asyncio.get_running_loop().create_task(self._take(receiving))
            for holder in (self._taking, self._bulk.taking):
                holder.add(task)
                task.add_done_callback(holder.discard)

    def _add_to_state(self, header: pb.State, assembly: Assembly, number: int, chunk: bytes | memoryview) -> None:
        try:
            assembly.add(number, chunk)
            if not assembly.complete:
                return
            data = assembly.finish()
        except WireError as error:
            self._relay.failed(header, str(error))
        else:
            self._relay.given(header, data)
        self._state = None

    async def _take(self, receiving: Receiving) -> None:
        header = receiving.header
        error: WireError | None = None
        try:
            await self._bulk.take(self.name, self.session, header, receiving.assembly)
        except WireError as found:
            error = found
        except Exception as found:  # no memory, for instance: whoever waits for an answer must get one
            log.exception("a contribution of %s to fragment %d could not be taken", self.name, header.fragment)
            error = Damaged(f"it could not be taken: {found!r}")
        finally:
            self._bulk.received(self.name, receiving)
        if error is None:
            await self._say(pb.UploadReply(fragment=header.fragment, step=header.step, accepted=True))
        elif isinstance(error, Unhealthy):
            await self._reply(header, error)
        else:
            await self._refuse(header, error)


async def first_message(messages: AsyncIterator[Message]) -> Message | None:
    """None if the stream ends without a word, or stays silent."""

    async def wait() -> Message | None:
        async for message in messages:
            return message
        return None

    try:
        return await asyncio.wait_for(wait(), HELLO_S)
    except asyncio.TimeoutError:
        return None
