"""Two groups of processes, each limited to half of the same cores. Needs root and the cpu controller of cgroups."""

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
        """Wrap a command so that it joins this group before it starts."""
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
            raise SystemExit(f"cannot limit groups to half of the cores: {error}") from None
        first, second = map(Half, made)
        yield first, second
    finally:
        for folder in made:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the group. Its processes may take a moment to end."""
    for _ in range(20):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    print(f"{folder} could not be removed: it still has processes", file=sys.stderr)
