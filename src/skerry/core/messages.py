"""What can happen to the syncer (events) and what it decides (actions). Plain data, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skerry.core.leases.ranges import Need, Pool

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Joined:
    """A learner said hello. The session names its process: the same session again is a reconnect, another one a restart."""

    name: str
    session: str
    step: int = 0
    tokens: int = 0
    held: tuple[int, ...] = ()
    """Versions it holds, one per fragment; empty for a learner that has none yet."""
    region: str = ""
    leased: int = 0
    """How many samples it knows it was given."""
    lease_floor: int = 0
    """Up to where it knows that they are not its own any more."""
    platform: str = ""
    """What the last bit of its arithmetic depends on."""


@dataclass(frozen=True)
class Ready:
    """A learner that joined has fetched every fragment and can start."""

    name: str


@dataclass(frozen=True)
class Reported:
    """Heard from a learner: its own step and the tokens its process has trained on."""

    name: str
    step: int
    tokens: int
    step_time_s: float
    loss: float | None = None
    need: Need | None = None
    """Of data, if it takes part in leases."""


@dataclass(frozen=True)
class Declared:
    """A learner says which data it can read; it wants leases for it."""

    name: str
    pools: tuple[Pool, ...]


@dataclass(frozen=True)
class Contributed:
    """A contribution has arrived whole. `step` is the round it answers, `upto` the learner's own count of steps in it."""

    name: str
    fragment: int
    step: int
    base: int
    steps: int
    tokens: int
    upto: int = 0
    norm: float = 0.0
    """Of the contribution as a vector; not finite if it, or anything in it, is not."""
    repeated: bool = False
    """It is bit for bit what this learner sent for the fragment last time."""
    session: str = ""
    samples: tuple[int, int] = (0, 0)
    """Leased samples in it, as positions in what its process was given: from, to."""
    upto_tokens: int = 0
    """The learner's own count of tokens in it."""


@dataclass(frozen=True)
class NothingToGive:
    """A learner that was asked has no progress to give."""

    name: str
    fragment: int
    step: int


@dataclass(frozen=True)
class Leaving:
    """A learner wants to go, after one last contribution of every fragment."""

    name: str


@dataclass(frozen=True)
class Disconnected:
    """The learner's stream ended without a goodbye."""

    name: str
    session: str


@dataclass(frozen=True)
class Stored:
    """The merge that was ordered is computed and durable."""

    fragment: int
    version: int


@dataclass(frozen=True)
class StoreFailed:
    """The merge that was ordered could not be computed or made durable; nothing was changed, and it will be tried again."""

    fragment: int
    reason: str


@dataclass(frozen=True)
class GoodKept:
    """A copy of the whole model, as it was at this step when all was well, can be gone back to; or it could not be kept."""

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
class Recovered:
    """The newest version of this fragment is lost for good. It goes on from an older state, as this version."""

    fragment: int
    version: int


@dataclass(frozen=True)
class CloseRequested:
    """Somebody asked for the run to end now."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Joined
    | Ready
    | Reported
    | Declared
    | Contributed
    | NothingToGive
    | Leaving
    | Disconnected
    | Stored
    | StoreFailed
    | GoodKept
    | FragmentsAway
    | FragmentsBack
    | Recovered
    | CloseRequested
    | Tick
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True)
class Welcome:
    """Tell a learner its place: slot, the run's step, the current versions."""

    name: str
    slot: int
    step: int
    resumed: bool
    versions: tuple[int, ...]
    merged_steps: tuple[int, ...]
    """For each fragment: the round its version was merged in."""
    counted: tuple[int, ...]
    """For each fragment: the learner's progress up to this many of its own steps is part of the current version."""
    quarantined: bool = False
    leased: int = 0
    """Samples it was ever given. If it does not resume, it holds none of them any more."""


@dataclass(frozen=True)
class Lease:
    """Tell a process that these samples are its own, once that is durable."""

    name: str
    session: str
    position: int
    pool: str
    start: int
    count: int


@dataclass(frozen=True)
class NoLease:
    """Tell a learner that it gets no data, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Begin:
    """Tell a learner to start training, from the run's step."""

    name: str
    step: int


@dataclass(frozen=True)
class Ask:
    """Ask a learner for a fragment. It must have adopted version `min_base` or a later one: what it gave is in there."""

    name: str
    fragment: int
    step: int
    min_base: int
    anew: bool = False
    """What was answered to this question before is lost."""


@dataclass(frozen=True)
class Share:
    """One contribution's part in a merge."""

    name: str
    base: int
    steps: int
    tokens: int
    weight: float
    upto: int = 0
    session: str = ""
    samples: tuple[int, int] = (0, 0)
    upto_tokens: int = 0


@dataclass(frozen=True)
class Merge:
    """Compute the next version from these contributions, make it durable, then report Stored."""

    fragment: int
    version: int
    step: int
    shares: tuple[Share, ...]
    outer_lr: float
    outer_momentum: float
    presence: float
    asked: int = 0

    @property
    def fresh(self) -> tuple[bool, ...]:
        """Which contributions are progress since the version before this one."""
        return tuple(share.base == self.version - 1 for share in self.shares)


@dataclass(frozen=True)
class KeepGood:
    """Keep a copy of the model as it is now, then report GoodKept."""

    step: int


@dataclass(frozen=True)
class Restore:
    """Make the next version of this fragment from the good copy of that step, make it durable, then report Stored."""

    fragment: int
    version: int
    step: int
    good_step: int


@dataclass(frozen=True)
class Announce:
    """Tell these learners that a new version can be fetched."""

    names: tuple[str, ...]
    fragment: int
    version: int
    step: int
    counted: tuple[int, ...]
    """For each of them: its progress up to this many of its own steps is part of the new version."""


@dataclass(frozen=True)
class StopTraining:
    """Tell a learner that the run is closing: stop, and give what it has."""

    name: str


@dataclass(frozen=True)
class Caution:
    """Tell a learner that its contributions are not merged any more because they are unhealthy, or that they are again."""

    name: str
    quarantined: bool
    reason: str


LEFT = "left"
OVER = "the run is over"


@dataclass(frozen=True)
class Goodbye:
    """End a learner's stream. If it is not final, the learner may connect again."""

    name: str
    reason: str
    final: bool = True


@dataclass(frozen=True)
class Record:
    """Write down a decision."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WakeAt:
    """Send a Tick at this time, if nothing happens earlier."""

    at: float


@dataclass(frozen=True)
class Ended:
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
    | Record
    | WakeAt
    | Ended
)
