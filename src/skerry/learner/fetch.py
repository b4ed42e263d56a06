"""Fetches merged fragments when they are announced, decodes them, and prepares them for the training thread to adopt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from safetensors.torch import load
from torch import Tensor

from skerry.core.exchange import Version
from skerry.errors import WireError
from skerry.learner.background import Background
from skerry.learner.replica import Prepared
from skerry.learner.session import Session
from skerry.learner.transport.reachability import Reachability
from skerry.learner.transport.routes import Routes
from skerry.learner.transport.sidecar import Sidecar
from skerry.learner.transport.stream import Download, NotAsWanted
from skerry.tensors.codecs.codec import FP32, Codec, byte_tensor
from skerry.tensors.codecs.per_tensor import fragment_codec
from skerry.wire import skerry_pb2 as pb

log = logging.getLogger("skerry.learner")

RETRY_S = 0.5
WARN_OVERTAKEN = 5
"""Warn when this many versions of a fragment in a row were replaced before they arrived."""
MAX_DIFFERENCES = 64
"""Most differences accepted in one download. A syncer keeps fewer; the limit bounds memory whatever a peer declares."""


class Fetcher:
    """Downloads versions. Runs on the event loop; background threads decode."""

    def __init__(
        self,
        session: Session,
        background: Background,
        reachability: Reachability,
        sidecar: Callable[[], Sidecar | None] = lambda: None,
    ) -> None:
        self._session, self._background, self._reachability = session, background, reachability
        self._sidecar = sidecar
        self._downloads: dict[int, Download] = {}
        """By fragment: downloads in progress. Chunks that have arrived survive a broken connection."""
        self._overtaken: Counter[int] = Counter()
        """By fragment: consecutive versions that were replaced while in flight."""

    async def fetch(self, version: Version) -> None:
        """Fetch and prepare a version. Failures are retried after a pause."""
        session, fragment = self._session, version.fragment
        routes = session.routes
        if routes is None:
            return
        with session.lock:
            have, values_had = self._newest_here(fragment)
        download = self._download(pb.Fetch(fragment=fragment, version=version.version, have=have))
        shard = routes.shard_of(fragment)
        try:
            await routes.to_fetch(fragment, download.room).fetch(download)
        except WireError as error:
            log.debug("%s: fragment %d was not fetched: %s", session.name, fragment, error)
            self._reachability.failed(shard, error)
            if isinstance(error, NotAsWanted):
                self._forget(download)
                self._came_too_late(fragment)
            self._fetch_again(version, routes)
            return
        self._reachability.went_through(shard)
        self._overtaken.pop(fragment, None)
        with session.lock:
            since_step = session.exchange.uncounted_since(version).steps

        self._forget(download)
        arguments = (download, values_had, since_step)
        try:
            if session.replica.quick:
                prepared = self._prepare(*arguments)
            else:
                prepared = await self._background.in_thread(self._prepare, *arguments)
        except WireError as error:
            log.debug("%s: fragment %d arrived damaged: %s", session.name, fragment, error)
            self._fetch_again(version, routes)
            return
        with session.lock:
            if session.exchange.fetched(version):
                session.prepared[fragment] = prepared
            session.lock.notify_all()
        session.wake()

    def _prepare(self, download: Download, had: Tensor | None, since_step: int) -> Prepared:
        header, data = download.finish()
        had = had if header.HasField("since") else None
        codec = self._codec(header)
        return self._session.replica.receive(header.fragment, codec, byte_tensor(data), had, since_step, header.floor)

    def _download(self, wanted: pb.Fetch) -> Download:
        """The download in progress if it is for the same request, else a new one."""
        download = self._downloads.get(wanted.fragment)
        if download is None or download.wanted != wanted:
            if download is not None:
                self._forget(download)
            room = self._room(wanted)
            download = Download(wanted, lambda header: self._check_size(wanted, header), room)
            self._downloads[wanted.fragment] = download
        return download

    def _came_too_late(self, fragment: int) -> None:
        """Count a version that was replaced while in flight. Now and then is harmless, but an island that never gets a version
        in time never contributes."""
        self._overtaken[fragment] += 1
        if self._overtaken[fragment] == WARN_OVERTAKEN:
            what = f"{WARN_OVERTAKEN} versions of fragment {fragment} in a row were replaced before they arrived"
            log.warning("%s: %s; use a larger H or fewer bits for this link (see skerry plan)", self._session.name, what)

    def _room(self, wanted: pb.Fetch) -> memoryview | None:
        """Memory shared with the sidecar, or None. Only differences go through it; whole versions are rare."""
        sidecar = self._sidecar()
        if sidecar is None or not sidecar.running or not wanted.HasField("have"):
            return None
        room = self._session.replica.room(wanted.fragment)
        return room if room is not None and sidecar.can_receive(room) else None

    def _forget(self, download: Download) -> None:
        fragment, sidecar = download.wanted.fragment, self._sidecar()
        if self._downloads.get(fragment) is download:
            del self._downloads[fragment]
            if sidecar is not None and download.room is not None and download.header is None:
                sidecar.forget(download.room)

    def _fetch_again(self, version: Version, routes: Routes) -> None:
        session = self._session

        def again() -> None:
            if session.routes is routes:  # else a new connection has already started its own fetch
                with session.lock:
                    session.exchange.fetch_failed(version)
                session.wake()

        self._background.call_later(RETRY_S, again)

    async def fetch_fixed(self, part: int) -> None:
        """Fetch the tensors that nobody trains, which the syncer serves as one additional fragment."""
        session, routes = self._session, self._session.routes
        assert routes is not None
        try:
            wanted = pb.Fetch(fragment=part, version=0)
            download = Download(wanted, lambda header: self._check_size(wanted, header))
            await routes.main.fetch(download)
            _, data = download.finish()
        except WireError as error:
            log.debug("%s: the fixed part was not fetched: %s", session.name, error)

            def again() -> None:
                if session.routes is routes:  # else a new connection has already started its own fetch
                    self._background.spawn(self.fetch_fixed(part))

            self._background.call_later(RETRY_S, again)
            return
        if session.fixed_loaded:
            return  # training may already be running
        session.replica.load_fixed(load(bytes(data)))
        with session.lock:
            session.fixed_loaded = True
            session.lock.notify_all()
        session.wake()

    def _newest_here(self, fragment: int) -> tuple[int | None, Tensor | None]:
        """Number and values of the newest complete version of a fragment: ready to be adopted, or in the model."""
        session, held = self._session, self._session.exchange.held[fragment]
        if held.fetched is not None and fragment in session.prepared:
            return held.fetched.version, session.prepared[fragment].values
        return (held.version, session.replica.held(fragment)) if held.version >= 0 else (None, None)

    def _codec(self, header: pb.Fetched) -> Codec:
        layout = self._session.replica.layout
        fragment = layout.fragments[header.fragment]
        name = self._session.sync.publish if header.HasField("since") else FP32.name
        if header.codec != name:
            raise WireError(f"fragment {header.fragment} was declared as {header.codec!r}, expected {name}")
        return fragment_codec(name, layout, fragment)

    def _check_size(self, wanted: pb.Fetch, header: pb.Fetched) -> None:
        layout = self._session.replica.layout
        if wanted.fragment == len(layout.fragments):
            limit = (1 << 20) + 9 * sum(spec.numel for spec in layout.tensors) + 1024 * len(layout.tensors)
            if header.codec != "safetensors" or header.size_bytes > limit:
                raise WireError(f"the fixed part was declared as {header.size_bytes} bytes of {header.codec!r}")
            return
        codec, numel = self._codec(header), layout.fragments[header.fragment].numel
        differences = 1
        if header.HasField("since"):
            differences = wanted.version - header.since
            if not wanted.HasField("have") or header.since != wanted.have or differences > MAX_DIFFERENCES:
                raise WireError(f"fragment {wanted.fragment} was sent as differences from version {header.since}")
        expected = differences * codec.size_bytes(numel)
        if header.size_bytes != expected:
            what = f"fragment {wanted.fragment} in {header.codec} was declared as {header.size_bytes} bytes"
            raise WireError(f"{what}, expected {expected}")

    def forget_all(self) -> None:
        self._downloads.clear()
