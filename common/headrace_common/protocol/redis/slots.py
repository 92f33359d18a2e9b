"""The slot of a shared accelerator over Redis: one hash, and the queue of the engine's model."""

import asyncio
import math
from typing import Any

from ...wire import keys
from ...wire.keys import ShardKeys
from ..slots import SlotAction, SlotView
from ..turns import Demand, Member, Turn
from .client.connection import Connection

TRIES = 2
_NOTHING = "-"


class RedisSlot:
    """A Slot over Redis, for an engine that takes from the first `shards` of its model's queue."""

    def __init__(
        self,
        connection: Connection,
        group: str,
        engine_id: str,
        model: str,
        *,
        shards: int = 1,
        lease_ms: int = keys.LEASE_MS,
    ) -> None:
        self.engine_id = engine_id
        self._connection = connection
        self._name = keys.slot(group)
        self._shards = [ShardKeys(model, number) for number in range(shards)]
        self._lease_ms = lease_ms

    async def demand(self) -> Demand | None:
        found = await asyncio.gather(*map(self._waiting, self._shards))
        waiting = [
            (int(number), int(admitted) / 1000, int(deadline) / 1000 or math.inf)
            for shard in found
            for number, admitted, deadline in shard
        ]
        if not waiting:
            return None
        priorities, admitted, deadlines = zip(*waiting, strict=True)
        return Demand(min(priorities), min(admitted), min(deadlines))

    async def _waiting(self, shard: ShardKeys) -> list[Any]:
        names = [shard.records, *shard.queues]
        found: list[Any] = await self._connection.run(
            "demand", names, [self._lease_ms], tries=TRIES
        )
        return found

    async def act(self, action: SlotAction, demand: Demand | None, running: int = 0) -> SlotView:
        facts = _facts(demand, running)
        arguments = [self.engine_id, self._lease_ms, facts, action.value]
        now, holder, since, last, members = await self._connection.run(
            "slot", [self._name], arguments, tries=TRIES
        )
        return SlotView(
            now=now / 1000,
            turn=Turn(holder.decode() or None, float(since) / 1000, last.decode() or None),
            members=[_member(*member) for member in members],
        )


def _facts(demand: Demand | None, running: int) -> str:
    if demand is None:
        return f"{running} {_NOTHING}"
    return f"{running} {demand.priority} {demand.since} {demand.deadline}"


def _member(engine_id: bytes, facts: bytes, ended: bytes) -> Member:
    running, *demand = facts.decode().split()
    known = None
    if demand != [_NOTHING]:
        priority, since, deadline = demand
        known = Demand(int(priority), float(since), float(deadline))
    return Member(engine_id.decode(), known, int(running), float(ended) / 1000)
