"""Restores a run from a snapshot."""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skerry.checksum import checksum, file_checksum
from skerry.core import records
from skerry.core.syncer import SyncerCore
from skerry.durable import DISK
from skerry.errors import StoreError
from skerry.syncer.storage import database as db
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.run_folder import identity_text, read_identity, snapshot_folders
from skerry.syncer.storage.store import RunStore
from skerry.syncer.storage.version_file import Label, label_of, read_version, write_version

SNAPSHOT_FORMAT = 3
_REQUIRED = {"number": int, "step": int, "tokens": int, "islands": dict, "files": dict}
"""Fields of a manifest, and their types."""


def manifest_text(manifest: dict[str, Any]) -> str:
    return json.dumps({"checksum": checksum(json.dumps(manifest).encode()), "manifest": manifest}, indent=1)


def read_manifest(snapshot: Path) -> dict[str, Any]:
    """Read a snapshot's manifest. Raises StoreError if it is missing or damaged."""
    path = snapshot / "manifest.json"
    try:
        envelope = json.loads(path.read_text())
        manifest: dict[str, Any] = envelope["manifest"]
        if envelope["checksum"] != checksum(json.dumps(manifest).encode()):
            raise StoreError(f"{path} is damaged: the content does not match its checksum")
        if manifest["format"] != SNAPSHOT_FORMAT:
            raise StoreError(f"{snapshot} has snapshot format {manifest['format']}, this Skerry reads {SNAPSHOT_FORMAT}")
        if not all(isinstance(manifest[name], kind) for name, kind in _REQUIRED.items()):
            raise StoreError(f"{path} is damaged: a field has the wrong type")
    except FileNotFoundError as error:
        raise StoreError(f"{snapshot} is not a complete snapshot: {error.filename} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{snapshot} cannot be read: {error}") from None
    return manifest


def check(snapshot: Path) -> dict[str, Any]:
    """Verify every file of a snapshot. Returns its manifest. Raises StoreError that says what is wrong."""
    manifest = read_manifest(snapshot)
    for name, (size, expected) in manifest["files"].items():
        path = snapshot / name
        try:
            if path.stat().st_size != size or file_checksum(path) != expected:
                raise StoreError(f"{path} is damaged: the content does not match the manifest")
        except FileNotFoundError:
            raise StoreError(f"{snapshot} is not a complete snapshot: {path} is missing") from None
        except OSError as error:
            raise StoreError(f"{snapshot} cannot be read: {error}") from None
    return manifest


def newest_complete(folder: Path, say: Callable[[str], None]) -> Path:
    """Pick the snapshot to restore: the newest intact one with the state of every island, or else the newest intact one. If
    `folder` is itself a snapshot, it is used. Reports through `say` what was skipped. Raises StoreError."""
    if (folder / "manifest.json").exists():
        check(folder)
        return folder
    incomplete: list[tuple[Path, list[str]]] = []
    for snapshot in reversed(snapshot_folders(folder)):
        try:
            islands = check(snapshot)["islands"]
        except StoreError as error:
            say(f"skipped: {error}")
            continue
        missing = sorted(name for name, state in islands.items() if state != "kept")
        if not missing:
            for skipped, names in incomplete:
                say(f"skipped: {skipped} is newer but lacks the inner state of {', '.join(names)}")
            return snapshot
        incomplete.append((snapshot, missing))
    if incomplete:
        snapshot, names = incomplete[0]
        say(f"no snapshot has the state of every island; using {snapshot}, which lacks {', '.join(names)}")
        return snapshot
    raise StoreError(f"{folder} has no intact snapshot")


def restore(snapshot: Path, target: Path, islands: int = 0) -> dict[str, Any]:
    """Create a run folder from a snapshot. It is a new run: islands of the old one cannot join it. `islands` changes the number
    of islands in the job. Returns the manifest. Raises StoreError."""
    manifest = check(snapshot)
    if target.exists() and any(target.iterdir()):
        raise StoreError(f"{target} exists and is not empty")
    partial = target.with_name(f".{target.name}.partial")
    try:
        make_empty(partial)
        for name in manifest["files"]:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(snapshot / name, partial / name)
            DISK.sync_path(partial / name)
        identity = json.loads((snapshot / "run.json").read_text())
        old_run_id, identity["run_id"] = identity["run_id"], uuid.uuid4().hex
        if identity["job"] is not None:
            identity["job"]["run"] = str(target)
            count = identity["job"]["islands"]["count"] = islands or identity["job"]["islands"]["count"]
            identity["sync"]["start_with"] = identity["job"]["sync"]["start_with"] = count
            DISK.write_durably(partial / "config.json", json.dumps(identity["job"], indent=2).encode() + b"\n")
        DISK.write_durably(partial / "run.json", identity_text(identity).encode())
        _relabel(partial)
        _end_sessions(partial, records.RestoredFrom(old_run_id, manifest["number"], manifest["step"]))
        for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
            DISK.sync_path(folder)
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
        DISK.sync_path(target.parent)
    except OSError as error:
        raise StoreError(f"cannot restore {snapshot} to {target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _relabel(folder: Path) -> None:
    """Write the new run's id into the version files and the tape."""
    identity = read_identity(folder)
    database = db.connect(folder)
    try:
        with database:
            db.put_meta(database, "identity", (folder / "run.json").read_text())
            db.put_meta(database, "generation", uuid.uuid4().hex)
            for fragment in identity.layout.fragments:
                row = db.newest_row(database, fragment.index)
                known = label_of(folder / "fragments" / row["file"])
                tokens = known[0].tokens if known is not None else 0
                label = Label(identity.run_id, fragment.index, row["version"], row["round"], tokens)
                write_version(folder, row["file"], read_version(folder, fragment, row), label, row["checksum"])
    finally:
        database.close()


def _end_sessions(folder: Path, restored: records.RestoredFrom) -> None:
    """End the old run's sessions and return their leases."""
    store = RunStore(folder)
    try:
        _, progress, standing = store.load()
        if standing.phase in ("closing", "ended"):
            raise StoreError("the run had already ended when the snapshot was taken; there is nothing to continue")
        core = SyncerCore(store.identity.sync, len(progress), progress=progress, standing=standing)
        returned = core.let_go_of_all("the run was restored from a snapshot")
        store.commit([], core.standing(), [TapeEntry(time.time(), record) for record in (restored, *returned)])
    finally:
        store.close()
