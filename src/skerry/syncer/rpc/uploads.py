"""Receives contributions: reassembles chunks, verifies, decodes, asks for a verdict, and holds them until they are merged."""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple

import torch
from torch import Tensor

from skerry.config import SyncConfig
from skerry.core import messages as m
from skerry.cores import cores
from skerry.errors import WireError
from skerry.syncer.rpc.admission import Admission, NotTaken
from skerry.syncer.rpc.fragments import ServedFragments
from skerry.tensors.codecs.codec import byte_tensor, is_quick
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.tensors.fragments import Layout
from skerry.tensors.merge import norms_of
from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import Assembly

MAX_PROGRESS = 1e12
"""Largest sane element. Sums and outer steps of such values stay finite in fp32."""
MAX_REMEMBERED = 100_000
REPEAT_NUMEL = 100
"""Smaller contributions may repeat by chance, so repetition is not reported for them."""
FEW_PIECES = 64
"""Contributions of more tensors are decoded off the event loop: each norm takes a few torch calls."""

Key = tuple[int, str, str, int]
"""A contribution: fragment, learner, session, and the session's step count at the snapshot."""


class MissingContribution(Exception):
    """A merge was ordered of a contribution that this process does not hold."""


class Gathered(NamedTuple):
    """A contribution that waits to be merged."""

    delta: Tensor
    norms: list[float]
    """One per tensor."""


class Receiving:
    """A contribution in flight, on one stream or several. Received chunks survive a broken stream."""

    def __init__(self, session: str, header: pb.Upload) -> None:
        self.session, self.header = session, header
        self.assembly = Assembly(header.size_bytes, header.checksum)
        self.given_up: str | None = None
        """Why the remaining chunks are no longer wanted; None while they are."""

    def is_same(self, session: str, header: pb.Upload) -> bool:
        mine = self.header
        same = (header.round, header.at_step, header.size_bytes, header.checksum)
        return session == self.session and same == (mine.round, mine.at_step, mine.size_bytes, mine.checksum)

    def give_up(self, reason: str) -> None:
        """Drop the received chunks, even if streams still refer to this object."""
        self.given_up = reason
        self.assembly = Assembly(self.header.size_bytes, self.header.checksum)

    @property
    def complete(self) -> bool:
        return self.assembly.complete


class Contributions:
    def __init__(self, layout: Layout, sync: SyncConfig, served: ServedFragments, admission: Admission) -> None:
        self._layout, self._sync, self._served, self._admission = layout, sync, served, admission
        self._codecs = [fragment_codec(sync.send, layout, fragment) for fragment in layout.fragments]
        self._receiving: dict[tuple[str, int], Receiving] = {}
        """By learner and fragment."""
        self._gathered: dict[Key, Gathered] = {}
        self._last_sent: dict[tuple[str, int], tuple[int, int]] = {}
        """By learner and fragment: checksum and `at_step` of the last contribution."""
        self._decoding = asyncio.Semaphore(cores())

    # ------------------------------------------------------------ arriving

    async def begin(self, learner: str, session: str, header: pb.Upload) -> Receiving:
        """Start or continue a contribution, which may arrive on several streams. A newer one replaces an unfinished one. Raises
        NotTaken if it is not wanted."""
        found = self._receiving.get((learner, header.fragment))
        another_part = found is not None and found.is_same(session, header) and found.given_up is None and not header.resume
        if not another_part or header.journal_json:  # later parts were admitted with the first one
            await self._admission.check(learner, session, header)
            self._check_size(header)
            found = self._receiving.get((learner, header.fragment))
        if found is None or not found.is_same(session, header):
            if found is not None and found.complete:
                raise NotTaken(f"another upload of fragment {header.fragment} is being judged; try again later", retry=True)
            if found is not None and found.session == session and found.header.at_step > header.at_step:
                raise NotTaken(f"a newer contribution to fragment {header.fragment} has arrived")
            if found is not None:
                found.give_up("")
            found = self._receiving[learner, header.fragment] = Receiving(session, header)
        return found

    def _check_size(self, header: pb.Upload) -> None:
        if header.fragment not in self._served:
            raise NotTaken(f"fragment {header.fragment} is not served here", retry=True)
        if header.codec != self._sync.send:
            raise NotTaken(f"this run's contributions are {self._sync.send}, got {header.codec!r}")
        size = self._codecs[header.fragment].size_bytes(self._layout.fragments[header.fragment].numel)
        if header.size_bytes != size:
            raise NotTaken(f"fragment {header.fragment} is {size} bytes in {self._sync.send}, {header.size_bytes} declared")

    def done(self, learner: str, receiving: Receiving) -> None:
        """Forget a contribution that was judged or refused."""
        if self._receiving.get((learner, receiving.header.fragment)) is receiving:
            del self._receiving[learner, receiving.header.fragment]

    async def take(self, learner: str, receiving: Receiving) -> m.Verdict:
        """Decode a complete contribution and return the verdict on it. Raises NotTaken."""
        header, session = receiving.header, receiving.session
        fragment = self._layout.fragments[header.fragment]
        if is_quick(self._sync.send, fragment.numel) and len(fragment.pieces) <= FEW_PIECES:
            gathered, length = self._decode(header.fragment, receiving.assembly)
        else:
            async with self._decoding:
                loop = asyncio.get_running_loop()
                gathered, length = await loop.run_in_executor(None, self._decode, header.fragment, receiving.assembly)
        repeated = self._is_repeated(learner, header) and fragment.numel >= REPEAT_NUMEL
        key = (header.fragment, learner, session, header.at_step)
        known = key in self._gathered  # a duplicate, which will be refused
        if not known:
            self._gathered[key] = gathered  # the verdict may trigger the merge, so it must be there before
        merged = False
        try:
            verdict = await self._admission.judge(learner, session, header, length, repeated)
            merged = verdict.merged
        finally:
            if not merged and not known:
                self._gathered.pop(key, None)
        return verdict

    def _is_repeated(self, learner: str, header: pb.Upload) -> bool:
        """Whether these bytes equal the last contribution, which covered other steps. A retry covers the same steps."""
        if len(self._last_sent) > MAX_REMEMBERED:
            self._last_sent.clear()  # mostly departed learners; for the others one comparison is missed
        last = self._last_sent.get((learner, header.fragment))
        self._last_sent[learner, header.fragment] = (header.checksum, header.at_step)
        return last is not None and last[0] == header.checksum and last[1] != header.at_step

    def _decode(self, index: int, assembly: Assembly) -> tuple[Gathered, float]:
        """Decode a contribution. Also returns its norm, which is infinite if an element is NaN or too large to merge."""
        fragment = self._layout.fragments[index]
        try:
            data = assembly.finish()
        except WireError as error:
            raise NotTaken(str(error), retry=True) from None
        delta = self._codecs[index].decode(byte_tensor(data), fragment.numel)
        norms = norms_of(fragment, delta)
        length = math.sqrt(sum(norm * norm for norm in norms))
        if not length <= MAX_PROGRESS:  # also true for NaN
            low, high = torch.aminmax(delta)
            length = length if max(-float(low), float(high)) <= MAX_PROGRESS else math.inf
        return Gathered(delta, norms), length

    # ------------------------------------------------------------ for merging

    def gathered(self, order: m.Merge) -> list[Gathered]:
        """The contributions to merge. Those still in flight for this round are too late and are given up."""
        for (learner, fragment), receiving in list(self._receiving.items()):
            if fragment == order.fragment and receiving.header.round <= order.round and not receiving.complete:
                receiving.give_up(f"round {receiving.header.round} of fragment {fragment} is over")
                self.done(learner, receiving)
        try:
            return [self._gathered[key] for key in _keys(order)]
        except KeyError as error:
            raise MissingContribution(f"a merge was ordered of a contribution that is missing: {error}") from None

    def merged(self, order: m.Merge) -> None:
        for key in _keys(order):
            self._gathered.pop(key, None)

    def forget(self, fragment: int) -> None:
        """Drop the contributions gathered for this fragment."""
        for key in [key for key in self._gathered if key[0] == fragment]:
            del self._gathered[key]


def _keys(order: m.Merge) -> list[Key]:
    return [(order.fragment, share.learner, share.session, share.at_step) for share in order.shares]
