"""Writes records to the tape. Merges that become ready while the disk is busy are committed together.

While the disk rejects writes, the first `WAITING` records are buffered in memory, in order. Later ones are dropped, and a
TapeGap record counts them by kind. Merges are never dropped: they do not happen until they are written. Repeated failures of
the same merge are folded into one record with a count.
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
"""Records buffered while the disk rejects writes."""
ALWAYS_KEPT = (
    records.Began,
    records.Closing,
    records.Ended,
    records.Leased,
    records.Returned,
    records.Banked,
    records.Journaled,
)
"""Records that are buffered beyond `WAITING`. The first three give the run's length; the ledger and replay need the others."""


class Tape:
    def __init__(self, store: RunStore, standing: Callable[[], Standing]) -> None:
        self._store = store
        self._standing = standing
        self._entries: list[TapeEntry] = []
        self._gap: int | None = None
        """Index of the TapeGap record in `_entries`."""
        self._failures: dict[tuple[int, int], int] = {}
        """Fragment and round → index of its MergeFailed record in `_entries`."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skerry-tape")
        self._writing = asyncio.Lock()
        self._ready: list[tuple[Written, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    def record(self, record: TapeRecord) -> None:
        """Queue a record for the next commit or flush."""
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

    def _put(self, index: int, at: float, record: TapeRecord) -> None:
        self._entries[index] = TapeEntry(at, record)

    def _take(self) -> list[TapeEntry]:
        """Remove and return the queue. The list must not change afterwards: the tape thread reads it."""
        entries, self._entries = self._entries, []
        self._gap = None
        self._failures = {}
        return entries

    def _put_back(self, entries: list[TapeEntry]) -> None:
        newer = self._take()
        self._entries = entries
        for index, entry in enumerate(entries):
            if isinstance(entry.record, records.TapeGap):
                self._gap = index
            elif isinstance(entry.record, records.MergeFailed):
                self._failures[entry.record.fragment, entry.record.round] = index
        for entry in newer:
            self._keep(entry)

    async def commit(self, written: Written) -> None:
        """Return once the merge is durable. Raises StoreError if it could not be written."""
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
                    # The caller retries the merges; the other records wait for the next write.
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
        """Write all queued records. Returns False if the disk rejected them; they stay queued."""
        # Shielded: if the caller is cancelled, the records taken from the queue must still be written or put back.
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
        """Run `work` in the tape's thread while no commit is in flight."""
        async with self._writing:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def close(self) -> None:
        if self._committing is not None:
            await self._committing
        for _ in range(3):
            await self.flush()
        self._thread.shutdown()
        if self._entries:
            raise StoreError(f"could not write the last {len(self._entries)} records to the tape")


def _merged(written: Written) -> TapeEntry:
    order = written.order
    where = (order.fragment, order.version, order.round)
    record = records.Merged(*where, order.shares, order.outer_lr, order.outer_momentum, order.presence, order.asked)
    return TapeEntry(time.time(), record)
