"""The state of a learner that has joined a run, and the lock that guards it.

The training thread and the background event loop share a session. Both hold `lock` while they touch shared state; it is
notified when there is news for the training thread. Lock order: the replica's gate, which guards the model's tensors, then
`lock`.
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
        """By fragment: versions ready for the training thread to adopt."""
        self.staged: dict[int, Snapshot] = {}
        """By fragment, in lock-step only: snapshots the training thread took when the fragments were due."""
        # Told by the syncer.
        self.slot = 0
        self.run_tokens = 0
        self.told_at_tokens = 0
        """This session's token count when the syncer last reported `run_tokens`."""
        self.connected = False
        self.quarantined = False
        self.goodbye: str | None = None
        # Told by the training loop.
        self.loss: float | None = None
        self.leaving = False
        self.pools: tuple[Pool, ...] = ()
        """Data sets this learner can read; empty if it does not lease data."""
        self.leases = LeaseCursor()
        self.no_lease: str | None = None
        """Why the syncer leases no data to this learner; None if it does."""
        # Progress of the session itself.
        self.fixed_loaded = False
        self.failure: SkerryError | None = None
        self.closing = False
        self.routes: Routes | None = None
        """Transport of bulk data; None while disconnected."""
        self.wake: Callable[[], None] = lambda: None
        """Makes the event loop check whether something can be sent or fetched. Safe to call from any thread."""

    def fail(self, error: SkerryError) -> None:
        """End this learner's part in the run. The training loop may go on without it."""
        log.error("%s is no longer part of the run: %s", self.name, error)
        with self.lock:
            self.failure = error
            self.exchange.stop()
            self.lock.notify_all()

    def heard(self, run_tokens: int) -> None:
        """Record the run's token count from the syncer. The caller holds the lock."""
        self.run_tokens = max(self.run_tokens, run_tokens)
        self.told_at_tokens = self.exchange.totals.tokens

    def stop_when_spent(self) -> None:
        """While disconnected, stop once this learner alone has trained the run's remaining budget: the run may be over."""
        budget, trained = self.sync.budget_tokens, self.exchange.totals.tokens - self.told_at_tokens
        if not self.connected and budget and self.run_tokens + trained >= budget:
            with self.lock:
                self.exchange.stop()

    def adopt_ready(self) -> None:
        """Write every version that may be adopted now into the model.

        The caller holds the lock and, once training has begun, the gate.
        """
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
            self.staged.pop(version.fragment, None)  # frees the previous version and a copy on the device
            adopted = True
        if adopted:
            replica.model_device.after_write()
            self.wake()

    def release(self) -> None:
        """Free the memory of the exchange. Nothing may be exchanged afterwards."""
        with self.lock:
            self.prepared.clear()
            self.staged.clear()
            self.replica.release()
