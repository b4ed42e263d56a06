"""Bounds on what a peer may say, and how long it may take to say the first word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

MAX_NAME = 200
MAX_COUNT = 1 << 53
HELLO_S = 30.0

Message = TypeVar("Message")


async def first_message(messages: AsyncIterator[Message]) -> Message | None:
    """None if the stream ends without a word, or stays silent."""

    async def wait() -> Message | None:
        async for message in messages:
            return message
        return None

    try:
        return await asyncio.wait_for(wait(), HELLO_S)
    except asyncio.TimeoutError:
        return None
