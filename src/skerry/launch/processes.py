"""Child processes: each in its own session, logged to a file, and never orphaned.

Children end with their parent even if it is killed with SIGKILL; see `die_with_parent`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

STOP_S = 15.0
_PARENT = "SKERRY_PARENT"


def skerry_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "skerry", *arguments]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self._command = command
        self._log = log
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self._environment, _PARENT: str(os.getpid())}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # A terminal sends Ctrl-C to the whole process group; here the parent alone handles it.
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit status, or None while the child runs or before it was started."""
        return self._process.poll() if self._process is not None else None

    def wait(self, timeout_s: float) -> int | None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Send SIGTERM, then SIGKILL if the child has not ended within the timeout."""
        if self._process is None or self._process.poll() is not None:
            return
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        if self.wait(timeout_s) is None:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def last_lines(self, count: int = 15) -> str:
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-count:])
        except OSError:
            return ""


def die_with_parent() -> None:
    """Call in a child: the kernel ends this process when its parent ends for any reason. Linux only."""
    parent = os.environ.get(_PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(f"the process that started this one ({parent}) is gone")
