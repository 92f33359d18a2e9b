"""Reads the numbers of waiting and running requests of one shard over Redis, their ages and rates.

It takes a few round trips and reads no prompts.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from ...wire import keys
from ...wire.keys import ShardKeys
from ..base import QueueDepth
from .client.client import Command

RATE_WINDOW = 30.0  # seconds, the same as in the scripts
MOST_TENANTS = 64  # the next tenants, of which the oldest request is read
Pipeline = Callable[..., Awaitable[list[Any]]]


class _Oldest(NamedTuple):
    """The oldest waiting request of a priority, and when it was admitted, in Unix ms."""

    admitted: float
    request_id: str


_NONE = _Oldest(math.inf, "")


async def depth_of(pipeline: Pipeline, shard: ShardKeys) -> QueueDepth:
    """The depth of a shard. `pipeline` runs commands in one round trip."""
    commands: list[Command] = [("HMGET", shard.stats, "wt", "p1", "p2", "p3"), ("TIME",)]
    commands.append(("XLEN", shard.dead_letters))
    for queue in shard.queues:
        commands += [("XLEN", queue), ("XINFO GROUPS", queue)]
    results = await pipeline(*commands, raise_on_error=False)
    (tokens, *lists), (seconds, micros), dead_letters, *queues = results
    waiting, pending, oldest = [], [], []
    for number, queue in enumerate(shard.queues):
        length, groups = queues[2 * number : 2 * number + 2]
        group = _group(groups)
        started = group["pending"] if group else 0
        blocked = max(0, int(lists[number] or 0))
        waiting.append(max(0, length - started) + blocked)
        pending.append(started)
        first = _NONE
        if length > started:
            first = await _oldest(pipeline, queue, group)
        if blocked:
            first = min(first, await _oldest_blocked(pipeline, shard, number + 1))
        oldest.append(first)
    now = seconds * 1000 + micros / 1000
    *others, low = oldest
    return QueueDepth(
        waiting=sum(waiting),
        waiting_tokens=max(0, int(tokens or 0)) if any(waiting) else 0,
        pending=sum(pending),
        oldest_age=_age(min(oldest), now),
        dead_letters=dead_letters,
        others_oldest_age=_age(min(others), now),
        low_waiting=waiting[-1],
        low_pending=pending[-1],
        low_time_used=await _time_used(pipeline, shard, low, now),
    )


def _age(oldest: _Oldest, now_ms: float) -> float:
    return 0.0 if oldest is _NONE else max(0.0, (now_ms - oldest.admitted) / 1000)


async def _time_used(pipeline: Pipeline, shard: ShardKeys, oldest: _Oldest, now_ms: float) -> float:
    """The share of the time until its deadline for which a request has waited; 0 without one."""
    if oldest is _NONE:
        return 0.0
    (deadline,) = await pipeline(("HGET", shard.record(oldest.request_id), "d"))
    time = float(deadline or math.inf) - oldest.admitted
    return min(1.0, max(0.0, (now_ms - oldest.admitted) / max(1.0, time)))


async def _oldest(pipeline: Pipeline, queue: str, group: dict[str, Any] | None) -> _Oldest:
    """The first unread entry; _NONE if there is none."""
    last = group["last-delivered-id"].decode() if group else "0-0"
    (found,) = await pipeline(("XRANGE", queue, f"({last}", "+", "COUNT", 1))
    if not found:
        return _NONE
    name, fields = found[0]
    admitted = float(fields.get(b"t") or name.split(b"-")[0])
    return _Oldest(admitted, fields.get(b"r", b"").decode())


async def _oldest_blocked(pipeline: Pipeline, shard: ShardKeys, priority: int) -> _Oldest:
    """The oldest request in its tenant's list; _NONE if there is none."""
    (tenants,) = await pipeline(("ZRANGE", shard.waiting_tenants(priority), 0, MOST_TENANTS - 1))
    if not tenants:
        return _NONE
    lists = [shard.tenant_list(priority, tenant.decode()) for tenant in tenants]
    first = await pipeline(*(("LINDEX", name, 0) for name in lists))
    ids = [rid.decode() for rid in first if rid is not None]
    if not ids:
        return _NONE
    times = await pipeline(*(("HGET", shard.record(rid), "t") for rid in ids))
    found = (_Oldest(float(at), rid) for at, rid in zip(times, ids, strict=True) if at)
    return min(found, default=_NONE)


async def rate_of(pipeline: Pipeline, shard: ShardKeys) -> float:
    """Requests per second that have lately ended in a shard."""
    (rate, last, first), (seconds, micros) = await pipeline(
        ("HMGET", shard.stats, "er", "et", "e0"), ("TIME",)
    )
    return decayed_rate(rate, last, first, seconds * 1000 + micros / 1000)


def decayed_rate(
    rate: bytes | None, last: bytes | None, first: bytes | None, now_ms: float
) -> float:
    """Endings per second from the scripts' decaying sum, corrected for its first RATE_WINDOW."""
    if rate is None or last is None or first is None:
        return 0.0
    faded = float(rate) * math.exp(-max(0.0, now_ms - float(last)) / 1000 / RATE_WINDOW)
    age = max(1.0, (now_ms - float(first)) / 1000)
    return faded / -math.expm1(-age / RATE_WINDOW)


def _group(groups: Any) -> dict[str, Any] | None:
    """The engines' group from XINFO GROUPS; None if the stream or the group does not exist yet."""
    if isinstance(groups, ResponseError):
        return None
    for group in groups:
        if group["name"] == keys.GROUP.encode():
            found: dict[str, Any] = group
            return found
    return None
