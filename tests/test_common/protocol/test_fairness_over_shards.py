"""Tenants share a model by tokens over all engines and shards, in proportion to their weights."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from headrace_common.protocol.base import (
    EngineQueue,
    GatewayQueue,
    Lease,
    Outcome,
    Progress,
    QueueLimits,
    TenantUse,
)
from headrace_common.protocol.redis import sharded_engine
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.sharded_engine import ShardedEngineQueue
from headrace_common.protocol.shards import ShardAssigner
from headrace_common.wire.keys import ShardKeys, new_request_id, shard_of
from headrace_common.wire.messages import ChoiceState, GenerateRequest
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
from virtual_time.measures import jain

LIMITS = QueueLimits(max_requests=10_000)
sharded = pytest.mark.parametrize("backend", ["memory*3", "redis*3"], indirect=True)


def ask(tenant: str, shard: int, *, prompt: int = 1, weight: float = 1.0) -> GenerateRequest:
    made = make_request(request_id=new_request_id(shard), prompt=(1,) * prompt, max_tokens=64)
    return replace(made, tenant=tenant, tenant_weight=weight)


@sharded
async def test_what_a_tenant_gets_in_one_shard_counts_in_the_others(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await engine.start()
    for shard in (0, 1, 2):
        for _ in range(30):
            await gateway.admit(ask("everywhere", shard, prompt=20), LIMITS)
    for _ in range(30):
        await gateway.admit(ask("first", 0, prompt=20), LIMITS)
    taken: Counter[tuple[str, int]] = Counter()
    for _ in range(36):
        (lease,) = await engine.take(1)
        taken[lease.request.tenant, shard_of(lease.request.request_id)] += 1
        await engine.finish(lease.request.request_id, lease.attempt, Outcome())
        await engine.beat([], make_status())
    assert taken["everywhere", 1] == taken["everywhere", 2] == 12
    assert taken["first", 0] >= 10


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant that has `at_once` requests, each with a prompt and an output of these lengths."""

    name: str
    weight: float
    at_once: int
    prompt: int
    output: int


class World:
    """Engines that each run SLOTS requests, STEP tokens of each in a virtual second."""

    SLOTS, STEP = 4, 4

    def __init__(
        self, gateway: GatewayQueue, engines: Iterable[EngineQueue], tenants: Iterable[Tenant]
    ) -> None:
        self._gateway = gateway
        self._engines = list(engines)
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._shards = ShardAssigner(random.Random(5))
        self._running: dict[EngineQueue, list[tuple[Lease, int]]] = {
            engine: [] for engine in self._engines
        }

    async def begin(self) -> None:
        for engine in self._engines:
            await engine.start()
        for tenant in self._tenants.values():
            for _ in range(tenant.at_once):
                await self._admit(tenant)

    async def _admit(self, tenant: Tenant) -> None:
        shard = self._shards.assign(MODEL, tenant.name, 3)
        request = ask(tenant.name, shard, prompt=tenant.prompt, weight=tenant.weight)
        await self._gateway.admit(request, LIMITS)

    async def second(self) -> Counter[str]:
        """Runs a virtual second; returns the tokens of each tenant, output twice, over its
        weight."""
        given: Counter[str] = Counter()
        for engine in self._engines:
            room = self.SLOTS - len(self._running[engine])
            leases = await engine.take(room) if room else ()
            for lease in leases:
                given[lease.request.tenant] += len(lease.request.prompt_token_ids)
            self._running[engine] += [(lease, 0) for lease in leases]
            given.update(await self._step(engine))
        return Counter(
            {name: round(given[name] / tenant.weight) for name, tenant in self._tenants.items()}
        )

    async def _step(self, engine: EngineQueue) -> Counter[str]:
        given: Counter[str] = Counter()
        going: list[tuple[Lease, int]] = []
        progress = []
        for lease, length in self._running[engine]:
            rid, tenant = lease.request.request_id, self._tenants[lease.request.tenant]
            made = min(self.STEP, tenant.output - length)
            given[tenant.name] += 2 * made
            if length + made == tenant.output:
                whole = ChoiceState(token_ids=(7,) * tenant.output, finish_reason="length")
                assert await engine.finish(rid, lease.attempt, Outcome(choices=(whole,)))
                await self._admit(tenant)
                continue
            new = ChoiceState(token_ids=(7,) * made)
            progress.append(
                Progress(request_id=rid, attempt=lease.attempt, journaled=(length,), choices=(new,))
            )
            going.append((lease, length + made))
        await engine.beat(progress, make_status(engine.engine_id))
        self._running[engine] = going
        return given


@sharded
async def test_ten_tenants_have_their_shares_on_four_engines_in_every_window(
    backend: Backend,
) -> None:
    """One tenant asks for everything, in long answers; nine ask for a little more than their
    share, two of them with another weight."""
    modest = [
        Tenant(f"modest{n}", weight, at_once=round(9 * weight), prompt=6 + n, output=8 + 2 * n)
        for n, weight in enumerate((1, 1, 1, 2, 1, 1, 1, 0.5, 1))
    ]
    greedy = Tenant("greedy", 1, at_once=90, prompt=30, output=40)
    engines = [backend.engine(f"e{n}") for n in range(4)]
    world = World(backend.gateway(), engines, [greedy, *modest])
    await world.begin()

    windows = []
    for _ in range(4):
        window: Counter[str] = Counter()
        for _ in range(30):
            window.update(await world.second())
        windows.append(window)

    assert all(jain([*window.values()]) >= 0.98 for window in windows[1:]), windows


async def test_a_slow_exchange_delays_one_beat_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_engine, "SHARE_PATIENCE", 0.0)
    backend, asked, answered = InMemory(3), list[int](), asyncio.Event()

    class Slow(MemoryEngineQueue):
        async def tenant_use(self, apart: float) -> TenantUse | None:
            asked.append(self.shard)
            await answered.wait()
            return await super().tenant_use(apart)

    engine = ShardedEngineQueue(
        lambda number: Slow(backend.store, "e", MODEL, shard=number), 3, share_every=0.0
    )
    await engine.start()
    for _ in range(3):
        await engine.beat((), make_status())
        await asyncio.sleep(0)
    assert asked == [0]

    answered.set()

    async def exchanged() -> bool:
        await engine.beat((), make_status())
        return asked[:4] == [0, 1, 2, 0]

    await eventually(exchanged)
    await engine.close()


async def test_repeating_or_delaying_an_exchange_adds_nothing_twice(
    over_redis: OverRedis,
) -> None:
    connection, counters = over_redis.connect("engine"), ShardKeys(MODEL, 1).counters
    shard = RedisEngineQueue(connection, "e", MODEL, shard=1)

    async def use(epoch: str, tokens: int) -> bytes | None:
        await shard.add_tenant_use({0: TenantUse(epoch, {"a": tokens})})
        found: bytes | None = await over_redis.client.command("HGET", counters, "a")
        return found

    assert await use("one", 100) is None
    assert [await use("one", n) for n in (150, 150, 120, 160)] == [b"50", b"50", b"50", b"60"]
    assert await use("two", 10) == b"60"
    assert await use("two", 15) == b"65"
    assert await over_redis.client.command("PTTL", counters) > 0


async def test_one_engine_at_a_time_reads_what_tenants_have_used(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    queues = [RedisEngineQueue(over_redis.connect("engine"), name, MODEL) for name in "ab"]
    none_yet = await queues[0].tenant_use(60.0)
    assert none_yet is not None and not none_yet.tokens
    for tenant in ("x", "y"):
        await gateway.admit(ask(tenant, 0, prompt=3), LIMITS)
    await engine.take(9)

    first = await queues[0].tenant_use(60.0)

    assert first is not None and first.tokens == {"x": 3, "y": 3}
    assert await queues[1].tenant_use(60.0) is None
    assert await queues[1].tenant_use(0.0) == first


async def test_an_exchange_may_end_between_two_beats() -> None:
    backend = InMemory(3)
    engine = ShardedEngineQueue(
        lambda number: MemoryEngineQueue(backend.store, "e", MODEL, shard=number),
        3,
        share_every=0.0,
    )
    await engine.start()
    beats = []
    for _ in range(50):
        beats.append(asyncio.create_task(engine.beat((), make_status())))
        await asyncio.sleep(0)

    await asyncio.gather(*beats)
    await engine.close()
