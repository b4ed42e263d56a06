"""Reads the control stream and applies each message to the session. Runs on the event loop."""

from __future__ import annotations

import logging
from collections.abc import Callable

from skerry.core.exchange import Question, Version
from skerry.core.leases.ranges import Range
from skerry.errors import ConfigError, JoinRefused, WireError
from skerry.learner.background import Background
from skerry.learner.session import Session
from skerry.learner.transfers import Transfers
from skerry.learner.transport.control import ControlStream
from skerry.wire import skerry_pb2 as pb
from skerry.wire.channel import TLS, check_reachable

log = logging.getLogger("skerry.learner")

STARTS_TRANSFERS = ("welcome", "ask", "announce", "stop", "begin")
"""Messages after which there may be something to send or fetch."""


class Inbox:
    """Turns each message from the syncer into changes of the session."""

    def __init__(self, session: Session, transfers: Transfers, background: Background, tls: TLS | None) -> None:
        self._session, self._transfers, self._background, self._tls = session, transfers, background, tls
        self.give_state: Callable[[pb.GiveState], None] = lambda asked: None
        """Sends optimizer state to a peer; set once this island has some."""
        self.lost_at_step: int | None = None
        """The learner's step when it lost the syncer; None while connected."""

    async def listen(self, stream: ControlStream) -> None:
        """Handle messages until the syncer says goodbye or ends the stream. Raises JoinRefused, or WireError if the stream
        breaks."""
        async for message in stream.messages():
            self.receive(message)
            if self._session.goodbye is not None:
                break

    def receive(self, message: pb.ToLearner) -> None:
        """Apply one message. Raises JoinRefused, or WireError for a message that makes no sense in this run."""
        session, exchange, kind = self._session, self._session.exchange, message.WhichOneof("message")
        _check_fragments(message, len(exchange.held))
        if kind in ("welcome", "places"):
            self._place(message.welcome.places if kind == "welcome" else message.places)
        with session.lock:
            if kind == "ask":
                exchange.asked(Question(message.ask.fragment, message.ask.round, message.ask.min_base), message.ask.anew)
            elif kind == "announce":
                note = message.announce
                exchange.announced(Version(note.fragment, note.version, note.round, note.counted))
                session.journal.durable(note.counted)
                session.heard(note.run_tokens)
            elif kind == "progress":
                session.heard(message.progress.run_tokens)
            elif kind == "pong":
                self._transfers.reporter.answered(message.pong.ping)
            elif kind == "lease":
                lease = message.lease
                session.leases.granted(lease.position, Range(lease.pool, lease.start, lease.count))
            elif kind == "welcome":
                self._welcomed(message.welcome)
            elif kind == "begin":
                exchange.begin(message.begin.step)
            elif kind == "stop":
                exchange.stop()
                self._transfers.reporter.wanted = True
            elif kind == "refusal":
                raise JoinRefused(message.refusal.reason)
            elif kind == "no_lease":
                session.no_lease = message.no_lease.reason
            elif kind == "give_state":
                self.give_state(message.give_state)
            elif kind == "caution":
                session.quarantined = message.caution.quarantined
                state = "no longer merged" if session.quarantined else "merged again"
                log.warning("%s: contributions are %s: %s", session.name, state, message.caution.reason)
            elif kind == "goodbye" and message.goodbye.final:
                self._dismissed(message.goodbye)
            session.lock.notify_all()
        if kind in STARTS_TRANSFERS:
            self._transfers.pump()

    def _welcomed(self, welcome: pb.Welcome) -> None:
        session, exchange = self._session, self._session.exchange
        if not welcome.resumed:
            session.leases.void(welcome.leased)
            exchange.void_samples(welcome.leased)
            if exchange.phase != "joining":
                exchange.start_over()
                session.replica.start_over()
                session.prepared.clear()
        session.slot, session.run_tokens = welcome.slot, max(session.run_tokens, welcome.run_tokens)
        session.connected = True
        session.quarantined = welcome.quarantined
        if self.lost_at_step is not None:
            alone = exchange.step - self.lost_at_step
            log.warning("%s is back with the syncer after %d steps alone", session.name, alone)
            self.lost_at_step = None
        self._transfers.ready_sent = welcome.resumed
        exchange.welcomed(tuple(welcome.versions), tuple(welcome.merged_rounds), tuple(welcome.counted), welcome.step)
        session.journal.durable(max(welcome.counted, default=0))
        if not session.fixed_loaded:
            self._background.spawn(self._transfers.fetcher.fetch_fixed(len(welcome.versions)))
        self.declare_data()
        if session.leaving:
            self.say_leaving()

    def _dismissed(self, goodbye: pb.Goodbye) -> None:
        self._session.goodbye = goodbye.reason
        if goodbye.expected:
            self._session.exchange.stop()
        else:
            self._session.fail(JoinRefused(goodbye.reason))

    def declare_data(self) -> None:
        """Tell the syncer which data sets this learner can read."""
        session = self._session
        if session.connected and session.pools and not session.leaving:
            pools = [pb.Pool(name=pool.name, size=pool.size, fingerprint=pool.fingerprint) for pool in session.pools]
            self._transfers.send(pb.ToSyncer(data=pb.Data(pools=pools)))
            self._transfers.reporter.report()

    def say_leaving(self) -> None:
        if self._session.connected:
            self._transfers.reporter.report()  # first: with nothing to hand over, the goodbye may come before the next report
            self._transfers.send(pb.ToSyncer(leaving=pb.Leaving()))

    def _place(self, places: pb.Places) -> None:
        fragments, shards = len(self._session.exchange.held), len(places.addresses)
        if shards and (len(places.of_fragment) != fragments or max(places.of_fragment, default=0) >= shards):
            raise WireError(f"the syncer did not assign each of {fragments} fragments to one of {shards} shards")
        if self._session.routes is not None:
            addresses = [address if self._is_usable(address) else "" for address in places.addresses]
            self._session.routes.place(addresses, places.of_fragment)

    def _is_usable(self, address: str) -> bool:
        if not address:
            return False
        try:
            check_reachable(address, self._tls)
        except ConfigError as error:
            log.warning("%s cannot reach a shard: %s", self._session.name, error)
            return False
        return True


def _check_fragments(message: pb.ToLearner, fragments: int) -> None:
    """Raise WireError for a message about a fragment that does not exist."""
    kind = message.WhichOneof("message")
    if kind == "welcome" and len(message.welcome.versions) != fragments:
        raise WireError(f"the syncer has {len(message.welcome.versions)} fragments, this learner {fragments}")
    named = message.ask.fragment if kind == "ask" else message.announce.fragment if kind == "announce" else 0
    if named >= fragments:
        raise WireError(f"the syncer named fragment {named} of {fragments}")
