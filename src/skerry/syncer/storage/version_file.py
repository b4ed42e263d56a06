"""Self-describing files that hold one version of one fragment each.

The tape has the checksum of each committed version. The file repeats it, in a label with the run, fragment and version. If the
tape is lost, the newest intact version of a fragment can still be found and verified from the files alone.
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
    """Identity of the version in a file."""

    run_id: str
    fragment: int
    version: int
    round: int
    """The round that merged it."""
    tokens: int = 0
    """Tokens the run had trained on at that point."""


@dataclass(frozen=True)
class Checksums:
    state: int
    """Checksum of all tensors in the file."""
    public: int
    """Checksum of the values that learners hold."""


@dataclass(frozen=True)
class Proven:
    """A version read from a file that matches its label and checksum."""

    label: Label
    path: Path
    state: FragmentState


def file_name(fragment: int, version: int, attempt: int | str = 0) -> str:
    return f"{fragment:04d}-{version:08d}{f'-{attempt}' if attempt else ''}.safetensors"


def numbers_of(name: str) -> tuple[int, int] | None:
    """Parse the fragment and version from a file name. Returns None for other files."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def checksums_of(state: FragmentState) -> Checksums:
    tensors = _tensors(state)
    total = public = checksum(raw_bytes(tensors.pop("values")))
    for name, tensor in tensors.items():
        total = checksum(raw_bytes(tensor), total)
        public = checksum(raw_bytes(tensor)) if name == "shown" else public
    return Checksums(total, public)


def state_checksum(state: FragmentState) -> int:
    total = 0
    for tensor in _tensors(state).values():
        total = checksum(raw_bytes(tensor), total)
    return total


def _tensors(state: FragmentState) -> dict[str, Tensor]:
    """Everything that is stored, in the order of the checksum."""
    tensors = {"values": state.values, **{name: state.state[name] for name in sorted(state.state)}}
    return tensors if state.shown is None else {**tensors, "shown": state.shown}


def write_version(folder: Path, file: str, state: FragmentState, label: Label, content: int, disk: Disk = DISK) -> None:
    """Write a version durably. `content` is the checksum of `state`. Raises OSError."""
    text = json.dumps([*asdict(label).values(), content])
    tensors = _tensors(state)
    metadata = {"label": text, "seal": f"{checksum(text.encode()):08x}", "shapes": _shapes(tensors)}
    disk.write_durably(folder / "fragments" / file, *as_parts(tensors, metadata))


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return json.dumps({name: list(tensors[name].shape) for name in sorted(tensors)})


def read_version(
    folder: Path, fragment: Fragment, row: Mapping[str, Any] | sqlite3.Row, missing_is_damage: bool = True
) -> FragmentState:
    """Read the version that a tape row names. Raises StoreError if the file is damaged or missing; FileNotFoundError for a
    missing file if `missing_is_damage` is False."""
    path = folder / "fragments" / row["file"]
    try:
        state = _read(path)
    except FileNotFoundError:
        if not missing_is_damage:
            raise
        raise StoreError(f"{path} is missing, but the tape refers to it") from None
    except (OSError, SafetensorError, KeyError) as error:
        raise StoreError(f"{path} is damaged: {one_line(error)}") from None
    if not _fits(state, fragment) or state_checksum(state) != row["checksum"]:
        raise StoreError(f"{path} is damaged: its content does not match the tape's checksum")
    return state


def _read(path: Path) -> FragmentState:
    # Checksums cover content only, and any name may be that of an optimizer's tensor, so names and shapes are written twice.
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shapes = (file.metadata() or {}).get("shapes")
    if shapes is None and tensors.keys() - {"shown"} != {"values", "momentum"}:  # a file from before other optimizers
        raise SafetensorError("the names of its tensors are not intact")
    if shapes is not None and shapes != _shapes(tensors):
        raise SafetensorError("the names or shapes of its tensors are not intact")
    values, shown = tensors.pop("values"), tensors.pop("shown", None)
    return FragmentState(values, tensors, shown)


def _fits(state: FragmentState, fragment: Fragment) -> bool:
    whole = (state.values, state.public)
    return all(t.shape == (fragment.numel,) for t in whole) and all(t.dtype == torch.float32 for t in _tensors(state).values())


def label_of(path: Path) -> tuple[Label, int] | None:
    """Read a file's label and content checksum without verifying the content. Returns None if there is no valid label."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        text = metadata["label"]
        if metadata["seal"] != f"{checksum(text.encode()):08x}":
            return None
        *values, content = json.loads(text)
        return Label(*values), content
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None


def prove(path: Path, run_id: str, fragment: Fragment) -> Proven | None:
    """Read a file if it is an intact version of this run and fragment. Returns None otherwise."""
    labelled = label_of(path)
    if labelled is None:
        return None
    label, content = labelled
    if (label.run_id, label.fragment) != (run_id, fragment.index):
        return None
    with contextlib.suppress(OSError, SafetensorError, KeyError):
        state = _read(path)
        if _fits(state, fragment) and state_checksum(state) == content:
            return Proven(label, path, state)
    return None


def newest_proven(paths: Iterable[Path], run_id: str, fragment: Fragment, below: int | None = None) -> Proven | None:
    """Find the newest intact version of a fragment among these files, older than `below` if given. Reads labels first and
    content only until one verifies. Among files of the same version the first one is preferred."""
    candidates = [path for path in paths if (numbers_of(path.name) or (-1, 0))[0] == fragment.index]
    labelled = [(found[0].version, path) for path in candidates if (found := label_of(path))]
    for version, path in sorted(labelled, key=lambda item: -item[0]):
        if below is None or version < below:
            proven = prove(path, run_id, fragment)
            if proven is not None:
                return proven
    return None
