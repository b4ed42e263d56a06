"""Quarantine for files that opening a run folder would otherwise delete. Each opening that needs it gets a numbered folder in
`aside/`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

KEPT_LEFTOVERS = 2
"""How many `-leftovers` folders stay. `-repair` folders are never deleted automatically."""


class Aside:
    def __init__(self, folder: Path, why: Literal["repair", "leftovers"]) -> None:
        self._parent = folder / "aside"
        self._why = why
        self._folder: Path | None = None
        self.moved: list[str] = []

    def move(self, path: Path) -> None:
        """Move a file into this opening's folder. Raises OSError."""
        if self._folder is None:
            numbers = [int(existing.name.split("-")[0]) for existing in _numbered(self._parent)]
            self._folder = self._parent / f"{max(numbers, default=0) + 1:04d}-{self._why}"
            self._folder.mkdir(parents=True)
        os.replace(path, self._folder / path.name)
        self.moved.append(path.name)


def _numbered(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if re.fullmatch(r"\d{4,}-(repair|leftovers)", path.name))


def tidy(folder: Path, wanted: set[str], healthy: bool, say: Callable[[str], None]) -> None:
    """Move files that no version needs to `aside/`. If the run is healthy (every file the tape names is intact), also delete
    half-written files and old `-leftovers` folders."""
    aside = Aside(folder, "leftovers" if healthy else "repair")
    for path in sorted((folder / "fragments").iterdir()):
        if path.name.endswith(".partial"):
            if healthy:
                with contextlib.suppress(OSError):
                    path.unlink()
        elif path.name not in wanted:
            with contextlib.suppress(OSError):  # harmless where it is, apart from the space
                aside.move(path)
    if aside.moved:
        say(f"moved {len(aside.moved)} files that no version needs to {folder / 'aside'}: {_first_few(aside.moved)}")
    if healthy:
        for old in [path for path in _numbered(folder / "aside") if path.name.endswith("-leftovers")][:-KEPT_LEFTOVERS]:
            shutil.rmtree(old, ignore_errors=True)


def free_half_written(folder: Path) -> None:
    """Delete half-written files, which no version refers to. On a full disk the tape may need their space."""
    for path in (folder / "fragments").glob(".*.partial"):
        with contextlib.suppress(OSError):
            path.unlink()


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
