"""The state machine with its clock and its tape. Everything in the syncer process that decides, or writes a decision down,
goes through here, on the event loop."""

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
        """Does what was decided. Set once by whoever can."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A bug in Skerry: the process must not go on as if nothing had happened."""

    def dispatch(self, event: m.Event) -> m.Verdict | None:
        with self._no_half_change():
            outcome = self.core.handle(event, self.clock.now())
            self.perform(outcome.actions)
        return outcome.verdict

    def join(self, event: m.Hello, connect: Callable[[], None]) -> m.Verdict:
        """Let a learner in. Messages to the session whose place it takes are sent before `connect`, the rest after it."""
        with self._no_half_change():
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
    def _no_half_change(self) -> Iterator[None]:
        """A caller may not notice an exception, but a state half changed must not go on."""
        try:
            yield
        except Exception as error:
            self.defect(error)
            raise

    def record(self, record: TapeRecord) -> None:
        """Write it on the tape, with the next commit or flush."""
        self.tape.record(record)
        self._log.event(record)

    def bytes_moved(self, learner: str) -> None:
        self.core.bytes_moved(learner, self.clock.now())

    def defect(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
