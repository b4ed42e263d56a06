"""Events that the syncer core handles and actions that it orders. Plain data, without behaviour.

A tape record (records.py) is an action too: it orders nothing but to be written.
"""

from __future__ import annotations

from dataclasses import dataclass

from skerry.core.leases.ranges import Need, Pool
from skerry.core.schema import TapeRecord
from skerry.core.share import Share

# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Hello:
    """A learner wants to join. The session identifies its process: a known session is a reconnect, a new one a restart."""

    learner: str
    session: str
    step: int = 0
    tokens: int = 0
    held: tuple[int, ...] = ()
    """The versions it holds, one per fragment; empty if it has none yet."""
    region: str = ""
    leased: int = 0
    """Samples it knows it was given."""
    lease_floor: int = 0
    """The position up to which it knows that its leases were taken back."""
    platform: str = ""
    """Everything that its arithmetic depends on to the last bit: library, device, threads."""


@dataclass(frozen=True)
class Ready:
    """A learner that joined has fetched every fragment and can start."""

    learner: str


@dataclass(frozen=True)
class Reported:
    """A learner's heartbeat: its step, and the tokens its session has trained on."""

    learner: str
    step: int
    tokens: int
    step_time_s: float
    loss: float | None = None
    need: Need | None = None
    """Its demand for leased data, if it uses leases."""


@dataclass(frozen=True)
class DataDeclared:
    """A learner declares which data pools it can read and asks for leases."""

    learner: str
    pools: tuple[Pool, ...]


@dataclass(frozen=True)
class Contributed:
    """A contribution has arrived completely."""

    learner: str
    fragment: int
    round: int
    """The round it answers."""
    base: int
    """The version from which the progress counts."""
    steps: int
    tokens: int
    at_step: int = 0
    """The session's total steps when the snapshot was taken."""
    norm: float = 0.0
    """The contribution's Euclidean norm; not finite if the contribution is not."""
    repeated: bool = False
    """Whether it is bit for bit identical to this learner's previous contribution to the fragment."""
    session: str = ""
    samples: tuple[int, int] = (0, 0)
    """Leased samples it covers, as (from, to) positions in the session's lease sequence."""
    at_tokens: int = 0
    """The session's total tokens when the snapshot was taken."""


@dataclass(frozen=True)
class NothingToGive:
    """A learner that was asked has no progress to contribute."""

    learner: str
    fragment: int
    round: int


@dataclass(frozen=True)
class LeaveRequested:
    """A learner wants to leave, after a last contribution to every fragment."""

    learner: str


@dataclass(frozen=True)
class StreamEnded:
    """A learner's control stream ended without a goodbye."""

    learner: str
    session: str


@dataclass(frozen=True)
class Stored:
    """The ordered merge or restore is computed and durable."""

    fragment: int
    version: int


@dataclass(frozen=True)
class StoreFailed:
    """The ordered merge or restore could not be computed or made durable. Nothing has changed; it will be retried."""

    fragment: int
    reason: str


@dataclass(frozen=True)
class GoodCopyKept:
    """The ordered good copy of the model was written, or could not be."""

    step: int
    failure: str = ""
    """Why it could not be written; empty if it was."""


@dataclass(frozen=True)
class FragmentsAway:
    """The process that serves these fragments is gone, and the contributions it had gathered are lost."""

    fragments: tuple[int, ...]


@dataclass(frozen=True)
class FragmentsBack:
    """These fragments are served again, from their last stored versions."""

    fragments: tuple[int, ...]


@dataclass(frozen=True)
class FragmentRecovered:
    """The newest version of this fragment is lost for good. An older state takes its place as this new version."""

    fragment: int
    version: int


@dataclass(frozen=True)
class CloseRequested:
    """An operator asked to end the run."""


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
    """Admit a learner: tell it its slot, the run's step and the current versions."""

    learner: str
    slot: int
    step: int
    resumed: bool
    versions: tuple[int, ...]
    merged_rounds: tuple[int, ...]
    """Per fragment: the round in which its version was merged."""
    counted: tuple[int, ...]
    """Per fragment: how many of the learner's own steps are part of the current version."""
    quarantined: bool = False
    leased: int = 0
    """Total samples ever leased to this session. If it does not resume, it no longer holds any of them."""


@dataclass(frozen=True)
class Lease:
    """Tell a session that these samples are leased to it, once that is durable."""

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
    """Tell a learner to start training at the run's step."""

    learner: str
    step: int


@dataclass(frozen=True)
class Ask:
    """Ask a learner for its progress on a fragment since version `min_base` or later."""

    learner: str
    fragment: int
    round: int
    min_base: int
    anew: bool = False
    """An earlier answer to this question was lost, so the learner must answer again."""


@dataclass(frozen=True)
class Merge:
    """Compute the next version from these contributions, make it durable, then send Stored."""

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
        """Which contributions count from the previous version, not from an older one."""
        return tuple(share.base == self.version - 1 for share in self.shares)


@dataclass(frozen=True)
class KeepGood:
    """Keep a copy of the current model as the good copy, then send GoodCopyKept."""

    step: int


@dataclass(frozen=True)
class Restore:
    """Make the next version of this fragment from the good copy, make it durable, then send Stored."""

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
    """Per learner: how many of its own steps are part of the new version."""


@dataclass(frozen=True)
class StopTraining:
    """Tell a learner that the run is closing: stop training and contribute what it has."""

    learner: str


@dataclass(frozen=True)
class Caution:
    """Tell a learner that it is in quarantine because its contributions are unhealthy, or that the quarantine is over."""

    learner: str
    quarantined: bool
    reason: str


LEFT = "left"
OVER = "the run is over"


@dataclass(frozen=True)
class Goodbye:
    """End a learner's stream. Unless it is final, the learner may reconnect."""

    learner: str
    reason: str
    final: bool = True


@dataclass(frozen=True)
class WakeAt:
    """Send a Tick at this time, unless another event comes first."""

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
    """The answer to a Hello or a contribution: accepted, or refused and why."""

    reason: str = ""
    """Why it was refused; empty if it was accepted."""
    unhealthy: bool = False
    """The contribution arrived intact but cannot be merged."""
    merged: bool = True
    """The contribution takes part in the next merge. False for a healthy contribution of a learner in quarantine."""

    @property
    def accepted(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class Outcome:
    """The result of an event: actions to take, in order, and a verdict if the event asked for one."""

    actions: list[Action]
    verdict: Verdict | None = None
