"""One learner's bulk stream, as the syncer reads it: parts are put together, and what is not wanted is passed over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeVar

from skerry.errors import WireError
from skerry.syncer.relay import NOTHING
from skerry.wire import skerry_pb2 as pb
from skerry.wire.chunks import Assembly

if TYPE_CHECKING:
    from skerry.syncer.bulk import Bulk

MAX_NAME = 200
HELLO_S = 30.0
LANE_QUEUE = 64
"""Answers that wait to be sent on one lane. While there are as many, nothing more is read from it."""

Message = TypeVar("Message")
Outgoing = pb.UploadReply | pb.Fetch | tuple[pb.State, memoryview] | None


class Unhealthy(WireError):
    """A contribution that arrived as it was sent and cannot be merged. The state machine has written it down."""


class Lane:
    """One bulk stream, from a learner's first word to its last."""

    def __init__(self, bulk: Bulk, name: str, session: str) -> None:
        self.name, self.session = name, session
        self.outbox: asyncio.Queue[Outgoing] = asyncio.Queue(LANE_QUEUE)
        self._bulk = bulk
        self._header: pb.Upload | pb.State | None = None
        self._assembly: Assembly | None = None
        self._decoding: set[asyncio.Task[None]] = set()

    async def read(self, messages: AsyncIterator[pb.BulkToSyncer | None]) -> None:
        try:
            async for message in messages:
                if message is None:
                    raise WireError("a damaged message on the bulk stream")
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
                    await self._end_early()
                    await self._begin(message.upload)
                elif kind == "state":
                    await self._end_early()
                    self._begin_state(message.state)
                elif self._header is None:
                    await self._refuse(None, WireError("an upload must start with its header"))
                await self._add(message.chunk)
            await self._end_early()
            await asyncio.gather(*self._decoding)
            await self.outbox.put(None)
        finally:
            # What is half here will not be finished. What is being decoded has arrived, and counts.
            self._drop()

    def _fetch_state(self, part: int) -> None:
        def deliver(header: pb.State, data: memoryview) -> None:
            # If it is full or nobody reads it any more, the learner asks again or does without.
            with contextlib.suppress(asyncio.QueueFull):
                self.outbox.put_nowait((header, data))

        if self._bulk.is_connected(self.name, self.session):
            self._bulk.relay.want(self.name, part, deliver)
        else:
            deliver(pb.State(part=part, reason=f"{self.name[:MAX_NAME]!r} is not connected with this session"), NOTHING)

    def _begin_state(self, header: pb.State) -> None:
        self._header = header
        try:
            if not self._bulk.is_connected(self.name, self.session):
                raise WireError("not connected with this session")
            self._bulk.relay.check(self.name, header)
            self._bulk.journal(self.name, self.session, header.journal_json)
        except WireError as error:
            self._bulk.refused(self.name, None, str(error))
            return
        if header.reason:
            self._bulk.relay.given(header, NOTHING)
        else:
            self._assembly = Assembly(header.size_bytes, header.checksum)

    async def _refuse(self, header: pb.Upload | None, error: WireError, damaged: bool = False) -> None:
        self._bulk.refused(self.name, header, str(error))
        await self._reply(header, error, damaged)

    async def _reply(self, header: pb.Upload | None, error: WireError, damaged: bool = False) -> None:
        fragment, step = (header.fragment, header.step) if header is not None else (0, 0)
        await self.outbox.put(pb.UploadReply(fragment=fragment, step=step, reason=str(error), damaged=damaged))

    def _drop(self) -> None:
        """Nothing more is wanted of the contribution begun last: its chunks are passed over until another begins."""
        if self._assembly is not None and isinstance(self._header, pb.Upload):
            self._bulk.release(self.name, self._header.fragment)
        if self._assembly is not None and isinstance(self._header, pb.State):
            self._bulk.relay.failed(self._header, "the peer's stream broke")
        self._assembly = None

    async def _begin(self, header: pb.Upload) -> None:
        self._header = header
        self._bulk.journal(self.name, self.session, header.journal_json)
        try:
            self._bulk.check(self.name, self.session, header)
        except WireError as error:
            await self._refuse(header, error)
            return
        if not self._bulk.claim(self.name, header.fragment):
            busy = WireError(f"another upload of fragment {header.fragment} is under way; try again later")
            await self._refuse(header, busy, damaged=True)
            return
        self._assembly = Assembly(header.size_bytes, header.checksum)

    async def _add(self, chunk: bytes) -> None:
        if self._assembly is None or self._header is None:
            return
        try:
            self._assembly.add(chunk)
        except WireError as error:
            self._drop()
            if isinstance(self._header, pb.Upload):
                await self._refuse(self._header, error)
            return
        self._bulk.bytes_moved(self.name)
        if self._assembly.complete:
            await self._finish(self._header, self._assembly)

    async def _end_early(self) -> None:
        if self._assembly is not None and self._header is not None:
            await self._finish(self._header, self._assembly)

    async def _finish(self, header: pb.Upload | pb.State, assembly: Assembly) -> None:
        self._header = self._assembly = None
        try:
            data = assembly.finish()
        except WireError as error:
            if isinstance(header, pb.State):
                self._bulk.relay.failed(header, str(error))
                return
            self._bulk.release(self.name, header.fragment)
            await self._refuse(header, error, damaged=True)
            return
        if isinstance(header, pb.State):
            self._bulk.relay.given(header, data)
            return
        task = asyncio.get_running_loop().create_task(self._take(header, data))
        self._decoding.add(task)
        task.add_done_callback(self._decoding.discard)

    async def _take(self, header: pb.Upload, data: memoryview) -> None:
        try:
            await self._bulk.take(self.name, self.session, header, data)
        except Unhealthy as error:
            await self._reply(header, error)
        except WireError as error:
            await self._refuse(header, error)
        else:
            await self.outbox.put(pb.UploadReply(fragment=header.fragment, step=header.step, accepted=True))
        finally:
            self._bulk.release(self.name, header.fragment)


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
