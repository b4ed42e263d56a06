"""Copies of the model from before it diverged. A rollback restores one of them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skerry.checksum import checksum
from skerry.durable import DISK, Disk, unlink
from skerry.errors import StoreError
from skerry.tensors.codecs.codec import raw_bytes
from skerry.tensors.tensor_file import as_parts

KEPT = 2
"""Copies kept on disk. Older ones are deleted."""


class GoodCopies:
    def __init__(self, folder: Path, disk: Disk = DISK) -> None:
        self._folder, self._disk = folder / "good", disk

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:010d}.safetensors"

    def steps(self) -> list[int]:
        """Steps with a copy, newest first."""
        names = [re.fullmatch(r"step-(\d{10})\.safetensors", path.name) for path in self._folder.glob("step-*")]
        return sorted((int(found[1]) for found in names if found), reverse=True)

    def keep(self, step: int, fragments: Sequence[Tensor]) -> None:
        """Write a copy atomically, then delete the outdated ones. Raises StoreError."""
        tensors = {str(index): values for index, values in enumerate(fragments)}
        checksums = {name: checksum(raw_bytes(values)) for name, values in tensors.items()}
        try:
            self._folder.mkdir(exist_ok=True)
            self._disk.write_durably(self._path(step), *as_parts(tensors, {"checksums": json.dumps(checksums)}))
        except OSError as error:
            raise StoreError(f"cannot write a good copy of the model to {self._folder}: {error.strerror}") from error
        for old in self.steps()[KEPT:]:
            with contextlib.suppress(OSError):
                unlink(self._path(old))

    def read(self, step: int, fragment: int) -> Tensor:
        """Read one fragment of a copy. Raises StoreError if the copy is missing or damaged."""
        path = self._path(step)
        try:
            with safe_open(path, framework="pt") as file:
                values: Tensor = file.get_tensor(str(fragment))
                checksums = json.loads((file.metadata() or {}).get("checksums", "{}"))
        except (OSError, SafetensorError, ValueError) as error:
            raise StoreError(f"cannot read the good copy of step {step}: {error}") from error
        if values.dtype != torch.float32 or checksums.get(str(fragment)) != checksum(raw_bytes(values)):
            raise StoreError(f"{path} is damaged: fragment {fragment} does not match its checksum")
        return values
