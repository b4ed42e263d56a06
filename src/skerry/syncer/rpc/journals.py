"""Receives learners' journals (learner/journal.py). Checks their shape and size, but not whether they are true."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from skerry.core import records
from skerry.core.schema import MalformedRecord, read_record
from skerry.syncer.decisions import Decisions

REMEMBERED = 10_000
"""Sessions whose position is remembered."""
MAX_BYTES = 1 << 20
NOT_A_JOURNAL = (ValueError, RecursionError, AttributeError, TypeError, MalformedRecord)


class Journals:
    """Records the new part of each journal on the tape. Learners resend entries until they know that these are durable."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._known: dict[str, int] = {}
        """Session → the step up to which its journal is recorded."""

    def take(self, learner: str, session: str, text: str) -> None:
        found = read_journal(text, learner, session)
        if found is None:
            self._decisions.record(records.Refused("a malformed journal", learner))
            return
        journal, inherited = found
        owners = {owner for owner, _ in journal.origin or ()}
        retired = set(self._decisions.core.retired(learner))
        if inherited is not None and journal.source == "own" and len(owners) == 1 and owners <= retired:
            self._keep(dataclasses.replace(inherited, session=owners.pop()))
        self._keep(journal)

    def _keep(self, journal: records.Journaled) -> None:
        known = self._known.get(journal.session, -1)
        fresh = newer(journal, known)
        if journal.until < known or (journal.until == known and not fresh.adopted):
            return
        if len(self._known) > REMEMBERED:
            self._known.clear()
        self._known[journal.session] = journal.until
        self._decisions.record(fresh)


def read_journal(text: str, learner: str, session: str) -> tuple[records.Journaled, records.Journaled | None] | None:
    """Parse a journal, and the one it inherited from an earlier session. Returns None if it is malformed."""
    if len(text) > MAX_BYTES:
        return None
    try:
        data = json.loads(text)
        inherited = data.pop("inherited", None)
        journal = _checked(data, learner, session)
    except NOT_A_JOURNAL:
        return None
    try:  # a damaged inheritance does not cost the island's own journal
        earlier = {name: part for name, part in inherited.items() if name not in ("inherited", "source", "origin")}
        return journal, _checked(earlier, learner, session)
    except NOT_A_JOURNAL:
        return journal, None


def _checked(data: dict[str, Any], learner: str, session: str) -> records.Journaled:
    """Raises ValueError or MalformedRecord."""
    journal = read_record(records.Journaled.kind, {**data, "learner": learner, "session": session})
    assert isinstance(journal, records.Journaled)
    ranges = [found for _, taken in journal.data for found in taken]
    numbers = [journal.since, journal.until, *(step for step, _ in journal.data), *(n for _, *rest in ranges for n in rest)]
    for row in (*journal.adopted, *journal.tokens, *journal.gaps):
        numbers += row
    numbers += [steps for _, steps in journal.origin or ()]
    names = [pool for pool, _, _ in ranges] + [owner for owner, _ in journal.origin or ()] + [journal.source or ""]
    if not all(isinstance(n, int) and 0 <= n < 1 << 53 for n in numbers) or not all(isinstance(n, str) for n in names):
        raise ValueError("a journal's counts must be non-negative integers, and its names strings")
    if not all(taken for _, taken in journal.data):
        raise ValueError("a data entry has no samples")
    return dataclasses.replace(journal, source=journal.source[:20] if journal.source is not None else None)


def newer(journal: records.Journaled, known: int) -> records.Journaled:
    """The part of a journal after step `known`. Adoptions at that step stay, because they may arrive in two parts."""
    return dataclasses.replace(
        journal,
        since=max(journal.since, known),
        adopted=tuple(entry for entry in journal.adopted if entry[0] >= known),
        tokens=tuple(entry for entry in journal.tokens if entry[0] > known),
        data=tuple(entry for entry in journal.data if entry[0] > known),
    )
