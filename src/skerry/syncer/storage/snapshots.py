"""Snapshots: a consistent cut of a whole run, taken while everyone goes on, and a new run made from one.

The syncer's part is what the tape says at one moment: every version that counts, outer momentum, leases and decisions. Files of
versions do not change once they count, so they are linked, not copied. Then every island is asked for its optimizer's state,
on the stream on which it hears of everything else: that question is the marker of Chandy and Lamport. What was on its
way at the cut is not kept: contributions that were not merged are no part of it, and the samples in them are leased again.

    snapshots/NNNNNN/manifest.json   written last; names every file with its size and checksum
    snapshots/NNNNNN/...             what a run folder holds
    snapshots/NNNNNN/islands/NAME.optimizer/PPPPP.safetensors

A snapshot whose files do not match its manifest is passed over. The newest that has the state of every island is used, and only
if there is none, the newest that lacks some.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from skerry.checksum import checksum_in_parts
from skerry.core.syncer import SyncerCore
from skerry.durable import sync_path, write_durably
from skerry.errors import StoreError
from skerry.syncer.rpc.state_relay import Relay
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.run_folder import identity_text
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.tape import Tape

FORMAT = 2
STATE_S = 60.0
"""How long an island may take to send one part of its optimizer's state."""
TRIES, RETRY_S = 10, 0.5
AT_ONCE = 2
"""Islands that are asked at a time: others may want a peer's state meanwhile."""
MOST_PARTS = 100_000
READ_BYTES = 1 << 20


class Snapshots:
    """Takes them, one at a time, and removes those that are too old."""

    def __init__(self, store: RunStore, core: SyncerCore, tape: Tape, relay: Relay) -> None:
        self._store = store
        self._core = core
        self._tape = tape
        self._relay = relay
        self._folder = store.folder / "snapshots"
        self._taking = asyncio.Lock()
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._closed = False
        _remove_partial(self._folder)

    async def take(self) -> dict[str, Any]:
        """Returns what is said about it on the tape. Raises StoreError, and leaves nothing behind, if it cannot be kept."""
        async with self._taking:
            number = 1 + max([int(path.name) for path in _found(self._folder)], default=0)
            partial = self._folder / f".{number:06d}.partial"
            try:
                return await self._take(number, partial)
            except OSError as error:
                raise StoreError(f"a snapshot cannot be kept in {self._folder}: {error}") from error
            finally:
                await _in_thread(shutil.rmtree, partial, True)

    def close(self) -> None:
        """One that is being taken is given up."""
        self._closed = True

    async def _take(self, number: int, partial: Path) -> dict[str, Any]:
        await _in_thread(_make_empty, partial)
        healthy = [learner for learner in self._core.learners.values() if learner.phase == "training" and not learner.strikes]
        names = [learner.name for learner in healthy]
        step, tokens = self._core.step, self._core.tokens
        await self._tape.between_commits(lambda: self._store.cut(partial))
        # The cut is made. From here on islands are asked, in the order in which they hear of everything.
        found = await asyncio.gather(*[self._island(name, partial / "islands", step) for name in names])
        if self._closed:
            raise StoreError("the syncer stops; the snapshot is given up")
        facts = {"number": number, "step": step, "tokens": tokens, "islands": dict(zip(names, found, strict=True))}
        await _in_thread(_finish, partial, self._folder / f"{number:06d}", facts)
        await _in_thread(self._remove_old)
        return facts

    async def _island(self, name: str, folder: Path, step: int) -> str:
        """An island's inner state, part by part, so that little of it is in memory. Returns "kept", or why it is not."""
        place = folder / f"{quote(name, safe='')}.optimizer"
        async with self._asking:
            try:
                reason = await self._ask(name, place)
                if not reason:
                    # The run's step, not the island's: how old it is, is counted in those.
                    await _in_thread(write_durably, place / "step", str(step).encode())
                    return "kept"
            except OSError as error:
                reason = f"it cannot be written: {error}"
        await _in_thread(shutil.rmtree, place, True)
        return reason

    async def _ask(self, name: str, place: Path) -> str:
        """Why it could not be had, if it could not."""
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
                return f"{header.parts} parts, after {parts}"
            await _in_thread(_write_part, place / f"{part:05d}.safetensors", bytes(data))
            part, tries = part + 1, 0
        return ""

    def _remove_old(self) -> None:
        kept = self._store.identity.sync.snapshots_kept
        for old in _found(self._folder)[:-kept]:
            _remove(old)


def _write_part(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(".*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _found(folder: Path) -> list[Path]:
    """Snapshots, oldest first, whole or not."""
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"\d{6,}", path.name)) if folder.is_dir() else []


def _remove(snapshot: Path) -> None:
    """First by name, so that one which is half removed is not taken for one that is damaged."""
    gone = snapshot.with_name(f".{snapshot.name}.partial")
    with contextlib.suppress(OSError):
        os.replace(snapshot, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _finish(partial: Path, final: Path, facts: dict[str, Any]) -> None:
    files = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        files[path.relative_to(partial).as_posix()] = [path.stat().st_size, _checksum(path)]
    for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
        sync_path(folder)
    manifest = {"format": FORMAT, "at": time.time(), **facts, "files": files}
    write_durably(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
    os.replace(partial, final)
    sync_path(final.parent)
    sync_path(final.parent.parent)


def _checksum(path: Path) -> int:
    with path.open("rb") as file:
        return checksum_in_parts(iter(lambda: file.read(READ_BYTES), b""))


async def _in_thread(work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


# ---------------------------------------------------------------- a run from a snapshot


def check(snapshot: Path) -> dict[str, Any]:
    """The manifest of a snapshot that is whole. Raises StoreError that says what is wrong with it."""
    try:
        manifest: dict[str, Any] = json.loads((snapshot / "manifest.json").read_text())
        if manifest["format"] != FORMAT:
            raise StoreError(f"{snapshot} has snapshot format {manifest['format']}, this Skerry reads {FORMAT}")
        for name, (size, expected) in manifest["files"].items():
            path = snapshot / name
            if path.stat().st_size != size or _checksum(path) != expected:
                raise StoreError(f"{path} is damaged: its content does not match the manifest")
    except FileNotFoundError as error:
        raise StoreError(f"{snapshot} is no whole snapshot: {error.filename} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{snapshot} cannot be read: {error}") from None
    return manifest


def newest_complete(folder: Path, say: Callable[[str], None]) -> Path:
    """Of a run folder the newest snapshot that is whole and has the state of every island, or else the newest that is whole; or
    the folder itself, if it is a snapshot. Says what is passed over."""
    if (folder / "manifest.json").exists():
        check(folder)
        return folder
    without_states: list[tuple[Path, list[str]]] = []
    for snapshot in reversed(_found(folder / "snapshots")):
        try:
            islands = check(snapshot)["islands"]
        except StoreError as error:
            say(f"passed over: {error}")
            continue
        missing = sorted(name for name, kept in islands.items() if kept != "kept")
        if not missing:
            for passed, names in without_states:
                say(f"passed over: {passed} is newer but lacks the inner state of {', '.join(names)}")
            return snapshot
        without_states.append((snapshot, missing))
    if without_states:
        snapshot, names = without_states[0]
        say(f"no snapshot has the state of every island; {snapshot} lacks that of {', '.join(names)}")
        return snapshot
    raise StoreError(f"{folder} has no whole snapshot")


def restore(snapshot: Path, target: Path, islands: int = 0) -> dict[str, Any]:
    """Make a run folder from a snapshot that is whole. It is a run of its own: islands of the other one are not let in. With
    `islands` the job is set up for another number of them."""
    manifest = check(snapshot)
    if target.exists() and any(target.iterdir()):
        raise StoreError(f"{target} exists and is not empty")
    partial = target.with_name(f".{target.name}.partial")
    try:
        _make_empty(partial)
        for name in manifest["files"]:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(snapshot / name, partial / name)
            sync_path(partial / name)
        identity = json.loads((snapshot / "run.json").read_text())
        before, identity["run_id"] = identity["run_id"], uuid.uuid4().hex
        if identity["job"] is not None:
            identity["job"]["run"] = str(target)
            count = identity["job"]["islands"]["count"] = islands or identity["job"]["islands"]["count"]
            identity["sync"]["start_with"] = identity["job"]["sync"]["start_with"] = count
            write_durably(partial / "config.json", json.dumps(identity["job"], indent=2).encode() + b"\n")
        write_durably(partial / "run.json", identity_text(identity).encode())
        _let_go(partial, {"run_id": before, "number": manifest["number"], "step": manifest["step"]})
        for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
            sync_path(folder)
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
        sync_path(target.parent)
    except OSError as error:
        raise StoreError(f"{target} cannot be made from {snapshot}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _let_go(folder: Path, told: dict[str, Any]) -> None:
    """The processes of the run that was cut are none of this one: what they held is leased to others."""
    store = RunStore(folder)
    try:
        _, progress, standing = store.load()
        if standing.phase in ("closing", "ended"):
            raise StoreError("the run had reached its end when the snapshot was taken, so there is nothing to go on with")
        core = SyncerCore(store.identity.sync, len(progress), progress=progress, standing=standing)
        records = core.let_go_of_all("the run was restored from a snapshot")
        entries = [TapeEntry(time.time(), record.kind, record.data) for record in records]
        restored = TapeEntry(time.time(), "restored_from", told)
        store.commit([], core.standing(), [restored, *entries])
    finally:
        store.close()
