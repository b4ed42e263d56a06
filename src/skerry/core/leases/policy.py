"""Lease policy: how joining, leaving and silence of learners decide which samples are leased and taken back."""

from __future__ import annotations

from typing import Any

from skerry.core import records
from skerry.core.leases.ranges import Leases
from skerry.core.messages import Action, DataDeclared, Hello, Lease, NoLease, Reported
from skerry.core.state import RunState


class LeasePolicy:
    """Reads the shared RunState but does not change it."""

    def __init__(self, run: RunState, saved: dict[str, Any], now: float) -> None:
        """`saved` comes from `Leases.to_json`."""
        self._run = run
        self._started_at = now
        self.leases = Leases(dict(pin.rsplit("=", 1) for pin in run.sync.pins))
        self.leases.restore(saved)
        for fragment in run.fragments:
            # Merged positions are stored with each merge; `saved` may be slightly older.
            for name, counted in fragment.counted.items():
                self.leases.merged(name, run.learners[name].session, counted.samples)

    def given_to(self, learner: str, session: str) -> int:
        """Total samples ever leased to this session."""
        return self.leases.of(learner, session).given

    def settle(self, event: Hello, resumed: bool, actions: list[Action]) -> bool:
        """Settle the leases of a learner that joins. Returns whether its session resumes; if not, its leases are taken back."""
        name, session = event.learner, event.session
        holding = self.leases.holdings.get(name)
        if holding is not None and holding.session != session:
            self.end(name, "another process has taken its place", actions)
        self.leases.connected(name)
        # A session may not have heard that its leases were taken back. Then its progress contains samples of others.
        holds = event.lease_floor >= self.leases.of(name, session).floor
        known = event.leased <= self.given_to(name, session)
        if not (resumed and holds and known):
            self.take_back(name, "it starts over", actions)
        if not known:
            # The tape lost its newest leases, so those samples may be leased to others again.
            self.leases.disown(name, session, event.leased)
        return resumed and holds and known

    def take_back(self, name: str, why: str, actions: list[Action]) -> None:
        """Take back the learner's samples that are in no merge and in no contribution that waits for one."""
        holding = self.leases.holdings.get(name)
        if holding is None:
            return
        arrived = [round_.arrived[name] for round_ in self._run.open_rounds() if name in round_.arrived]
        kept = max((offer.samples[1] for offer in arrived if offer.session in ("", holding.session)), default=0)
        session, position, ranges = self.leases.take_back(name, kept)
        if ranges:
            given_back = tuple((held.pool, held.start, held.count) for held in ranges)
            actions.append(records.Returned(name, session, position, given_back, why))

    def end(self, name: str, why: str, actions: list[Action]) -> None:
        """Take back everything this learner holds and forget it; its session will not return."""
        if name in self.leases.holdings:
            self.take_back(name, why, actions)
            self.leases.forget(name)

    def end_all(self, why: str, actions: list[Action]) -> None:
        for name in list(self.leases.holdings):
            self.end(name, why, actions)

    def disconnected(self, name: str) -> None:
        self.leases.disconnected(name)

    def declare(self, event: DataDeclared, now: float, actions: list[Action]) -> None:
        learner = self._run.learners.get(event.learner)
        if learner is None:
            return
        reason = self.leases.declare(event.learner, learner.session, learner.region, event.pools)
        if reason is not None:
            actions.append(records.Refused(reason, event.learner))
            actions.append(NoLease(event.learner, reason))

    def give(self, event: Reported, actions: list[Action]) -> None:
        """Lease more samples to a learner that reports a need."""
        learner = self._run.learners[event.learner]
        if event.need is None or learner.phase not in ("waiting", "training"):
            return
        live = sum(other.name in self.leases.holdings for other in self._run.live())
        told, fresh = self.leases.give(event.learner, event.need, live)
        for position, leased in fresh:
            where = (event.learner, learner.session, position)
            actions.append(records.Leased(*where, leased.pool, leased.start, leased.count))
        for position, leased in told:
            actions.append(Lease(event.learner, learner.session, position, leased.pool, leased.start, leased.count))

    def expire(self, now: float, actions: list[Action]) -> None:
        """Take back the leases of learners that have been gone for `lease_s` (rule 11)."""
        lease_s = self._run.sync.lease_s
        for name, holding in self.leases.holdings.items():
            learner = self._run.learners.get(name)
            if not holding.ranges or (learner is not None and learner.phase != "gone"):
                continue
            # Counted from when the learner was declared lost, not last heard: the syncer itself may have been frozen.
            if now >= (learner.gone_at if learner is not None else self._started_at) + lease_s:
                self.take_back(name, f"it was gone for {lease_s:.0f} s", actions)
