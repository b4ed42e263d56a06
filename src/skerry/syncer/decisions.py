"""The state machine with its clock and its tape. All decisions and records of the syncer process go through here, on the event
loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from skerry.clock import Clock
from skerry.core import messages as m
from skerry.core.schema import TapeRecord
from skerry.core.syncer import SyncerCore
from skerry.syncer.metrics_log import MetricsLog
from skerry.syncer.storage.tape import Tape


class Decisions:
    def __init__(self, core: SyncerCore, clock: Clock, tape: Tape, log: MetricsLog) -> None:
        self.core, self.clock, self.tape = core, clock, tape
        self._log = log
        self.perform: Callable[[list[m.Action]], None] = lambda actions: None
        """Carries out the core's actions. Set once, by the server."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set to an exception on a bug in Skerry; the process must then stop."""

    def dispatch(self, event: m.Event) -> m.Verdict | None:
        with self._failing_on_error():
            outcome = self.core.handle(event, self.clock.now())
            self.perform(outcome.actions)
        return outcome.verdict

    def join(self, event: m.Hello, connect: Callable[[], None]) -> m.Verdict:
        """Handle a hello. Messages to the session that it replaces are sent before `connect` is called, the others after."""
        with self._failing_on_error():
            outcome = self.core.handle(event, self.clock.now())
            assert outcome.verdict is not None
            actions = outcome.actions
            welcome = next((n for n, action in enumerate(actions) if isinstance(action, m.Welcome)), len(actions))
            self.perform(actions[:welcome])
            if outcome.verdict.accepted:
                connect()
            self.perform(actions[welcome:])
        return outcome.verdict

    @contextlib.contextmanager
    def _failing_on_error(self) -> Iterator[None]:
        """Stop the process on an exception, even if the caller swallows it: the core's state may be half changed."""
        try:
            yield
        except Exception as error:
            self.defect(error)
            raise

    def record(self, record: TapeRecord) -> None:
        """Write a record to the tape with the next commit or flush, and to the metrics."""
        self.tape.record(record)
        self._log.event(record)

    def bytes_moved(self, learner: str) -> None:
        self.core.bytes_moved(learner, self.clock.now())

    def defect(self, error: BaseException) -> None:
        """Report a bug in Skerry, which stops the process."""
        if not self.failed.done():
            self.failed.set_exception(error)
