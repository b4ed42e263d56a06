"""Starts whatever can be sent or fetched now. Looked at after every event; on the event loop."""

from __future__ import annotations

from collections.abc import Callable

from skerry.learner.background import Background
from skerry.learner.contribute import Contributor
from skerry.learner.fetch import Fetcher
from skerry.learner.reporter import Reporter
from skerry.learner.session import Session
from skerry.wire import skerry_pb2 as pb


class Transfers:
    def __init__(
        self, session: Session, background: Background, contributor: Contributor, fetcher: Fetcher, reporter: Reporter
    ) -> None:
        self._session, self._background = session, background
        self.contributor, self.fetcher, self.reporter = contributor, fetcher, reporter
        self.send: Callable[[pb.ToSyncer], None] = lambda message: None
        """To the syncer; set for each connection."""
        self.ready_sent = False
        self._pending = False
        session.wake = self.wake

    def connected(self, send: Callable[[pb.ToSyncer], None]) -> None:
        """Messages go to another stream from now on."""
        self.send = self.contributor.send = self.reporter.send = send

    def wake(self) -> None:
        """From any thread. Waking the event loop takes the GIL from the training thread, so it is done once, not for each."""
        if not self._pending:
            self._pending = True
            self._background.call(self.pump)

    def pump(self) -> None:
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
        """The training thread has taken a step."""
        self._session.stop_when_spent()
        if self.reporter.is_due():
            self.reporter.wanted = True
            self.wake()
        elif self._session.exchange.has_questions():
            self.wake()

    def forget_all(self) -> None:
        self.contributor.forget_all()
        self.fetcher.forget_all()
