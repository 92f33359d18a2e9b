"""Estimates the position of a waiting request in its queue over Redis: cheap, but not exact.

Tenants take turns by the tokens that they will have used. That is not known yet, so the estimate
assumes equal use.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from ...wire.keys import ShardKeys

BLOCKED = b"p"  # as in lua/tenants.lua
Pipeline = Callable[..., Awaitable[list[Any]]]


async def requests_ahead(pipeline: Pipeline, shard: ShardKeys, request_id: str) -> int | None:
    """The estimated number of requests that are taken before it; None if it does not wait.

    `pipeline` runs commands in one round trip; its errors are raised.
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
    before = 0 if entry != BLOCKED else turns_ahead(index or 0, tenants, waiting[number - 1])
    return sum(waiting[: number - 1]) + before


def turns_ahead(index: int, tenants: int, waiting: int) -> int:
    """The requests before the one at `index` in its tenant's list.

    `tenants` tenants take turns after the next request; `waiting` requests wait in all.
    """
    return max(0, min(1 + index * tenants, waiting - 1))
