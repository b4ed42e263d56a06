"""Data leases as the syncer's state machine deals with them: who comes and goes decides what is given and taken back."""

from __future__ import annotations

from skerry.config import SyncConfig
from skerry.core.leases.ranges import Leases
from skerry.core.messages import Action, Declared, Joined, Lease, NoLease, Record, Reported
from skerry.core.standing import FragmentProgress, LearnerState, Standing


class LeaseDesk:
    """Shares the state machine's learners and fragments, and changes neither."""

    def __init__(
        self,
        sync: SyncConfig,
        standing: Standing,
        fragments: list[FragmentProgress],
        learners: dict[str, LearnerState],
        now: float,
    ) -> None:
        self._lease_s = sync.lease_s
        self._fragments = fragments
        self._learners = learners
        self._started_at = now
        self.leases = Leases(dict(pin.rsplit("=", 1) for pin in sync.pins))
        self.leases.restore(standing.leases)
        for fragment in fragments:
            # What is merged is on disk with the merge itself, the standing may be a moment older.
            for name, counted in fragment.counted.items():
                self.leases.merged(name, learners[name].session, counted.samples)

    def settle(self, event: Joined, resumed: bool, actions: list[Action]) -> bool:
        """Whether this process still holds what it was given. If not, or if it starts over, nothing is its own any more."""
        holding = self.leases.holdings.get(event.name)
        if holding is not None and holding.session != event.session:
            self.end(event.name, "another process has taken its place", actions)
        self.leases.connected(event.name)
        # One that was told that it has lost something may not have heard it.
        holds = event.lease_floor >= self.leases.of(event.name, event.session).floor
        if not (resumed and holds):
            self.take_back(event.name, "it starts over", actions)
        if event.leased > self.leases.of(event.name, event.session).given:
            # The tape has lost what it was given last. None of that is its own any more, and others may be given it again.
            self.leases.disown(event.name, event.session, event.leased)
        return holds

    def take_back(self, name: str, why: str, actions: list[Action]) -> None:
        holding = self.leases.holdings.get(name)
        if holding is None:
            return
        # What has arrived and is not merged yet will be, or is dropped with its contribution.
        arrived = [f.round.arrived[name] for f in self._fragments if f.round and name in f.round.arrived]
        kept = max((offer.samples[1] for offer in arrived if offer.session in ("", holding.session)), default=0)
        session, position, ranges = self.leases.take_back(name, kept)
        if ranges:
            given_back = [[held.pool, held.start, held.count] for held in ranges]
            told = {"learner": name, "session": session, "position": position, "ranges": given_back, "why": why}
            actions.append(Record("returned", told))

    def end(self, name: str, why: str, actions: list[Action]) -> None:
        """This process will not come back."""
        if name in self.leases.holdings:
            self.take_back(name, why, actions)
            self.leases.forget(name)

    def declare(self, event: Declared, actions: list[Action]) -> None:
        learner = self._learners.get(event.name)
        if learner is None:
            return
        reason = self.leases.declare(event.name, learner.session, learner.region, event.pools)
        if reason is not None:
            pools = [pool.name for pool in event.pools]
            actions.append(Record("refused", {"learner": event.name, "pools": pools, "reason": reason}))
            actions.append(NoLease(event.name, reason))

    def give(self, event: Reported, actions: list[Action]) -> None:
        learner = self._learners[event.name]
        if event.need is None or learner.phase not in ("waiting", "training"):
            return
        live = sum(other.phase != "gone" and name in self.leases.holdings for name, other in self._learners.items())
        told, fresh = self.leases.give(event.name, event.need, live)
        for position, found in fresh:
            what = {"pool": found.pool, "start": found.start, "count": found.count}
            actions.append(Record("leased", {"learner": event.name, "session": learner.session, "position": position, **what}))
        for position, found in told:
            actions.append(Lease(event.name, learner.session, position, found.pool, found.start, found.count))

    def expire(self, now: float, actions: list[Action]) -> None:
        for name, holding in self.leases.holdings.items():
            learner = self._learners.get(name)
            if not holding.ranges or (learner is not None and learner.phase != "gone"):
                continue
            # From when we found it gone: a syncer that stood still itself has not heard of anybody.
            if now >= (learner.gone_at if learner is not None else self._started_at) + self._lease_s:
                self.take_back(name, f"it was not heard of for {self._lease_s:.0f} s", actions)
