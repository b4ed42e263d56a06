"""Messages that wait to be sent on one stream. Whoever does not take them is cut off rather than held for."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Outbox(Generic[Message]):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue(limit)

    @property
    def half_full(self) -> bool:
        return self._queue.qsize() >= self._limit // 2

    async def get(self) -> Message | None:
        """None when the stream is to end."""
        return await self._queue.get()

    def send(self, message: Message) -> None:
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """Once what is queued has been sent; at once if the queue is full."""
        if self._queue.full():
            while not self._queue.empty():
                self._queue.get_nowait()
        self._queue.put_nowait(None)
