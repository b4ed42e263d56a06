"""Moves optimizer state: to a file on this machine, to a peer that lost its own, and from a peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from pathlib import Path

from skerry.checksum import checksum
from skerry.errors import WireError
from skerry.learner.background import Background
from skerry.learner.session import Session
from skerry.learner.state.optimizer_state import CannotKeep, OptimizerState
from skerry.tensors.codecs.codec import raw_bytes
from skerry.wire import skerry_pb2 as pb
from skerry.wire.calls import TryAgain
from skerry.wire.framing import state_limit_bytes

log = logging.getLogger("skerry.learner")

KEEP_EVERY_S = 20.0
"""Interval between saves to disk."""
FETCH_S = 30.0
"""Timeout for one part of a peer's state."""
TRIES = 3
RETRY_S = 0.5


class StateCourier:
    """Saves, serves and fetches the optimizer state of one learner."""

    def __init__(self, session: Session, background: Background, state: OptimizerState) -> None:
        self.state = state
        self.keep: Path | None = None
        """File the state is saved to; None to save nothing."""
        self._session, self._background = session, background
        self._kept_at = 0.0
        self._kept_step = 0
        self._keeping = threading.Lock()

    # ------------------------------------------------------------ to disk

    def time_to_keep(self, now: float) -> bool:
        """Whether a save is due. If so, the next one is due KEEP_EVERY_S later."""
        due = self.keep is not None and now - self._kept_at >= KEEP_EVERY_S
        if due:
            self._kept_at = now
        return due

    def keep_beside(self) -> None:
        """Save the state, unless a save is in progress. Called in a background thread."""
        if self._keeping.acquire(blocking=False):
            try:
                self._keep()
            finally:
                self._keeping.release()

    def keep_now(self) -> None:
        """Save the state a last time, after any save in progress."""
        with self._keeping:
            self._keep()

    def _keep(self) -> None:
        """Save the state for the process that replaces this one."""
        session, keep, step = self._session, self.keep, self._session.exchange.step
        if keep is None or step == self._kept_step:
            return
        try:
            self.state.save_to(keep, session.run_id, step, session.id, self._journal)
        except CannotKeep as error:
            if session.exchange.totals.steps:
                log.warning("%s does not save its optimizer state: %s", session.name, error)
                self.keep = None
        except OSError as error:
            log.warning("%s could not save its optimizer state to %s: %s", session.name, keep, error.strerror)
        else:
            self._kept_step = step

    def _journal(self) -> str:
        with self._session.lock:
            return self._session.journal.upto(self._session.exchange.totals.steps)

    # ------------------------------------------------------------ to a peer

    async def answer(self, asked: pb.GiveState) -> None:
        """Send the syncer a part of this state for a peer, or the values of a version whose file it has lost."""
        if asked.HasField("held"):
            header, data = self._held(asked.ticket, asked.held.fragment, asked.held.version)
        else:
            header, data = await self._part(asked.ticket, asked.part)
        routes = self._session.routes
        if routes is not None:
            with contextlib.suppress(WireError):  # the receiver times out
                await routes.main.send_state(header, data)

    async def _part(self, ticket: int, part: int) -> tuple[pb.State, memoryview]:
        header, data = pb.State(ticket=ticket, part=part, parts=self.state.parts), memoryview(b"")
        if part >= self.state.parts:
            header.reason = f"there is no part {part}"
            return header, data
        try:
            data, header.steps = await self._background.in_thread(self.state.pack, part)
            header.size_bytes, header.checksum = len(data), checksum(data)
            header.session, header.journal_json = self._session.id, self._journal()
        except CannotKeep as error:
            header.reason = str(error)
        return header, data

    def _held(self, ticket: int, fragment: int, version: int) -> tuple[pb.State, memoryview]:
        session, header = self._session, pb.State(ticket=ticket, parts=1)
        with session.lock:
            known = fragment < len(session.exchange.held) and session.exchange.held[fragment].version == version
            held = session.replica.held(fragment) if known else None
        if held is None:
            header.reason = f"version {version} of fragment {fragment} is not held here"
            return header, memoryview(b"")
        data = raw_bytes(held)
        header.size_bytes, header.checksum = len(data), checksum(data)
        return header, data

    # ------------------------------------------------------------ from a peer

    def fetch(self) -> tuple[list[bytes], list[tuple[str, int]]]:
        """Fetch every part of a healthy peer's state. Returns the parts, and the session and its step count for each.

        Called on the training thread. Raises WireError.
        """
        return asyncio.run_coroutine_threadsafe(self._fetch(), self._background.loop).result()

    async def _fetch(self) -> tuple[list[bytes], list[tuple[str, int]]]:
        session = self._session
        limit = state_limit_bytes(session.replica.layout)
        parts: list[bytes] = []
        origin: list[tuple[str, int]] = []
        tries = 0
        while True:
            routes = session.routes
            if routes is None or not session.connected or session.goodbye is not None:
                raise WireError("the syncer is away")
            try:
                header, data = await asyncio.wait_for(routes.main.fetch_state(len(parts), limit), FETCH_S)
            except asyncio.TimeoutError:
                raise WireError(f"a peer's optimizer state did not arrive within {FETCH_S:.0f} s") from None
            except TryAgain as error:
                tries += 1
                if tries > TRIES:
                    raise
                log.debug("%s: part %d of a peer's state is not available yet: %s", session.name, len(parts), error)
                await asyncio.sleep(RETRY_S)
                continue
            tries = 0
            parts.append(bytes(data))
            origin.append((header.session, header.steps))
            if len(parts) >= header.parts:
                return parts, origin
