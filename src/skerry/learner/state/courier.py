"""Moves an optimizer's state: to a file of this island from time to time, to a peer that lost its own, and from a peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.checksum import checksum
from skerry.errors import WireError
from skerry.learner.state.optimizer_state import CannotKeep, OptimizerState
from skerry.tensors.codecs.codec import raw_bytes
from skerry.wire import skerry_pb2 as pb
from skerry.wire.calls import TryAgain
from skerry.wire.framing import state_limit_bytes

if TYPE_CHECKING:
    from skerry.learner.link import Link

log = logging.getLogger("skerry.learner")

KEEP_EVERY_S = 20.0
FETCH_S = 30.0
TRIES = 3
RETRY_S = 0.5


class StateCourier:
    def __init__(self, link: Link, state: OptimizerState) -> None:
        self.state = state
        self.keep: Path | None = None
        """Where the state is kept from time to time."""
        self._link = link
        self._kept_at = 0.0
        self._kept_step = 0
        self._keeping = threading.Lock()

    def time_to_keep(self, now: float) -> bool:
        due = self.keep is not None and now - self._kept_at >= KEEP_EVERY_S
        if due:
            self._kept_at = now
        return due

    def keep_beside(self) -> None:
        """From time to time, in another thread than the one that trains, unless that is still being done."""
        if self._keeping.acquire(blocking=False):
            try:
                self._keep()
            finally:
                self._keeping.release()

    def keep_now(self) -> None:
        """The last time."""
        with self._keeping:
            self._keep()

    def _keep(self) -> None:
        """Write it down, for a process that takes this one's place."""
        exchange, keep, name = self._link.exchange, self.keep, self._link.name
        assert exchange is not None
        step = exchange.step
        if keep is None or step == self._kept_step:
            return
        try:
            self.state.save_to(keep, self._link.run_id, step, self._link.session, self._journal)
        except CannotKeep as error:
            if exchange.totals.steps:
                log.warning("%s does not keep its optimizer's state: %s", name, error)
                self.keep = None
        except OSError as error:
            log.warning("%s could not keep its optimizer's state in %s: %s", name, keep, error.strerror)
        else:
            self._kept_step = step

    async def give_held(self, ticket: int, fragment: int, version: int) -> None:
        """The syncer's own copy of a version is damaged, and this island holds it."""
        link = self._link
        assert link.routes is not None and link.exchange is not None and link.replica is not None
        header, data = pb.State(ticket=ticket, parts=1), memoryview(b"")
        with link.changed:
            held = link.replica.held(fragment) if fragment < len(link.exchange.held) else None
            if held is None or link.exchange.held[fragment].version != version:
                header.reason = f"version {version} of fragment {fragment} is not held here"
        if held is not None and not header.reason:
            data = raw_bytes(held)
            header.size_bytes, header.checksum = len(data), checksum(data)
        with contextlib.suppress(WireError):  # whoever waits for it finds out
            await link.routes.main.send_state(header, data)

    async def give(self, ticket: int, part: int) -> None:
        """A peer lost its own."""
        routes = self._link.routes
        assert routes is not None
        header = pb.State(ticket=ticket, part=part, parts=self.state.parts)
        data = memoryview(b"")
        if part >= self.state.parts:
            header.reason = "there is no such part"
        else:
            try:
                data, header.steps = await self._link.off_loop(self.state.pack, part)
                header.size_bytes, header.checksum = len(data), checksum(data)
                header.session, header.journal_json = self._link.session, self._journal()
            except CannotKeep as error:
                header.reason = str(error)
        with contextlib.suppress(WireError):  # whoever waits for it finds out
            await routes.main.send_state(header, data)

    def _journal(self) -> str:
        with self._link.changed:
            assert self._link.exchange is not None
            return self._link.journal.upto(self._link.exchange.totals.steps)

    async def fetch(self) -> tuple[list[bytes], list[tuple[str, int]]]:
        """Every part of a healthy peer's, and of each whose it is after how many steps. Raises WireError."""
        link = self._link
        assert link.replica is not None
        limit = state_limit_bytes(link.replica.layout)
        found: list[bytes] = []
        origin: list[tuple[str, int]] = []
        tries = 0
        while True:
            routes = link.routes
            if routes is None or not link.connected or link.goodbye is not None:
                raise WireError("the syncer is away")
            try:
                header, data = await asyncio.wait_for(routes.main.fetch_state(len(found), limit), FETCH_S)
            except asyncio.TimeoutError:
                raise WireError(f"nothing came within {FETCH_S:.0f} s") from None
            except TryAgain as error:
                tries += 1
                if tries > TRIES:
                    raise
                log.debug("%s: part %d of a peer's state did not come: %s", link.name, len(found), error)
                await asyncio.sleep(RETRY_S)
                continue
            tries = 0
            found.append(bytes(data))
            origin.append((header.session, header.steps))
            if len(found) >= header.parts:
                return found, origin
