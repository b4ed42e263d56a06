"""What the tape of a run says about who did what, sorted for a replay; and where two tapes first differ."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from skerry.config import Config, from_json
from skerry.core import records
from skerry.core.leases.ranges import Range
from skerry.core.schema import TapeRecord
from skerry.errors import ReplayError
from skerry.syncer.storage.run_folder import RunIdentity, read_checksums, read_identity, read_tape

BREAKS: dict[type[TapeRecord], str] = {
    records.Restored: "was put back to an earlier state",
    records.RestoredFrom: "was restored from a snapshot",
    records.Recovered: "lost a version to a damaged file",
}
"""Records after which weights do not follow from what is on the tape."""
KINDS = (records.Joined, records.Journaled, records.Merged, *BREAKS)


@dataclass(frozen=True)
class OuterStep:
    """A merge, as the tape has it, and the checksum of the version it made."""

    merge: records.Merged
    checksum: int

    def __str__(self) -> str:
        return f"version {self.merge.version} of fragment {self.merge.fragment} in round {self.merge.round}"


@dataclass
class RecordedSession:
    """What the tape knows about one session of an island."""

    learner: str
    session: str
    platform: str = ""
    source: str = "fresh"
    origin: tuple[tuple[str, int], ...] = ()
    covered: int = 0
    """Steps whose journal is complete."""
    adopted: dict[int, list[tuple[int, int, bool]]] = field(default_factory=lambda: defaultdict(list))
    """After how many steps → (fragment, version, whether it was taken whole), in order."""
    tokens: dict[int, int] = field(default_factory=dict)
    data: dict[int, list[Range]] = field(default_factory=dict)
    gives: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """After how many steps → (fragment, base) of contributions that were merged."""
    handed_on: set[int] = field(default_factory=set)
    """After how many steps another session took over its optimizer's state."""

    @property
    def needed(self) -> int:
        """Steps that something later depends on."""
        return max([*self.gives, *self.handed_on], default=0)

    def add(self, journal: records.Journaled) -> None:
        self.source = journal.source if journal.source is not None else self.source
        self.origin = journal.origin if journal.origin is not None else self.origin
        if journal.since <= self.covered and not any(start < journal.until for start, _ in journal.gaps):
            self.covered = max(self.covered, journal.until)
        for step, fragment, version, whole in journal.adopted:
            if (fragment, version, bool(whole)) not in self.adopted[step]:
                self.adopted[step].append((fragment, version, bool(whole)))
        self.tokens.update(dict(journal.tokens))
        self.data.update({step: [Range(*found) for found in ranges] for step, ranges in journal.data})


class Recording:
    """The tape of a run, sorted by who did what."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity: RunIdentity = read_identity(folder)
        if not self.identity.job_json:
            raise ReplayError(f"{folder} has no training job of its own; only runs of skerry train can be executed again")
        self.config: Config = from_json(Config, self.identity.job_json)
        if self.config.train.compile:
            raise ReplayError("a run with train.compile cannot be executed again yet: compiled code may sum in another order")
        self.sessions: dict[str, RecordedSession] = {}
        self._merges: list[records.Merged] = []
        read_tape(folder, KINDS, self._see)
        self.merges = with_checksums(folder, self._merges)
        for merge in self._merges:
            if not merge.shares:
                raise ReplayError(f"the run in {folder} was put back to an earlier state, which cannot be executed again yet")
            for share in merge.shares:
                self._of(share.session, share.learner).gives[share.at_step].append((merge.fragment, share.base))
        for session in self.sessions.values():
            for origin, steps in session.origin:
                if origin in self.sessions:
                    self.sessions[origin].handed_on.add(steps)

    def _see(self, record: TapeRecord) -> None:
        if type(record) in BREAKS:
            raise ReplayError(f"the run in {self.folder} {BREAKS[type(record)]}, which cannot be executed again yet")
        if isinstance(record, records.Merged):
            self._merges.append(record)
        elif isinstance(record, records.Joined):
            self._of(record.session, record.learner).platform = record.platform
        elif isinstance(record, records.Journaled):
            self._of(record.session, record.learner).add(record)

    def _of(self, session: str, learner: str) -> RecordedSession:
        return self.sessions.setdefault(session, RecordedSession(learner, session))


def first_difference(one: Path, other: Path) -> str | None:
    """Where two runs first differ, by their tapes, in words; None if one is the beginning of the other."""
    tapes = [_outer_steps(folder) for folder in (one, other)]
    for number, (a, b) in enumerate(zip(*tapes, strict=False), 1):
        if str(a) != str(b):
            return f"outer step {number}: {a} in {one}, {b} in {other}"
        shares = [{s.learner: (s.base, s.steps, s.tokens, s.at_step) for s in step.merge.shares} for step in (a, b)]
        if shares[0] != shares[1]:
            names = sorted(n for n in shares[0].keys() | shares[1].keys() if shares[0].get(n) != shares[1].get(n))
            return f"outer step {number}, {a}: other contributions, of {', '.join(names)}"
        if a.checksum != b.checksum:
            return f"outer step {number}, {a}: the same contributions by name and steps, but other values"
    return None


def _outer_steps(folder: Path) -> list[OuterStep]:
    read_identity(folder)  # says so if it is of another release, with other checksums
    found: list[records.Merged] = []

    def see(record: TapeRecord) -> None:
        assert isinstance(record, records.Merged)
        found.append(record)

    read_tape(folder, [records.Merged], see)
    return with_checksums(folder, found)


def with_checksums(folder: Path, merges: list[records.Merged]) -> list[OuterStep]:
    """To be called after the tape was read: a running syncer writes both at once."""
    checksums = read_checksums(folder)
    missing = [merge for merge in merges if (merge.fragment, merge.version) not in checksums]
    if missing:
        what = f"version {missing[0].version} of fragment {missing[0].fragment}"
        raise ReplayError(f"the tape of {folder} has lost the checksum of {what}")
    return [OuterStep(merge, checksums[merge.fragment, merge.version]) for merge in merges]
