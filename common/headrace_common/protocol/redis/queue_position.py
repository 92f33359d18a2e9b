"""Estimates the positions of waiting requests in their queue over Redis: cheap, but not exact.

Tenants take turns by the tokens that they will have used. That is not known yet, so the estimate
assumes equal use.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from ...wire.keys import ShardKeys, shard_of

BLOCKED = b"p"  # as in lua/tenants.lua
Pipeline = Callable[..., Awaitable[list[Any]]]


class _Line(NamedTuple):
    """The requests of a priority that wait in a shard."""

    shard: int
    priority: int


async def requests_ahead(
    pipeline: Pipeline, model: str, request_ids: Sequence[str]
) -> dict[str, int]:
    """For each request that waits, the estimated number of those that are taken before it.

    `pipeline` runs commands in one round trip; its errors are raised. There are two trips, and what
    waiting requests have in common is read once.
    """
    shards = {number: ShardKeys(model, number) for number in map(shard_of, request_ids)}
    records = await pipeline(
        *(
            ("HMGET", shards[shard_of(rid)].record(rid), "st", "mid", "q", "tn")
            for rid in request_ids
        )
    )
    waiting: dict[str, _Line] = {}
    blocked: dict[str, str] = {}  # requests in their tenant's list, which is the value
    for rid, (state, entry, priority, tenant) in zip(request_ids, records, strict=True):
        if state == b"queued":
            line = waiting[rid] = _Line(shard_of(rid), int(priority))
            if entry == BLOCKED:
                name = (tenant or b"").decode()
                blocked[rid] = shards[line.shard].tenant_list(line.priority, name)
    if not waiting:
        return {}
    lines = list(dict.fromkeys(waiting.values()))
    counted = await pipeline(
        *(("HMGET", shards[line.shard].stats, "w1", "w2", "w3") for line in lines),
        *(("ZCARD", shards[line.shard].waiting_tenants(line.priority)) for line in lines),
        *(("LPOS", name, rid) for rid, name in blocked.items()),
    )
    counts, rest = counted[: len(lines)], counted[len(lines) :]
    classes = {
        line: [max(0, int(count or 0)) for count in found]
        for line, found in zip(lines, counts, strict=True)
    }
    tenants = dict(zip(lines, rest, strict=False))
    indices = dict(zip(blocked, rest[len(lines) :], strict=True))
    ahead: dict[str, int] = {}
    for rid, line in waiting.items():
        before = 0
        if rid in blocked:
            most = classes[line][line.priority - 1]
            before = turns_ahead(indices[rid] or 0, tenants[line], most)
        ahead[rid] = sum(classes[line][: line.priority - 1]) + before
    return ahead


def turns_ahead(index: int, tenants: int, waiting: int) -> int:
    """The requests before the one at `index` in its tenant's list.

    `tenants` tenants take turns after the next request; `waiting` requests wait in all.
    """
    return max(0, min(1 + index * tenants, waiting - 1))
