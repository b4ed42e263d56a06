"""Two groups of processes that have equal shares of the same cores, whatever either of them does. Needs root, and the cpu
controller of cgroups."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 100_000
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


class Half:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self, words: list[str]) -> list[str]:
        """The same command, as one of this group from its first moment."""
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "sh", *words]


@contextlib.contextmanager
def halves(cores: int) -> Iterator[tuple[Half, Half]]:
    quota = cores * PERIOD_US // 2
    old = (V1 / "cpu.cfs_quota_us").exists() or (V1 / "cpu.shares").exists()
    made: list[Path] = []
    try:
        try:
            if not old:
                (V2 / "cgroup.subtree_control").write_text("+cpu")
            for number in range(2):
                folder = (V1 if old else V2) / f"skerry-wan-{os.getpid()}-{number}"
                folder.mkdir()
                made.append(folder)
                if old:
                    (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (folder / "cpu.cfs_quota_us").write_text(str(quota))
                else:
                    (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        except OSError as error:
            raise SystemExit(f"cores cannot be shared out in halves: {error}") from None
        first, second = map(Half, made)
        yield first, second
    finally:
        for folder in made:
            _remove(folder)


def _remove(folder: Path) -> None:
    """What was in it may take a moment to be gone."""
    for _ in range(20):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    print(f"{folder} is left, with processes that do not end", file=sys.stderr)
