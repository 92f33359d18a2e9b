"""About where a waiting request is in its queue over Redis, which is cheap to say and never exact.

Tenants take turns by what they use, and nobody knows yet how much that will be: all are taken to
use the same.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from ..keys import ShardKeys

PARKED = b"p"  # as in lua/tenants.lua
Pipeline = Callable[..., Awaitable[list[Any]]]


async def requests_ahead(pipeline: Pipeline, shard: ShardKeys, request_id: str) -> int | None:
    """How many requests are likely to be taken before; None where it does not wait.

    `pipeline` runs commands in one round trip. Raises what that does.
    """
    ((state, entry, priority, tenant),) = await pipeline(
        ("HMGET", shard.record(request_id), "st", "mid", "q", "tn")
    )
    if state != b"queued":
        return None
    number = int(priority)
    ((*classes,), tenants, index) = await pipeline(
        ("HMGET", shard.stats, "w1", "w2", "w3"),
        ("ZCARD", shard.waiting_tenants(number)),
        ("LPOS", shard.tenant_list(number, (tenant or b"").decode()), request_id),
    )
    waiting = [max(0, int(count or 0)) for count in classes]
    before = 0 if entry != PARKED else turns_ahead(index or 0, tenants, waiting[number - 1])
    return sum(waiting[: number - 1]) + before


def turns_ahead(index: int, tenants: int, waiting: int) -> int:
    """Requests before the one that has so many of its own tenant before it in its list, where so
    many tenants take turns behind the next one, and so many requests wait in all."""
    return max(0, min(1 + index * tenants, waiting - 1))
