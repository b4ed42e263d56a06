"""Where an opening puts what it would otherwise remove: one numbered folder in `aside/` for each opening that needs it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

KEPT_LEFTOVERS = 2
"""Folders with leftovers of healthy openings. Those of repairs stay until somebody removes them."""


class Aside:
    def __init__(self, folder: Path, why: Literal["repair", "leftovers"]) -> None:
        self._parent = folder / "aside"
        self._why = why
        self._folder: Path | None = None
        self.moved: list[str] = []

    def move(self, path: Path) -> None:
        """Raises OSError."""
        if self._folder is None:
            taken = [int(found.name.split("-")[0]) for found in _numbered(self._parent)]
            self._folder = self._parent / f"{max(taken, default=0) + 1:04d}-{self._why}"
            self._folder.mkdir(parents=True)
        os.replace(path, self._folder / path.name)
        self.moved.append(path.name)


def _numbered(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if re.fullmatch(r"\d{4,}-(repair|leftovers)", path.name))


def tidy(folder: Path, wanted: set[str], healthy: bool, say: Callable[[str], None]) -> None:
    """Move files that no version needs out of the way. Only once everything the tape names was found whole are half-written
    files removed, and what earlier healthy openings moved aside."""
    aside = Aside(folder, "leftovers" if healthy else "repair")
    for path in sorted((folder / "fragments").iterdir()):
        if path.name.endswith(".partial"):
            if healthy:
                with contextlib.suppress(OSError):
                    path.unlink()
        elif path.name not in wanted:
            with contextlib.suppress(OSError):  # it takes space, but it is in nobody's way
                aside.move(path)
    if aside.moved:
        say(f"{len(aside.moved)} files that no version needs were moved to {folder / 'aside'}: {_few(aside.moved)}")
    if healthy:
        for old in [path for path in _numbered(folder / "aside") if path.name.endswith("-leftovers")][:-KEPT_LEFTOVERS]:
            shutil.rmtree(old, ignore_errors=True)


def free_half_written(folder: Path) -> None:
    """On a full disk the tape may need the space of files that were never finished. They never counted."""
    for path in (folder / "fragments").glob(".*.partial"):
        with contextlib.suppress(OSError):
            path.unlink()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
