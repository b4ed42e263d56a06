"""Writing records to the tape. Merges that become ready while the disk is busy are committed together.

While the disk takes nothing, records wait in memory: the first `WAITING` of them, in order. Later ones are only counted, and a
TapeGap record says how many of which kind are missing. Nothing is missing about merges: they wait themselves. A merge that
fails again and again is one record with a count.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from skerry.core import records
from skerry.core.schema import TapeRecord
from skerry.core.standing import Standing
from skerry.errors import SkerryError, StoreError
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.store import RunStore, Written

T = TypeVar("T")

WAITING = 10_000
ALWAYS_KEPT = (
    records.Began,
    records.Closing,
    records.Ended,
    records.Leased,
    records.Returned,
    records.Banked,
    records.Journaled,
)
"""The length of a run is read from the first three; the ledger and replays need the others."""


class Tape:
    def __init__(self, store: RunStore, standing: Callable[[], Standing]) -> None:
        self._store = store
        self._standing = standing
        self._entries: list[TapeEntry] = []
        self._gap: int | None = None
        """Where in the list the gap record is."""
        self._failures: dict[tuple[int, int], int] = {}
        """Fragment and round → where in the list the record of its failed merge is."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skerry-tape")
        self._writing = asyncio.Lock()
        self._ready: list[tuple[Written, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    def record(self, record: TapeRecord) -> None:
        """Written with the next commit or flush."""
        self._keep(TapeEntry(time.time(), record))

    def _keep(self, entry: TapeEntry) -> None:
        record = entry.record
        if isinstance(record, records.MergeFailed) and (key := (record.fragment, record.round)) in self._failures:
            known = self._entries[self._failures[key]]
            assert isinstance(known.record, records.MergeFailed)
            times, until = known.record.times + record.times, record.until or entry.at
            self._put(self._failures[key], known.at, dataclasses.replace(known.record, times=times, until=until))
        elif len(self._entries) < WAITING or isinstance(record, ALWAYS_KEPT):
            if isinstance(record, records.MergeFailed):
                self._failures[record.fragment, record.round] = len(self._entries)
            self._entries.append(entry)
        elif self._gap is None:
            self._gap = len(self._entries)
            self._entries.append(TapeEntry(entry.at, records.TapeGap({record.kind: 1}, entry.at)))
        else:
            known = self._entries[self._gap]
            assert isinstance(known.record, records.TapeGap)
            missing = {**known.record.missing, record.kind: known.record.missing.get(record.kind, 0) + 1}
            self._put(self._gap, known.at, records.TapeGap(missing, entry.at))

    def _put(self, place: int, at: float, record: TapeRecord) -> None:
        self._entries[place] = TapeEntry(at, record)

    def _take(self) -> list[TapeEntry]:
        """Everything that waits. It no longer changes, because another thread reads it."""
        entries, self._entries = self._entries, []
        self._gap = None
        self._failures = {}
        return entries

    def _put_back(self, entries: list[TapeEntry]) -> None:
        since = self._take()
        self._entries = entries
        for place, entry in enumerate(entries):
            if isinstance(entry.record, records.TapeGap):
                self._gap = place
            elif isinstance(entry.record, records.MergeFailed):
                self._failures[entry.record.fragment, entry.record.round] = place
        for entry in since:
            self._keep(entry)

    async def commit(self, written: Written) -> None:
        """Returns once the merge cannot be lost any more; raises if it did not happen."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.append((written, done))
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit_all())
        await done

    async def _commit_all(self) -> None:
        while self._ready:
            async with self._writing:
                batch, self._ready = self._ready, []
                entries = self._take()
                merged = [_merged(written) for written, _ in batch]
                try:
                    await self._write([written for written, _ in batch], entries + merged)
                except Exception as error:
                    # These merges did not happen; everything else waits for the next write.
                    self._put_back(entries)
                    for _, done in batch:
                        done.set_exception(error)
                else:
                    for _, done in batch:
                        done.set_result(None)
        self._committing = None

    async def _write(self, merges: list[Written], entries: list[TapeEntry]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._store.commit, merges, self._standing(), entries)

    async def flush(self) -> bool:
        """Whether everything recorded before is written now."""
        # A caller may be cancelled, but what was taken to be written must be written or put back.
        return await asyncio.shield(asyncio.get_running_loop().create_task(self._flush()))

    async def _flush(self) -> bool:
        async with self._writing:
            entries = self._take()
            try:
                if entries:
                    await self._write([], entries)
            except Exception as error:
                self._put_back(entries)
                if not isinstance(error, SkerryError):
                    raise
                return False
            return True

    async def between_commits(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do something in the tape's thread while nothing is written."""
        async with self._writing:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def close(self) -> None:
        if self._committing is not None:
            await self._committing
        for _ in range(3):
            await self.flush()
        self._thread.shutdown()
        if self._entries:
            raise StoreError(f"the last {len(self._entries)} records could not be written to the tape")


def _merged(written: Written) -> TapeEntry:
    order = written.order
    where = (order.fragment, order.version, order.round)
    record = records.Merged(*where, order.shares, order.outer_lr, order.outer_momentum, order.presence, order.asked)
    return TapeEntry(time.time(), record)
