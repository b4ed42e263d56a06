"""The state machine's verdicts, as seen by a process that receives contributions.

`LocalAdmission` calls the state machine directly. A shard asks over its stream (`RemoteAdmission` in sharding/shard.py).
"""

from __future__ import annotations

from typing import Protocol

from skerry.core import messages as m
from skerry.core import records
from skerry.errors import WireError
from skerry.syncer.decisions import Decisions
from skerry.syncer.rpc.journals import Journals
from skerry.syncer.rpc.limits import MAX_COUNT, MAX_NAME
from skerry.syncer.rpc.roster import Roster
from skerry.wire import skerry_pb2 as pb


class NotTaken(WireError):
    """A contribution is unwanted or unusable."""

    def __init__(self, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry
        """The same bytes may be sent again: they were damaged in transit, or arrived at a bad moment."""


class Admission(Protocol):
    def may_fetch(self, learner: str, session: str) -> bool: ...

    def floor(self, fragment: int) -> int:
        """The version at which the fragment was last rolled back or recovered; 0 if never."""
        ...

    async def check(self, learner: str, session: str, header: pb.Upload) -> None:
        """Decide from the header whether to receive the bytes. Records the header's journal first. Raises NotTaken."""
        ...

    async def judge(self, learner: str, session: str, header: pb.Upload, norm: float, repeated: bool) -> m.Verdict:
        """Judge a complete contribution. Raises NotTaken if that is not possible now."""
        ...

    def bytes_moved(self, learner: str) -> None: ...

    def refused(self, learner: str, header: pb.Upload | None, reason: str) -> None:
        """Record that something was refused before the state machine saw it."""
        ...


class LocalAdmission:
    def __init__(self, decisions: Decisions, roster: Roster, journals: Journals) -> None:
        self._decisions, self._roster, self._journals = decisions, roster, journals

    def may_fetch(self, learner: str, session: str) -> bool:
        return self._roster.is_connected(learner, session)

    def floor(self, fragment: int) -> int:
        return self._decisions.core.fragments[fragment].floor

    async def check(self, learner: str, session: str, header: pb.Upload) -> None:
        if header.journal_json and self._roster.is_connected(learner, session):
            self._journals.take(learner, session, header.journal_json)
        offer = self._offer(learner, session, header, 0.0, False)
        if reason := self._decisions.core.why_refused(offer):
            raise NotTaken(reason)

    async def judge(self, learner: str, session: str, header: pb.Upload, norm: float, repeated: bool) -> m.Verdict:
        verdict = self._decisions.dispatch(self._offer(learner, session, header, norm, repeated))
        assert verdict is not None
        return verdict

    def bytes_moved(self, learner: str) -> None:
        self._decisions.bytes_moved(learner)

    def refused(self, learner: str, header: pb.Upload | None, reason: str) -> None:
        fragment, number = (header.fragment, header.round) if header is not None else (None, None)
        self._decisions.record(records.Refused(reason, learner[:MAX_NAME] or None, fragment=fragment, round=number))

    def _offer(self, learner: str, session: str, header: pb.Upload, norm: float, repeated: bool) -> m.Contributed:
        if not self._roster.is_connected(learner, session):
            raise NotTaken(f"{learner[:MAX_NAME]!r} is not connected with this session", retry=True)
        counts = (header.round, header.base, header.steps, header.tokens, header.at_step, header.samples_to, header.at_tokens)
        if max(counts) > MAX_COUNT:
            raise NotTaken(f"counts must be at most {MAX_COUNT}")
        if header.at_tokens < header.tokens:
            raise NotTaken(f"tokens ({header.tokens}) must not exceed at_tokens ({header.at_tokens})")
        return m.Contributed(
            learner,
            header.fragment,
            header.round,
            header.base,
            header.steps,
            header.tokens,
            header.at_step,
            norm,
            repeated,
            session,
            (header.samples_from, header.samples_to),
            header.at_tokens,
        )
