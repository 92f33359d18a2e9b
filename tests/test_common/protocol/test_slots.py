"""The slot of a shared accelerator over Redis: one holder at a time, and what its members know."""

import asyncio
import math

import pytest

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.redis.slots import RedisSlot
from headrace_common.protocol.slots import SlotAction, SlotView
from headrace_common.protocol.turns import Demand, Member
from headrace_testing.backends import MODEL, OverRedis, make_request
from headrace_testing.waiting import eventually

WATCH, TAKE, LEAVE = SlotAction.WATCH, SlotAction.TAKE, SlotAction.LEAVE
LONG_MS = 600_000


def slot_of(backend: OverRedis, engine: str, *, lease_ms: int = LONG_MS) -> RedisSlot:
    return RedisSlot(backend.connect("engine"), "gpu", engine, MODEL, lease_ms=lease_ms)


async def test_one_engine_has_the_slot_until_it_leaves_it(over_redis: OverRedis) -> None:
    first, second = slot_of(over_redis, "a"), slot_of(over_redis, "b")
    taken = await first.act(TAKE, None)
    assert taken.turn.holder == "a" and taken.turn.last is None
    refused = await second.act(TAKE, None)
    assert refused.turn == taken.turn
    kept = await first.act(TAKE, None)
    assert kept.turn == taken.turn, "keeping it begins no new turn"
    left = await first.act(LEAVE, None)
    assert (left.turn.holder, left.turn.last) == (None, "a")
    again = await second.act(TAKE, None)
    assert (again.turn.holder, again.turn.last) == ("b", "a")
    assert again.turn.since >= taken.turn.since
    assert (await first.act(LEAVE, None)).turn.holder == "b", "it is not the holder any more"


async def test_many_that_want_it_at_once_agree(over_redis: OverRedis) -> None:
    slots = [slot_of(over_redis, str(number)) for number in range(8)]
    views = await asyncio.gather(*(slot.act(TAKE, None) for slot in slots))
    assert len({view.turn.holder for view in views}) == 1


async def test_members_know_what_waits_for_each_other(over_redis: OverRedis) -> None:
    first, second = slot_of(over_redis, "a"), slot_of(over_redis, "b")
    demand = Demand(2, 17.25, 1e9)
    await first.act(TAKE, demand, 3)
    view = await second.act(WATCH, Demand(0, 5.0))
    assert by_name(view) == {
        "a": Member("a", demand, 3),
        "b": Member("b", Demand(0, 5.0, math.inf)),
    }
    ended = by_name(await first.act(LEAVE, None))["a"].ended
    assert ended == pytest.approx(view.now, abs=60.0)


async def test_a_silent_holder_loses_the_slot_to_the_next_one(over_redis: OverRedis) -> None:
    dead, second = slot_of(over_redis, "a", lease_ms=20), slot_of(over_redis, "b")
    await dead.act(TAKE, None)

    async def taken() -> bool:
        return (await second.act(TAKE, None)).turn.holder == "b"

    await eventually(taken)
    assert (await dead.act(TAKE, None)).turn.holder == "b"


async def test_a_silent_engine_is_no_member_any_more(over_redis: OverRedis) -> None:
    await slot_of(over_redis, "a").act(WATCH, Demand(0, 1.0))
    second = slot_of(over_redis, "b", lease_ms=20)

    async def alone() -> bool:
        return by_name(await second.act(WATCH, None)).keys() == {"b"}

    await eventually(alone)


async def test_a_slot_that_redis_has_lost_is_taken_again(over_redis: OverRedis) -> None:
    slot = slot_of(over_redis, "a")
    await slot.act(TAKE, None)
    await over_redis.wipe()
    assert (await slot.act(WATCH, None)).turn.holder is None
    assert (await slot.act(TAKE, None)).turn.holder == "a"


async def test_the_demand_is_what_no_engine_has(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    await gateway.start()
    await engine.start()
    slot = slot_of(over_redis, "e")
    assert await slot.demand() is None
    request = make_request(request_id="0.a", priority=0)
    await gateway.admit(request, QueueLimits())
    waiting = await slot.demand()
    assert waiting is not None
    assert waiting.deadline == pytest.approx(request.deadline_ms / 1000, abs=60)
    await engine.take(1)
    assert await slot.demand() is None, "an engine runs it"
    await engine.give_back(["0.a"])
    assert await slot.demand() == waiting, "it waits again, as long as before"


async def test_the_demand_has_the_highest_priority_and_the_oldest_request(
    over_redis: OverRedis,
) -> None:
    gateway, slot = over_redis.gateway(), slot_of(over_redis, "e")
    await gateway.start()
    await gateway.admit(make_request(request_id="0.low", priority=50), QueueLimits())
    low = await slot.demand()
    await gateway.admit(make_request(request_id="0.high", priority=-50), QueueLimits())
    both = await slot.demand()
    assert low is not None and both is not None
    assert both.priority < low.priority and both.since == low.since


def by_name(view: SlotView) -> dict[str, Member]:
    return {member.engine_id: member for member in view.members}
