"""Limits on what peers may send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

MAX_NAME = 200
"""Characters in a name, a session id or an address."""
MAX_COUNT = 1 << 53
"""Largest step, token or sample count. Up to here a float64 is exact."""
HELLO_S = 30.0
"""How long a new stream may stay silent."""

Message = TypeVar("Message")


async def first_message(messages: AsyncIterator[Message]) -> Message | None:
    """The first message of a stream, or None if the stream ends or times out before one arrives."""

    async def wait() -> Message | None:
        async for message in messages:
            return message
        return None

    try:
        return await asyncio.wait_for(wait(), HELLO_S)
    except asyncio.TimeoutError:
        return None
