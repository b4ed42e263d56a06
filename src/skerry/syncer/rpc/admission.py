"""What the state machine says to contributions: whether one is wanted, and what becomes of it once it is here."""

from __future__ import annotations

from typing import Any, Protocol

from skerry.core import messages as m
from skerry.core.syncer import SyncerCore
from skerry.errors import WireError
from skerry.syncer.rpc.uploads import MAX_NAME, Busy, Unhealthy
from skerry.wire import skerry_pb2 as pb

MAX_COUNT = 1 << 53


class Desk(Protocol):
    """Whoever receives contributions asks here. In the syncer's own process the answers come at once."""

    def may_fetch(self, name: str, session: str) -> bool: ...

    def floor(self, fragment: int) -> int:
        """The version at which it was last put back."""
        ...

    async def check(self, name: str, session: str, header: pb.Upload) -> None:
        """Raises WireError if what this announces is not wanted. What the learner tells with it is written down first."""
        ...

    async def take(self, name: str, session: str, header: pb.Upload, norm: float, repeated: bool) -> bool:
        """It is here, whole. Whether it will be merged; raises WireError if it is not wanted any more, or is unhealthy."""
        ...

    def bytes_moved(self, name: str) -> None: ...

    def refused(self, name: str, header: pb.Upload | None, reason: str) -> None: ...


class Host(Protocol):
    """What the desk needs to know and to tell."""

    core: SyncerCore

    def is_connected(self, name: str, session: str) -> bool: ...
    def bytes_moved(self, name: str) -> None: ...
    def dispatch(self, event: m.Event) -> None: ...
    def record(self, kind: str, data: dict[str, Any]) -> None: ...
    def journal(self, name: str, session: str, text: str) -> None: ...


class CoreDesk:
    """In the process of the state machine. Nothing else happens between the question and what follows from it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def may_fetch(self, name: str, session: str) -> bool:
        return self._host.is_connected(name, session)

    def floor(self, fragment: int) -> int:
        return self._host.core.fragments[fragment].floor

    async def check(self, name: str, session: str, header: pb.Upload) -> None:
        self.journal(name, session, header.journal_json)
        self._offer(name, session, header, 0.0, False)

    async def take(self, name: str, session: str, header: pb.Upload, norm: float, repeated: bool) -> bool:
        offer = self._offer(name, session, header, norm, repeated)
        why = self._host.core.why_unhealthy(offer)
        self._host.dispatch(offer)
        if why is not None:
            raise Unhealthy(why)
        return not self._host.core.learners[name].quarantined

    def bytes_moved(self, name: str) -> None:
        self._host.bytes_moved(name)

    def refused(self, name: str, header: pb.Upload | None, reason: str) -> None:
        who = {"learner": name[:MAX_NAME]} if name else {}
        what = {"fragment": header.fragment, "step": header.step} if header is not None else {}
        self._host.record("refused", {**who, **what, "reason": reason})

    def journal(self, name: str, session: str, text: str) -> None:
        """Put what a learner says it did on the tape, once, before anything that follows from it."""
        if text and self._host.is_connected(name, session):
            self._host.journal(name, session, text)

    def _offer(self, name: str, session: str, header: pb.Upload, norm: float, repeated: bool) -> m.Contributed:
        if not self._host.is_connected(name, session):
            raise Busy(f"{name[:MAX_NAME]!r} is not connected with this session")
        counts = (header.step, header.base, header.steps, header.tokens, header.upto, header.samples_to, header.upto_tokens)
        if max(counts) > MAX_COUNT:
            raise WireError(f"counts must be at most {MAX_COUNT}")
        if header.upto_tokens < header.tokens:
            raise WireError(f"{header.tokens} tokens cannot end at {header.upto_tokens}")
        offer = m.Contributed(
            name,
            header.fragment,
            header.step,
            header.base,
            header.steps,
            header.tokens,
            header.upto,
            norm,
            repeated,
            session,
            (header.samples_from, header.samples_to),
            header.upto_tokens,
        )
        reason = self._host.core.why_refused(offer)
        if reason is not None:
            raise WireError(reason)
        return offer
