"""The shards of one model's queue: their servers, the choice of a shard, and the order of TAKE."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from redis.crc import key_slot

from headrace_common.errors import BackendUnavailable, MessageError, QueueFull
from headrace_common.protocol.base import Beat, EngineStatus, Lease, Outcome, Progress, QueueLimits
from headrace_common.protocol.prefix_routing import placement_of
from headrace_common.protocol.redis import sharded_engine
from headrace_common.protocol.redis.admin import QueueAdmin
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.sharded_engine import ShardedEngineQueue
from headrace_common.protocol.requests import check_shard
from headrace_common.protocol.shards import ShardAssigner, shards_of
from headrace_common.wire.keys import MAX_SHARDS, SLOTS, ShardKeys, new_request_id, shard_of
from headrace_common.wire.messages import GenerateRequest
from headrace_testing.backends import (
    MODEL,
    Backend,
    InMemory,
    OverRedis,
    make_request,
    make_status,
)
from headrace_testing.memory_queue.queues import MemoryEngineQueue
from headrace_testing.waiting import eventually

LIMITS = QueueLimits()
sharded = pytest.mark.parametrize("backend", ["memory*3", "redis*3"], indirect=True)


def request(shard: int, *, tenant: str = "default", priority: int = 0) -> GenerateRequest:
    made = make_request(request_id=new_request_id(shard), priority=priority)
    return replace(made, tenant=tenant)


async def admit(backend: Backend, *shards: int, **fields: object) -> list[str]:
    gateway = backend.gateway()
    ids = []
    for shard in shards:
        one = replace(request(shard), **fields)  # type: ignore[arg-type]
        await gateway.admit(one, LIMITS)
        ids.append(one.request_id)
    return ids


def shards_in(leases: Sequence[Lease]) -> list[int]:
    return [shard_of(lease.request.request_id) for lease in leases]


# Servers


def slot(model: str, shard: int) -> int:
    return int(key_slot(ShardKeys(model, shard).stats.encode()))


@pytest.mark.parametrize("count", [3, 6, 12, 24, MAX_SHARDS])
def test_shards_are_evenly_spread_over_a_cluster(count: int) -> None:
    for model in ("m", "org/model-1", "a:b {c}.7"):
        slots = sorted(slot(model, shard) for shard in range(count))
        gaps = [(b - a) % SLOTS for a, b in zip(slots, slots[1:] + slots[:1], strict=True)]
        assert max(abs(gap - SLOTS / count) for gap in gaps) <= 18


def test_the_first_shards_keys_are_those_of_older_releases() -> None:
    assert ShardKeys("org/m.1").queues == [
        "q:{org/m.1.0}:hi",
        "q:{org/m.1.0}:n",
        "q:{org/m.1.0}:lo",
    ]


async def test_no_two_models_share_a_shard(over_redis: OverRedis) -> None:
    models = ("m", "m.1", "m.1:7", "a/b c")
    queue = over_redis.gateway()
    for model in models:
        await queue.admit(replace(request(2), model=model), LIMITS)
    assert await QueueAdmin(over_redis.connection).models() == dict.fromkeys(sorted(models), 3)


async def test_operators_see_and_empty_all_shards(over_redis: OverRedis) -> None:
    admin = QueueAdmin(over_redis.connection)
    normal = await admit(over_redis, 0, 0, 2, 2)
    (urgent,) = await admit(over_redis, 1, priority=-1)
    shards = (await admin.models())[MODEL]
    assert (await admin.status(MODEL, shards)).depth.waiting == 5
    seen = [one.request_id for one in await admin.peek(MODEL, shards, limit=3)]
    assert seen == [urgent, normal[0], normal[2]]
    assert await admin.purge_waiting(MODEL, shards) == 5
    assert (await admin.status(MODEL, shards)).depth.waiting == 0


# The shard of a request


def test_a_tenants_requests_are_dealt_evenly() -> None:
    assigner = ShardAssigner(random.Random(7))
    for tenants in (["a"], ["a", "b", "a"], [f"t{n}" for n in range(50)]):
        assigned: Counter[tuple[str, int]] = Counter()
        for turn in range(40 * len(tenants)):
            tenant = tenants[turn % len(tenants)]
            assigned[tenant, assigner.assign("m", tenant, 3)] += 1
            counts = [assigned[tenant, shard] for shard in range(3)]
            assert max(counts) - min(counts) <= 2  # a round of shards may have begun
        assigner = ShardAssigner(random.Random(8))


def test_alternating_tenants_use_all_shards() -> None:
    assigner = ShardAssigner(random.Random(7))
    assigned = [(assigner.assign("m", "a", 2), assigner.assign("m", "b", 2)) for _ in range(64)]
    assert len(set(assigned)) == 4


def test_a_new_shard_count_is_used_at_once() -> None:
    assigner = ShardAssigner(random.Random(7))
    assert {assigner.assign("m", "a", 6) for _ in range(5)} <= set(range(6))
    assert {assigner.assign("m", "a", 2) for _ in range(4)} == {0, 1}
    assert assigner.assign("m", "a", 1) == 0


def status(name: str, shards: int, *, draining: bool = False) -> EngineStatus:
    return replace(make_status(name), shards=shards, draining=draining)


def test_only_shards_that_every_engine_takes_from_are_used() -> None:
    assert shards_of([]) == 1
    assert shards_of([status("a", 6), status("b", 3)]) == 3
    assert shards_of([status("a", 6), status("b", 3, draining=True)]) == 6


def test_requests_are_placed_with_engines_of_their_shard() -> None:
    engines = [status("old", 1), status("a", 3), status("b", 3)]
    placed = {
        shard: placement_of(request(shard), engines, prefix_tokens=8, load_factor=1.25, hold_ms=100)
        for shard in (0, 2)
    }
    assert placed[0] is not None
    assert placed[2] is not None
    assert {candidate.engine_id for candidate in placed[0].candidates} == {"old", "a", "b"}
    assert {candidate.engine_id for candidate in placed[2].candidates} == {"a", "b"}


@sharded
async def test_a_shard_has_its_part_of_the_engines_room(backend: Backend) -> None:
    """Of six requests in each shard, three are placed on each of two engines, instead of all on the
    engine with the larger capacity."""
    engines = [status(name, 3) for name in ("a", "b")]
    gateway, placed = backend.gateway(), Counter[str]()
    queues = {name: backend.engine(name) for name in ("a", "b")}
    for queue in queues.values():
        await queue.start()
    for turn in range(30):
        one = request(turn % 3)
        where = placement_of(one, engines, prefix_tokens=1, load_factor=1.0, hold_ms=60_000)
        await gateway.admit(one, LIMITS, placement=where)
    for name, queue in queues.items():
        placed[name] = len(await queue.take(99))
    assert placed == {"a": 15, "b": 15}


# The order of TAKE


@sharded
async def test_an_engine_takes_from_all_shards(backend: Backend) -> None:
    engine = backend.engine()
    await engine.start()
    ids = await admit(backend, 0, 0, 1, 2, 2, 2)
    leases = [*await engine.take(2), *await engine.take(99)]
    assert sorted(lease.request.request_id for lease in leases) == sorted(ids)
    assert await engine.take(99) == []


@sharded
async def test_room_is_shared_by_shards_that_wait(backend: Backend) -> None:
    engine = backend.engine()
    await engine.start()
    await admit(backend, *[0, 1, 2] * 6, 1, 1, 1)
    for room in (6, 3, 1, 1, 1):
        before = Counter(shards_in(await engine.take(room)))
        assert max(before.values()) <= -(-room // 3)
    assert Counter(shards_in(await engine.take(99))) == {0: 2, 1: 5, 2: 2}


async def test_turns_rotate_in_spite_of_other_queries() -> None:
    backend = InMemory(2)
    engine = backend.engine()
    await engine.start()
    await admit(backend, *[0, 1] * 4)
    taken = []
    for _ in range(4):
        taken += shards_in(await engine.take(1))
        await engine.reap(1)
    assert Counter(taken) == {0: 2, 1: 2}


@sharded
async def test_no_shard_is_starved_by_a_busy_one(backend: Backend) -> None:
    """The engine has capacity for one request each time, and the first shard always has one."""
    engine = backend.engine()
    await engine.start()
    assert await engine.take(1) == []  # from now on it hears of new requests
    (late,) = await admit(backend, 2)

    async def comes() -> bool:
        await admit(backend, 0)
        return late in [lease.request.request_id for lease in await engine.take(1)]

    await eventually(comes)


@sharded
async def test_waiting_ends_when_there_is_something_new_in_any_shard(backend: Backend) -> None:
    engine = backend.engine()
    await engine.start()
    for shard in (2, 0, 1):
        assert await engine.take(9) == []
        woken = asyncio.create_task(engine.wait())
        done, _ = await asyncio.wait({woken}, timeout=0.05)
        assert not done
        (rid,) = await admit(backend, shard)
        await asyncio.wait_for(woken, 60)
        (lease,) = await engine.take(9)
        assert lease.request.request_id == rid


@sharded
async def test_small_prompts_of_other_shards_do_not_block_a_large_one(backend: Backend) -> None:
    engine = backend.engine()
    await engine.start()
    (large,) = await admit(backend, 1, prompt_token_ids=(7,) * 40)
    await admit(backend, *[0, 2] * 20)
    taken: list[Lease] = []
    for _ in range(20):
        taken += await engine.take(1, 12)
    assert len(taken) <= 2  # until it was its turn
    woken = asyncio.create_task(engine.wait())
    done, _ = await asyncio.wait({woken}, timeout=0.05)
    assert not done
    woken.cancel()
    (lease,) = await engine.take(1, 48)
    assert lease.request.request_id == large
    assert set(shards_in(await engine.take(4, 12))) == {0, 2}


class Fallible(MemoryEngineQueue):
    """A shard that the test can make unreachable."""

    away = False

    async def take(
        self, count: int, prompt_tokens: int | None = None, low_priority: int | None = None
    ) -> Sequence[Lease]:
        if self.away:
            raise BackendUnavailable("redis: gone")
        return await super().take(count, prompt_tokens, low_priority)


async def test_an_oversized_prompt_blocks_nothing_while_its_shard_is_unreachable() -> None:
    backend, queues = InMemory(3), list[Fallible]()

    def make(number: int) -> Fallible:
        queues.append(Fallible(backend.store, "e", MODEL, shard=number))
        return queues[-1]

    engine = ShardedEngineQueue(make, 3)
    await engine.start()
    await admit(backend, 1, prompt_token_ids=(7,) * 40)
    assert await engine.take(9, 12) == []
    others = await admit(backend, 0, 2)
    assert await engine.take(9, 12) == []
    queues[1].away = True
    taken = [lease.request.request_id for lease in await engine.take(9, 12)]
    assert sorted(taken) == sorted(others)
    await engine.close()


async def refuse_writes(backend: OverRedis, *, refuse: bool) -> None:
    """Refuses writes, as a master does that has fewer replicas than it needs."""
    await backend.client.command("CONFIG SET", "min-replicas-to-write", int(refuse))


async def test_failed_shards_are_skipped_for_a_while(over_redis: OverRedis) -> None:
    """Such shards can be read, and their waiting requests would end each wait immediately."""
    backend = OverRedis(over_redis.config.url, block=600, shards=3)
    engine = backend.engine()
    await engine.start()
    (large,) = await admit(backend, 1, prompt_token_ids=(7,) * 40)
    assert await engine.take(9, 12) == []
    small = await admit(backend, 0, 2)
    await refuse_writes(backend, refuse=True)
    try:
        for _ in range(4):  # one of them for the shard that makes the others wait
            assert await engine.take(9, 12) == []
        woken = asyncio.create_task(engine.wait())
        done, _ = await asyncio.wait({woken}, timeout=0.05)
        assert not done
    finally:
        await refuse_writes(backend, refuse=False)
    taken = set[str]()
    while taken != {large, *small}:
        await asyncio.wait_for(woken, 60)
        taken |= {lease.request.request_id for lease in await engine.take(9, 48)}
        woken = asyncio.create_task(engine.wait())
    woken.cancel()
    await backend.close()


@sharded
async def test_tenants_share_over_all_shards(backend: Backend) -> None:
    """While both tenants wait, the numbers that start differ by at most two a shard, however many
    requests each has."""
    engine, assigner = backend.engine(), ShardAssigner(random.Random(7))
    await engine.start()
    gateway = backend.gateway()
    for tenant, count in (("many", 90), ("few", 15)):
        for _ in range(count):
            await gateway.admit(request(assigner.assign(MODEL, tenant, 3), tenant=tenant), LIMITS)
    served: Counter[str] = Counter()
    while served["few"] < 15:
        (lease,) = await engine.take(1)
        served[lease.request.tenant] += 1
        assert served["many"] - served["few"] <= 2 * 3
        await engine.finish(lease.request.request_id, lease.attempt, Outcome())


@sharded
async def test_a_higher_priority_waits_for_one_turn_of_the_shards(backend: Backend) -> None:
    engine = backend.engine()
    await engine.start()
    await admit(backend, *[0, 1, 2] * 5, priority=1)
    (urgent,) = await admit(backend, 1, priority=-1)
    taken = [lease.request.request_id for _ in range(3) for lease in await engine.take(1)]
    assert urgent in taken


# Limits and messages


@sharded
async def test_bounds_are_for_all_shards_together(backend: Backend) -> None:
    engine, gateway = backend.engine(), backend.gateway()
    await engine.start()
    share = QueueLimits(max_requests=6, max_tokens=1000, max_tenant_requests=6).share(3)
    assert (share.max_requests, share.max_tokens, share.max_tenant_requests) == (2, 334, 2)
    assert QueueLimits().share(3).max_tenant_requests == 0
    for shard in (0, 1, 2, 0, 1):
        await gateway.admit(request(shard), share)
    with pytest.raises(QueueFull, match="5 requests wait"):
        await gateway.admit(request(1), replace(share, max_tenant_requests=0))
    with pytest.raises(QueueFull, match="5 requests of this tenant"):
        await gateway.admit(request(0), replace(share, max_requests=9))
    depth = await gateway.depth(MODEL)
    assert (depth.waiting, depth.waiting_tokens, depth.pending) == (5, 95, 0)


@sharded
async def test_a_queue_position_counts_requests_of_other_shards(backend: Backend) -> None:
    engine, gateway = backend.engine(), backend.gateway()
    await engine.start()
    first, *_ = await admit(backend, 0, 0, 0, 1, 2, 2, 2, 2)
    (last,) = await admit(backend, 0)
    places = await gateway.queue_positions([first, last], MODEL)
    assert [place and place.position for place in places] == [1, 1 + 3 + 1 + 3]


@sharded
async def test_requests_in_removed_shards_are_found_after_the_count_was_lowered(
    backend: Backend,
) -> None:
    before, gateway = backend.engine("before"), backend.gateway()
    await before.start()
    held, *waiting = await admit(backend, 2, 0, 1, 2)
    (lease,) = [one for one in await before.take(2) if one.request.request_id == held]
    await before.give_back([held])
    await before.close()
    after = of_one_shard(backend, "after")
    await after.start()
    await after.beat((), make_status("after"))
    assert [one.shards for one in await gateway.engines(MODEL)] == [1]
    taken = [*await after.take(9), *await after.reap(9)]
    assert {one.request.request_id for one in taken} >= {held}
    assert lease.attempt == 1
    assert (await gateway.depth(MODEL)).waiting == 0
    await after.close()
    assert waiting


@sharded
async def test_a_request_continues_in_a_shard_that_lost_its_state(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines were set to fewer shards and Redis was emptied while the request ran."""
    monkeypatch.setattr(sharded_engine, "TELL", 0.0)
    gateway, before = backend.gateway(), backend.engine("before")
    await before.start()
    lost = request(2)
    await gateway.admit(lost, LIMITS)
    assert shards_in(await before.take(1)) == [2]
    await backend.wipe()
    after = of_one_shard(backend, "after")
    await after.start()
    await gateway.admit(lost, LIMITS, seen=1)
    found: list[Lease] = []

    async def taken() -> bool:
        await after.beat((), make_status("after"))
        found.extend(await after.take(9))
        return bool(found)

    await eventually(taken)
    (lease,) = found
    assert (lease.request, lease.attempt, lease.recovered) == (lost, 2, True)
    await after.close()


def of_one_shard(backend: Backend, name: str) -> ShardedEngineQueue:
    """An engine that uses one shard, on a backend with more shards."""
    if isinstance(backend, InMemory):
        store = backend.store
        return ShardedEngineQueue(
            lambda shard: MemoryEngineQueue(store, name, MODEL, shard=shard), 1, reap_every=0
        )
    assert isinstance(backend, OverRedis)
    connection: Connection = backend.connect("engine")
    return ShardedEngineQueue(
        lambda shard: RedisEngineQueue(connection, name, MODEL, shard=shard), 1, reap_every=0
    )


class Counted(MemoryEngineQueue):
    """Counts the calls."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: Counter[str] = Counter()

    async def take(
        self, count: int, prompt_tokens: int | None = None, low_priority: int | None = None
    ) -> Sequence[Lease]:
        self.calls["take"] += 1
        return await super().take(count, prompt_tokens, low_priority)

    async def reap(self, count: int, *, suspects: bool = True) -> Sequence[Lease]:
        self.calls["reap"] += 1
        return await super().reap(count, suspects=suspects)

    async def beat(self, progress: Sequence[Progress], status: EngineStatus) -> Mapping[str, Beat]:
        self.calls["status"] += 1
        return await super().beat(progress, status)


async def test_shards_without_changes_are_not_read_again() -> None:
    """A busy engine looks for work at each step, which must not ask each shard."""
    backend, queues = InMemory(3), list[Counted]()

    def make(number: int) -> Counted:
        queues.append(Counted(backend.store, "e", MODEL, shard=number))
        return queues[-1]

    engine = ShardedEngineQueue(make, 3, reap_every=math.inf)
    await engine.start()
    for _ in range(5):
        await engine.take(9)
        await engine.reap(9)
        await engine.beat((), make_status())
    assert [queue.calls["take"] for queue in queues] == [1, 1, 1]
    (rid,) = await admit(backend, 1)
    await asyncio.wait_for(engine.wait(), 60)
    assert [lease.request.request_id for lease in await engine.take(9)] == [rid]
    await engine.reap(9)
    assert [queue.calls["take"] for queue in queues] == [1, 2, 1]
    assert [queue.calls["reap"] for queue in queues] == [1, 2, 1]
    assert [queue.calls["status"] for queue in queues][1:] == [0, 0]
    await engine.close()


async def test_an_unreachable_shard_does_not_affect_the_others() -> None:
    backend = InMemory(3)
    away: set[int] = {1}

    class Shard(MemoryEngineQueue):
        async def take(
            self, count: int, prompt_tokens: int | None = None, low_priority: int | None = None
        ) -> Sequence[Lease]:
            if self.shard in away:
                raise BackendUnavailable("redis: connection refused")
            return await super().take(count, prompt_tokens, low_priority)

    engine = ShardedEngineQueue(lambda n: Shard(backend.store, "e", MODEL, shard=n), 3)
    await engine.start()
    await admit(backend, 0, 1, 2)
    assert sorted(shards_in(await engine.take(9))) == [0, 2]
    away.clear()
    await asyncio.wait_for(engine.wait(), 60)
    assert shards_in(await engine.take(9)) == [1]
    await engine.close()


def test_a_request_in_a_shard_that_is_not_its_own_is_refused() -> None:
    check_shard("2.aa", 2)
    with pytest.raises(MessageError, match="not one of shard 0"):
        check_shard("2.aa", 0)
