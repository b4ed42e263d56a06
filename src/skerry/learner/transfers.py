"""Starts every transfer that can start now. Runs on the event loop, after each event that may allow one."""

from __future__ import annotations

from collections.abc import Callable

from skerry.learner.background import Background
from skerry.learner.contribute import Contributor
from skerry.learner.fetch import Fetcher
from skerry.learner.reporter import Reporter
from skerry.learner.session import Session
from skerry.wire import skerry_pb2 as pb


class Transfers:
    """The contributor, the fetcher and the reporter of a session, and what starts them."""

    def __init__(
        self, session: Session, background: Background, contributor: Contributor, fetcher: Fetcher, reporter: Reporter
    ) -> None:
        self._session, self._background = session, background
        self.contributor, self.fetcher, self.reporter = contributor, fetcher, reporter
        self.send: Callable[[pb.ToSyncer], None] = lambda message: None
        """Sends a control message; replaced on each connection."""
        self.ready_sent = False
        self._pending = False
        session.wake = self.wake

    def connected(self, send: Callable[[pb.ToSyncer], None]) -> None:
        """Send messages to a new stream from now on."""
        self.send = self.contributor.send = self.reporter.send = send

    def wake(self) -> None:
        """Run `pump` soon. Safe to call from any thread. Waking the event loop takes the GIL from the training thread, so calls
        before the next `pump` are merged into one."""
        if not self._pending:
            self._pending = True
            self._background.call(self.pump)

    def pump(self) -> None:
        """Start every fetch and every answer that can start now, and send what is due."""
        self._pending = False
        session, exchange = self._session, self._session.exchange
        if not session.connected or session.goodbye is not None:
            return
        with session.lock:
            fetches = exchange.to_fetch()
            answerable = exchange.can_answer()
            ready = not self.ready_sent and session.fixed_loaded and bool(exchange.versions)
        if ready:
            self.ready_sent = True
            self.send(pb.ToSyncer(ready=pb.Ready()))
        for version in fetches:
            self._background.spawn(self.fetcher.fetch(version))
        if answerable:
            self.contributor.answer()
        self.reporter.report_if_wanted(again=self.pump)

    def step_done(self) -> None:
        """Note a finished step. Called on the training thread."""
        self._session.stop_when_spent()
        if self.reporter.is_due():
            self.reporter.wanted = True
            self.wake()
        elif self._session.exchange.has_questions():
            self.wake()

    def forget_all(self) -> None:
        self.contributor.forget_all()
        self.fetcher.forget_all()
