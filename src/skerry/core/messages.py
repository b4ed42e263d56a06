"""What can happen to the syncer (events) and what it decides (actions). Plain data, without behaviour.

A decision that is only written down is a record (records.py), which is an action like the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from skerry.core.leases.ranges import Need, Pool
from skerry.core.schema import TapeRecord
from skerry.core.share import Share

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Hello:
    """A learner wants to join. The session names its process: the same session again is a reconnect, another one a restart."""

    learner: str
    session: str
    step: int = 0
    tokens: int = 0
    held: tuple[int, ...] = ()
    """Versions it holds, one per fragment; empty for a learner that has none yet."""
    region: str = ""
    leased: int = 0
    """How many samples it knows it was given."""
    lease_floor: int = 0
    """Up to where it knows that they are no longer its own."""
    platform: str = ""
    """What the last bit of its arithmetic depends on."""


@dataclass(frozen=True)
class Ready:
    """A learner that joined has fetched every fragment and can start."""

    learner: str


@dataclass(frozen=True)
class Reported:
    """A learner's heartbeat: its own step, and the tokens its session has trained on."""

    learner: str
    step: int
    tokens: int
    step_time_s: float
    loss: float | None = None
    need: Need | None = None
    """What it needs of leased data, if it uses any."""


@dataclass(frozen=True)
class DataDeclared:
    """A learner says which data it can read, and wants leases for it."""

    learner: str
    pools: tuple[Pool, ...]


@dataclass(frozen=True)
class Contributed:
    """A contribution has arrived whole."""

    learner: str
    fragment: int
    round: int
    """The round it answers."""
    base: int
    """The version it is progress since."""
    steps: int
    tokens: int
    at_step: int = 0
    """The learner's own step count when the snapshot was taken."""
    norm: float = 0.0
    """The contribution's Euclidean norm; not finite if the contribution is not."""
    repeated: bool = False
    """It is bit for bit what this learner sent for the fragment last time."""
    session: str = ""
    samples: tuple[int, int] = (0, 0)
    """Leased samples in it, as positions in the sequence its session was given: from, to."""
    at_tokens: int = 0
    """The learner's own token count when the snapshot was taken."""


@dataclass(frozen=True)
class NothingToGive:
    """A learner that was asked has made no progress."""

    learner: str
    fragment: int
    round: int


@dataclass(frozen=True)
class LeaveRequested:
    """A learner wants to go, after one last contribution to every fragment."""

    learner: str


@dataclass(frozen=True)
class StreamEnded:
    """A learner's control stream ended without a goodbye."""

    learner: str
    session: str


@dataclass(frozen=True)
class Stored:
    """The merge that was ordered is computed and durable."""

    fragment: int
    version: int


@dataclass(frozen=True)
class StoreFailed:
    """The merge that was ordered could not be computed or made durable. Nothing has changed; it will be tried again."""

    fragment: int
    reason: str


@dataclass(frozen=True)
class GoodCopyKept:
    """The copy of the whole model that was ordered can be gone back to; or it could not be written."""

    step: int
    failure: str = ""


@dataclass(frozen=True)
class FragmentsAway:
    """The process that has the data of these fragments is gone, and with it what was gathered for them."""

    fragments: tuple[int, ...]


@dataclass(frozen=True)
class FragmentsBack:
    """These fragments are served again, as they were stored last."""

    fragments: tuple[int, ...]


@dataclass(frozen=True)
class FragmentRecovered:
    """The newest version of this fragment is lost for good. It goes on from an older state, as this version."""

    fragment: int
    version: int


@dataclass(frozen=True)
class CloseRequested:
    """An operator asked for the run to end now."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Hello
    | Ready
    | Reported
    | DataDeclared
    | Contributed
    | NothingToGive
    | LeaveRequested
    | StreamEnded
    | Stored
    | StoreFailed
    | GoodCopyKept
    | FragmentsAway
    | FragmentsBack
    | FragmentRecovered
    | CloseRequested
    | Tick
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True)
class Welcome:
    """Tell a learner its place: slot, the run's step, the current versions."""

    learner: str
    slot: int
    step: int
    resumed: bool
    versions: tuple[int, ...]
    merged_rounds: tuple[int, ...]
    """For each fragment: the round its version was merged in."""
    counted: tuple[int, ...]
    """For each fragment: how many of the learner's own steps are part of the current version."""
    quarantined: bool = False
    leased: int = 0
    """Samples it was ever given. If it does not resume, it no longer holds any of them."""


@dataclass(frozen=True)
class Lease:
    """Tell a session that these samples are its own, once that is durable."""

    learner: str
    session: str
    position: int
    pool: str
    start: int
    count: int


@dataclass(frozen=True)
class NoLease:
    """Tell a learner that it gets no data, and why."""

    learner: str
    reason: str


@dataclass(frozen=True)
class Begin:
    """Tell a learner to start training, from the run's step."""

    learner: str
    step: int


@dataclass(frozen=True)
class Ask:
    """Ask a learner for its progress on a fragment, counted from version `min_base` or later, which contains what it gave
    before."""

    learner: str
    fragment: int
    round: int
    min_base: int
    anew: bool = False
    """Its answer to this question was lost. It must answer again."""


@dataclass(frozen=True)
class Merge:
    """Compute the next version from these contributions, make it durable, then report Stored."""

    fragment: int
    version: int
    round: int
    shares: tuple[Share, ...]
    outer_lr: float
    outer_momentum: float
    presence: float
    asked: int = 0
    tokens: int = 0
    """Tokens the run has trained on so far."""

    @property
    def fresh(self) -> tuple[bool, ...]:
        """Which contributions are progress since the version before this one."""
        return tuple(share.base == self.version - 1 for share in self.shares)


@dataclass(frozen=True)
class KeepGood:
    """Keep a copy of the model as it is now, then report GoodCopyKept."""

    step: int


@dataclass(frozen=True)
class Restore:
    """Make the next version of this fragment from the good copy of that step, make it durable, then report Stored."""

    fragment: int
    version: int
    round: int
    good_step: int


@dataclass(frozen=True)
class Announce:
    """Tell these learners that a new version can be fetched."""

    learners: tuple[str, ...]
    fragment: int
    version: int
    round: int
    counted: tuple[int, ...]
    """For each of them: how many of its own steps are part of the new version."""


@dataclass(frozen=True)
class StopTraining:
    """Tell a learner that the run is closing: stop, and give what it has."""

    learner: str


@dataclass(frozen=True)
class Caution:
    """Tell a learner that its contributions are no longer merged because they are unhealthy, or that they are again."""

    learner: str
    quarantined: bool
    reason: str


LEFT = "left"
OVER = "the run is over"


@dataclass(frozen=True)
class Goodbye:
    """End a learner's stream. If it is not final, the learner may connect again."""

    learner: str
    reason: str
    final: bool = True


@dataclass(frozen=True)
class WakeAt:
    """Send a Tick at this time, unless something happens earlier."""

    at: float


@dataclass(frozen=True)
class RunEnded:
    """The run is over; every fragment is final."""


Action = (
    Welcome
    | Lease
    | NoLease
    | Begin
    | Ask
    | Merge
    | KeepGood
    | Restore
    | Announce
    | StopTraining
    | Caution
    | Goodbye
    | WakeAt
    | RunEnded
    | TapeRecord
)

# ---------------------------------------------------------------- verdicts


@dataclass(frozen=True)
class Verdict:
    """The answer to a learner that wants to join or has contributed."""

    reason: str = ""
    """Why not; empty if it was accepted."""
    unhealthy: bool = False
    """The contribution arrived as it was sent, and cannot be merged."""
    merged: bool = True
    """The contribution takes part in the next merge. False for a healthy one from a learner in quarantine."""

    @property
    def accepted(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Outcome:
    """What follows from an event: what to do, in order, and the verdict if the event asked for one."""

    actions: list[Action]
    verdict: Verdict | None = None
