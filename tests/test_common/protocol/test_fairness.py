"""Tenants share a queue by the tokens that they use on all engines; the same on each backend."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace_common.errors import QueueFull
from headrace_common.protocol.base import (
    EngineQueue,
    GatewayQueue,
    Lease,
    Outcome,
    Progress,
    QueueLimits,
)
from headrace_common.wire.messages import ChoiceState, GenerateRequest
from headrace_testing.backends import MODEL, Backend, OverRedis, make_request, make_status
from headrace_testing.memory_queue.fairness import DEBT, Counters
from headrace_testing.waiting import eventually

LIMITS = QueueLimits(max_requests=10_000)


def ask(tenant: str, prompt: int = 1, *, weight: float = 1, **options: float) -> GenerateRequest:
    request = make_request(prompt=(1,) * prompt, **options)  # type: ignore[arg-type]
    return replace(request, tenant=tenant, tenant_weight=weight)


async def queued(
    gateway: GatewayQueue, tenant: str, count: int, prompt: int = 1, weight: float = 1
) -> list[str]:
    requests = [ask(tenant, prompt, weight=weight) for _ in range(count)]
    for request in requests:
        await gateway.admit(request, LIMITS)
    return [request.request_id for request in requests]


async def served(engine: EngineQueue, lease: Lease, output: int) -> None:
    state = ChoiceState(token_ids=(7,) * output, finish_reason="length")
    await engine.finish(lease.request.request_id, lease.attempt, Outcome(choices=(state,)))


def tenants(leases: Sequence[Lease]) -> list[str]:
    return [lease.request.tenant for lease in leases]


async def test_one_tenant_is_served_in_order_of_arrival(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    ids = await queued(gateway, "a", 5)
    first = await engine.take(2)
    ids += await queued(gateway, "a", 2)
    leases = [*first, *await engine.take(9)]
    assert [lease.request.request_id for lease in leases] == ids


async def test_a_light_tenant_does_not_wait_for_a_heavy_one(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await queued(gateway, "heavy", 60)
    await queued(gateway, "light", 5)
    order = tenants(await engine.take(100))
    assert len(order) == 65
    assert max(index for index, name in enumerate(order) if name == "light") <= 11


async def test_shares_count_tokens_and_not_requests(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await queued(gateway, "long", 30, prompt=9)
    await queued(gateway, "short", 60, prompt=3)
    order = Counter(tenants(await engine.take(24)))
    assert 2.5 <= order["short"] / order["long"] <= 3.5


async def test_output_is_charged_when_it_has_been_made(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await queued(gateway, "talks", 20)
    await queued(gateway, "listens", 20)
    order: Counter[str] = Counter()
    for _ in range(16):
        (lease,) = await engine.take(1)
        order[lease.request.tenant] += 1
        await served(engine, lease, 10 if lease.request.tenant == "talks" else 1)
    assert order["listens"] >= 3 * order["talks"] > 0


async def test_a_tenant_gets_its_weight_in_prompts(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await queued(gateway, "three", 60, prompt=4, weight=3)
    await queued(gateway, "one", 60, prompt=4)
    order = Counter(tenants(await engine.take(40)))
    assert order["three"] == pytest.approx(30, abs=2)


async def test_a_tenant_gets_its_weight_in_output(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await queued(gateway, "half", 60, weight=0.5)
    await queued(gateway, "one", 60)
    order: Counter[str] = Counter()
    for _ in range(30):
        (lease,) = await engine.take(1)
        order[lease.request.tenant] += 1
        await served(engine, lease, 20)
    assert order["one"] == pytest.approx(20, abs=2)


async def test_parts_of_an_answer_cost_as_much_as_the_whole(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    await queued(gateway, "three", 1, weight=3)
    (lease,) = await engine.take(1)
    for length in range(30):
        step = Progress(
            request_id=lease.request.request_id,
            attempt=1,
            journaled=(length,),
            choices=(ChoiceState(token_ids=(7,)),),
        )
        await engine.beat([step], make_status())
    counters = over_redis.keys.counters
    assert await over_redis.client.command("HGET", counters, "three") == b"20"
    await served(engine, lease, 33)
    assert await over_redis.client.command("HGET", counters, "three") == b"22"


async def test_all_engines_charge_the_same_counters(backend: Backend) -> None:
    gateway, engines = backend.gateway(), [backend.engine(f"e{n}") for n in range(3)]
    await queued(gateway, "a", 30)
    await queued(gateway, "b", 30)
    order: Counter[str] = Counter()
    for turn in range(18):
        order.update(tenants(await engines[turn % 3].take(1)))
    assert abs(order["a"] - order["b"]) <= 2


async def test_a_later_tenant_gets_no_credit_for_the_time_before(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await queued(gateway, "early", 40)
    await engine.take(20)
    await queued(gateway, "late", 20)
    order = tenants(await engine.take(10))
    assert 4 <= order.count("late") <= 6


async def test_the_waiting_requests_of_a_tenant_are_limited(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    limits = QueueLimits(max_requests=10, max_tenant_requests=2)
    for _ in range(2):
        await gateway.admit(ask("a"), limits)
    with pytest.raises(QueueFull, match="2 requests of this tenant") as refused:
        await gateway.admit(ask("a"), limits)
    assert refused.value.tenant
    await gateway.admit(ask("b"), limits)
    (lease,) = await engine.take(1)
    await gateway.admit(ask(lease.request.tenant), limits)
    with pytest.raises(QueueFull, match="wait for") as full:
        await gateway.admit(ask("c"), replace(limits, max_requests=3))
    assert not full.value.tenant


async def test_requests_in_a_tenants_list_can_be_cancelled_and_expire(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    ids = await queued(gateway, "a", 2) + await queued(gateway, "b", 2)
    await gateway.cancel(ids[0], MODEL)
    await gateway.cancel(ids[3], MODEL)
    await gateway.cancel(ids[3], MODEL)
    await gateway.admit(ask("c", seconds=-1), LIMITS)
    depth = await gateway.depth(MODEL)
    assert (depth.waiting, depth.waiting_tokens) == (3, 3 * 17)
    assert {lease.request.request_id for lease in await engine.take(9)} == {ids[1], ids[2]}
    depth = await gateway.depth(MODEL)
    assert (depth.waiting, depth.waiting_tokens, depth.pending) == (0, 0, 2)


async def test_engines_wake_for_requests_after_a_cancelled_one(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await engine.start()
    ids = await queued(gateway, "a", 1) + await queued(gateway, "b", 1)
    await gateway.cancel(ids[0], MODEL)
    await engine.wait()
    assert tenants(await engine.take(1)) == ["b"]


async def test_admitting_a_request_that_already_waits_changes_nothing(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await queued(gateway, "a", 1)
    request = ask("b")
    for _ in range(2):
        await gateway.admit(request, LIMITS)
    assert (await gateway.depth(MODEL)).waiting == 2
    assert len(await engine.take(9)) == 2


async def test_requests_that_did_not_wait_give_no_advantage_to_the_next_one(
    backend: Backend,
) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await queued(gateway, "busy", 1, prompt=50)
    await engine.take(1)
    for name in ("first", "busy", "other"):
        await queued(gateway, name, 10, prompt=5)
    order = Counter(tenants(await engine.take(18)))
    assert all(count >= 4 for count in order.values()), order


async def test_a_waiting_request_has_a_position(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    heavy = await queued(gateway, "heavy", 10)
    (light,) = await queued(gateway, "light", 1)
    hi = make_request(priority=-1)
    await gateway.admit(hi, LIMITS)
    ids = [hi.request_id, heavy[0], light, heavy[9]]
    places = await gateway.queue_positions(ids, MODEL)
    assert [place.position for place in places if place is not None] == [1, 2, 3, 12]
    assert places[0] is not None and places[0].eta is None
    (lease,) = await engine.take(1)
    await served(engine, lease, 1)
    places = await gateway.queue_positions([hi.request_id, light, "0.unknown"], MODEL)
    unqueued, place, unknown = places
    assert unqueued is unknown is None
    assert place is not None and place.position == 2 and place.eta is not None and place.eta > 0


async def test_the_oldest_request_is_found_in_the_lists(over_redis: OverRedis) -> None:
    gateway = over_redis.gateway()
    ids = await queued(gateway, "a", 3)
    for rid, age in zip(ids, (1, 50, 2), strict=True):
        record = over_redis.keys.record(rid)
        seconds, _ = await over_redis.client.command("TIME")
        await over_redis.client.command("HSET", record, "t", (seconds - age) * 1000)
    assert 49 <= (await gateway.depth(MODEL)).oldest_age <= 52


async def test_no_tenant_data_is_left_when_no_request_waits(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    await queued(gateway, "a", 4)
    ids = await queued(gateway, "b", 4)
    await gateway.cancel(ids[1], MODEL)
    await engine.take(99)
    left = await over_redis.client.command("KEYS", "[vt][tqwc]:*")
    assert [name.split(b":")[0] for name in left] == [b"vc"]
    assert await over_redis.client.command("PTTL", over_redis.keys.counters) > 0


def test_earlier_use_counts_up_to_a_bound() -> None:
    counters = Counters()
    counters.charge("busy", 10 * DEBT)
    counters.begin("busy", lowest=1000)
    assert counters.used("busy") == 1000 + DEBT
    counters.begin("new", lowest=1000)
    assert counters.used("new") == 1000


async def test_an_engine_takes_only_so_many_requests_of_low_priority(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    for priority in (1, 1, 1, 0):
        await gateway.admit(ask("a", priority=priority), LIMITS)

    first = await engine.take(9, None, 1)
    assert [lease.request.priority for lease in first] == [0, 1]
    assert await engine.take(9, None, 0) == []
    await gateway.admit(ask("a"), LIMITS)
    assert [lease.request.priority for lease in await engine.take(9, None, 0)] == [0]
    assert (await gateway.depth(MODEL)).waiting == 2
    assert [lease.request.priority for lease in await engine.take(9)] == [1, 1]


async def test_requests_of_low_priority_are_counted_apart(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    assert (await gateway.depth(MODEL)).low_time_used == 0.0
    for priority in (1, 5, 1, 0):
        await gateway.admit(ask("a", priority=priority), LIMITS)
    await engine.take(2)

    depth = await gateway.depth(MODEL)
    assert (depth.waiting, depth.pending) == (2, 2)
    assert (depth.low_waiting, depth.low_pending) == (2, 1)
    assert depth.others_oldest_age == 0.0
    assert 0.0 <= depth.low_time_used < 0.5


async def test_time_used_is_that_of_the_oldest_waiting_request(backend: Backend) -> None:
    gateway = backend.gateway()
    await gateway.admit(ask("a", priority=1, seconds=100), LIMITS)

    async def waited() -> bool:
        return (await gateway.depth(MODEL)).oldest_age >= 0.01

    await eventually(waited)  # times of admission are whole milliseconds
    await gateway.admit(ask("b", priority=1, seconds=10_000), LIMITS)
    depth = await gateway.depth(MODEL)
    assert depth.low_time_used == pytest.approx(depth.oldest_age / 100, rel=0.5)
