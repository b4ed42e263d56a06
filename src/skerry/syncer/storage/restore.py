"""A run made from a snapshot. A snapshot whose files do not match its manifest is passed over; the newest that has the state of
every island is used, and only if there is none, the newest that lacks some."""

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
_FACTS = {"number": int, "step": int, "tokens": int, "islands": dict, "files": dict}


def manifest_text(manifest: dict[str, Any]) -> str:
    return json.dumps({"checksum": checksum(json.dumps(manifest).encode()), "manifest": manifest}, indent=1)


def read_manifest(snapshot: Path) -> dict[str, Any]:
    """Raises StoreError if it is not what was written."""
    path = snapshot / "manifest.json"
    try:
        outside = json.loads(path.read_text())
        manifest: dict[str, Any] = outside["manifest"]
        if outside["checksum"] != checksum(json.dumps(manifest).encode()):
            raise StoreError(f"{path} is damaged: its content does not match its checksum")
        if manifest["format"] != SNAPSHOT_FORMAT:
            raise StoreError(f"{snapshot} has snapshot format {manifest['format']}, this Skerry reads {SNAPSHOT_FORMAT}")
        if not all(isinstance(manifest[name], kind) for name, kind in _FACTS.items()):
            raise StoreError(f"{path} is damaged: it lacks facts")
    except FileNotFoundError as error:
        raise StoreError(f"{snapshot} is no whole snapshot: {error.filename} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{snapshot} cannot be read: {error}") from None
    return manifest


def check(snapshot: Path) -> dict[str, Any]:
    """The manifest of a snapshot that is whole. Raises StoreError that says what is wrong with it."""
    manifest = read_manifest(snapshot)
    for name, (size, expected) in manifest["files"].items():
        path = snapshot / name
        try:
            if path.stat().st_size != size or file_checksum(path) != expected:
                raise StoreError(f"{path} is damaged: its content does not match the manifest")
        except FileNotFoundError:
            raise StoreError(f"{snapshot} is no whole snapshot: {path} is missing") from None
        except OSError as error:
            raise StoreError(f"{snapshot} cannot be read: {error}") from None
    return manifest


def newest_complete(folder: Path, say: Callable[[str], None]) -> Path:
    """Of a run folder the newest snapshot that is whole and has the state of every island, or else the newest that is whole; or
    the folder itself, if it is a snapshot. Says what is passed over."""
    if (folder / "manifest.json").exists():
        check(folder)
        return folder
    incomplete: list[tuple[Path, list[str]]] = []
    for snapshot in reversed(snapshot_folders(folder)):
        try:
            islands = check(snapshot)["islands"]
        except StoreError as error:
            say(f"passed over: {error}")
            continue
        missing = sorted(name for name, kept in islands.items() if kept != "kept")
        if not missing:
            for passed, names in incomplete:
                say(f"passed over: {passed} is newer but lacks the inner state of {', '.join(names)}")
            return snapshot
        incomplete.append((snapshot, missing))
    if incomplete:
        snapshot, names = incomplete[0]
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
        make_empty(partial)
        for name in manifest["files"]:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(snapshot / name, partial / name)
            DISK.sync_path(partial / name)
        identity = json.loads((snapshot / "run.json").read_text())
        before, identity["run_id"] = identity["run_id"], uuid.uuid4().hex
        if identity["job"] is not None:
            identity["job"]["run"] = str(target)
            count = identity["job"]["islands"]["count"] = islands or identity["job"]["islands"]["count"]
            identity["sync"]["start_with"] = identity["job"]["sync"]["start_with"] = count
            DISK.write_durably(partial / "config.json", json.dumps(identity["job"], indent=2).encode() + b"\n")
        DISK.write_durably(partial / "run.json", identity_text(identity).encode())
        _relabel(partial)
        _let_go(partial, records.RestoredFrom(before, manifest["number"], manifest["step"]))
        for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
            DISK.sync_path(folder)
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
        DISK.sync_path(target.parent)
    except OSError as error:
        raise StoreError(f"{target} cannot be made from {snapshot}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _relabel(folder: Path) -> None:
    """Versions and the tape name the run they belong to, which is another one now."""
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


def _let_go(folder: Path, told: records.RestoredFrom) -> None:
    """The sessions of the run that was cut are none of this one: what they held is leased to others."""
    store = RunStore(folder)
    try:
        _, progress, standing = store.load()
        if standing.phase in ("closing", "ended"):
            raise StoreError("the run had reached its end when the snapshot was taken, so there is nothing to go on with")
        core = SyncerCore(store.identity.sync, len(progress), progress=progress, standing=standing)
        given_back = core.let_go_of_all("the run was restored from a snapshot")
        store.commit([], core.standing(), [TapeEntry(time.time(), record) for record in (told, *given_back)])
    finally:
        store.close()
