"""Bulk transfers and the control stream from a learner's side. gRPC's errors become WireError here."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from skerry.errors import WireError
from skerry.wire import skerry_pb2 as pb
from skerry.wire.chunks import Assembly, cut
from skerry.wire.service import SyncerStub

T = TypeVar("T")


@contextlib.contextmanager
def wire_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise WireError(f"{error.code().name.lower()}: {error.details()}") from None
    except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
        raise WireError(str(error) or "the stream has ended") from None
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls; then it is the connection that ended, not the caller. Before Python
        # 3.11 a task cannot tell, and callers that cancel keep a flag.
        cancelling = getattr(asyncio.current_task(), "cancelling", lambda: 0)
        if cancelling():
            raise
        raise WireError("the connection was closed") from None


async def read(call: Any) -> Any:
    """The next message of a stream, or EOF."""
    with wire_errors():
        return _whole(await call.read())


async def describe(stub: SyncerStub, protocol: int, timeout_s: float = 10.0) -> pb.RunDescription:
    with wire_errors():
        return _whole(await stub.describe(pb.DescribeRequest(protocol=protocol), timeout=timeout_s))


def _whole(message: T | None) -> T:
    if message is None:  # what gRPC makes of bytes that are no message
        raise WireError("the message received is damaged")
    return message


class TryAgain(WireError):
    """A refusal that may not last."""


@dataclass
class _Fetch:
    """A version on its way here."""

    fragment: int
    version: int
    check: Callable[[pb.Fetched], None]
    received: Callable[[int], None]
    done: asyncio.Future[memoryview]
    header: pb.Fetched | None = None
    assembly: Assembly | None = None
    limit_bytes: int = 0
    state: pb.State | None = None

    def fail(self, error: WireError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _forget(future: asyncio.Future[Any]) -> None:
    """Nobody will ask what became of it."""
    if not future.cancel() and not future.cancelled():
        future.exception()


class Lane:
    """A learner's bulk stream. It is opened when first used, and again when it broke; what was under way then fails."""

    def __init__(self, stub: SyncerStub, name: str, session: str) -> None:
        self._stub = stub
        self._hello = pb.BulkHello(name=name, session=session)
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._uploading = asyncio.Lock()
        self._replies: dict[tuple[int, int], asyncio.Future[pb.UploadReply]] = {}
        self._fetches: deque[_Fetch] = deque()
        self._arriving: _Fetch | None = None
        self._state: _Fetch | None = None
        self._moved_at = 0.0

    async def upload(self, header: pb.Upload, data: memoryview, sent: Callable[[int], None]) -> pb.UploadReply:
        """Send one contribution. The syncer may answer before it has everything, if it does not want it."""
        key = (header.fragment, header.step)
        async with self._uploading:
            async with self._writing:
                call = await self._open()
            reply: asyncio.Future[pb.UploadReply] = asyncio.get_running_loop().create_future()
            self._moved()
            self._replies[key] = reply
            try:
                for number, chunk in enumerate(cut(data)):
                    if reply.done():
                        break
                    # A request to fetch something may go in between.
                    async with self._writing:
                        with wire_errors():
                            await call.write(pb.BulkToSyncer(upload=header if number == 0 else None, chunk=chunk))
                    self._moved()
                    sent(len(chunk))
            except BaseException:
                self._replies.pop(key, None)
                _forget(reply)
                raise
        return await reply

    async def fetch(
        self, wanted: pb.Fetch, check: Callable[[pb.Fetched], None], received: Callable[[int], None]
    ) -> tuple[pb.Fetched, memoryview]:
        """Fetch one version. `check` is called with what is declared, before memory is set aside for it."""
        fetch = _Fetch(wanted.fragment, wanted.version, check, received, asyncio.get_running_loop().create_future())
        async with self._writing:
            call = await self._open()
            self._moved()
            self._fetches.append(fetch)
            try:
                with wire_errors():
                    await call.write(pb.BulkToSyncer(fetch=wanted))
            except BaseException:
                _forget(fetch.done)
                raise
        data = await fetch.done
        assert fetch.header is not None
        return fetch.header, data

    async def fetch_state(self, part: int, limit_bytes: int, received: Callable[[int], None]) -> tuple[pb.State, memoryview]:
        """One part of a peer's optimizer state and what is said about it. One at a time."""
        assert self._state is None, "optimizer state is fetched one part after the other"
        done: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        fetch = self._state = _Fetch(part, 0, lambda header: None, received, done, limit_bytes=limit_bytes)
        try:
            async with self._writing:
                call = await self._open()
                with wire_errors():
                    await call.write(pb.BulkToSyncer(fetch_state=pb.FetchState(part=part)))
            data = await done
        finally:
            self._state = None
            _forget(done)
        assert fetch.state is not None
        return fetch.state, data

    async def send_state(self, header: pb.State, data: memoryview, sent: Callable[[int], None]) -> None:
        async with self._uploading:
            async with self._writing:
                call = await self._open()
            for number, chunk in enumerate(cut(data)):
                async with self._writing:
                    with wire_errors():
                        await call.write(pb.BulkToSyncer(state=header if number == 0 else None, chunk=chunk))
                sent(len(chunk))

    def drop_if_stuck(self, limit_s: float) -> None:
        """Something is under way and nothing has moved for so long: a stream can be dead without either end hearing of it."""
        waited_for = self._fetches or self._arriving or self._replies
        if self._call is not None and waited_for and asyncio.get_running_loop().time() - self._moved_at > limit_s:
            self._call.cancel()

    def _moved(self) -> None:
        self._moved_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _open(self) -> Any:
        if self._call is None:
            with wire_errors():
                call = self._call = self._stub.bulk()
                self._reader = asyncio.get_running_loop().create_task(self._read(call))
                await call.write(pb.BulkToSyncer(hello=self._hello))
        return self._call

    async def _read(self, call: Any) -> None:
        ended = WireError("the syncer ended the bulk stream")
        try:
            while (message := await read(call)) is not grpc.aio.EOF:
                self._received(message)
        except WireError as error:
            ended = error
        finally:
            call.cancel()
            self._call = None
            fetches = [*self._fetches, *([self._arriving] if self._arriving else [])]
            replies = list(self._replies.values())
            self._fetches.clear()
            self._replies.clear()
            self._arriving = None
            for fetch in [*fetches, *([self._state] if self._state else [])]:
                fetch.fail(ended)
            for reply in replies:
                if not reply.done():
                    reply.set_exception(ended)

    def _received(self, message: pb.BulkToLearner) -> None:
        self._moved()
        kind = message.WhichOneof("message")
        if kind == "reply":
            waiting = self._replies.pop((message.reply.fragment, message.reply.step), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.reply)
            return
        if kind == "fetched":
            self._begin_fetch(message.fetched)
        elif kind == "state":
            self._begin_state(message.state)
        fetch = self._arriving
        if fetch is None:
            return  # the rest of something that was found to be wrong
        assert fetch.assembly is not None
        fetch.received(len(message.chunk))
        try:
            fetch.assembly.add(message.chunk)
            if fetch.assembly.complete:
                self._arriving = None
                data = fetch.assembly.finish()
                if not fetch.done.done():
                    fetch.done.set_result(data)
        except WireError as error:
            self._arriving = None
            fetch.fail(error)

    def _begin_state(self, header: pb.State) -> None:
        self._cut_short()
        fetch = self._state
        if fetch is None or fetch.fragment != header.part:
            return  # the answer to a question that was given up
        if header.reason:
            fetch.fail(TryAgain(header.reason) if header.again else WireError(header.reason))
        elif header.size_bytes > fetch.limit_bytes:
            fetch.fail(WireError(f"a part of optimizer state has at most {fetch.limit_bytes} bytes"))
        else:
            fetch.state, fetch.assembly = header, Assembly(header.size_bytes, header.checksum)
            self._arriving = fetch

    def _cut_short(self) -> None:
        if self._arriving is not None:
            self._arriving.fail(WireError(f"fragment {self._arriving.fragment} was cut short by another"))
            self._arriving = None

    def _begin_fetch(self, header: pb.Fetched) -> None:
        self._cut_short()
        fetch = self._fetches.popleft() if self._fetches else None
        if fetch is None or (fetch.fragment, fetch.version) != (header.fragment, header.version):
            if fetch is not None:
                fetch.fail(WireError("another fragment was sent"))
            raise WireError(f"version {header.version} of fragment {header.fragment} was sent without being asked for")
        if header.reason:
            fetch.fail(WireError(header.reason))
            return
        try:
            fetch.check(header)
        except WireError as error:
            fetch.fail(error)
            return
        fetch.header, fetch.assembly = header, Assembly(header.size_bytes, header.checksum)
        self._arriving = fetch


class ControlStream:
    """A learner's control stream. Sending never blocks; of reports that cannot be sent yet only the newest is kept."""

    def __init__(self, stub: SyncerStub) -> None:
        self._call: Any = stub.control()
        self._outbox: deque[pb.ToSyncer] = deque()
        self._filled = asyncio.Event()
        self._heard_at = asyncio.get_running_loop().time()
        self._silent_s = 0.0
        self._writer = asyncio.get_running_loop().create_task(self._write())

    def send(self, message: pb.ToSyncer) -> None:
        if self._outbox and message.HasField("report") and self._outbox[-1].HasField("report"):
            self._outbox.pop()
        self._outbox.append(message)
        self._filled.set()

    async def _write(self) -> None:
        with contextlib.suppress(WireError):  # the reading side finds out why
            while True:
                await self._filled.wait()
                while self._outbox:
                    with wire_errors():
                        await self._call.write(self._outbox.popleft())
                self._filled.clear()

    async def messages(self) -> AsyncIterator[pb.ToLearner]:
        while True:
            try:
                message = await read(self._call)
            except WireError:
                if self._silent_s:
                    raise WireError(f"nothing was heard of the syncer for {self._silent_s:.0f} s") from None
                raise
            if message is grpc.aio.EOF:
                return
            self._heard_at = asyncio.get_running_loop().time()
            yield message

    def drop_if_silent(self, limit_s: float) -> None:
        """The syncer says something several times a second. A stream can be dead without either end hearing of it."""
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        if silent_s > limit_s:
            self._silent_s = silent_s
            self._call.cancel()

    async def close(self) -> None:
        self._writer.cancel()
        self._call.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
