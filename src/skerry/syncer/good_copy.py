"""Copies of the whole model from times when all was well, to go back to when it diverges. The newest two are kept."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from skerry.core.tensor_file import as_parts
from skerry.durable import unlink, write_durably
from skerry.errors import StoreError

KEPT = 2


class GoodCopies:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "good"

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:010d}.safetensors"

    def keep(self, step: int, fragments: Sequence[Tensor]) -> None:
        """Whole or not at all; older ones go once this one is safe."""
        parts = as_parts({str(index): values for index, values in enumerate(fragments)})
        try:
            self._folder.mkdir(exist_ok=True)
            write_durably(self._path(step), *parts)
        except OSError as error:
            raise StoreError(f"a good copy of the model cannot be kept in {self._folder}: {error.strerror}") from error
        copies = sorted(p for p in self._folder.iterdir() if re.fullmatch(r"step-\d{10}\.safetensors", p.name))
        for old in copies[:-KEPT]:
            with contextlib.suppress(OSError):
                unlink(old)

    def read(self, step: int, fragment: int) -> Tensor:
        try:
            with safe_open(self._path(step), framework="pt") as file:
                return file.get_tensor(str(fragment))  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise StoreError(f"the good copy of step {step} cannot be read: {error}") from error
