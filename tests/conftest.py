"""Fixtures that run a real syncer, with real sockets and files, in the test process, so that failures have tracebacks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.syncer.process import run_syncer
from skerry.syncer.sharding.shard import run_shard
from skerry.syncer.storage.store import RunStore
from skerry.wire.channel import TLS

# Some virtual machines advertise AMX (bf16 tiles) but do not allow it, and torch would crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Exit without the interpreter's shutdown: gRPC's daemon threads may abort it after all tests have passed."""
    if _status and not hasattr(config, "workerinput"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[-1])


_status: list[int] = []


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _status.append(int(exitstatus))


_call_soon_threadsafe = asyncio.BaseEventLoop.call_soon_threadsafe


def _call_soon_unless_closed(loop: asyncio.BaseEventLoop, *arguments: Any, **context: Any) -> Any:
    """Ignore callbacks to a closed loop. gRPC's poller serves every loop of the process and keeps calling those it has seen; an
    error from a closed one would delay the events of other loops for seconds."""
    if loop.is_closed():
        return None
    return _call_soon_threadsafe(loop, *arguments, **context)


asyncio.BaseEventLoop.call_soon_threadsafe = _call_soon_unless_closed  # type: ignore[method-assign]


class SyncerThread:
    """A syncer for an existing run folder, with its event loop in a thread."""

    def __init__(self, folder: Path, port: int = 0, tls: TLS | None = None, shards: int = 0) -> None:
        self.folder = folder
        self.shards = shards
        self.port = port
        self.ended: bool | None = None
        self.error: BaseException | None = None
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._listening, self._listened = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> SyncerThread:
        self._thread.start()
        assert self._listening.wait(30), "the syncer did not start"
        if self.error and not self._listened:  # `wait` raises later errors
            raise self.error
        return self

    def _run(self) -> None:
        def listening(port: int) -> None:
            self.port, self._listened = port, True
            self._listening.set()

        async def serve() -> bool:
            self._loop = asyncio.get_running_loop()
            return await self._serve(listening)

        try:
            self.ended = asyncio.run(serve())
        except BaseException as error:
            self.error = error
        finally:
            self._listening.set()

    async def _serve(self, listening: Callable[[int], None]) -> bool:
        store = RunStore(self.folder)
        return await run_syncer(store, self.address, self._tls, on_listening=listening, stop=self._stop, shards=self.shards)

    def wait(self) -> bool:
        """Wait for the end of the run."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the run did not end"
        if self.error:
            raise self.error
        return bool(self.ended)

    def stop(self) -> None:
        if self._thread.is_alive() and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)
        assert not self._thread.is_alive(), "the syncer did not stop"
        if self.error:
            raise self.error


class ShardThread(SyncerThread):
    """A shard of a syncer, with its event loop in a thread."""

    def __init__(self, syncer: SyncerThread, number: int, advertised: str = "") -> None:
        super().__init__(syncer.folder)
        self._syncer, self._number, self._advertised = syncer.address, number, advertised

    async def _serve(self, listening: Callable[[int], None]) -> bool:
        return await run_shard(
            self.folder,
            self._number,
            self._syncer,
            self.address,
            self._advertised,
            None,
            on_listening=listening,
            stop=self._stop,
        )


@pytest.fixture
def free_port() -> int:
    """A local port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def start_syncer() -> Iterator[Callable[..., SyncerThread]]:
    started: list[SyncerThread] = []

    def start(folder: Path, port: int = 0, tls: TLS | None = None, shards: int = 0) -> SyncerThread:
        syncer = SyncerThread(folder, port, tls, shards)
        started.append(syncer)
        return syncer.start()

    yield start
    for syncer in started:
        if syncer.error is None:
            syncer.stop()


@pytest.fixture
def start_shard() -> Iterator[Callable[..., ShardThread]]:
    started: list[ShardThread] = []

    def start(syncer: SyncerThread, number: int, advertised: str = "") -> ShardThread:
        shard = ShardThread(syncer, number, advertised)
        started.append(shard)
        shard.start()
        return shard

    yield start
    for shard in started:
        if shard.error is None:
            shard.stop()
