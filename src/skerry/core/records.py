"""What is written on the tape: one class for each kind of record. The only place that knows the schema.

Tuples are written as JSON lists and read back as tuples; fields without a value are left out. docs/tape.md is generated from
this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from skerry.core.schema import TapeRecord
from skerry.core.share import Share

# ---------------------------------------------------------------- the run


@dataclass(frozen=True)
class Created(TapeRecord):
    """The run folder was made."""

    fragments: int


@dataclass(frozen=True)
class SyncerStarted(TapeRecord):
    """A syncer process opened the folder."""

    step: int
    phase: str


@dataclass(frozen=True)
class Began(TapeRecord):
    """Enough learners are there, and training starts."""

    learners: tuple[str, ...]


@dataclass(frozen=True)
class Closing(TapeRecord):
    """The run closes: everyone stops, and every fragment is merged once more."""

    why: str
    """`budget` or `requested`."""
    step: int
    tokens: int


@dataclass(frozen=True)
class Ended(TapeRecord):
    """Every fragment is final."""

    step: int
    tokens: int
    merges: int


# ---------------------------------------------------------------- learners


@dataclass(frozen=True)
class Joined(TapeRecord):
    """A learner was let in. If it resumed, it keeps the versions and progress it has."""

    learner: str
    session: str
    slot: int
    """Its number among the live learners, from 0."""
    resumed: bool
    step: int
    platform: str = ""
    """What the last bit of its arithmetic depends on: library, device, threads."""


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
    """A learner asked to leave, after one last contribution to every fragment."""

    learner: str


@dataclass(frozen=True)
class Left(TapeRecord):
    """A learner that asked to leave has left."""

    learner: str


@dataclass(frozen=True)
class Banked(TapeRecord):
    """A session is over. Tokens it trained on stay counted."""

    learner: str
    session: str
    tokens: int


@dataclass(frozen=True)
class OptimizerRestored(TapeRecord):
    """A learner that joined a running run says where its optimizer state came from: own, peer or cold."""

    learner: str
    source: str


@dataclass(frozen=True)
class StateRelayed(TapeRecord):
    """A learner was given the optimizer state of a peer."""

    learner: str
    donor: str


@dataclass(frozen=True)
class Journaled(TapeRecord):
    """What a session did that cannot be derived from the rest of the tape; a replay needs it."""

    learner: str
    session: str
    since: int
    """Entries are complete from this step on ..."""
    until: int
    """... up to this one."""
    adopted: tuple[tuple[int, int, int, bool], ...] = ()
    """(after step, fragment, version, whether it was taken as it is, whatever the rule of adoption)."""
    tokens: tuple[tuple[int, int], ...] = ()
    """(from step on, run tokens that its schedule follows)."""
    data: tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...] = ()
    """(step, ranges of samples as (pool, start, count)), where they do not continue those of the step before."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Steps whose entries had to be dropped: from, to."""
    source: str | None = None
    origin: tuple[tuple[str, int], ...] | None = None
    """Where its optimizer state came from: sessions, and after how many of their steps."""


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
    """The process that held these contributions is gone, and with it what was gathered. It is asked for again."""

    fragment: int
    round: int
    lost: tuple[str, ...]
    """Learners whose contributions were lost."""


@dataclass(frozen=True)
class Merged(TapeRecord):
    """An outer step: a new version of a fragment, with everything it was computed from."""

    fragment: int
    version: int
    round: int
    shares: tuple[Share, ...]
    outer_lr: float
    outer_momentum: float
    presence: float
    """The progress was scaled by this, because asked learners were missing."""
    asked: int = 0
    """Learners that were asked or answered."""


@dataclass(frozen=True)
class MergeFailed(TapeRecord):
    """A merge could not be computed or stored. It is tried again; repeated failures are one record."""

    fragment: int
    round: int
    reason: str
    times: int = 1
    """Failures in a row."""
    until: float | None = None
    """Time of the last one, in Unix seconds."""


@dataclass(frozen=True)
class LeftOut(TapeRecord):
    """At the end of the run nobody served this fragment, so it stays at this version."""

    fragment: int
    version: int


# ---------------------------------------------------------------- guards


@dataclass(frozen=True)
class Refused(TapeRecord):
    """Something a peer sent was turned down."""

    reason: str
    learner: str | None = None
    shard: int | None = None
    fragment: int | None = None
    round: int | None = None


@dataclass(frozen=True)
class Unhealthy(TapeRecord):
    """A contribution was left out of its merge."""

    learner: str
    fragment: int
    round: int
    reason: str


@dataclass(frozen=True)
class Quarantined(TapeRecord):
    """A learner's contributions are not merged until it has sent several healthy ones."""

    learner: str
    reason: str


@dataclass(frozen=True)
class Readmitted(TapeRecord):
    """A learner's contributions are merged again."""

    learner: str


@dataclass(frozen=True)
class Diverged(TapeRecord):
    """The loss stayed far above its best. The model is put back to the good copy, unless `why` says why not."""

    step: int
    rolled_back: bool
    loss: float | None = None
    """Median loss over the learners, above the limit."""
    best: float | None = None
    good_step: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class GoodKept(TapeRecord):
    """A copy of the model was kept that can be gone back to."""

    step: int


@dataclass(frozen=True)
class GoodNotKept(TapeRecord):
    """Such a copy could not be written."""

    step: int
    reason: str


@dataclass(frozen=True)
class Restored(TapeRecord):
    """A fragment was put back to the good copy, as a new version."""

    fragment: int
    version: int
    good_step: int


@dataclass(frozen=True)
class NotRestored(TapeRecord):
    """A fragment could not be put back and goes on from what it is."""

    fragment: int
    reason: str


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class Leased(TapeRecord):
    """A range of samples was given to a session."""

    learner: str
    session: str
    position: int
    """Where it starts in the sequence of all samples this session was given."""
    pool: str
    start: int
    count: int


@dataclass(frozen=True)
class Returned(TapeRecord):
    """Samples that are in no merge were taken back from a session, to be leased again."""

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
    """(learner, "kept" or why its optimizer state is not in it)."""
    seconds: float


@dataclass(frozen=True)
class SnapshotFailed(TapeRecord):
    """A snapshot could not be kept."""

    reason: str


@dataclass(frozen=True)
class RestoredFrom(TapeRecord):
    """This run was made from a snapshot of another one."""

    run_id: str
    number: int
    step: int


@dataclass(frozen=True)
class Repaired(TapeRecord):
    """Something in the run folder was missing or damaged when it was opened."""

    what: str
    """One line: what was wrong, and what that cost."""


@dataclass(frozen=True)
class Recovered(TapeRecord):
    """The newest version of a fragment was damaged. The fragment goes on as `version`."""

    fragment: int
    lost: int
    """The damaged version."""
    version: int
    source: str
    """Where its values came from: an island's name, or an older state in words."""


@dataclass(frozen=True)
class TapeRecovered(TapeRecord):
    """The tape itself was damaged. Records before this one may be missing."""

    problem: str
    cost: str


@dataclass(frozen=True)
class TapeGap(TapeRecord):
    """The disk took nothing for so long that records were dropped."""

    missing: dict[str, int]
    """How many of each kind."""
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
    """A shard is gone."""

    shard: int


@dataclass(frozen=True)
class FaultInjected(TapeRecord):
    """Chaos did something to a part of the run on purpose."""

    part: str
    """`syncer` or the name of an island."""
    fault: str
    detail: str
    words: str
    """The fault in the short form that a plan understands."""


@dataclass(frozen=True)
class FaultHealed(TapeRecord):
    """A fault that chaos injected is over."""

    part: str
    fault: str
    detail: str
    words: str


@dataclass(frozen=True)
class PartRestarted(TapeRecord):
    """The supervisor started a part of the run again."""

    part: str
    pid: int
