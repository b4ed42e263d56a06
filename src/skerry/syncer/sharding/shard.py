"""A shard: a process that holds the tensors of some fragments and takes orders from the syncer.

Learners send contributions to the shard and fetch versions from it. The shard computes merges and writes version files to the
run folder. The syncer decides which contributions are accepted, when to merge, and which versions are committed. Without a
syncer the shard still serves published versions, but drops gathered contributions; learners are asked for them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc

from skerry.core import messages as m
from skerry.core.share import Share
from skerry.errors import RunFailed, SkerryError, StoreError, WireError
from skerry.syncer.extensions import check_extensions
from skerry.syncer.merging import LocalPlane, in_pool
from skerry.syncer.rpc.admission import NotTaken
from skerry.syncer.rpc.bulk import BulkService
from skerry.syncer.rpc.fragments import ServedFragments
from skerry.syncer.rpc.outbox import Outbox
from skerry.syncer.rpc.uploads import Contributions, MissingContribution
from skerry.syncer.sharding.shards import QUEUE, read_key
from skerry.syncer.storage.run_folder import RunIdentity, read_identity
from skerry.syncer.storage.store import Written
from skerry.syncer.storage.version_file import Label, checksums_of, file_name, read_version, write_version
from skerry.tensors.merge import FragmentState
from skerry.wire import skerry_pb2 as pb
from skerry.wire.calls import describe, read, wire_errors
from skerry.wire.channel import PROTOCOL, SERVER_OPTIONS, TLS, bind, open_channel, with_port
from skerry.wire.framing import Parcel
from skerry.wire.service import SyncerStub, add_bulk_to_server

log = logging.getLogger("skerry.shard")

MOVED_EVERY_S = 0.25
"""How often the syncer is told which learners moved bytes."""
BACK_OFF_S = (0.2, 5.0)
"""Shortest and longest pause between connection attempts."""


class RemoteAdmission:
    """Asks the syncer for verdicts over the shard's stream."""

    def __init__(self) -> None:
        self.floors: dict[int, int] = {}
        self.moved: set[str] = set()
        self._questions = itertools.count(1)
        self._asked: dict[int, asyncio.Future[pb.Verdict]] = {}
        self._send: Callable[[pb.FromShard], None] | None = None

    def connected(self, send: Callable[[pb.FromShard], None]) -> None:
        self._send = send

    def disconnected(self) -> None:
        self._send = None
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(NotTaken("the shard has lost the syncer", retry=True))
        self._asked.clear()
        self.moved.clear()

    def answered(self, verdict: pb.Verdict) -> None:
        asked = self._asked.pop(verdict.question, None)
        if asked is not None and not asked.done():
            asked.set_result(verdict)

    def may_fetch(self, learner: str, session: str) -> bool:
        return True  # anyone who can connect may read the model

    def floor(self, fragment: int) -> int:
        return self.floors.get(fragment, 0)

    async def check(self, learner: str, session: str, header: pb.Upload) -> None:
        offer = pb.Offered(name=learner, session=session, header=header)
        verdict = await self._ask(offer, lambda offered: pb.FromShard(offered=offered))
        if verdict.reason:
            raise NotTaken(verdict.reason, retry=verdict.damaged)

    async def judge(self, learner: str, session: str, header: pb.Upload, norm: float, repeated: bool) -> m.Verdict:
        offer = pb.Offered(name=learner, session=session, header=header, norm=norm, repeated=repeated)
        verdict = await self._ask(offer, lambda arrived: pb.FromShard(arrived=arrived))
        if verdict.damaged:
            raise NotTaken(verdict.reason, retry=True)
        return m.Verdict(verdict.reason, verdict.unhealthy, not verdict.unmerged)

    def bytes_moved(self, learner: str) -> None:
        self.moved.add(learner)

    def refused(self, learner: str, header: pb.Upload | None, reason: str) -> None:
        if self._send is not None:
            self._send(pb.FromShard(refused=pb.ShardRefused(name=learner, header=header, reason=reason)))

    async def _ask(self, offer: pb.Offered, message: Callable[[pb.Offered], pb.FromShard]) -> pb.Verdict:
        if self._send is None:
            raise NotTaken("the shard has lost the syncer", retry=True)
        offer.question = next(self._questions)
        asked: asyncio.Future[pb.Verdict] = asyncio.get_running_loop().create_future()
        self._asked[offer.question] = asked
        self._send(message(offer))
        try:
            return await asked
        finally:
            self._asked.pop(offer.question, None)


class Shard:
    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._number = number
        self._identity: RunIdentity = read_identity(folder)
        self._process = uuid.uuid4().hex[:8]
        self._attempts = itertools.count(1)
        self._admission = RemoteAdmission()
        layout, sync = self._identity.layout, self._identity.sync
        check_extensions(sync, str(folder))
        served = ServedFragments(layout, sync)
        self._contributions = Contributions(layout, sync, served, self._admission)
        self._bulk = BulkService(served, self._contributions, self._admission)
        self._plane = LocalPlane(layout, sync, served, self._contributions, self._write)
        self._serving: dict[int, tuple[int, int]] = {}
        """Fragment → version and checksum of what is served."""
        self._written: dict[int, Written] = {}
        """Fragment → the version written last, not published yet."""
        self._working: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set to an exception on a bug in Skerry; the process must then stop."""
        self._closing = False
        self._break: Callable[[], object] = lambda: None
        """Ends the stream to the syncer."""

    # ------------------------------------------------------------ for learners

    async def bulk(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None], context: Any) -> None:
        await self._bulk.serve(messages, context)

    # ------------------------------------------------------------ orders from the syncer

    async def follow(self, syncer: str, address: str, tls: TLS | None) -> None:
        """Carry out the syncer's orders until the run is over. Reconnects as needed. Raises RunFailed if dismissed."""
        pause = BACK_OFF_S[0]
        while not self._closing:
            why = "the syncer ended the stream"
            goodbye, welcomed = None, False
            try:
                async with open_channel(syncer, tls) as channel:
                    goodbye, welcomed = await self._one_connection(SyncerStub(channel), address)
            except WireError as error:
                why = str(error)
            if goodbye is not None:
                if goodbye.over:
                    return
                raise RunFailed(f"the syncer dismissed shard {self._number}: {goodbye.reason}")
            log.warning("shard %d is not connected to the syncer: %s; retrying", self._number, why)
            pause = BACK_OFF_S[0] if welcomed else min(pause * 1.6, BACK_OFF_S[1])
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))

    async def _one_connection(self, stub: SyncerStub, address: str) -> tuple[pb.ShardGoodbye | None, bool]:
        await describe(stub)
        call = stub.shard()
        outbox: Outbox[pb.FromShard] = Outbox(QUEUE)
        hello = pb.ShardHello(
            protocol=PROTOCOL,
            run_id=self._identity.run_id,
            number=self._number,
            address=address,
            key=read_key(self._folder),
            process=self._process,
        )
        outbox.send(pb.FromShard(hello=hello))
        loop = asyncio.get_running_loop()
        sending = [loop.create_task(self._send(call, outbox)), loop.create_task(self._tell_moved(outbox))]
        self._break = call.cancel
        welcomed = False
        try:
            while (message := await read(call)) is not grpc.aio.EOF:
                kind = message.WhichOneof("message")
                if kind == "goodbye":
                    return message.goodbye, welcomed
                if kind == "welcome":
                    await self._welcomed(message.welcome)
                    self._admission.connected(outbox.send)
                    outbox.send(pb.FromShard(ready=pb.ShardReady()))
                    welcomed = True
                else:
                    self._received(message, outbox.send)
            return None, welcomed
        finally:
            call.cancel()
            self._admission.disconnected()
            for task in sending:
                task.cancel()
            # Orders of this stream are void: another process may be ordered to make the same version.
            await asyncio.gather(*sending, *self._working, return_exceptions=True)
            for fragment in self._serving:
                self._contributions.forget(fragment)
            self._written.clear()

    async def _send(self, call: Any, outbox: Outbox[pb.FromShard]) -> None:
        with contextlib.suppress(WireError):  # the reader sees the broken stream as well
            while (message := await outbox.get()) is not None:
                with wire_errors():
                    await call.write(message)
            call.cancel()

    async def _tell_moved(self, outbox: Outbox[pb.FromShard]) -> None:
        while True:
            await asyncio.sleep(MOVED_EVERY_S)
            if self._admission.moved:
                names, self._admission.moved = sorted(self._admission.moved), set()
                outbox.send(pb.FromShard(moved=pb.Moved(names=names)))

    async def _welcomed(self, welcome: pb.ShardWelcome) -> None:
        """Serve the committed versions. Those already loaded before the stream broke are not read again."""
        for fragment in set(self._serving) - {stored.fragment for stored in welcome.versions}:
            del self._serving[fragment]
            self._plane.withdraw(fragment)
        for stored in welcome.versions:
            if self._serving.get(stored.fragment) != (stored.version, stored.checksum):
                await self._serve(stored)

    async def _serve(self, stored: pb.StoredVersion) -> None:
        fragment = self._identity.layout.fragments[stored.fragment]
        row = {"file": stored.file, "checksum": stored.checksum}
        state = await in_pool(self._plane.pool, read_version, self._folder, fragment, row)
        self._plane.serve(stored.fragment, stored.version, state)
        self._admission.floors[stored.fragment] = stored.floor
        self._serving[stored.fragment] = stored.version, stored.checksum

    def _received(self, message: pb.ToShard, send: Callable[[pb.FromShard], None]) -> None:
        kind = message.WhichOneof("message")
        if kind == "verdict":
            self._admission.answered(message.verdict)
        elif kind == "merge":
            self._begin(self._make(message.merge, send))
        elif kind == "publish":
            self._begin(self._publish(message.publish, send))
        elif kind == "put_back":
            self._begin(self._put_back(message.put_back, send))

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.failed.done():
            self.failed.set_exception(task.exception())  # type: ignore[arg-type]

    async def _make(self, message: pb.MergeOrder, send: Callable[[pb.FromShard], None]) -> None:
        shares = tuple(Share(s.name, s.session, s.base, 0, 0, s.weight, s.at_step) for s in message.shares)
        outer = (message.outer_lr, message.outer_momentum, message.presence)
        order = m.Merge(message.fragment, message.version, message.round, shares, *outer, tokens=message.tokens)
        try:
            written = self._written[order.fragment] = await self._plane.make(order)
        except SkerryError as error:
            failed = pb.NotMade(fragment=order.fragment, version=order.version, reason=str(error))
            send(pb.FromShard(not_made=failed))
            return
        except MissingContribution as error:
            log.error("shard %d is out of step with the syncer and reconnects: %s", self._number, error)
            self._break()
            return
        made = pb.Made(
            fragment=order.fragment,
            version=order.version,
            file=written.file,
            checksum=written.checksum,
            public_checksum=written.public,
        )
        send(pb.FromShard(made=made))

    async def _publish(self, message: pb.Published, send: Callable[[pb.FromShard], None]) -> None:
        written = self._written.pop(message.fragment)
        assert written.order.version == message.version, "only the version written last can be published"
        await self._plane.publish(written)
        self._serving[message.fragment] = message.version, written.checksum
        send(pb.FromShard(published=message))

    async def _put_back(self, stored: pb.StoredVersion, send: Callable[[pb.FromShard], None]) -> None:
        self._contributions.forget(stored.fragment)
        await self._serve(stored)
        send(pb.FromShard(published=pb.Published(fragment=stored.fragment, version=stored.version)))

    def _write(self, order: m.Merge, state: FragmentState) -> Written:
        """Write a version's file. Raises StoreError."""
        sums, last = checksums_of(state), self._written.get(order.fragment)
        same = last is not None and (last.order.version, last.checksum) == (order.version, sums.state)
        if last is not None and same and (self._folder / "fragments" / last.file).exists():
            return last  # a retry after a failed commit: a full disk has no room for a copy
        # The name must be unique: a restarted syncer may order the same version from another process.
        file = file_name(order.fragment, order.version, f"{self._process}-{next(self._attempts)}")
        label = Label(self._identity.run_id, order.fragment, order.version, order.round, order.tokens)
        try:
            write_version(self._folder, file, state, label, sums.state)
        except OSError as error:
            raise StoreError(f"version {order.version} of fragment {order.fragment} cannot be written: {error}") from error
        return Written(order, file, sums.state, sums.public)

    def stop(self) -> None:
        """End the loop of `follow`. Call before cancelling it: before Python 3.11 a task cannot tell its own cancellation
        from a closed channel."""
        self._closing = True

    def close(self) -> None:
        self._plane.close()


async def run_shard(
    folder: Path,
    number: int,
    syncer: str,
    address: str,
    advertised: str,
    tls: TLS | None,
    *,
    listening_tls: TLS | None = None,
    on_listening: Callable[[int], None],
    stop: asyncio.Event,
) -> bool:
    """Serve until the run has ended (returns True) or `stop` is set (returns False). Learners connect to `advertised`, with
    `listening_tls` if it differs from `tls`."""
    shard = Shard(folder, number)
    server = grpc.aio.server(options=SERVER_OPTIONS, compression=grpc.Compression.NoCompression)
    add_bulk_to_server(shard, server)
    try:
        port = bind(server, address, listening_tls or tls)
        await server.start()
        on_listening(port)
        public_address = advertised or with_port(address, port)
        loop = asyncio.get_running_loop()
        follow, stopped = loop.create_task(shard.follow(syncer, public_address, tls)), loop.create_task(stop.wait())
        waits: set[asyncio.Future[Any]] = {follow, stopped, shard.failed}
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        shard.stop()
        for task in (follow, stopped):
            task.cancel()
        await asyncio.gather(follow, stopped, return_exceptions=True)
        for finished in done - {stopped}:
            finished.result()
        return follow in done
    finally:
        await server.stop(grace=0.5)
        shard.close()
