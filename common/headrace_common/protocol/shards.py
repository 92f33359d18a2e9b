"""The number of shards of a model's queue, and the shard of each new request.

Each engine publishes how many shards it takes from; the first shard's statistics hold how many were
in use lately. Gateways use as many as every engine takes from, so that engines and gateways need
not be changed at the same time.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence

from ..wire.keys import MAX_SHARDS, SHARDS_KEPT_MS
from .base import EngineStatus

# fields of the first shard's statistics: number, and until when (Unix ms)
SHARD_FIELDS = ("sh", "su")
REMEMBERED = 10_000  # pairs of model and tenant whose requests are spread evenly


def shards_of(engines: Sequence[EngineStatus]) -> int:
    """The number of shards that every engine takes from, without draining engines; at least 1."""
    return min((engine.shards for engine in engines if not engine.draining), default=1)


def shards_kept(fields: Sequence[bytes | None], now_ms: float) -> int:
    """The number of shards that may hold requests, by the values of SHARD_FIELDS."""
    count, until = fields
    try:
        kept = int(count) if count and until and float(until) > now_ms else 1
    except ValueError:  # a model's engines may write anything there
        kept = 1
    return min(max(1, kept), MAX_SHARDS)


def shard_note(shards: int, kept: int, now_ms: float) -> tuple[str | int, ...]:
    """SHARD_FIELDS and values to write for an engine that takes from `shards` shards.

    Empty if the fields need no change.
    """
    if shards == 1 or shards < kept:
        return ()
    until = int(now_ms) + SHARDS_KEPT_MS
    return (SHARD_FIELDS[0], shards, SHARD_FIELDS[1], until)


class ShardAssigner:
    """Assigns requests to shards, evenly for each tenant and in random order.

    A tenant's requests go once to every shard in random order, and then again in a new order. So
    the shards differ by at most one request of a tenant. The order is random, since otherwise
    tenants that send in turn would each use only some of the shards.
    """

    def __init__(self, source: random.Random | None = None) -> None:
        self._random = source or random.Random()  # noqa: S311 - a guess gives no advantage
        self._left: OrderedDict[tuple[str, str], list[int]] = OrderedDict()

    def assign(self, model: str, tenant: str, shards: int) -> int:
        """The shard of the tenant's next request."""
        if shards == 1:
            return 0
        left = self._left.pop((model, tenant), [])
        if not left or max(left) >= shards:
            left = self._random.sample(range(shards), shards)
        shard = left.pop()
        self._left[model, tenant] = left
        if len(self._left) > REMEMBERED:
            self._left.popitem(last=False)
        return shard
