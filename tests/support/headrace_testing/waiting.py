"""Waits in tests: for conditions, with a generous limit, and never for a fixed time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 30.0) -> None:
    """Returns when `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.005)


async def first(stream: AsyncIterator[T], count: int, seconds: float = 30.0) -> list[T]:
    """The next `count` items of an async generator, which is then closed. Raises TimeoutError."""
    found: list[T] = []
    async with asyncio.timeout(seconds), aclosing(stream) as items:  # type: ignore[type-var]
        async for item in items:
            found.append(item)
            if len(found) == count:
                break
    return found
