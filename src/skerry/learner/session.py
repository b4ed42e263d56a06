"""What a learner has once it knows which run it joins, and the lock that guards it.

Two threads share a session: the training thread, and the event loop in the background. Both hold `lock` while they read or
change what the other may change. It is notified when there is news for the training thread. The replica's gate, which guards
the model's tensors, always comes before the lock.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from skerry.config import SyncConfig
from skerry.core.exchange import Exchange
from skerry.core.leases.cursor import LeaseCursor
from skerry.core.leases.ranges import Pool
from skerry.errors import ConfigError, SkerryError
from skerry.learner.journal import Journal
from skerry.learner.pace import Pace
from skerry.learner.replica import Prepared, Replica, Snapshot
from skerry.learner.transport.routes import Routes

log = logging.getLogger("skerry.learner")


class Session:
    def __init__(self, name: str, run_id: str, sync: SyncConfig, replica: Replica) -> None:
        self.name, self.run_id, self.sync = name, run_id, sync
        self.id = uuid.uuid4().hex
        self.lock = threading.Condition()
        self.exchange = Exchange(sync, len(replica.layout.fragments))
        self.replica = replica
        self.journal = Journal()
        self.pace = Pace()
        self.prepared: dict[int, Prepared] = {}
        """By fragment: downloads that wait for the training thread to adopt them."""
        self.staged: dict[int, Snapshot] = {}
        """In lock-step, by fragment: snapshots the training thread took when fragments were due."""
        # What the syncer said.
        self.slot = 0
        self.run_tokens = 0
        self.told_at_tokens = 0
        """This session's token count when it last heard how far the run is."""
        self.connected = False
        self.quarantined = False
        self.goodbye: str | None = None
        # What the loop said.
        self.loss: float | None = None
        self.leaving = False
        self.pools: tuple[Pool, ...] = ()
        """Data this learner can read; none if it does not use leases."""
        self.leases = LeaseCursor()
        self.no_lease: str | None = None
        """Why the syncer gives it no data."""
        # What became of it.
        self.fixed_loaded = False
        self.failure: SkerryError | None = None
        self.closing = False
        self.routes: Routes | None = None
        """Where bulk data goes; None while there is no connection."""
        self.wake: Callable[[], None] = lambda: None
        """From any thread: look whether something can be sent or fetched."""

    def fail(self, error: SkerryError) -> None:
        """This learner is no longer part of the run. Training may go on without it."""
        log.error("%s is no longer part of the run: %s", self.name, error)
        with self.lock:
            self.failure = error
            self.exchange.stop()
            self.lock.notify_all()

    def heard(self, run_tokens: int) -> None:
        """The syncer said how far the run is. With the lock held."""
        self.run_tokens = max(self.run_tokens, run_tokens)
        self.told_at_tokens = self.exchange.totals.tokens

    def stop_when_spent(self) -> None:
        """Without the syncer: stop once this learner alone has done all that was left of the run, which may have ended."""
        budget, trained = self.sync.budget_tokens, self.exchange.totals.tokens - self.told_at_tokens
        if not self.connected and budget and self.run_tokens + trained >= budget:
            with self.lock:
                self.exchange.stop()

    def adopt_ready(self) -> None:
        """Put every version that may be adopted now into the model. With the lock held, and the gate once training began."""
        exchange, replica, adopted = self.exchange, self.replica, False
        for version in exchange.adoptable():
            prepared = self.prepared.pop(version.fragment, None)
            if prepared is None:
                continue
            if not adopted:
                replica.model_device.before_write()
            try:
                whole = replica.adopt(version.fragment, prepared, exchange.uncounted_since(version).steps, version.counted)
            except ConfigError as error:
                self.fail(error)
                raise
            self.journal.adopted(exchange.totals.steps, version.fragment, version.version, whole)
            exchange.adopted(version)
            self.staged.pop(version.fragment, None)  # it holds the version before and a copy on the device
            adopted = True
        if adopted:
            replica.model_device.after_write()
            self.wake()

    def release(self) -> None:
        """Nothing will be exchanged any more: let go of the memory."""
        with self.lock:
            self.prepared.clear()
            self.staged.clear()
            self.replica.release()
