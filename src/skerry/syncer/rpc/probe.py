"""Exchanges random bytes with `skerry doctor`, which measures the link. Their number is bounded."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from skerry.wire import skerry_pb2 as pb
from skerry.wire.framing import CHUNK_BYTES

MOST_PROBES = 16
"""Concurrent probes."""
MAX_PROBE = 4 << 30
"""Bytes per call, each way."""


class Probes:
    def __init__(self) -> None:
        self._active = 0

    async def serve(self, messages: AsyncIterator[pb.ProbeUp | None], context: Any) -> AsyncIterator[pb.ProbeDown]:
        if self._active >= MOST_PROBES:
            return
        self._active += 1
        received = sent = 0
        noise = os.urandom(CHUNK_BYTES)
        try:
            async for message in messages:
                received += len(message.chunk) if message is not None else MAX_PROBE
                for _ in range(message.wanted if message is not None else 0):
                    if max(sent, received) >= MAX_PROBE:
                        return
                    sent += len(noise)
                    yield pb.ProbeDown(chunk=noise)
                if received >= MAX_PROBE:
                    return
                yield pb.ProbeDown(received_bytes=received)
        finally:
            self._active -= 1
