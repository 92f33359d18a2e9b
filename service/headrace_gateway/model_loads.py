"""Registered models whose files take gateways down are set aside after a few of them.

A gateway writes down what it begins to load: what stays written belongs to one that died.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from headrace_common.errors import HeadraceError

# A load takes seconds. After this time its gateway is taken for dead, and nobody waits for it.
LOAD_S = 60.0
LOOK_S = 0.5


class ModelSetAside(HeadraceError):
    """Too many gateways died while they loaded these files."""

    code = "model_set_aside"


class Loads(Protocol):
    """See RedisModelLoads."""

    async def begin(self, digest: str) -> float | None: ...

    async def end(self, digest: str) -> None: ...


@asynccontextmanager
async def counted(
    loads: Loads, digest: str, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> AsyncIterator[None]:
    """Around a load; waits while others load the same. Raises ModelSetAside, BackendUnavailable."""
    while (age := await loads.begin(digest)) is not None:
        if age > LOAD_S:
            raise ModelSetAside(
                "its files are set aside: gateways that loaded them died; register others, or "
                "wait an hour"
            )
        await sleep(LOOK_S)
    try:
        yield
    finally:
        await loads.end(digest)
