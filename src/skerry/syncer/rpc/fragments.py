"""The newest versions of the fragments that a process serves."""

from __future__ import annotations

from collections.abc import Callable

from skerry.config import SyncConfig
from skerry.syncer.rpc.published import Published
from skerry.tensors.codecs.codec import FP32, raw_bytes
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.tensors.fragments import Layout
from skerry.tensors.merge import FragmentState, publish
from skerry.wire import skerry_pb2 as pb

NOTHING = memoryview(b"")


class ServedFragments:
    def __init__(self, layout: Layout, sync: SyncConfig) -> None:
        self._layout = layout
        self._codecs = [fragment_codec(sync.publish, layout, fragment) for fragment in layout.fragments]
        self._published: dict[int, Published] = {}
        """By fragment. The fixed tensors are one more, with the index after the last fragment."""

    def __contains__(self, fragment: int) -> bool:
        return fragment in self._published

    def serve_whole(self, fragment: int, version: int, state: FragmentState) -> None:
        self._published[fragment] = Published(version, FP32.name, raw_bytes(state.public))

    def serve_fixed(self, data: bytes) -> None:
        self._published[len(self._layout.fragments)] = Published(0, "safetensors", memoryview(data))

    def serve(self, fragment: int, published: Published) -> None:
        self._published[fragment] = published

    def withdraw(self, fragment: int) -> None:
        self._published.pop(fragment, None)

    def encode(
        self, fragment: int, version: int, before: FragmentState, after: FragmentState
    ) -> tuple[FragmentState, Published]:
        """Encode the next version for learners. Safe in any thread, because a fragment has one merge at a time."""
        codec, published = self._codecs[fragment], self._published[fragment]
        state, data = publish(before, after, codec)
        if codec.exact:
            published = Published(version, FP32.name, raw_bytes(data))
        else:
            published = published.followed_by(version, raw_bytes(state.public), raw_bytes(data), codec.name)
        published.find(version - 1)  # most learners will fetch this one: compute its checksum here, off the event loop
        return state, published

    def find(self, wanted: pb.Fetch, floor: Callable[[int], int]) -> tuple[pb.Fetched, memoryview]:
        """Answer a fetch. If the version is not served, the header has a reason and there is no data."""
        header = pb.Fetched(fragment=wanted.fragment, version=wanted.version, first_chunk=wanted.first_chunk)
        published = self._published.get(wanted.fragment)
        if published is None:
            header.reason = f"there is no fragment {wanted.fragment}"
            return header, NOTHING
        if published.version != wanted.version:
            header.reason = f"fragment {wanted.fragment} is at version {published.version}, not {wanted.version}"
            return header, NOTHING
        found = published.find(wanted.have if wanted.HasField("have") else None)
        header.codec, header.size_bytes, header.checksum = found.codec, len(found.data), found.checksum
        if found.since is not None:
            header.since = found.since
        if wanted.fragment < len(self._layout.fragments):
            header.floor = floor(wanted.fragment)
        return header, found.data
