"""Over how many shards a model's queue is spread, and which one a new request goes to.

The engines say it: each one how many it takes from, and the first shard's statistics how many there
have been lately. Gateways use as many as all engines take from, so that nothing need be changed at
the same time.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence

from ..keys import SHARDS_KEPT_MS
from .base import EngineStatus

SHARD_FIELDS = ("sh", "su")  # of the first shard's statistics: how many, until when (Unix ms)
REMEMBERED = 10_000  # tenants and models that are dealt to evenly


def shards_of(engines: Sequence[EngineStatus]) -> int:
    """How many shards are taken from by every engine that takes requests; 1 where none does."""
    return min((engine.shards for engine in engines if not engine.draining), default=1)


def shards_kept(fields: Sequence[bytes | None], now_ms: float) -> int:
    """How many shards there may be something in, by the values of SHARD_FIELDS."""
    count, until = fields
    return int(count) if count and until and float(until) > now_ms else 1


def shard_note(shards: int, kept: int, now_ms: float) -> tuple[str | int, ...]:
    """SHARD_FIELDS with values for an engine that takes from so many shards to write; empty where
    it has nothing to say."""
    if shards == 1 or shards < kept:
        return ()
    until = int(now_ms) + SHARDS_KEPT_MS
    return (SHARD_FIELDS[0], shards, SHARD_FIELDS[1], until)


class Dealer:
    """Deals requests to shards: those of a tenant evenly, in no order that others could follow.

    Each tenant's go once to every shard, by lot, and then again. So the shards differ by one
    request of a tenant at most, and tenants that take turns do not part the shards among them.
    """

    def __init__(self, source: random.Random | None = None) -> None:
        self._random = source or random.Random()  # noqa: S311 - nobody gains by guessing it
        self._hands: OrderedDict[tuple[str, str], list[int]] = OrderedDict()

    def deal(self, model: str, tenant: str, shards: int) -> int:
        """The shard of the tenant's next request."""
        if shards == 1:
            return 0
        hand = self._hands.pop((model, tenant), [])
        if not hand or max(hand) >= shards:
            hand = self._random.sample(range(shards), shards)
        shard = hand.pop()
        self._hands[model, tenant] = hand
        if len(self._hands) > REMEMBERED:
            self._hands.popitem(last=False)
        return shard
