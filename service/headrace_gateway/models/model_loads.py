"""Sets registered models aside if their files have ended several gateways.

A gateway records in Redis what it begins to load; a record that stays belongs to a gateway that
died.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from headrace_common.errors import HeadraceError

# A load takes seconds. After this time its gateway is considered dead, and others stop waiting.
LOAD_S = 60.0
POLL_S = 0.5


class ModelSetAside(HeadraceError):
    """Too many gateways died while they loaded these files."""

    code = "model_set_aside"


class Loads(Protocol):
    """The part of RedisModelLoads that is used here."""

    async def begin(self, digest: str) -> float | None: ...

    async def end(self, digest: str) -> None: ...


@asynccontextmanager
async def counted(
    loads: Loads, digest: str, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> AsyncIterator[None]:
    """Notes a load within the block; waits while others load the same files.

    Raises ModelSetAside, BackendUnavailable.
    """
    while (age := await loads.begin(digest)) is not None:
        if age > LOAD_S:
            raise ModelSetAside(
                "its files are set aside: gateways that loaded them died; register others, or "
                "wait an hour"
            )
        await sleep(POLL_S)
    try:
        yield
    finally:
        await loads.end(digest)
