"""Takes snapshots: consistent cuts of a run, without pausing it.

The syncer's part is the tape at one moment: committed versions, outer momentum, leases and records. Committed version files are
immutable, so they are hard-linked. Then every island is asked for its optimizer state, on its control stream: this request is
the marker of the Chandy-Lamport algorithm. Contributions in flight at the cut are left out; their samples are leased again.

    snapshots/NNNNNN/manifest.json   written last; names every file with its size and checksum
    snapshots/NNNNNN/...             the files of a run folder
    snapshots/NNNNNN/islands/NAME.optimizer/PPPPP.safetensors
    snapshots/fixed-CHECKSUM.safetensors   tensors that are not trained, shared by all snapshots

storage/restore.py creates a run from a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skerry.checksum import file_checksum
from skerry.core.syncer import SyncerCore
from skerry.durable import Disk
from skerry.errors import StoreError
from skerry.syncer.rpc.state_relay import StateRelay
from skerry.syncer.storage.restore import SNAPSHOT_FORMAT, make_empty, manifest_text, read_manifest
from skerry.syncer.storage.run_folder import snapshot_folders
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.tape import Tape

STATE_S = 60.0
"""How long an island may take to send one part of its optimizer state."""
TRIES, RETRY_S = 10, 0.5
AT_ONCE = 2
"""Islands asked at a time. This leaves relay capacity for islands that need a peer's state."""
MOST_PARTS = 100_000


class Snapshots:
    """Takes snapshots, one at a time, and deletes old ones."""

    def __init__(self, store: RunStore, core: SyncerCore, tape: Tape, relay: StateRelay) -> None:
        self._store = store
        self._core = core
        self._tape = tape
        self._relay = relay
        self._folder = store.folder / "snapshots"
        self._taking = asyncio.Lock()
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._closed = False
        for path in self._folder.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=True)

    async def take(self) -> dict[str, Any]:
        """Take a snapshot. Returns its number, step, tokens and islands. Raises StoreError, and then leaves nothing behind."""
        async with self._taking:
            number = 1 + max([int(path.name) for path in snapshot_folders(self._store.folder)], default=0)
            partial = self._folder / f".{number:06d}.partial"
            try:
                return await self._take(number, partial)
            except OSError as error:
                raise StoreError(f"cannot write a snapshot to {self._folder}: {error}") from error
            finally:
                await _in_thread(shutil.rmtree, partial, True)

    def close(self) -> None:
        """Abandon the snapshot in progress."""
        self._closed = True

    async def _take(self, number: int, partial: Path) -> dict[str, Any]:
        await _in_thread(make_empty, partial)
        names = [learner.name for learner in self._core.run.in_phase("training") if not learner.strikes]
        step, tokens = self._core.step, self._core.tokens
        await self._tape.between_commits(self._store.cut, partial)
        # The syncer's part is complete. Requests to islands are ordered with all their other messages.
        results = await asyncio.gather(*[self._island(name, partial / "islands", step) for name in names])
        if self._closed:
            raise StoreError("the snapshot was abandoned because the syncer is stopping")
        facts = {"number": number, "step": step, "tokens": tokens, "islands": dict(zip(names, results, strict=True))}
        await _in_thread(_finish, partial, self._folder / f"{number:06d}", facts, self._store.disk)
        await _in_thread(self._remove_old)
        return facts

    async def _island(self, name: str, folder: Path, step: int) -> str:
        """Save an island's optimizer state. Returns "kept", or the reason why it is missing."""
        target = folder / f"{quote(name, safe='')}.optimizer"
        async with self._asking:
            try:
                reason = await self._ask(name, target)
                if not reason:
                    # The run's step, not the island's own, because the age of the state is measured in run steps.
                    await _in_thread(self._store.disk.write_durably, target / "step", str(step).encode())
                    return "kept"
            except OSError as error:
                reason = f"it cannot be written: {error}"
        await _in_thread(shutil.rmtree, target, True)
        return reason

    async def _ask(self, name: str, target: Path) -> str:
        """Fetch and write the parts one by one, to bound memory. Returns "" or the reason for the failure."""
        part, parts, tries = 0, 0, 0
        while part < parts or not parts:
            header, data = await self._relay.ask(name, part, STATE_S)
            if header.reason:
                tries += 1
                if not header.again or tries > TRIES:
                    return str(header.reason)
                await asyncio.sleep(RETRY_S)
                continue
            parts = parts or header.parts
            if header.parts != parts or not 0 < parts <= MOST_PARTS:
                return f"the number of parts is {header.parts}, before it was {parts}"
            await _in_thread(_write_part, target / f"{part:05d}.safetensors", bytes(data), self._store.disk)
            part, tries = part + 1, 0
        return ""

    def _remove_old(self) -> None:
        """Delete all but the newest few, and the newest one with the state of every island."""
        snapshots = snapshot_folders(self._store.folder)
        kept = set(snapshots[-self._store.identity.sync.snapshots_kept :])
        complete = [snapshot for snapshot in snapshots if _is_complete(snapshot)]
        for old in set(snapshots) - kept - set(complete[-1:]):
            _remove(old)


def _is_complete(snapshot: Path) -> bool:
    try:
        return all(state == "kept" for state in read_manifest(snapshot)["islands"].values())
    except StoreError:
        return False


def _write_part(path: Path, data: bytes, disk: Disk) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write_durably(path, data)


def _remove(snapshot: Path) -> None:
    """Delete a snapshot. The rename first prevents an interrupted deletion from looking like a damaged snapshot."""
    renamed = snapshot.with_name(f".{snapshot.name}.partial")
    with contextlib.suppress(OSError):
        os.replace(snapshot, renamed)
        shutil.rmtree(renamed, ignore_errors=True)


def _finish(partial: Path, final: Path, facts: dict[str, Any], disk: Disk) -> None:
    """Write the manifest, make everything durable, and move the snapshot to its final name."""
    files = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        files[path.relative_to(partial).as_posix()] = [path.stat().st_size, file_checksum(path)]
    for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
        disk.sync_path(folder)
    manifest = {"format": SNAPSHOT_FORMAT, "at": time.time(), **facts, "files": files}
    disk.write_durably(partial / "manifest.json", manifest_text(manifest).encode())
    os.replace(partial, final)
    disk.sync_path(final.parent)
    disk.sync_path(final.parent.parent)


async def _in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)
