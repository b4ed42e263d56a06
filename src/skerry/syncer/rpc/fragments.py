"""Bulk data of the fragments that a process serves: contributions are received, checked and decoded; published versions are
handed out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc
import torch
from torch import Tensor

from skerry.config import SyncConfig
from skerry.core import messages as m
from skerry.cores import cores
from skerry.errors import WireError
from skerry.syncer.published import Published
from skerry.syncer.rpc.admission import Desk
from skerry.syncer.rpc.state_relay import Relay
from skerry.syncer.rpc.uploads import MAX_NAME, Busy, Damaged, Lane, Receiving, first_message
from skerry.tensors.codecs.codec import FP32, byte_tensor, is_quick, raw_bytes
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.tensors.fragments import Layout
from skerry.tensors.merge import FragmentState, norms_of, publish
from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import Assembly, Parcel, chunk, count_chunks

MAX_PROGRESS = 1e12
"""No element of a sane contribution is larger; sums and outer steps of such values stay finite in fp32."""
MAX_REMEMBERED = 100_000
REPEAT_NUMEL = 100
"""Progress of fewer numbers than this may well be the same twice."""
FEW_PIECES = 64
"""The norms of more tensors than these are not worked out on the event loop: each is a few calls of torch."""

Write = Callable[[Parcel[pb.BulkToLearner]], Awaitable[None]]
Key = tuple[int, str, str, int]
"""Of a contribution: fragment, learner, its process, and how many of its steps it covers."""


class MissingContribution(Exception):
    """Whoever ordered the merge takes something for gathered that is not."""


class Gathered(NamedTuple):
    """A contribution that waits to be merged."""

    delta: Tensor
    norms: list[float]
    """Of each of its tensors."""


class Bulk:
    def __init__(self, layout: Layout, sync: SyncConfig, desk: Desk, relay: Relay | None = None) -> None:
        self._layout = layout
        self._sync = sync
        self.desk = desk
        self.relay = relay
        """Where optimizer state goes through, if it does here."""
        self._received = [fragment_codec(sync.send, layout, fragment) for fragment in layout.fragments]
        self._shown = [fragment_codec(sync.publish, layout, fragment) for fragment in layout.fragments]
        self._published: dict[int, Published] = {}
        """Of the fragments that are served here. The fixed part of the model counts as one more."""
        self._gathered: dict[Key, Gathered] = {}
        self._receiving: dict[tuple[str, int], Receiving] = {}
        """By learner and fragment."""
        self._last_sent: dict[tuple[str, int], tuple[int, int]] = {}
        """Checksum and steps of each learner's last contribution to each fragment."""
        self._decoding = asyncio.Semaphore(cores())
        """More at a time would only get in each other's way."""
        self.taking: set[asyncio.Task[None]] = set()
        """Contributions that are whole and being looked at, also if the lane they came on is gone."""

    # ------------------------------------------------------------ what merging needs

    def publish_whole(self, fragment: int, version: int, state: FragmentState) -> None:
        self._published[fragment] = Published(version, FP32.name, raw_bytes(state.public))

    def publish_fixed(self, data: bytes) -> None:
        self._published[len(self._layout.fragments)] = Published(0, "safetensors", memoryview(data))

    def withdraw(self, fragment: int) -> None:
        self._published.pop(fragment, None)
        self.forget(fragment)

    def encode(
        self, fragment: int, version: int, before: FragmentState, after: FragmentState
    ) -> tuple[FragmentState, Published]:
        """The next version as learners will see it. In any thread; a fragment has one merge at a time."""
        codec, published = self._shown[fragment], self._published[fragment]
        state, data = publish(before, after, codec)
        if codec.exact:
            published = Published(version, FP32.name, raw_bytes(data))
        else:
            published = published.followed_by(version, raw_bytes(state.public), raw_bytes(data), codec.name)
        published.find(version - 1)  # what nearly all will ask for: its checksum is worked out here, not on the event loop
        return state, published

    def publish(self, fragment: int, published: Published) -> None:
        self._published[fragment] = published

    def gathered(self, order: m.Merge) -> list[Gathered]:
        """What is to be merged. More does not come in time, so what is half here is let go."""
        for (name, fragment), receiving in list(self._receiving.items()):
            if fragment == order.fragment and receiving.header.step <= order.step and not receiving.complete:
                receiving.give_up(f"round {receiving.header.step} of fragment {fragment} is over")
                self.received(name, receiving)
        try:
            return [self._gathered[key] for key in _keys(order)]
        except KeyError as error:
            raise MissingContribution(f"a merge was ordered of a contribution that is not here: {error}") from None

    def merged(self, order: m.Merge) -> None:
        for key in _keys(order):
            self._gathered.pop(key, None)

    def forget(self, fragment: int) -> None:
        """What was gathered for this fragment is not wanted any more."""
        for key in [key for key in self._gathered if key[0] == fragment]:
            del self._gathered[key]

    # ------------------------------------------------------------ a learner's stream

    async def serve(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None], context: Any) -> None:
        """A call of gRPC, from its first message to its last."""

        async def write(message: Parcel[pb.BulkToLearner]) -> None:
            try:
                await context.write(message)
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None  # the learner has gone, and reading ends as well

        try:
            await self._serve(messages, write)
        except WireError as error:
            self.desk.refused("", None, str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _serve(self, messages: AsyncIterator[Parcel[pb.BulkToSyncer] | None], write: Write) -> None:
        first = await first_message(messages)
        if first is None or first.message.WhichOneof("message") != "hello":
            raise WireError("the first message of a bulk stream must say who speaks")
        lane = Lane(self, first.message.hello.name, first.message.hello.session)
        sender = asyncio.get_running_loop().create_task(self._send(lane, write))
        try:
            await lane.read(messages)
            await sender
        finally:
            sender.cancel()

    async def _send(self, lane: Lane, write: Write) -> None:
        async def say_replies() -> None:
            while not lane.replies.empty():
                await write(Parcel(pb.BulkToLearner(reply=lane.replies.get_nowait())))

        while (item := await lane.outbox.get()) is not None:
            await say_replies()
            if item == "reply":
                continue
            if isinstance(item, pb.Fetch):
                header, data = self._find(lane.name, lane.session, item)
                first = pb.BulkToLearner(fetched=header)
            else:
                first, data = pb.BulkToLearner(state=item[0]), item[1]
            start, stop = 0, count_chunks(len(data))
            if isinstance(item, pb.Fetch) and not first.fetched.reason:
                start = item.first_chunk
                stop = min(stop, start + item.chunks) if item.chunks else stop
            message = first
            for number in range(start, max(stop, start + 1)):
                await write(Parcel(message, chunk(data, number)))
                self.desk.bytes_moved(lane.name)
                message = pb.BulkToLearner()
                await say_replies()
        await say_replies()

    def _find(self, name: str, session: str, wanted: pb.Fetch) -> tuple[pb.Fetched, memoryview]:
        header = pb.Fetched(fragment=wanted.fragment, version=wanted.version, first_chunk=wanted.first_chunk)
        nothing = memoryview(b"")
        if not self.desk.may_fetch(name, session):
            header.reason = f"{name[:MAX_NAME]!r} is not connected with this session"
            return header, nothing
        published = self._published.get(wanted.fragment)
        if published is None:
            header.reason = f"there is no fragment {wanted.fragment}"
            return header, nothing
        if published.version != wanted.version:
            header.reason = f"fragment {wanted.fragment} is at version {published.version}, not {wanted.version}"
            return header, nothing
        found = published.find(wanted.have if wanted.HasField("have") else None)
        header.codec, header.size_bytes, header.checksum = found.codec, len(found.data), found.checksum
        if found.since is not None:
            header.since = found.since
        if wanted.fragment < len(self._layout.fragments):
            header.floor = self.desk.floor(wanted.fragment)
        return header, found.data

    # ------------------------------------------------------------ contributions

    async def check(self, name: str, session: str, header: pb.Upload) -> None:
        begun = self._receiving.get((name, header.fragment))
        another_part = begun is not None and begun.is_of(session, header) and begun.given_up is None and not header.resume
        if another_part and not header.journal_json:
            return  # of what was found to be wanted; it is asked again when all of it is here
        await self.desk.check(name, session, header)
        if header.fragment not in self._published:
            raise Busy(f"fragment {header.fragment} is not served here")
        if header.codec != self._sync.send:
            raise WireError(f"this run's contributions are {self._sync.send}, got {header.codec!r}")
        size = self._received[header.fragment].size_bytes(self._layout.fragments[header.fragment].numel)
        if header.size_bytes != size:
            raise WireError(f"fragment {header.fragment} is {size} bytes in {self._sync.send}, {header.size_bytes} declared")

    def receiving(self, name: str, session: str, header: pb.Upload) -> Receiving:
        """What has come of this contribution so far, on whichever lane. A newer one takes the place of one that was not
        finished."""
        found = self._receiving.get((name, header.fragment))
        if found is None or not found.is_of(session, header):
            if found is not None and found.complete:
                raise Busy(f"another upload of fragment {header.fragment} is under way; try again later")
            if found is not None and found.session == session and found.header.upto > header.upto:
                raise WireError(f"a newer answer of fragment {header.fragment} has come")
            if found is not None:
                found.give_up("")
            found = self._receiving[name, header.fragment] = Receiving(session, header)
        return found

    def received(self, name: str, receiving: Receiving) -> None:
        """Nothing more is done with it."""
        if self._receiving.get((name, receiving.header.fragment)) is receiving:
            del self._receiving[name, receiving.header.fragment]

    async def take(self, name: str, session: str, header: pb.Upload, assembly: Assembly) -> None:
        """A whole contribution has arrived: decode it and hand it to the state machine."""
        fragment = self._layout.fragments[header.fragment]
        if is_quick(self._sync.send, fragment.numel) and len(fragment.pieces) <= FEW_PIECES:
            gathered, length = self._decode(header.fragment, assembly)
        else:
            async with self._decoding:
                loop = asyncio.get_running_loop()
                gathered, length = await loop.run_in_executor(None, self._decode, header.fragment, assembly)
        # Much may have happened meanwhile.
        if len(self._last_sent) > MAX_REMEMBERED:
            self._last_sent.clear()  # names of learners that came and went; to forget the others costs one look
        last = self._last_sent.get((name, header.fragment))
        self._last_sent[name, header.fragment] = (header.checksum, header.upto)
        # The same answer sent again because the first did not get through covers the same steps.
        repeated = fragment.numel >= REPEAT_NUMEL and last is not None and last[0] == header.checksum and last[1] != header.upto
        key = (header.fragment, name, session, header.upto)
        known = key in self._gathered  # the same again, which will be refused
        if not known:
            self._gathered[key] = gathered  # first: what is taken may be merged at once
        refusal: WireError | None = None
        try:
            merged = await self.desk.take(name, session, header, length, repeated)
        except WireError as error:
            merged, refusal = False, error
        if not merged and not known:
            self._gathered.pop(key, None)
        if refusal is not None:
            raise refusal

    def _decode(self, fragment: int, assembly: Assembly) -> tuple[Gathered, float]:
        """The contribution and its norm, which is infinite if there is something in it that no merge could digest."""
        try:
            data = assembly.finish()
        except WireError as error:
            raise Damaged(str(error)) from None
        of = self._layout.fragments[fragment]
        delta = self._received[fragment].decode(byte_tensor(data), of.numel)
        norms = norms_of(of, delta)
        length = math.sqrt(sum(norm * norm for norm in norms))
        if not length <= MAX_PROGRESS:  # one element may be too large, or no number, of which comparisons are false
            low, high = torch.aminmax(delta)
            length = length if max(-float(low), float(high)) <= MAX_PROGRESS else math.inf
        return Gathered(delta, norms), length


def _keys(order: m.Merge) -> list[Key]:
    return [(order.fragment, share.name, share.session, share.upto) for share in order.shares]
