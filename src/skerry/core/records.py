"""The tape's schema: one class per kind of record. The only place that defines it.

Tuples are written as JSON lists and read back as tuples. Fields that are None are left out. docs/tape.md is generated from
this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from skerry.core.schema import TapeRecord
from skerry.core.share import Share

# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class Created(TapeRecord):
    """The run folder was created."""

    fragments: int


@dataclass(frozen=True)
class SyncerStarted(TapeRecord):
    """A syncer process opened the folder."""

    step: int
    phase: str


@dataclass(frozen=True)
class Began(TapeRecord):
    """Enough learners have joined, and training starts."""

    learners: tuple[str, ...]


@dataclass(frozen=True)
class Closing(TapeRecord):
    """The run closes: everyone stops, and every fragment is merged a last time."""

    why: str
    """`budget` or `requested`."""
    step: int
    tokens: int


@dataclass(frozen=True)
class Ended(TapeRecord):
    """The run has ended; every fragment is final."""

    step: int
    tokens: int
    merges: int


# ---------------------------------------------------------------- learners


@dataclass(frozen=True)
class Joined(TapeRecord):
    """A learner was admitted. If it resumed, it keeps its versions and progress."""

    learner: str
    session: str
    slot: int
    """Its number among the live learners, from 0."""
    resumed: bool
    step: int
    platform: str = ""
    """Everything that its arithmetic depends on to the last bit: library, device, threads."""


@dataclass(frozen=True)
class Disconnected(TapeRecord):
    """A learner's control stream ended without a goodbye."""

    learner: str


@dataclass(frozen=True)
class Lost(TapeRecord):
    """A learner was silent for too long and is no longer asked."""

    learner: str
    silent_s: float


@dataclass(frozen=True)
class Leaving(TapeRecord):
    """A learner asked to leave, after a last contribution to every fragment."""

    learner: str


@dataclass(frozen=True)
class Left(TapeRecord):
    """A learner that asked to leave has left."""

    learner: str


@dataclass(frozen=True)
class Banked(TapeRecord):
    """A session is over. Its tokens stay counted."""

    learner: str
    session: str
    tokens: int


@dataclass(frozen=True)
class OptimizerRestored(TapeRecord):
    """A learner that joined late reported where its optimizer state came from: own, peer or cold."""

    learner: str
    source: str


@dataclass(frozen=True)
class StateRelayed(TapeRecord):
    """A learner received the optimizer state of a peer."""

    learner: str
    donor: str


@dataclass(frozen=True)
class Journaled(TapeRecord):
    """A session's local actions that a replay needs and the rest of the tape does not contain."""

    learner: str
    session: str
    since: int
    """First step for which the entries are complete."""
    until: int
    """Last step for which the entries are complete."""
    adopted: tuple[tuple[int, int, int, bool], ...] = ()
    """(after step, fragment, version, whether it overwrote the local values regardless of `sync.adopt`)."""
    tokens: tuple[tuple[int, int], ...] = ()
    """(first step, run tokens that the learning-rate schedule uses from there on)."""
    data: tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...] = ()
    """(step, sample ranges as (pool, start, count)), for steps whose samples do not continue those of the previous step."""
    gaps: tuple[tuple[int, int], ...] = ()
    """(from, to): steps whose entries were dropped."""
    source: str | None = None
    """Where its optimizer state came from: own, peer or cold."""
    origin: tuple[tuple[str, int], ...] | None = None
    """(session, step): the sessions its optimizer state came from, and after how many of their steps."""


# ---------------------------------------------------------------- rounds and merges


@dataclass(frozen=True)
class Opened(TapeRecord):
    """A round was opened for a fragment, and these learners were asked."""

    fragment: int
    round: int
    asked: tuple[str, ...]


@dataclass(frozen=True)
class Cancelled(TapeRecord):
    """A round ended without a contribution."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Dropped(TapeRecord):
    """The process that held these contributions is gone. Learners are asked for them again."""

    fragment: int
    round: int
    lost: tuple[str, ...]
    """Learners whose contributions were lost."""


@dataclass(frozen=True)
class Merged(TapeRecord):
    """An outer step: a new version of a fragment, with all its inputs."""

    fragment: int
    version: int
    round: int
    shares: tuple[Share, ...]
    outer_lr: float
    outer_momentum: float
    presence: float
    """Factor by which the progress was scaled, because some of the asked learners were missing."""
    asked: int = 0
    """Learners that were asked or answered."""


@dataclass(frozen=True)
class MergeFailed(TapeRecord):
    """A merge could not be computed or stored. It is retried; repeated failures share one record."""

    fragment: int
    round: int
    reason: str
    times: int = 1
    """Failures in a row."""
    until: float | None = None
    """Time of the last one, in Unix seconds."""


@dataclass(frozen=True)
class LeftOut(TapeRecord):
    """No process served this fragment at the end of the run, so it stays at this version."""

    fragment: int
    version: int


# ---------------------------------------------------------------- guards


@dataclass(frozen=True)
class Refused(TapeRecord):
    """A message from a learner or shard was refused."""

    reason: str
    learner: str | None = None
    shard: int | None = None
    fragment: int | None = None
    round: int | None = None


@dataclass(frozen=True)
class Unhealthy(TapeRecord):
    """A contribution was excluded from its merge."""

    learner: str
    fragment: int
    round: int
    reason: str


@dataclass(frozen=True)
class Quarantined(TapeRecord):
    """A learner's contributions are not merged until it has sent `sync.strikes` healthy ones."""

    learner: str
    reason: str


@dataclass(frozen=True)
class Readmitted(TapeRecord):
    """A learner's contributions are merged again."""

    learner: str


@dataclass(frozen=True)
class Diverged(TapeRecord):
    """The loss stayed far above its best. The model is rolled back to the good copy, unless `why` says why not."""

    step: int
    rolled_back: bool
    loss: float | None = None
    """Median loss over the learners, above the limit."""
    best: float | None = None
    good_step: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class GoodKept(TapeRecord):
    """A good copy of the model was kept for a later rollback."""

    step: int


@dataclass(frozen=True)
class GoodNotKept(TapeRecord):
    """A good copy of the model could not be written."""

    step: int
    reason: str


@dataclass(frozen=True)
class Restored(TapeRecord):
    """A fragment was rolled back to the good copy, as a new version."""

    fragment: int
    version: int
    good_step: int


@dataclass(frozen=True)
class NotRestored(TapeRecord):
    """A fragment could not be rolled back and keeps its current values."""

    fragment: int
    reason: str


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class Leased(TapeRecord):
    """A range of samples was leased to a session."""

    learner: str
    session: str
    position: int
    """Where the range starts in the sequence of all samples leased to this session."""
    pool: str
    start: int
    count: int


@dataclass(frozen=True)
class Returned(TapeRecord):
    """Samples that are in no merge were taken back from a session and will be leased again."""

    learner: str
    session: str
    position: int
    ranges: tuple[tuple[str, int, int], ...]
    """(pool, start, count)."""
    why: str


# ---------------------------------------------------------------- storage


@dataclass(frozen=True)
class SnapshotTaken(TapeRecord):
    """A consistent copy of the whole run was kept."""

    number: int
    """Name of its folder in `snapshots/`."""
    step: int
    tokens: int
    islands: tuple[tuple[str, str], ...]
    """(learner, "kept" or why the snapshot does not include its optimizer state)."""
    seconds: float


@dataclass(frozen=True)
class SnapshotFailed(TapeRecord):
    """A snapshot could not be kept."""

    reason: str


@dataclass(frozen=True)
class RestoredFrom(TapeRecord):
    """This run was created from a snapshot of another run."""

    run_id: str
    number: int
    step: int


@dataclass(frozen=True)
class Repaired(TapeRecord):
    """A part of the run folder was missing or damaged when the folder was opened."""

    what: str
    """One line: what was wrong, and what that cost."""


@dataclass(frozen=True)
class Recovered(TapeRecord):
    """The newest version of a fragment (`lost`) was damaged. The fragment continues as `version`."""

    fragment: int
    lost: int
    """The damaged version."""
    version: int
    source: str
    """Where its values came from: an island's name, or a description of the older state."""


@dataclass(frozen=True)
class TapeRecovered(TapeRecord):
    """The tape itself was damaged. Earlier records may be missing."""

    problem: str
    cost: str


@dataclass(frozen=True)
class TapeGap(TapeRecord):
    """The disk was not writable for so long that records were dropped."""

    missing: dict[str, int]
    """Dropped records by kind."""
    until: float
    """Time of the last record dropped, in Unix seconds."""


# ---------------------------------------------------------------- shards and faults


@dataclass(frozen=True)
class ShardJoined(TapeRecord):
    """A shard serves its fragments."""

    shard: int
    address: str


@dataclass(frozen=True)
class ShardLost(TapeRecord):
    """A shard's process is gone."""

    shard: int


@dataclass(frozen=True)
class FaultInjected(TapeRecord):
    """A fault was injected on purpose (`skerry chaos`)."""

    part: str
    """`syncer` or the name of an island."""
    fault: str
    detail: str
    words: str
    """The fault in the syntax of a chaos plan."""


@dataclass(frozen=True)
class FaultHealed(TapeRecord):
    """An injected fault is over."""

    part: str
    fault: str
    detail: str
    words: str


@dataclass(frozen=True)
class PartRestarted(TapeRecord):
    """The supervisor restarted a process of the run."""

    part: str
    pid: int
