"""Roles in disaggregated prefill: which engine takes which request, and what was handed over."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace_common.protocol.base import (
    EngineQueue,
    EngineStatus,
    Lease,
    QueueLimits,
    TakeBounds,
)
from headrace_common.protocol.kv_roles import Fleet, KVRole, able_to_take
from headrace_common.protocol.prefix_routing import placement_of
from headrace_common.protocol.variants import CANARY, STABLE, EngineSide
from headrace_common.wire.messages import GenerateRequest
from headrace_testing.backends import Backend, make_request, make_status

LIMITS = QueueLimits()
LONG_HOLD = 3600.0
PRODUCES = TakeBounds(fewest=9, handed_over=False, hold=LONG_HOLD)
CONSUMES = TakeBounds(most=8, hold=LONG_HOLD)


def prompt_of(tokens: int, tenant: str = "default") -> GenerateRequest:
    return replace(make_request(), prompt_token_ids=tuple(range(1, tokens + 1)), tenant=tenant)


def engine(name: str, role: KVRole, local: int = 8, **fields: Any) -> EngineStatus:
    status = make_status(engine_id=name)
    return replace(status, kv_role=role, max_local_prefill_length=local, **fields)


def ids(leases: Sequence[Lease]) -> list[str]:
    return [lease.request.request_id for lease in leases]


async def admitted(backend: Backend, *requests: GenerateRequest) -> list[str]:
    gateway = backend.gateway()
    for request in requests:
        await gateway.admit(request, LIMITS)
    return [request.request_id for request in requests]


def test_long_prompts_are_the_producers_and_short_ones_the_consumers() -> None:
    producer, consumer = engine("p", KVRole.PRODUCER), engine("c", KVRole.CONSUMER)
    fleet = [producer, consumer]

    assert able_to_take(fleet, 9) == [producer]
    assert able_to_take(fleet, 8) == [consumer]
    assert not Fleet.of(fleet).bounds(producer, 1.0).handed_over
    assert Fleet.of(fleet).bounds(consumer, 1.0).handed_over


@pytest.mark.parametrize("role", [KVRole.PRODUCER, KVRole.CONSUMER, KVRole.BOTH])
@pytest.mark.parametrize("away", [{"draining": True}, {"sleep_level": 1}])
def test_engines_of_one_role_alone_do_everything(role: KVRole, away: dict[str, Any]) -> None:
    mine = engine("a", role)
    other = KVRole.CONSUMER if role == KVRole.PRODUCER else KVRole.PRODUCER
    fleet = [mine, engine("b", role), engine("c", other, **away)]

    assert Fleet.of(fleet).bounds(mine, 1.0) == TakeBounds()
    assert len(able_to_take(fleet, 1)) == len(able_to_take(fleet, 10_000)) == 2


def test_engines_of_both_roles_take_everything_and_stand_in_for_either_role() -> None:
    both = engine("b", KVRole.BOTH)
    producer, consumer = engine("p", KVRole.PRODUCER), engine("c", KVRole.CONSUMER)

    assert able_to_take([both, producer], 4) == [both]
    assert able_to_take([both, consumer], 40) == [both]
    assert able_to_take([both, producer, consumer], 40) == [both, producer]


def test_the_smallest_bound_of_a_consumer_counts_so_that_no_length_is_left_out() -> None:
    fleet = [engine("p", KVRole.PRODUCER, 100), engine("c", KVRole.CONSUMER, 20)]
    fleet.append(engine("d", KVRole.CONSUMER, 40))

    assert [each.engine_id for each in able_to_take(fleet, 21)] == ["p", "d"]
    assert all(able_to_take(fleet, tokens) for tokens in range(1, 200))


def test_requests_are_placed_only_with_engines_that_take_them() -> None:
    fleet = [engine(f"p{n}", KVRole.PRODUCER) for n in range(2)]
    fleet += [engine(f"c{n}", KVRole.CONSUMER) for n in range(2)]
    for tokens, kind in ((4, "c"), (40, "p")):
        placement = placement_of(
            prompt_of(tokens), fleet, prefix_tokens=4, load_factor=1.25, hold_ms=100
        )
        assert placement is not None
        assert {each.engine_id[0] for each in placement.candidates} == {kind}


def test_the_sides_of_a_canary_have_roles_of_their_own() -> None:
    """A prompt of a canary without producers is placed with its consumers."""
    fleet = [engine(f"p{n}", KVRole.PRODUCER) for n in range(2)]
    fleet += [engine(f"c{n}", KVRole.CONSUMER, variant=CANARY) for n in range(2)]
    for variant, kind in (("", "p"), (CANARY, "c")):
        for tokens in (4, 40):
            request = replace(prompt_of(tokens), variant=variant)
            placement = placement_of(request, fleet, prefix_tokens=4, load_factor=1.25, hold_ms=100)
            assert placement is not None
            assert {each.engine_id[0] for each in placement.candidates} == {kind}


async def test_each_engine_takes_what_is_within_its_bounds(backend: Backend) -> None:
    producer, consumer = backend.engine("p"), backend.engine("c")
    producer.limit(PRODUCES)
    consumer.limit(CONSUMES)
    requests = [prompt_of(n, tenant=f"t{n % 3}") for n in (20, 4, 9, 8, 30, 40, 1, 50)]
    found = await admitted(backend, *requests)
    sizes = {rid: len(each.prompt_token_ids) for rid, each in zip(found, requests, strict=True)}

    short, long = await consumer.take(16), await producer.take(16)

    assert sorted(sizes[rid] for rid in ids(short)) == [1, 4, 8]
    assert sorted(sizes[rid] for rid in ids(long)) == [9, 20, 30, 40, 50]


async def test_after_the_hold_any_engine_takes_a_request(backend: Backend) -> None:
    consumer = backend.engine("c")
    consumer.limit(replace(CONSUMES, hold=0.0))
    (rid,) = await admitted(backend, prompt_of(40))

    assert ids(await consumer.take(1)) == [rid]


async def test_a_handed_over_request_goes_to_an_engine_that_goes_on_with_it(
    backend: Backend,
) -> None:
    producer, other, consumer = backend.engine("p"), backend.engine("q"), backend.engine("c")
    for each in (producer, other):
        each.limit(PRODUCES)
    consumer.limit(CONSUMES)
    (rid,) = await admitted(backend, prompt_of(40))
    assert ids(await producer.take(1)) == [rid]

    await producer.give_back([rid], handed_over=True)

    assert await other.reap(4) == []
    assert await producer.reap(4) == []
    (lease,) = await consumer.reap(4)
    assert (ids([lease]), lease.attempt, lease.recovered) == ([rid], 2, True)


async def test_a_handed_over_request_keeps_its_side(backend: Backend) -> None:
    def of(name: str, variant: str, bounds: TakeBounds) -> EngineQueue:
        made = backend.engine(name, side=EngineSide(variant, f"{variant}-weights"))
        made.limit(bounds)
        return made

    producer = of("p", CANARY, PRODUCES)
    producer_of_side, consumer = of("q", CANARY, PRODUCES), of("c", CANARY, CONSUMES)
    stable = [of("s", STABLE, CONSUMES), of("t", STABLE, TakeBounds())]
    requests = [replace(prompt_of(tokens), variant=CANARY) for tokens in (40, 4)]
    long, short = await admitted(backend, *requests)
    for each in stable:
        assert await each.take(4) == []
    assert ids(await producer.take(4)) == [long]

    await producer.give_back([long], handed_over=True)

    for each in (*stable, producer_of_side):
        assert await each.reap(4) == []
    (lease,) = await consumer.reap(4)
    assert (ids([lease]), lease.recovered, lease.foreign) == ([long], True, False)
    assert ids(await consumer.take(4)) == [short]


async def test_a_producer_goes_on_itself_after_the_hold_or_without_consumers(
    backend: Backend,
) -> None:
    producer, other = backend.engine("p"), backend.engine("q")
    (rid,) = await admitted(backend, prompt_of(40))
    for bounds in (replace(PRODUCES, hold=0.0), TakeBounds()):
        taken = await producer.take(1) or await producer.reap(1)
        assert ids(taken) == [rid]
        await producer.give_back([rid], handed_over=True)
        other.limit(bounds)
        assert ids(await other.reap(1)) == [rid]
        await other.give_back([rid])


async def test_what_was_given_back_otherwise_goes_to_any_engine(backend: Backend) -> None:
    producer, other = backend.engine("p"), backend.engine("q")
    other.limit(PRODUCES)
    (rid,) = await admitted(backend, prompt_of(4))
    await producer.take(1)

    await producer.give_back([rid])

    assert ids(await other.reap(1)) == [rid]


async def test_an_engine_reads_the_roles_of_the_others(backend: Backend) -> None:
    first, second = backend.engine("p"), backend.engine("c")
    await first.beat((), engine("p", KVRole.PRODUCER, 7))
    await second.beat((), engine("c", KVRole.CONSUMER, 9))

    found = {each.engine_id: each for each in await first.engines()}

    assert found["p"].kv_role == KVRole.PRODUCER
    assert (found["c"].kv_role, found["c"].max_local_prefill_length) == (KVRole.CONSUMER, 9)
