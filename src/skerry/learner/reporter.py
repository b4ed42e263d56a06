"""Reports: the learner's heartbeat, with its pace, loss, need for data, and statistics of its link."""

from __future__ import annotations

import math
from collections.abc import Callable

from skerry.clock import Clock
from skerry.learner.background import Background
from skerry.learner.session import Session
from skerry.learner.transport.meter import Meter
from skerry.wire import skerry_pb2 as pb

HEARTBEAT_S = 1.0
REPORT_EVERY_S = 0.2
LOW_REPORT_S = 0.05
"""Interval of reports while leases are about to run out."""
REPORT_PAUSE_S = 0.01
"""Shortest pause between two reports."""
SOON_S = 1e-6
"""A shorter wait may be a rounding error of the clock."""
ACCOUNT_EVERY_S = 1.0
ROUND_TRIP_NEWEST = 0.3
"""Weight of the newest sample in the moving average of the round-trip time."""


class Reporter:
    """Decides when to report, and builds the report."""

    def __init__(self, session: Session, background: Background, clock: Clock, sent: Meter, received: Meter) -> None:
        self._session, self._background, self._clock = session, background, clock
        self._sent, self._received = sent, received
        self.send: Callable[[pb.ToSyncer], None] = lambda message: None
        """Sends a control message; replaced on each connection."""
        self.wanted = False
        """A report should go out as soon as REPORT_PAUSE_S has passed since the last."""
        self._timer_set = False
        self._reported_at = -1.0
        self._round_trip_s = 0.0
        self._accounted_at = -ACCOUNT_EVERY_S
        self._pings = 0

    def is_due(self) -> bool:
        """Whether a report is due. The training thread asks after each step."""
        session = self._session
        limit_s = LOW_REPORT_S if session.pools and session.leases.low else REPORT_EVERY_S
        return self._age_s() >= limit_s or bool(session.exchange.schedule.due(session.exchange.step))

    def beat(self) -> None:
        """Report unless a report went out recently. Called about once a second."""
        if self._age_s() >= HEARTBEAT_S / 2:
            self.report()

    def report_if_wanted(self, again: Callable[[], None]) -> None:
        """Send a wanted report now, or call `again` once REPORT_PAUSE_S has passed since the last."""
        wait = REPORT_PAUSE_S - self._age_s()
        if self.wanted and wait <= SOON_S:
            self.report()
        elif self.wanted and not self._timer_set:  # one timer is enough: each takes the GIL from the training thread

            def due() -> None:
                self._timer_set = False
                again()

            self._timer_set = True
            self._background.call_later(wait, due)

    def _age_s(self) -> float:
        passed = self._clock.now() - self._reported_at
        return passed if passed >= 0 else math.inf  # a clock set back must not silence reports

    def report(self) -> None:
        """Send a report now, if connected."""
        session, exchange = self._session, self._session.exchange
        if not session.connected:
            return
        with session.lock:
            self.wanted = False
            report = pb.Report(
                step=exchange.step,
                tokens=exchange.totals.tokens,
                step_time_s=session.pace.step_time_s,
                loss=session.loss,
                sent_bytes=self._sent.total_bytes,
                received_bytes=self._received.total_bytes,
                steps=exchange.totals.steps,
                stall_s=session.pace.longest_s,
                stalled_s=session.pace.stalled_s,
            )
            if session.pools and session.no_lease is None:
                need = session.leases.need(session.pace.step_time_s, session.sync.ahead_s)
                wanted = {"taken": need.taken, "wanted": need.wanted, "least": need.least}
                report.need.CopyFrom(pb.DataNeed(given=need.given, settled=exchange.settled_samples, **wanted))
            session.pace.longest_s = 0.0
        now = self._background.loop.time()
        if now - self._accounted_at >= ACCOUNT_EVERY_S:
            self._accounted_at = now
            self._pings += 1
            report.link.CopyFrom(self._account())
        self._reported_at = self._clock.now()
        self.send(pb.ToSyncer(report=report))

    def answered(self, ping: int) -> None:
        """Measure the round trip when the syncer answers a report. Answers to older pings are ignored."""
        if ping == self._pings:
            took = self._background.loop.time() - self._accounted_at
            self._round_trip_s += (ROUND_TRIP_NEWEST if self._round_trip_s else 1.0) * (took - self._round_trip_s)

    def _account(self) -> pb.LinkAccount:
        sent, received, routes = self._sent.by_kind, self._received.by_kind, self._session.routes
        return pb.LinkAccount(
            contributions_bytes=sent["contributions"],
            versions_bytes=received["versions"],
            state_sent_bytes=sent["state"],
            state_received_bytes=received["state"],
            control_sent_bytes=sent["control"],
            control_received_bytes=received["control"],
            send_bytes_per_s=self._sent.bytes_per_s,
            receive_bytes_per_s=self._received.bytes_per_s,
            round_trip_s=self._round_trip_s,
            queue_s=routes.queue_s if routes is not None else 0.0,
            waited_s=self._session.pace.waited_s,
            ping=self._pings,
        )
