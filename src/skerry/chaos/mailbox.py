"""Carry requests from `skerry chaos` to the supervisor of a running run, and answers back, as files in `RUN/chaos`."""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from pathlib import Path

from skerry.errors import ConfigError, RunFailed

ANSWER_S = 15.0
LOOK_S = 0.05


class Mailbox:
    """The supervisor's side. The lock it holds shows that the run is supervised."""

    def __init__(self, folder: Path) -> None:
        self._requests, self._answers = folder / "requests", folder / "answers"
        for directory in (self._requests, self._answers):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder)
        if self._lock is None:
            raise RunFailed(f"{folder.parent} is already run by another skerry train")
        for left_behind in [*self._requests.iterdir(), *self._answers.iterdir()]:
            left_behind.unlink()

    def requests(self) -> list[tuple[str, str]]:
        found = []
        for path in sorted(self._requests.glob("*.txt")):
            found.append((path.stem, path.read_text()))
            path.unlink()
        return found

    def answer(self, identity: str, done: bool, words: str) -> None:
        path = self._answers / f"{identity}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"done": done, "words": words}))
        os.replace(partial, path)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def ask(run: Path, text: str, timeout_s: float = ANSWER_S) -> str:
    """Ask the supervisor of a run to inject faults. Returns the faults it accepted."""
    if not (run / "config.json").exists():
        raise ConfigError(f"{run} is not a run of skerry train: it has no config.json")
    folder = run / "chaos"
    lock = _locked(folder) if folder.is_dir() else -1
    if lock is not None:
        if lock >= 0:
            os.close(lock)
        raise ConfigError(f"no skerry train supervises {run}; start it, then inject faults")
    identity = uuid.uuid4().hex
    path, answer = folder / "requests" / f"{identity}.txt", folder / "answers" / f"{identity}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)
    deadline = time.monotonic() + timeout_s
    while not answer.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            raise RunFailed(f"the supervisor of {run} did not answer within {timeout_s:.0f} s")
        time.sleep(LOOK_S)
    found = json.loads(answer.read_text())
    answer.unlink()
    if not found["done"]:
        raise ConfigError(found["words"])
    return str(found["words"])


def _locked(folder: Path) -> int | None:
    """Take the mailbox's lock and return its descriptor, or None if another process holds it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
