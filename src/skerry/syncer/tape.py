"""Writing down what the syncer decided. Merges that become ready while the disk is busy are committed together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from skerry.core.standing import Standing
from skerry.errors import SkerryError, StoreError
from skerry.syncer.store import RunStore, TapeEntry, Written


class Tape:
    def __init__(self, store: RunStore, standing: Callable[[], Standing]) -> None:
        self._store = store
        self._standing = standing
        self._entries: list[TapeEntry] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skerry-tape")
        self._ready: list[tuple[Written, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    def record(self, kind: str, data: dict[str, Any]) -> None:
        """Written with the next commit or flush."""
        self._entries.append(TapeEntry(time.time(), kind, data))

    async def commit(self, written: Written) -> None:
        """Returns once the merge cannot be lost any more; raises if it did not happen."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.append((written, done))
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit_all())
        await done

    async def _commit_all(self) -> None:
        while self._ready:
            batch, self._ready = self._ready, []
            for written, _ in batch:
                shares = [asdict(share) for share in written.order.shares]
                self.record("merged", {**asdict(written.order), "shares": shares})
            entries, self._entries = self._entries, []
            try:
                await self._write([written for written, _ in batch], entries)
            except Exception as error:
                # These merges did not happen; everything else waits for the next write.
                self._entries = [entry for entry in entries if entry.kind != "merged"] + self._entries
                for _, done in batch:
                    done.set_exception(error)
            else:
                for _, done in batch:
                    done.set_result(None)
        self._committing = None

    async def _write(self, merges: list[Written], entries: list[TapeEntry]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._store.commit, merges, self._standing(), entries)

    async def flush(self) -> None:
        if not self._entries:
            return
        entries, self._entries = self._entries, []
        try:
            await self._write([], entries)
        except SkerryError:
            self._entries = entries + self._entries

    async def close(self) -> None:
        if self._committing is not None:
            await self._committing
        for _ in range(3):
            await self.flush()
        self._thread.shutdown()
        if self._entries:
            raise StoreError(f"the last {len(self._entries)} decisions could not be written to the tape")
