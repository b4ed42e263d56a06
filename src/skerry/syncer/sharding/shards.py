"""The syncer's side of its shards: which shard holds which fragments, and the orders they get.

A shard connects, is told the committed versions of its fragments, and then carries out orders. When its stream ends, the
contributions it had gathered are lost. Committed version files are in the run folder, which all processes share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from skerry.core import messages as m
from skerry.core import records
from skerry.errors import ConfigError, JoinRefused, SkerryError, StoreError, WireError
from skerry.syncer.decisions import Decisions
from skerry.syncer.rescue import Rescue
from skerry.syncer.rpc.admission import LocalAdmission, NotTaken
from skerry.syncer.rpc.limits import MAX_NAME, first_message
from skerry.syncer.rpc.outbox import Outbox
from skerry.syncer.rpc.roster import Roster
from skerry.syncer.storage.store import RunStore, Written
from skerry.syncer.storage.version_file import file_name
from skerry.tensors.fragments import Layout
from skerry.tensors.merge import FragmentState
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import PROTOCOL, require_tls_off_loopback, split_address

QUEUE = 65_536
"""Messages queued to or from one shard. Learners and fragments cannot cause more while the peer reads."""
STUCK = 20
"""A shard that has not carried out an order after this many times `silence_s` is disconnected: its disk or process may hang."""
LEAST_STUCK_S = 60.0
REMEMBERED = 100
"""Replaced processes remembered per shard."""


def spread(layout: Layout, shards: int) -> list[int]:
    """Assign a shard to each fragment, so that all shards hold about the same number of elements."""
    load = [0] * shards
    shard_of = [0] * len(layout.fragments)
    for fragment in sorted(layout.fragments, key=lambda fragment: (-fragment.numel, fragment.index)):
        shard_of[fragment.index] = min(range(shards), key=lambda shard: (load[shard], shard))
        load[shard_of[fragment.index]] += fragment.numel
    return shard_of


class ShardStream:
    """The stream of one shard process."""

    def __init__(self, number: int, address: str, process: str, stuck_s: float) -> None:
        self.number, self.address, self.process = number, address, process
        self._stuck_s = stuck_s
        self.welcomed = self.ready = False
        self.outbox: Outbox[pb.ToShard] = Outbox(QUEUE)
        self.waiting: dict[tuple[str, int, int], asyncio.Future[pb.Made | None]] = {}
        """Orders in flight, by expected answer, fragment and version."""

    def fail(self) -> None:
        for waiting in self.waiting.values():
            if not waiting.done():
                waiting.set_exception(StoreError(f"shard {self.number} is not connected"))
        self.waiting.clear()

    async def order(self, expected: str, fragment: int, version: int, message: pb.ToShard) -> pb.Made | None:
        """Send an order and wait for its answer. Raises StoreError."""
        key = (expected, fragment, version)
        answer: asyncio.Future[pb.Made | None] = asyncio.get_running_loop().create_future()
        self.waiting[key] = answer
        self.outbox.send(message)
        try:
            return await asyncio.wait_for(answer, self._stuck_s)
        except asyncio.TimeoutError:
            self.outbox.end()
            raise StoreError(f"shard {self.number} has not carried out an order for {self._stuck_s:.0f} s") from None
        finally:
            self.waiting.pop(key, None)

    def answered(self, kind: str, fragment: int, version: int, answer: pb.Made | StoreError | None) -> None:
        waiting = self.waiting.get((kind, fragment, version))
        if waiting is None or waiting.done():
            return
        if isinstance(answer, StoreError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)


class Shards:
    """The plane of a syncer whose fragments live in shards."""

    def __init__(
        self,
        count: int,
        store: RunStore,
        admission: LocalAdmission,
        decisions: Decisions,
        roster: Roster,
        rescue: Rescue,
    ) -> None:
        self.of_fragment = spread(store.identity.layout, count)
        self._count = count
        self._store = store
        self._admission, self._decisions = admission, decisions
        self._roster, self._rescue = roster, rescue
        self.secure = False
        """Whether learners connect with TLS."""
        self._connections: dict[int, ShardStream] = {}
        self._replaced: dict[int, deque[str]] = {number: deque(maxlen=REMEMBERED) for number in range(count)}
        """Processes that another one has replaced."""
        self._occupied = [asyncio.Lock() for _ in self.of_fragment]
        self._closed: pb.ShardGoodbye | None = None
        self._key = write_key(store.folder)

    @property
    def places(self) -> pb.Places:
        streams = [self._connections.get(number) for number in range(self._count)]
        addresses = [stream.address if stream is not None and stream.ready else "" for stream in streams]
        return pb.Places(addresses=addresses, of_fragment=self.of_fragment)

    def _fragments(self, number: int) -> tuple[int, ...]:
        return tuple(fragment for fragment, shard in enumerate(self.of_fragment) if shard == number)

    # ------------------------------------------------------------ as a Plane (merging.py)

    async def make(self, order: m.Merge) -> Written:
        connection = self._ready(order.fragment)
        if connection is None:
            raise StoreError(f"shard {self.of_fragment[order.fragment]} is not connected")
        shares = [
            pb.OrderedShare(name=s.learner, session=s.session, at_step=s.at_step, weight=s.weight, base=s.base)
            for s in order.shares
        ]
        message = pb.MergeOrder(
            fragment=order.fragment,
            version=order.version,
            round=order.round,
            shares=shares,
            outer_lr=order.outer_lr,
            outer_momentum=order.outer_momentum,
            presence=order.presence,
            tokens=order.tokens,
        )
        made = await connection.order("made", order.fragment, order.version, pb.ToShard(merge=message))
        assert made is not None
        loop = asyncio.get_running_loop()
        public = made.public_checksum if made.HasField("public_checksum") else None
        return await loop.run_in_executor(None, self._store.written_elsewhere, order, made.file, made.checksum, public)

    async def publish(self, written: Written) -> None:
        order = written.order
        connection = self._ready(order.fragment)
        if connection is None:
            return  # it will load the committed version when it connects
        published = pb.Published(fragment=order.fragment, version=order.version)
        try:
            # Wait, because learners may fetch the version as soon as it is announced.
            await connection.order("published", order.fragment, order.version, pb.ToShard(publish=published))
        except StoreError:
            return

    async def put_back(self, written: Written, state: FragmentState) -> None:
        order = written.order
        connection = self._connections.get(self.of_fragment[order.fragment])
        if connection is None or not connection.welcomed:
            return  # it will load the committed version when it connects
        version = pb.StoredVersion(
            fragment=order.fragment,
            version=order.version,
            file=written.file,
            checksum=written.checksum,
            floor=order.version,
        )
        try:
            await connection.order("published", order.fragment, order.version, pb.ToShard(put_back=version))
        except StoreError:
            return

    def occupied(self, fragment: int) -> asyncio.Lock:
        """Lock held while a version of the fragment is made. A shard that connects meanwhile waits for it."""
        return self._occupied[fragment]

    def _ready(self, fragment: int) -> ShardStream | None:
        connection = self._connections.get(self.of_fragment[fragment])
        return connection if connection is not None and connection.ready else None

    # ------------------------------------------------------------ streams from shards

    async def serve(self, messages: AsyncIterator[pb.FromShard | None]) -> AsyncIterator[pb.ToShard]:
        first = await first_message(messages)
        if self._closed is not None:
            yield pb.ToShard(goodbye=self._closed)
            return
        if first is None:
            self._decisions.record(records.Refused("a shard's stream without a hello"))
            return  # without a goodbye, so that the shard retries: the hello may have been damaged in transit
        try:
            connection = self._admit(first)
        except JoinRefused as refusal:
            self._decisions.record(records.Refused(str(refusal)))
            yield pb.ToShard(goodbye=pb.ShardGoodbye(reason=str(refusal)))
            return
        if connection is None:
            self._decisions.record(records.Refused("a shard does not see the run folder of this syncer"))
            return  # without a goodbye, so that the shard retries: it may have read the previous syncer's key
        reader = asyncio.get_running_loop().create_task(self._read(connection, messages))
        try:
            while (message := await connection.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._lost(connection)

    def _admit(self, first: pb.FromShard) -> ShardStream | None:
        if first.WhichOneof("message") != "hello":
            raise JoinRefused("the first message of a shard must be a hello")
        hello = first.hello
        if hello.protocol != PROTOCOL:
            raise JoinRefused(f"protocol mismatch: the syncer speaks version {PROTOCOL}, this shard {hello.protocol}")
        if hello.run_id != self._store.identity.run_id:
            raise JoinRefused(f"this syncer serves run {self._store.identity.run_id}, the shard has {hello.run_id}")
        if hello.number >= self._count:
            raise JoinRefused(f"this syncer has shards 0 to {self._count - 1}, there is no shard {hello.number}")
        if max(len(hello.address), len(hello.process)) > MAX_NAME:
            raise JoinRefused(f"a shard's address and process id must have at most {MAX_NAME} characters")
        try:
            host, _ = split_address(hello.address)
            if not self.secure:
                require_tls_off_loopback(host, None)
        except ConfigError as error:
            raise JoinRefused(f"learners cannot reach shard {hello.number} at {hello.address!r}: {error}") from None
        if not secrets.compare_digest(hello.key.encode(), self._key.encode()):
            return None
        reason = f"another process has replaced shard {hello.number}"
        if hello.process in self._replaced[hello.number]:
            raise JoinRefused(reason)
        old = self._connections.pop(hello.number, None)
        if old is not None:
            if old.process != hello.process:
                self._replaced[hello.number].append(old.process)
                old.outbox.send(pb.ToShard(goodbye=pb.ShardGoodbye(reason=reason)))
            old.outbox.end()
            self._away(old)
        stuck_s = max(STUCK * self._store.identity.sync.silence_s, LEAST_STUCK_S)
        connection = self._connections[hello.number] = ShardStream(hello.number, hello.address, hello.process, stuck_s)
        return connection

    async def _read(self, connection: ShardStream, messages: AsyncIterator[pb.FromShard | None]) -> None:
        try:
            await self._welcome(connection)
            async for message in messages:
                if self._connections.get(connection.number) is not connection:
                    return
                if message is None:
                    raise WireError("a damaged message")
                await self._received(connection, message)
        except SkerryError as error:
            self._decisions.record(records.Refused(str(error), shard=connection.number))
        except Exception as error:
            self._decisions.defect(error)
            raise
        finally:
            connection.outbox.end()

    async def _welcome(self, connection: ShardStream) -> None:
        """Tell a shard the committed versions, after any merge in flight for its predecessor."""
        fragments = self._fragments(connection.number)
        await self._rescue.over.wait()
        async with contextlib.AsyncExitStack() as locks:
            for fragment in fragments:
                await locks.enter_async_context(self.occupied(fragment))
            newest = await self._decisions.tape.between_commits(self._store.newest, fragments)
            versions = [
                pb.StoredVersion(
                    fragment=fragment, version=version, file=file, checksum=checksum, floor=self._admission.floor(fragment)
                )
                for fragment, version, file, checksum in newest
            ]
            connection.welcomed = True
            connection.outbox.send(pb.ToShard(welcome=pb.ShardWelcome(versions=versions)))

    async def _received(self, connection: ShardStream, message: pb.FromShard) -> None:
        kind = message.WhichOneof("message")
        if kind == "ready":
            connection.ready = True
            fragments = self._fragments(connection.number)
            self._decisions.record(records.ShardJoined(connection.number, connection.address))
            self._roster.send_to_all(pb.ToLearner(places=self.places))
            self._decisions.dispatch(m.FragmentsBack(fragments))
        elif kind == "moved":
            for name in message.moved.names:
                self._decisions.bytes_moved(name)
        elif not connection.ready:
            raise WireError(f"shard {connection.number} sent {kind or 'an empty message'} before it was ready")
        elif kind == "offered":
            connection.outbox.send(await self._verdict(connection, message.offered, complete=False))
        elif kind == "arrived":
            connection.outbox.send(await self._verdict(connection, message.arrived, complete=True))
        elif kind == "made":
            made = message.made
            if not _is_valid_name(made):
                raise WireError(f"shard {connection.number} sent the invalid file name {made.file[:MAX_NAME]!r}")
            connection.answered("made", made.fragment, made.version, made)
        elif kind == "not_made":
            failed = message.not_made
            connection.answered("made", failed.fragment, failed.version, StoreError(failed.reason))
        elif kind == "published":
            connection.answered("published", message.published.fragment, message.published.version, None)
        elif kind == "refused":
            refused = message.refused
            self._admission.refused(refused.name, refused.header if refused.HasField("header") else None, refused.reason)

    async def _verdict(self, connection: ShardStream, offered: pb.Offered, complete: bool) -> pb.ToShard:
        """The verdict on a contribution: on its header alone, or on a `complete` one."""
        answer = pb.Verdict(question=offered.question)
        fragment, contribution = offered.header.fragment, (offered.name, offered.session, offered.header)
        try:
            if fragment >= len(self.of_fragment) or self.of_fragment[fragment] != connection.number:
                raise NotTaken(f"shard {connection.number} does not hold fragment {fragment}", retry=True)
            if complete:
                verdict = await self._admission.judge(*contribution, offered.norm, offered.repeated)
                answer.reason, answer.unhealthy, answer.unmerged = verdict.reason, verdict.unhealthy, not verdict.merged
            else:
                await self._admission.check(*contribution)
        except NotTaken as error:
            answer.reason, answer.damaged = str(error) or "not wanted", error.retry
        return pb.ToShard(verdict=answer)

    def _lost(self, connection: ShardStream) -> None:
        if self._connections.get(connection.number) is connection:
            del self._connections[connection.number]
            self._away(connection)

    def _away(self, connection: ShardStream) -> None:
        was_ready, connection.ready = connection.ready, False
        connection.fail()
        if was_ready and self._closed is None:
            self._decisions.record(records.ShardLost(connection.number))
            self._roster.send_to_all(pb.ToLearner(places=self.places))
            self._decisions.dispatch(m.FragmentsAway(self._fragments(connection.number)))

    def dismiss(self, reason: str, over: bool) -> None:
        """End all streams. If the run is `over`, shards exit; otherwise they wait for the syncer to return."""
        if over:
            self._closed = pb.ShardGoodbye(reason=reason, over=True)
        for connection in self._connections.values():
            if over:
                connection.outbox.send(pb.ToShard(goodbye=self._closed))
            connection.outbox.end()


def _is_valid_name(made: pb.Made) -> bool:
    """Whether the file is named as `Shard._write` names a file of this version."""
    prefix = re.escape(file_name(made.fragment, made.version).removesuffix(".safetensors"))
    return re.fullmatch(rf"{prefix}-[0-9a-f]{{8}}-[0-9]+\.safetensors", made.file) is not None


def write_key(folder: Path) -> str:
    """Write a new key to the run folder. A process that can read it sees the same folder, and may be a shard."""
    key = secrets.token_hex(16)
    path = folder / "shard-key"
    try:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from None
    return key


def read_key(folder: Path) -> str:
    try:
        return (folder / "shard-key").read_text()
    except OSError:
        return ""  # the syncer has not started yet
