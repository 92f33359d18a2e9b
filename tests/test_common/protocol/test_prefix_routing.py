"""Prefix routing: requests with equal beginnings go to one engine; the queue keeps its promises."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.protocol.base import (
    Candidate,
    EngineQueue,
    GatewayQueue,
    Lease,
    Outcome,
    Placement,
    QueueLimits,
)
from headrace_common.protocol.prefix_routing import (
    MAX_CANDIDATES,
    placement_of,
    prefix_key,
    ranked,
)
from headrace_common.wire.messages import GenerateRequest
from headrace_testing.backends import MODEL, Backend, OverRedis, make_request, make_status
from headrace_testing.memory_queue.backend import MemoryBackend
from headrace_testing.memory_queue.placement import PASSES, SLACK, WINDOW
from headrace_testing.memory_queue.records import Taken

LIMITS = QueueLimits()
# ms that a request is held: one that never ends in a test, and a short one
LONG, SHORT = 3_600_000, 1


def on(
    *engines: str, hold_ms: int = LONG, capacity: int = 64, load_factor: float = 99
) -> Placement:
    """Placement with the first of these engines that is not overloaded; by default with the
    first."""
    return Placement(
        candidates=tuple(Candidate(engine_id=name, capacity=capacity) for name in engines),
        capacity=2 * capacity,
        load_factor=load_factor,
        hold_ms=hold_ms,
    )


async def placed(
    gateway: GatewayQueue, placement: Placement | None, count: int = 1, **options: object
) -> list[str]:
    """Queues requests with this placement and returns their ids; options are those of
    GenerateRequest."""
    prompt = (1,) * int(str(options.pop("prompt", 1)))
    requests = [replace(make_request(prompt=prompt), **options) for _ in range(count)]  # type: ignore[arg-type]
    for request in requests:
        await gateway.admit(request, LIMITS, placement=placement)
    return [request.request_id for request in requests]


def ids(leases: Sequence[Lease]) -> list[str]:
    return [lease.request.request_id for lease in leases]


async def finish(engine: EngineQueue, lease: Lease) -> None:
    await engine.finish(lease.request.request_id, lease.attempt, Outcome())


async def test_a_request_goes_to_the_engine_that_it_is_placed_with(backend: Backend) -> None:
    gateway, a, b = backend.gateway(), backend.engine("a"), backend.engine("b")
    (rid,) = await placed(gateway, on("a", "b"))
    assert await b.take(4) == []
    (lease,) = await a.take(4)
    assert (lease.request.request_id, lease.placed) == (rid, True)
    depth = await gateway.depth(MODEL)
    assert (depth.waiting, depth.pending) == (0, 1)


async def test_an_engine_takes_its_own_before_one_that_is_held_for_another(
    backend: Backend,
) -> None:
    gateway, a, b = backend.gateway(), backend.engine("a"), backend.engine("b")
    (first,) = await placed(gateway, on("a"))
    (second,) = await placed(gateway, on("b"))
    (third,) = await placed(gateway, None)
    assert ids(await b.take(9)) == [second]
    assert [lease.placed for lease in await a.take(9)] == [True, None]
    assert ids(await b.take(9)) == []
    assert (await gateway.request_status(first, MODEL)).started  # type: ignore[union-attr]
    assert (await gateway.request_status(third, MODEL)).started  # type: ignore[union-attr]


async def test_a_request_held_for_a_full_engine_is_taken_by_another(
    backend: Backend,
) -> None:
    gateway, b = backend.gateway(), backend.engine("b")
    await b.start()
    ids_held = await placed(gateway, on("a", hold_ms=50), 2)
    taken: list[Lease] = []
    while len(taken) < 2:  # each wait ends by itself when the hold ends
        taken += await b.take(9)
        if len(taken) < 2:
            await b.wait()
    assert ids(taken) == ids_held
    assert [lease.placed for lease in taken] == [False, False]


async def test_a_request_after_a_held_one_wakes_its_own_engine(backend: Backend) -> None:
    if isinstance(backend, OverRedis):
        backend.config = replace(backend.config, block=3600.0)  # nothing else wakes it
    gateway, b = backend.gateway(), backend.engine("b")
    await b.start()
    await placed(gateway, on("a"))
    assert await b.take(9) == []
    (own,) = await placed(gateway, on("b"))
    await b.wait()
    assert ids(await b.take(9)) == [own]


async def test_the_requests_that_pass_one_request_are_limited(backend: Backend) -> None:
    gateway, a, b = backend.gateway(), backend.engine("a"), backend.engine("b")
    (held,) = await placed(gateway, on("a"))
    own = await placed(gateway, on("b"), PASSES + 4)
    assert ids(await b.take(99)) == own[:PASSES]
    assert ids(await b.take(99)) == []
    assert ids(await a.take(1)) == [held]
    assert ids(await b.take(99)) == own[PASSES:]


async def test_a_much_later_request_does_not_overtake(backend: Backend) -> None:
    gateway, b = backend.gateway(), backend.engine("b")
    (held,) = await placed(gateway, on("a", hold_ms=SHORT))
    began = time.time()
    while time.time() - began < 5 * WINDOW * SHORT / 1000:
        await gateway.depth(MODEL)
    (own,) = await placed(gateway, on("b", hold_ms=SHORT))
    assert ids(await b.take(9)) == [held, own]


async def test_a_passing_tenant_may_have_used_only_a_bounded_number_of_tokens_more(
    backend: Backend,
) -> None:
    gateway, b = backend.gateway(), backend.engine("b")
    await placed(gateway, None, tenant="light")
    (held,) = await placed(gateway, on("a"), tenant="light")
    own = await placed(gateway, on("b"), 9, tenant="heavy", prompt=SLACK // 4)
    taken = ids(await b.take(99))
    assert held not in taken
    assert 4 <= len(set(taken) & set(own)) <= 6


async def test_no_request_is_held_ahead_of_one_that_has_waited_that_long(
    over_redis: OverRedis,
) -> None:
    gateway, b = over_redis.gateway(), over_redis.engine("b")
    await placed(gateway, None)
    (older,) = await placed(gateway, on("a"), tenant="y")
    began = time.time()
    while time.time() - began < 0.21:
        await gateway.depth(MODEL)
    (newer,) = await placed(gateway, on("a", hold_ms=200), tenant="x")
    assert newer == ids(await b.take(9))[-1]
    assert not (await gateway.request_status(older, MODEL)).started  # type: ignore[union-attr]


async def test_priorities_are_respected_with_placement(backend: Backend) -> None:
    gateway, a, b = backend.gateway(), backend.engine("a"), backend.engine("b")
    (low,) = await placed(gateway, on("b"), priority=0)
    (high,) = await placed(gateway, on("a"), priority=-1)
    assert await b.take(9) == []
    assert ids(await a.take(9)) == [high]
    assert ids(await b.take(9)) == [low]


async def test_no_request_is_placed_with_an_engine_over_its_share(backend: Backend) -> None:
    gateway, a, b = backend.gateway(), backend.engine("a"), backend.engine("b")
    where = on("a", "b", load_factor=1.25)
    await placed(gateway, where, 8)
    counts = [len(await engine.take(99)) for engine in (a, b)]
    assert sorted(counts) == [3, 5]
    await placed(gateway, where, 8)
    counts = [n + len(await engine.take(99)) for n, engine in zip(counts, (a, b), strict=True)]
    assert counts == [10, 6]


async def test_an_engine_that_is_full_is_not_given_more_while_others_have_room(
    backend: Backend,
) -> None:
    gateway, a, b = backend.gateway(), backend.engine("a"), backend.engine("b")
    await placed(gateway, on("a", "b", capacity=3), 5)
    assert [len(await engine.take(99)) for engine in (a, b)] == [3, 2]


async def test_cancelled_and_expired_requests_no_longer_count(backend: Backend) -> None:
    gateway, a = backend.gateway(), backend.engine("a")
    where = on("a", "b", capacity=1)
    (cancelled,) = await placed(gateway, where)
    await gateway.cancel(cancelled, MODEL)
    (second,) = await placed(gateway, where)
    (lease,) = await a.take(9)
    assert lease.request.request_id == second
    await finish(a, lease)
    await placed(gateway, where, deadline_ms=int(time.time() * 1000) - 1)
    assert await a.take(9) == []
    (third,) = await placed(gateway, where)
    assert ids(await a.take(9)) == [third]


async def test_an_engine_takes_the_requests_placed_on_it_that_fit(backend: Backend) -> None:
    gateway, b = backend.gateway(), backend.engine("b")
    await placed(gateway, on("a"))
    await placed(gateway, on("b"), prompt=9)
    (fits,) = await placed(gateway, on("b"), prompt=2)
    assert ids(await b.take(9, 4)) == [fits]


async def test_requests_held_for_a_dead_engine_are_not_lost(backend: Backend) -> None:
    gateway, dead, b = backend.gateway(), backend.engine("dead"), backend.engine("b")
    waiting = await placed(gateway, on("dead", hold_ms=SHORT), 3)
    started = ids(await dead.take(1))
    for lease_id in started:
        await gateway.release(lease_id, MODEL, "dead", 1)
    taken = [*ids(await b.reap(9))]
    while len(taken) < 3:
        taken += ids(await b.take(9))
    assert sorted(taken) == sorted(waiting)


async def test_a_placed_request_that_is_admitted_again_is_still_one(backend: Backend) -> None:
    gateway, a = backend.gateway(), backend.engine("a")
    request = make_request()
    for _ in range(3):
        await gateway.admit(request, LIMITS, placement=on("a"))
    assert len(await a.take(9)) == 1
    assert await backend.engine("b").reap(9) == []


async def test_no_placement_data_is_left_when_no_request_waits(over_redis: OverRedis) -> None:
    gateway, a, b = over_redis.gateway(), over_redis.engine("a"), over_redis.engine("b")
    await placed(gateway, on("a", hold_ms=SHORT), 3)
    await placed(gateway, on("b", hold_ms=SHORT), 3)
    (cancelled,) = await placed(gateway, on("a"))
    await gateway.cancel(cancelled, MODEL)
    taken: list[Lease] = []
    while len(taken) < 6:
        for engine in (a, b):
            leases = await engine.take(1)
            for lease in leases:
                await finish(engine, lease)
            taken += leases
    assert await over_redis.client.command("KEYS", "pl:*") == []
    assert (await gateway.depth(MODEL)).pending == 0


def test_prompts_with_the_same_beginning_prefer_the_same_engines() -> None:
    engines = [make_status(f"e{number}") for number in range(8)]
    request = make_request(prompt=tuple(range(200)))
    alike = replace(request, prompt_token_ids=(*range(128), 7, 8), request_id="0.x")
    others = [replace(request, cache_salt=b"tenant"), replace(request, lora="adapter")]
    options = {"prefix_tokens": 128, "load_factor": 1.25, "hold_ms": 100}
    first, second = (placement_of(r, engines, **options) for r in (request, alike))  # type: ignore[arg-type]
    assert first is not None and first == second and first.capacity == 8 * 16
    assert len({prefix_key(each, 128) for each in (request, alike, *others)}) == 3
    assert placement_of(request, engines[:1], **options) is None  # type: ignore[arg-type]
    for state in ({"draining": True}, {"sleep_level": 1}):
        one = [engines[0], replace(engines[1], **state)]
        assert placement_of(request, one, **options) is None  # type: ignore[arg-type]


def test_the_engines_with_most_of_a_prompt_come_first() -> None:
    engines = [make_status(f"e{number}") for number in range(12)]
    request = make_request(prompt=tuple(range(4000)))
    options = {"prefix_tokens": 128, "load_factor": 1.25, "hold_ms": 100}

    def order(cached: dict[str, int], prompt: GenerateRequest = request) -> list[str]:
        placement = placement_of(prompt, engines, cached=cached, **options)  # type: ignore[arg-type]
        assert placement is not None
        assert {c.cached_tokens for c in placement.candidates} <= {0, *cached.values()}
        return [candidate.engine_id for candidate in placement.candidates]

    alone = order({})
    assert len(alone) == MAX_CANDIDATES
    deep = {"e3": 2000, "e7": 3008, "e1": 128}
    rest = [name for name in alone if name not in deep]
    assert order(deep)[:3] == ["e7", "e3", "e1"]
    assert order(deep)[3:] == rest[: MAX_CANDIDATES - 3], "as if nothing were known"
    assert order(dict.fromkeys(deep, 112)) == alone, "what many prompts begin with"
    same = dict.fromkeys(("e3", "e7", "e1"), 2000)
    firsts = Counter(
        order(same, replace(request, prompt_token_ids=(*range(2000), *[turn] * 300)))[0]
        for turn in range(60)
    )
    assert set(firsts) == set(same) and min(firsts.values()) > 5, "spread by what follows"


def test_an_engine_that_goes_moves_its_own_prompts_only() -> None:
    engines = [make_status(f"e{number}") for number in range(8)]
    keys = [number.to_bytes(2, "big") for number in range(400)]
    before = [ranked(key, engines)[0].engine_id for key in keys]
    after = [ranked(key, engines[1:])[0].engine_id for key in keys]
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"e0"}
    assert max(Counter(before).values()) < 2 * 400 / 8


def admit(backend: MemoryBackend, request: GenerateRequest, placement: Placement | None) -> None:
    backend.admit(request, "g", LIMITS, None, False, placement, left=math.inf)


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 2), st.integers(0, 3)), max_size=20
    ),
    idle=st.integers(1, 2),
)
@settings(max_examples=60)
def test_no_request_waits_longer_than_the_hold_while_an_engine_has_room(
    arrivals: list[tuple[int, int, int]], idle: int
) -> None:
    """Some engines always have capacity and one is dead; each TAKE runs when wait() would end."""
    hold, now = 0.1, 1000.0
    backend = MemoryBackend(lambda: now)
    shard = backend.shard(MODEL)
    took: list[Taken] = []
    came: dict[str, float] = {}

    def look(until: float) -> None:
        nonlocal now
        while True:
            ends = []
            for number in range(idle):
                turn = backend.take(shard, f"e{number}", 99, None)
                for one in turn.taken:
                    assert now - came[one.request_id] <= hold + 1e-6
                took.extend(turn.taken)
                ends.append(turn.free_at)
            if min(ends) > until:
                now = until
                return
            now = max(now, min(ends))

    for number, (pause, engine, tenant) in enumerate(arrivals):
        look(now + pause / 1000)
        request = replace(make_request(request_id=f"0.r{number}"), tenant=f"t{tenant}")
        request = replace(request, deadline_ms=10**13)
        came[request.request_id] = now
        admit(backend, request, on(f"e{engine}", hold_ms=100))
    look(now + 10)
    assert sorted(one.request_id for one in took) == sorted(came)


def test_tenants_get_equal_shares_with_and_without_placement() -> None:
    """All tenants have a backlog, each on one engine: their shares differ by at most the slack."""
    now = 1000.0
    backend = MemoryBackend(lambda: now)
    shard = backend.shard(MODEL)
    for number in range(400):
        tenant = number % 4
        request = replace(
            make_request(request_id=f"0.{number:03}", prompt=(1,) * 500), tenant=f"t{tenant}"
        )
        admit(backend, request, on(f"e{tenant % 2}", hold_ms=100))
    now += 10
    order = [
        shard.records[one.request_id].tenant
        for turn in range(200)
        for one in backend.take(shard, f"e{turn % 3 % 2}", 1, None).taken
    ]
    tokens = {tenant: 500 * count for tenant, count in Counter(order).items()}
    assert len(order) == 200 and len(tokens) == 4
    assert max(tokens.values()) - min(tokens.values()) <= 2 * (SLACK + 500)
