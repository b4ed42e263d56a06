"""What a learner sends and fetches: snapshots are taken, encoded and given; versions are fetched, decoded and made ready."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from safetensors.torch import load
from torch import Tensor

from skerry.checksum import checksum
from skerry.core.exchange import Give, GiveNothing, Question, Version
from skerry.errors import WireError
from skerry.learner.replica import Prepared, Snapshot
from skerry.learner.transport.routes import Routes
from skerry.learner.transport.stream import Download, NotAsWanted
from skerry.tensors.codecs.codec import FP32, Codec, byte_tensor, raw_bytes
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.wire import skerry_pb2 as pb

if TYPE_CHECKING:
    from skerry.learner.link import Link

log = logging.getLogger("skerry.learner")

RETRY_TRANSFER_S = 0.5
ENCODED_AT_ONCE = 2
"""While one waits for the GPU, another may begin; each takes a few times its size there."""
WARN_S = 30.0
"""After this long without getting through to a shard that the syncer has named, it is said."""
QUIET_S = 120.0
"""After this long without trying, what fails is another trouble."""
OVERTAKEN = 5
MAX_DIFFERENCES = 64
"""More than any syncer keeps: a learner does not set memory aside for whatever is declared."""


@dataclass(frozen=True)
class Encoded:
    """An answer, ready to be sent."""

    give: Give
    data: memoryview
    checksum: int


class Answers(NamedTuple):
    """To the questions that can be answered at one moment."""

    again: list[Encoded]
    taken: list[tuple[Give, Snapshot]]
    nothings: list[Question]


@dataclass
class _Unreached:
    since: float
    last: float = 0.0
    said: bool = False


class Transfers:
    """On the event loop of the link, whose state it shares; the loop's threads copy, encode and decode."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._answering = False
        self._encoders = asyncio.Semaphore(ENCODED_AT_ONCE)
        self._encoding: set[int] = set()
        """Fragments whose last answer is not encoded yet: asked again after a new welcome, the same one is to be given."""
        self._encoded: dict[int, Encoded] = {}
        """By fragment: the last answer, until it is delivered."""
        self._sending: set[tuple[Routes, int, int]] = set()
        self._downloads: dict[int, Download] = {}
        """By fragment: what has come of a version stays when connections break."""
        self._overtaken: Counter[int] = Counter()
        """By fragment: versions that were replaced on their way here, since one came."""
        self._unreached: dict[str, _Unreached] = {}
        """By the address of a shard to which nothing has got through of late."""

    # ------------------------------------------------------------ contributions

    def answer(self) -> None:
        """Answer every question that can be answered, unless that is being done."""
        replica = self._link.replica
        assert replica is not None
        if self._answering:
            return
        if replica.quick and replica.gate.acquire(blocking=False):
            if replica.between_steps:
                self._give_all(self._take_snapshots())
                return
            replica.gate.release()
        self._answering = True
        self._link.spawn(self._answer_between_steps())

    async def _answer_between_steps(self) -> None:
        try:
            found = await self._link.off_loop(self._wait_for_snapshots)
        finally:
            self._answering = False
        self._give_all(found)
        if any(found):
            self._link.pump()  # what was asked meanwhile

    def _give_all(self, found: Answers) -> None:
        link = self._link
        assert link.replica is not None
        for question in found.nothings:
            link.send(pb.ToSyncer(nothing=pb.NothingToGive(fragment=question.fragment, step=question.step)))
        for encoded in found.again:
            link.spawn(self._upload(encoded))
        for give, snapshot in found.taken:
            link.spawn(self._upload(self._encode(give, snapshot)) if link.replica.quick else self._give(give, snapshot))

    def _wait_for_snapshots(self) -> Answers:
        link = self._link
        assert link.replica is not None
        if not link.replica.acquire_between_steps(lambda: link.closing):
            return Answers([], [], [])
        return self._take_snapshots()

    def _take_snapshots(self) -> Answers:
        """With the gate held, which is let go: copies of one moment between two optimizer steps, for every question that can
        be answered."""
        link, exchange, replica = self._link, self._link.exchange, self._link.replica
        assert exchange is not None and replica is not None
        found = Answers([], [], [])
        try:
            with link.changed:
                for answer in exchange.answers(self._encoding):
                    if isinstance(answer, GiveNothing):
                        found.nothings.append(answer.question)
                        continue
                    fragment = answer.question.fragment
                    if answer.again:
                        found.again.append(dataclasses.replace(self._encoded[fragment], give=answer))
                        continue
                    snapshot = link.staged.get(fragment) if answer.staged else None
                    found.taken.append((answer, snapshot or replica.snapshot(fragment, answer.at.steps)))
                    exchange.given(answer)
                    self._encoding.add(fragment)
        finally:
            replica.gate.release()
        return found

    async def _give(self, give: Give, snapshot: Snapshot) -> None:
        link = self._link
        assert link.replica is not None and link.exchange is not None
        async with self._encoders:
            encoded = await link.off_loop(self._encode, give, snapshot)
        del snapshot  # it holds a copy on the device and the version before, and to send what was made of it may take long
        if link.exchange.has_questions():
            link.pump()
        await self._upload(encoded)

    def _encode(self, give: Give, snapshot: Snapshot) -> Encoded:
        """On a GPU this waits until the step before the snapshot has been computed."""
        link, exchange, replica = self._link, self._link.exchange, self._link.replica
        assert exchange is not None and replica is not None
        data = raw_bytes(replica.encode(snapshot))
        encoded = Encoded(give, data, checksum(data))
        with link.changed:
            self._encoded[give.question.fragment] = encoded
            self._encoding.discard(give.question.fragment)
            exchange.encoded(give)
        return encoded

    async def _upload(self, encoded: Encoded) -> None:
        routes, question = self._link.routes, encoded.give.question
        assert routes is not None
        sending = (routes, question.fragment, question.step)
        if sending in self._sending:
            return  # the same question came again while this answer was being encoded
        self._sending.add(sending)
        try:
            await self._send(routes, encoded)
        finally:
            self._sending.discard(sending)

    async def _send(self, routes: Routes, encoded: Encoded) -> None:
        link, exchange = self._link, self._link.exchange
        assert exchange is not None
        give, data, question = encoded.give, encoded.data, encoded.give.question
        with link.changed:
            journal = link.journal.upto(give.at.steps)
        header = pb.Upload(
            fragment=question.fragment,
            step=question.step,
            base=give.base,
            steps=give.steps,
            tokens=give.tokens,
            codec=exchange.sync.send,
            size_bytes=len(data),
            checksum=encoded.checksum,
            upto=give.at.steps,
            samples_from=give.samples[0],
            samples_to=give.samples[1],
            upto_tokens=give.at.tokens,
            journal_json=journal,
        )
        resume = give.again
        while True:
            address = routes.address_of(question.fragment)  # before waiting: it may be another afterwards
            try:
                reply = await routes.upload(header, data, resume)
            except WireError as error:
                log.debug("%s: fragment %d was not sent: %s", link.name, question.fragment, error)
                self._failed(address, error)
            else:
                self._went_through(address)
                if not reply.accepted:
                    log.debug("%s: fragment %d was not taken: %s", link.name, question.fragment, reply.reason)
                if not reply.damaged:
                    self._delivered(encoded)
                    return
            resume = True
            await asyncio.sleep(RETRY_TRANSFER_S)
            if link.routes is not routes or link.closing:
                return  # after a new welcome it is asked for again, if it is still wanted
            with link.changed:
                wanted = exchange.still_wanted(question)
            if not wanted:
                self._delivered(encoded)
                return

    def _delivered(self, encoded: Encoded) -> None:
        fragment = encoded.give.question.fragment
        with self._link.changed:
            assert self._link.exchange is not None
            self._link.exchange.delivered(encoded.give.question)
            kept = self._encoded.get(fragment)
            if kept is not None and kept.data is encoded.data:
                del self._encoded[fragment]

    def _failed(self, address: str, error: WireError) -> None:
        """The syncer can be reached, else it would be said elsewhere; a shard perhaps not."""
        if not address or isinstance(error, NotAsWanted):
            return
        now = time.monotonic()
        trouble = self._unreached.get(address)
        if trouble is None or now - trouble.last > QUIET_S:
            trouble = self._unreached[address] = _Unreached(now)
        trouble.last = now
        if now - trouble.since >= WARN_S and not trouble.said:
            trouble.said = True
            log.warning("%s gets nothing through to the shard at %s: %s; training goes on", self._link.name, address, error)

    def _went_through(self, address: str) -> None:
        self._unreached.pop(address, None)

    def forget_all(self) -> None:
        self._encoded.clear()
        self._downloads.clear()

    # ------------------------------------------------------------ merged fragments

    async def fetch(self, version: Version) -> None:
        link, exchange, replica = self._link, self._link.exchange, self._link.replica
        fragment, routes = version.fragment, link.routes
        assert exchange is not None and replica is not None and routes is not None
        with link.changed:
            have, values_had = self._newest_here(fragment)
        wanted = pb.Fetch(fragment=fragment, version=version.version, have=have)
        download = self._downloads.get(fragment)
        if download is None or download.wanted != wanted:
            if download is not None:
                self._forget(download)
            check, room = (lambda header: self._check_size(wanted, header)), self._room(wanted)
            download = self._downloads[fragment] = Download(wanted, check, room)
        address = routes.address_of(fragment)
        try:
            await routes.fetch(download)
        except WireError as error:
            log.debug("%s: fragment %d was not fetched: %s", link.name, fragment, error)
            self._failed(address, error)
            if isinstance(error, NotAsWanted):
                self._forget(download)
                self._came_too_late(fragment)
            self._fetch_again(version, routes)
            return

        self._went_through(address)
        self._overtaken.pop(fragment, None)
        with link.changed:
            since_step = exchange.uncounted_since(version).steps

        def decode() -> Prepared:
            header, data = download.finish()
            codec, numel = self._codec(header)
            values = replica.decode(codec, byte_tensor(data), numel, values_had if header.HasField("since") else None)
            return replica.prepare(fragment, values, since_step, header.floor)

        self._forget(download)
        try:
            prepared = decode() if replica.quick else await link.off_loop(decode)
        except WireError as error:
            log.debug("%s: fragment %d did not arrive as it was sent: %s", link.name, fragment, error)
            self._fetch_again(version, routes)
            return
        with link.changed:
            if exchange.fetched(version):
                link.prepared[fragment] = prepared
            link.changed.notify_all()
        link.pump()

    def _came_too_late(self, fragment: int) -> None:
        """Another version took the place of the one that was on its way. Once is nothing; always, and this island never has
        anything to give."""
        self._overtaken[fragment] += 1
        if self._overtaken[fragment] == OVERTAKEN:
            what = f"versions of fragment {fragment} are replaced before they have come, {OVERTAKEN} times in a row"
            log.warning("%s: %s: a larger H or fewer bits would suit its link (skerry plan)", self._link.name, what)

    def _room(self, wanted: pb.Fetch) -> memoryview | None:
        """Memory that is shared with the process that carries bulk data. It carries differences; a whole version is rare."""
        ferry, replica = self._link.ferry, self._link.replica
        if ferry is None or not ferry.running or replica is None or not wanted.HasField("have"):
            return None
        room = replica.room(wanted.fragment)
        return room if room is not None and ferry.takes(room) else None

    def _forget(self, download: Download) -> None:
        fragment, ferry = download.wanted.fragment, self._link.ferry
        if self._downloads.get(fragment) is download:
            del self._downloads[fragment]
            if ferry is not None and download.room is not None and download.header is None:
                ferry.forget(download.room)

    def _fetch_again(self, version: Version, routes: Routes) -> None:
        link, exchange = self._link, self._link.exchange
        assert exchange is not None

        def again() -> None:
            if link.routes is routes:  # a new connection has begun to fetch by itself
                exchange.fetch_failed(version)

        link.again(RETRY_TRANSFER_S, again)

    async def fetch_fixed(self, part: int) -> None:
        """Tensors nobody trains."""
        link, replica, routes = self._link, self._link.replica, self._link.routes
        assert replica is not None and routes is not None
        try:
            wanted = pb.Fetch(fragment=part, version=0)
            download = Download(wanted, lambda header: self._check_size(wanted, header))
            await routes.main.fetch(download)
            _, data = download.finish()
        except WireError as error:
            log.debug("%s: the fixed part was not fetched: %s", link.name, error)
            # A new connection begins to fetch it by itself.
            link.again(RETRY_TRANSFER_S, lambda: link.spawn(self.fetch_fixed(part)) if link.routes is routes else None)
            return
        if link.fixed_loaded:
            return  # and training may have begun
        replica.load_fixed(load(bytes(data)))
        with link.changed:
            link.fixed_loaded = True
            link.changed.notify_all()
        link.pump()

    def _newest_here(self, fragment: int) -> tuple[int | None, Tensor | None]:
        """The newest version of a fragment that is whole here, waiting to be adopted or in the model."""
        link, exchange, replica = self._link, self._link.exchange, self._link.replica
        assert exchange is not None and replica is not None
        held = exchange.held[fragment]
        if held.fetched is not None and fragment in link.prepared:
            return held.fetched.version, link.prepared[fragment].values
        return (held.version, replica.held(fragment)) if held.version >= 0 else (None, None)

    def _codec(self, header: pb.Fetched) -> tuple[Codec, int]:
        """Of a fragment's version, and the number of its elements."""
        assert self._link.replica is not None and self._link.exchange is not None
        layout = self._link.replica.layout
        fragment = layout.fragments[header.fragment]
        name = self._link.exchange.sync.publish if header.HasField("since") else FP32.name
        if header.codec != name:
            raise WireError(f"fragment {header.fragment} should be in {name}, {header.codec!r} declared")
        return fragment_codec(name, layout, fragment), fragment.numel

    def _check_size(self, wanted: pb.Fetch, header: pb.Fetched) -> None:
        assert self._link.replica is not None
        layout = self._link.replica.layout
        if wanted.fragment == len(layout.fragments):
            limit = (1 << 20) + 9 * sum(spec.numel for spec in layout.tensors) + 1024 * len(layout.tensors)
            if header.codec != "safetensors" or header.size_bytes > limit:
                raise WireError(f"the fixed part is declared as {header.size_bytes} bytes of {header.codec!r}")
            return
        codec, numel = self._codec(header)
        differences = 1
        if header.HasField("since"):
            differences = wanted.version - header.since
            if not wanted.HasField("have") or header.since != wanted.have or differences > MAX_DIFFERENCES:
                raise WireError(f"fragment {wanted.fragment} was sent as differences to version {header.since}")
        expected = differences * codec.size_bytes(numel)
        if header.size_bytes != expected:
            what = f"fragment {wanted.fragment} should be {expected} bytes in {header.codec}"
            raise WireError(f"{what}, {header.size_bytes} declared")
