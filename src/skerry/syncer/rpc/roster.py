"""The connected learners and their outgoing control messages.

Each learner has a bounded queue. A learner that does not drain it is disconnected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from skerry.core.syncer import SyncerCore
from skerry.syncer.metrics_log import Vitals
from skerry.syncer.rpc.outbox import Outbox
from skerry.syncer.rpc.outgoing import progress_of
from skerry.wire import skerry_pb2 as pb

CONTROL_QUEUE = 4096
MAX_FIGURE = 1 << 53
"""Larger link figures are dropped."""


@dataclass
class LearnerStream:
    """One learner's control stream, as the syncer sees it."""

    session: str
    outbox: Outbox[pb.ToLearner] = field(default_factory=lambda: Outbox(CONTROL_QUEUE))
    vitals: Vitals = field(default_factory=Vitals)
    progress_sent: bool = False
    """The run's progress was sent since the last call of `Roster.tell_progress`."""

    def send(self, message: pb.ToLearner) -> None:
        if message.WhichOneof("message") in ("announce", "progress"):
            self.progress_sent = True
        self.outbox.send(message)

    def reported(self, report: pb.Report) -> None:
        loss = report.loss if report.HasField("loss") else self.vitals.loss
        stall_s = max(self.vitals.stall_s, report.stall_s)
        link = self.vitals.link
        if report.HasField("link"):
            link = _link_figures(report.link)
            if not self.outbox.half_full:
                self.send(pb.ToLearner(pong=pb.Pong(ping=report.link.ping)))
        moved = (report.sent_bytes, report.received_bytes)
        self.vitals = Vitals(loss, *moved, report.steps, stall_s, report.stalled_s, link)


def _link_figures(account: pb.LinkAccount) -> dict[str, float]:
    values = {field.name: value for field, value in account.ListFields() if field.name != "ping"}
    return {name: round(value, 6) for name, value in values.items() if math.isfinite(value) and 0 <= value <= MAX_FIGURE}


class Roster:
    def __init__(self) -> None:
        self._streams: dict[str, LearnerStream] = {}

    def add(self, learner: str, stream: LearnerStream) -> None:
        self._streams[learner] = stream

    def get(self, learner: str) -> LearnerStream | None:
        return self._streams.get(learner)

    def is_connected(self, learner: str, session: str) -> bool:
        stream = self._streams.get(learner)
        return stream is not None and stream.session == session

    def send(self, learner: str, message: pb.ToLearner) -> None:
        stream = self._streams.get(learner)
        if stream is not None:
            stream.send(message)

    def send_to_all(self, message: pb.ToLearner) -> None:
        for stream in self._streams.values():
            stream.send(message)

    def tell_progress(self, core: SyncerCore) -> None:
        """Send the run's progress to every learner that did not get it since the last call."""
        progress = progress_of(core)
        for stream in self._streams.values():
            if not stream.progress_sent and not stream.outbox.half_full:
                stream.send(progress)
            stream.progress_sent = False

    def end(self, learner: str) -> None:
        """End a learner's stream after its queued messages are sent."""
        stream = self._streams.pop(learner, None)
        if stream is not None:
            stream.outbox.end()

    def end_all(self) -> None:
        for stream in self._streams.values():
            stream.outbox.end()

    def remove(self, learner: str, stream: LearnerStream) -> bool:
        """Remove a stream. Returns False if another one has replaced it."""
        if self._streams.get(learner) is not stream:
            return False
        del self._streams[learner]
        return True

    @property
    def vitals(self) -> dict[str, Vitals]:
        return {learner: stream.vitals for learner, stream in self._streams.items()}
