"""Writing down what the syncer decided. Merges that become ready while the disk is busy are committed together.

While the disk takes nothing, entries wait in memory: the first `WAITING` of them, in their order. Later ones are only counted,
and an entry `tape_gap` says how many of which kind are missing, and from when to when. Nothing is missing about merges: they
wait themselves, and are written down as they are made. A merge that fails again and again is one entry with a count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from skerry.core.standing import Standing
from skerry.errors import SkerryError, StoreError
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.store import RunStore, Written

WAITING = 10_000
KEPT = ("began", "closing", "ended", "leased", "returned", "banked", "journal")
"""Kept in any case: the length of a run is read from the first three, the ledger needs the others. There are few of them."""


class Tape:
    def __init__(self, store: RunStore, standing: Callable[[], Standing]) -> None:
        self._store = store
        self._standing = standing
        self._entries: list[TapeEntry] = []
        self._gap: TapeEntry | None = None
        self._failures: dict[tuple[Any, Any], TapeEntry] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skerry-tape")
        self._writing = asyncio.Lock()
        self._ready: list[tuple[Written, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    def record(self, kind: str, data: dict[str, Any]) -> None:
        """Written with the next commit or flush."""
        self._keep(TapeEntry(time.time(), kind, dict(data)))

    def _keep(self, entry: TapeEntry) -> None:
        same = self._failures.get(_which(entry)) if entry.kind == "merge_failed" else None
        if same is not None:
            same.data["times"] = same.data.get("times", 1) + entry.data.get("times", 1)
            same.data["until"] = entry.data.get("until", entry.at)
        elif len(self._entries) < WAITING or entry.kind in KEPT:
            self._entries.append(entry)
            if entry.kind == "merge_failed":
                self._failures[_which(entry)] = entry
        else:
            if self._gap is None:
                self._gap = TapeEntry(entry.at, "tape_gap", {"missing": {}, "until": entry.at})
                self._entries.append(self._gap)
            missing = self._gap.data["missing"]
            missing[entry.kind] = missing.get(entry.kind, 0) + 1
            self._gap.data["until"] = entry.at

    def _take(self) -> list[TapeEntry]:
        """All that waits. It is not changed any more, because another thread reads it."""
        entries, self._entries = self._entries, []
        self._gap = None
        self._failures = {}
        return entries

    def _put_back(self, entries: list[TapeEntry]) -> None:
        since = self._take()
        self._entries = entries
        self._gap = next((entry for entry in entries if entry.kind == "tape_gap"), None)
        self._failures = {_which(entry): entry for entry in entries if entry.kind == "merge_failed"}
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
        # Who waits for it may be cancelled, but what was taken to be written must be written or put back.
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

    async def between_commits(self, work: Callable[[], None]) -> None:
        """Nothing is written meanwhile."""
        async with self._writing:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        if self._committing is not None:
            await self._committing
        for _ in range(3):
            await self.flush()
        self._thread.shutdown()
        if self._entries:
            raise StoreError(f"the last {len(self._entries)} decisions could not be written to the tape")


def _which(entry: TapeEntry) -> tuple[Any, Any]:
    return entry.data.get("fragment"), entry.data.get("step")


def _merged(written: Written) -> TapeEntry:
    shares = [asdict(share) for share in written.order.shares]
    return TapeEntry(time.time(), "merged", {**asdict(written.order), "shares": shares})
