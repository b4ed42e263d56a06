"""Creates run folders."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from skerry.checksum import checksum
from skerry.config import SyncConfig, to_json
from skerry.core import records
from skerry.durable import DISK, unlink
from skerry.errors import StoreError
from skerry.syncer.extensions import check_extensions
from skerry.syncer.storage import database as db
from skerry.syncer.storage.database import TapeEntry
from skerry.syncer.storage.run_folder import FORMAT, RunIdentity, identity_text, is_run, read_identity
from skerry.syncer.storage.version_file import Label, checksums_of, file_name, write_version
from skerry.tensors.fragments import Fragment, Layout, TensorSpec, split
from skerry.tensors.merge import FragmentState, outer_optimizer


def gather(layout: Layout, fragment: Fragment, tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate a fragment's pieces into one flat fp32 vector."""
    pieces = []
    for piece in fragment.pieces:
        flat = tensors[layout.tensors[piece.tensor].name].detach().reshape(-1)
        pieces.append(flat[piece.start : piece.stop].to(device="cpu", dtype=torch.float32))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float32)


def create_run(folder: Path, tensors: Sequence[tuple[TensorSpec, Tensor]], sync: SyncConfig, job_json: str = "") -> RunIdentity:
    """Create a run folder from a model's initial tensors. The run exists once run.json does. Raises StoreError."""
    if is_run(folder):
        raise StoreError(f"{folder} already holds a run")
    check_extensions(sync)
    outer = outer_optimizer(sync)
    specs = [spec for spec, _ in tensors]
    layout = split(specs, sync.fragments)
    named = {spec.name: tensor for spec, tensor in tensors}
    for name, tensor in named.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise StoreError(f"initial weights must be finite, tensor {name!r} is not")
    run_id = uuid.uuid4().hex
    try:
        _make_folder(folder)
        for name in db.TAPE_FILES:
            unlink(folder / name)
        fixed = {layout.tensors[p.tensor].name: named[layout.tensors[p.tensor].name] for p in layout.fixed.pieces}
        fixed_bytes = save({name: tensor.detach().cpu().contiguous() for name, tensor in fixed.items()})
        DISK.write_durably(folder / "fixed.safetensors", fixed_bytes)
        database = db.connect(folder, mode="rwc")
        with contextlib.closing(database), database:
            db.make_tables(database)
            for fragment in layout.fragments:
                state = FragmentState.fresh(gather(layout, fragment, named), outer)
                file, sums = file_name(fragment.index, 0), checksums_of(state)
                write_version(folder, file, state, Label(run_id, fragment.index, 0, 0), sums.state)
                db.put_version(database, fragment.index, 0, 0, file, sums.state, sums.public)
            db.append(database, [TapeEntry(time.time(), records.Created(len(layout.fragments)))])
            db.put_meta(database, "generation", uuid.uuid4().hex)
            db.count_rows(database)
        identity = {
            "format": FORMAT,
            "run_id": run_id,
            "fixed_checksum": checksum(fixed_bytes),
            "tensors": [[s.name, list(s.shape), s.dtype, s.rule] for s in specs],
            "sync": json.loads(to_json(sync)),
            "job": json.loads(job_json) if job_json else None,
        }
        text = identity_text(identity)
        DISK.write_durably(folder / "run.json", text.encode())
        # The tape's copy implies that run.json existed, so it must come last.
        with contextlib.closing(db.connect(folder)) as database, database:
            db.put_meta(database, "identity", text)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot create a run in {folder}: {error}") from error
    return read_identity(folder)


def _make_folder(folder: Path) -> None:
    """Create the folder and its parents, and make their directory entries durable."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    os.makedirs(folder / "fragments", exist_ok=True)
    DISK.sync_path(folder)
    for path in made or [folder]:  # an existing folder may have been created just before, and not synced
        with contextlib.suppress(PermissionError):  # the parent may not be readable
            DISK.sync_path(path.parent)
