"""Bounded queue of messages to one stream. On overflow the stream is ended: a slow peer must not hold up the others."""

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
        """The next message, or None when the stream should end."""
        return await self._queue.get()

    def send(self, message: Message) -> None:
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.end()

    def end(self) -> None:
        """End the stream after the queued messages are sent, or at once if the queue is full."""
        if self._queue.full():
            while not self._queue.empty():
                self._queue.get_nowait()
        self._queue.put_nowait(None)
