"""One version of one fragment as a file that proves itself: whose it is, which version, and that every byte is as written.

The tape also has the checksum of each version that counts. The label in the file itself is for the day the tape is lost: the
newest version of a fragment can then still be found among the files, and be trusted.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from skerry.checksum import checksum
from skerry.durable import DISK, Disk
from skerry.errors import StoreError
from skerry.syncer.storage.database import one_line
from skerry.tensors.codecs.codec import raw_bytes
from skerry.tensors.fragments import Fragment
from skerry.tensors.merge import FragmentState
from skerry.tensors.tensor_file import as_parts

_NAME = re.compile(r"(\d{4,})-(\d{8,})(-[0-9a-z-]+)?\.safetensors")


@dataclass(frozen=True)
class Label:
    """What a version's file says about itself."""

    run_id: str
    fragment: int
    version: int
    round: int
    """The round it was merged in."""
    tokens: int = 0
    """Tokens the run had trained on by then."""


@dataclass(frozen=True)
class Checksums:
    state: int
    """Of everything that is stored."""
    public: int
    """Of the values alone, as learners have them."""


@dataclass(frozen=True)
class Proven:
    """A version whose file was read and found whole."""

    label: Label
    path: Path
    state: FragmentState


def file_name(fragment: int, version: int, attempt: int | str = 0) -> str:
    return f"{fragment:04d}-{version:08d}{f'-{attempt}' if attempt else ''}.safetensors"


def numbers_of(name: str) -> tuple[int, int] | None:
    """Fragment and version of a file with this name; None if it is not the file of a version."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def checksums_of(state: FragmentState) -> Checksums:
    tensors = _tensors(state)
    found = public = checksum(raw_bytes(tensors.pop("values")))
    for name, tensor in tensors.items():
        found = checksum(raw_bytes(tensor), found)
        public = checksum(raw_bytes(tensor)) if name == "shown" else public
    return Checksums(found, public)


def state_checksum(state: FragmentState) -> int:
    found = 0
    for tensor in _tensors(state).values():
        found = checksum(raw_bytes(tensor), found)
    return found


def _tensors(state: FragmentState) -> dict[str, Tensor]:
    found = {"values": state.values, "momentum": state.momentum}
    return found if state.shown is None else {**found, "shown": state.shown}


def write_version(folder: Path, file: str, state: FragmentState, label: Label, found: int, disk: Disk = DISK) -> None:
    """`found` is the state's checksum. Raises OSError."""
    text = json.dumps([*asdict(label).values(), found])
    metadata = {"label": text, "seal": f"{checksum(text.encode()):08x}"}
    disk.write_durably(folder / "fragments" / file, *as_parts(_tensors(state), metadata))


def read_version(
    folder: Path, fragment: Fragment, row: Mapping[str, Any] | sqlite3.Row, missing_is_damage: bool = True
) -> FragmentState:
    """The version that a row of the tape names. Raises StoreError if the file is not what the row says."""
    path = folder / "fragments" / row["file"]
    try:
        state = _read(path)
    except FileNotFoundError:
        if not missing_is_damage:
            raise
        raise StoreError(f"{path} is missing, but the tape counts on it") from None
    except (OSError, SafetensorError, KeyError) as error:
        raise StoreError(f"{path} is damaged: {one_line(error)}") from None
    if not _fits(state, fragment) or state_checksum(state) != row["checksum"]:
        raise StoreError(f"{path} is damaged: its content does not match the tape's checksum")
    return state


def _read(path: Path) -> FragmentState:
    tensors = load_file(path)
    return FragmentState(tensors["values"], tensors["momentum"], tensors.get("shown"))


def _fits(state: FragmentState, fragment: Fragment) -> bool:
    return all(t.shape == (fragment.numel,) and t.dtype == torch.float32 for t in _tensors(state).values())


def label_of(path: Path) -> tuple[Label, int] | None:
    """What a file says about itself, and the checksum of its content, which is not looked at. None if it says nothing."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        text = metadata["label"]
        if metadata["seal"] != f"{checksum(text.encode()):08x}":
            return None
        *values, found = json.loads(text)
        return Label(*values), found
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None


def prove(path: Path, run_id: str, fragment: Fragment) -> Proven | None:
    """The version in this file, if it is one of this run and fragment, and whole."""
    labelled = label_of(path)
    if labelled is None or (labelled[0].run_id, labelled[0].fragment) != (run_id, fragment.index):
        return None
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        state = _read(path)
        if _fits(state, fragment) and state_checksum(state) == labelled[1]:
            return Proven(labelled[0], path, state)
    return None


def newest_proven(paths: Iterable[Path], run_id: str, fragment: Fragment, below: int | None = None) -> Proven | None:
    """The newest version of a fragment among these files, or the newest before `below`. Reads only as many as it takes."""
    mine = [path for path in paths if (numbers_of(path.name) or (-1, 0))[0] == fragment.index]
    labelled = [(found[0].version, path) for path in mine if (found := label_of(path))]
    for version, path in sorted(labelled, key=lambda found: -found[0]):  # among equals the caller's order counts
        if below is None or version < below:
            proven = prove(path, run_id, fragment)
            if proven is not None:
                return proven
    return None
