"""Read a run's tape for a replay, grouped by session; and find where two tapes first differ."""

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
    records.Restored: "was rolled back",
    records.RestoredFrom: "was restored from a snapshot",
    records.Recovered: "lost a version to a damaged file",
}
"""Records after which the weights cannot be derived from the tape."""
KINDS = (records.Joined, records.Journaled, records.Merged, *BREAKS)


@dataclass(frozen=True)
class OuterStep:
    """A merge from the tape, and the checksum of the version it made."""

    merge: records.Merged
    checksum: int

    def __str__(self) -> str:
        return f"version {self.merge.version} of fragment {self.merge.fragment} in round {self.merge.round}"


@dataclass
class RecordedSession:
    """One session of an island, as recorded on the tape."""

    learner: str
    session: str
    platform: str = ""
    source: str = "fresh"
    origin: tuple[tuple[str, int], ...] = ()
    covered: int = 0
    """The journal is complete up to this step."""
    adopted: dict[int, list[tuple[int, int, bool]]] = field(default_factory=lambda: defaultdict(list))
    """Step → (fragment, version, whether it replaced the weights whatever the adoption rule), adopted after it, in order."""
    tokens: dict[int, int] = field(default_factory=dict)
    data: dict[int, list[Range]] = field(default_factory=dict)
    gives: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Step → (fragment, base) of merged contributions taken after it."""
    handed_on: set[int] = field(default_factory=set)
    """Steps after which another session took over this optimizer state."""

    @property
    def needed(self) -> int:
        """The last step that a merge or another session depends on."""
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
    """The tape of a run: its merges, and what each session did."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.identity: RunIdentity = read_identity(folder)
        if not self.identity.job_json:
            raise ReplayError(f"{folder} has no training job of its own; only runs of skerry train can be replayed")
        self.config: Config = from_json(Config, self.identity.job_json)
        if self.config.train.compile:
            raise ReplayError("a run with train.compile cannot be replayed: compiled code may sum in another order")
        self.sessions: dict[str, RecordedSession] = {}
        self._merges: list[records.Merged] = []
        read_tape(folder, KINDS, self._see)
        self.merges = with_checksums(folder, self._merges)
        for merge in self._merges:
            if not merge.shares:
                raise ReplayError(f"the run in {folder} was rolled back, so it cannot be replayed")
            for share in merge.shares:
                self._of(share.session, share.learner).gives[share.at_step].append((merge.fragment, share.base))
        for session in self.sessions.values():
            for origin, steps in session.origin:
                if origin in self.sessions:
                    self.sessions[origin].handed_on.add(steps)

    def _see(self, record: TapeRecord) -> None:
        if type(record) in BREAKS:
            raise ReplayError(f"the run in {self.folder} {BREAKS[type(record)]}, so it cannot be replayed")
        if isinstance(record, records.Merged):
            self._merges.append(record)
        elif isinstance(record, records.Joined):
            self._of(record.session, record.learner).platform = record.platform
        elif isinstance(record, records.Journaled):
            self._of(record.session, record.learner).add(record)

    def _of(self, session: str, learner: str) -> RecordedSession:
        return self.sessions.setdefault(session, RecordedSession(learner, session))


def first_difference(one: Path, other: Path) -> str | None:
    """Describe where the tapes of two runs first differ. None if one is a prefix of the other."""
    tapes = [_outer_steps(folder) for folder in (one, other)]
    for number, (a, b) in enumerate(zip(*tapes, strict=False), 1):
        if str(a) != str(b):
            return f"outer step {number}: {a} in {one}, {b} in {other}"
        shares = [{s.learner: (s.base, s.steps, s.tokens, s.at_step) for s in step.merge.shares} for step in (a, b)]
        if shares[0] != shares[1]:
            names = sorted(n for n in shares[0].keys() | shares[1].keys() if shares[0].get(n) != shares[1].get(n))
            return f"outer step {number}, {a}: different contributions of {', '.join(names)}"
        if a.checksum != b.checksum:
            return f"outer step {number}, {a}: the same contributions by name and steps, but different values"
    return None


def _outer_steps(folder: Path) -> list[OuterStep]:
    read_identity(folder)  # raises for folders of another format version
    found: list[records.Merged] = []

    def see(record: TapeRecord) -> None:
        assert isinstance(record, records.Merged)
        found.append(record)

    read_tape(folder, [records.Merged], see)
    return with_checksums(folder, found)


def with_checksums(folder: Path, merges: list[records.Merged]) -> list[OuterStep]:
    """Pair merges with their checksums. Call it after reading the tape: a running syncer commits both together."""
    checksums = read_checksums(folder)
    missing = [merge for merge in merges if (merge.fragment, merge.version) not in checksums]
    if missing:
        what = f"version {missing[0].version} of fragment {missing[0].fragment}"
        raise ReplayError(f"{folder} has no checksum of {what}")
    return [OuterStep(merge, checksums[merge.fragment, merge.version]) for merge in merges]
