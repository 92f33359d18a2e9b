"""A canary's share of the requests: which side runs them, and whose answers an engine continues."""

from dataclasses import replace

import pytest

from headrace_common.protocol.base import CanaryPlan, EngineQueue, Lease, QueueLimits
from headrace_common.protocol.prefix_routing import placement_of
from headrace_common.protocol.redis.variants import RedisCanary
from headrace_common.protocol.variants import (
    CANARY,
    STABLE,
    Agreement,
    EngineSide,
    drawn,
    side_of,
)
from headrace_common.wire.messages import ChoiceState, GenerateRequest
from headrace_testing.backends import MODEL, Backend, OverRedis, make_request, make_status

LIMITS = QueueLimits()
LEASE_MS = 40
OLD, NEW = "old-weights", "new-weights"
BEGUN = (ChoiceState(token_ids=(5, 6)),)


def request_for(variant: str, tenant: str = "default") -> GenerateRequest:
    return replace(make_request(), variant=variant, tenant=tenant)


def ids(leases: list[Lease] | tuple[Lease, ...]) -> set[str]:
    return {lease.request.request_id for lease in leases}


class Sides:
    """A stable engine and a canary of one model, which know of each other."""

    def __init__(self, backend: Backend, canary_weights: str = NEW, lease_ms: int = 60_000) -> None:
        self.backend = backend
        self.stable_side = EngineSide(STABLE, OLD)
        self.canary_side = EngineSide(CANARY, canary_weights)
        self.stable = backend.engine("a", side=self.stable_side, lease_ms=lease_ms)
        self.canary = backend.engine("b", side=self.canary_side, lease_ms=lease_ms)

    async def meet(self) -> None:
        await self.backend.set_canary_percent(50)
        for side in (self.canary_side, self.stable_side):
            side.canary_wanted, side.alone = True, False

    async def taken_by_the_canary(self) -> Lease:
        request = request_for(CANARY)
        await self.backend.gateway().admit(request, LIMITS)
        (lease,) = await self.canary.take(1)
        return lease

    async def canary_is_killed(self) -> None:
        self.stable_side.alone = True


@pytest.fixture
async def sides(backend: Backend) -> Sides:
    made = Sides(backend)
    await made.meet()
    return made


async def beat(
    engine: EngineQueue, name: str, variant: str = STABLE, *, draining: bool = False
) -> None:
    await engine.beat((), replace(make_status(name), variant=variant, draining=draining))


def test_the_share_of_requests_is_drawn_by_their_ids() -> None:
    names = [f"0.{number:032x}" for number in range(20_000)]

    assert 0.24 < sum(drawn(name, 25) for name in names) / len(names) < 0.26
    assert not any(drawn(name, 0) for name in names)
    assert all(drawn(name, 100) for name in names)
    small = {name for name in names if drawn(name, 5)}
    assert small < {name for name in names if drawn(name, 10)}, "a larger share has the same ones"


def test_a_side_without_engines_leaves_its_requests_to_the_other() -> None:
    stable = make_status("a")
    canary = replace(make_status("b"), variant=CANARY)
    full = replace(canary, running=canary.capacity)

    assert side_of("0.1", 100, [stable, canary]) == CANARY
    assert side_of("0.1", 0, [stable, canary]) == STABLE
    assert side_of("0.1", 100, [stable]) == STABLE
    assert side_of("0.1", 100, [stable, replace(canary, draining=True)]) == STABLE
    assert side_of("0.1", 100, [stable, full]) == STABLE, "a full canary gets no more"
    assert side_of("0.1", 0, [canary, replace(stable, draining=True)]) == CANARY


def test_requests_are_placed_with_engines_of_their_side() -> None:
    engines = [make_status("a"), make_status("b")]
    engines += [replace(make_status(name), variant=CANARY) for name in ("c", "d")]

    def candidates(variant: str) -> set[str]:
        found = placement_of(
            request_for(variant), engines, prefix_tokens=8, load_factor=1.25, hold_ms=100
        )
        assert found is not None
        return {each.engine_id for each in found.candidates}

    assert candidates(STABLE) == {"a", "b"}
    assert candidates(CANARY) == {"c", "d"}


async def test_each_side_takes_its_own_requests_past_those_of_the_other(sides: Sides) -> None:
    gateway = sides.backend.gateway()
    mixed = [
        request_for(CANARY if number % 3 == 0 else STABLE, f"t{number % 2}") for number in range(12)
    ]
    for request in mixed:
        await gateway.admit(request, LIMITS)

    stable, canary = await sides.stable.take(16), await sides.canary.take(16)

    assert ids(tuple(stable)) == {each.request_id for each in mixed if each.variant == STABLE}
    assert ids(tuple(canary)) == {each.request_id for each in mixed if each.variant == CANARY}


async def test_a_side_takes_all_requests_once_the_other_has_no_engines(sides: Sides) -> None:
    gateway = sides.backend.gateway()
    request = request_for(STABLE)
    await gateway.admit(request, LIMITS)
    assert not await sides.canary.take(1)

    sides.canary_side.alone = True

    assert ids(tuple(await sides.canary.take(1))) == {request.request_id}


async def test_a_stream_is_continued_by_its_own_side(sides: Sides) -> None:
    lease = await sides.taken_by_the_canary()
    await sides.canary.give_back([lease.request.request_id])

    assert not await sides.stable.reap(4)
    (again,) = await sides.backend.engine("c", side=sides.canary_side).reap(4)
    assert not again.foreign


async def test_the_other_side_learns_that_it_would_continue_with_other_weights(
    sides: Sides,
) -> None:
    lease = await sides.taken_by_the_canary()
    await sides.canary.give_back([lease.request.request_id])
    await sides.canary_is_killed()

    (again,) = await sides.stable.reap(4)

    assert again.foreign
    assert not again.abandoned


async def test_equal_weights_of_another_image_may_continue(backend: Backend) -> None:
    sides = Sides(backend, canary_weights=OLD)
    await sides.meet()
    lease = await sides.taken_by_the_canary()
    await sides.canary.give_back([lease.request.request_id])
    assert not await sides.stable.reap(4), "its own side comes first"
    await sides.canary_is_killed()

    (again,) = await sides.stable.reap(4)

    assert not again.foreign


async def test_a_begun_answer_waits_for_its_weights_as_long_as_the_canary_is_wanted(
    sides: Sides,
) -> None:
    rid = (await sides.taken_by_the_canary()).request.request_id
    await sides.canary.give_back([rid])
    await sides.canary_is_killed()
    await sides.stable.reap(4)
    await sides.stable.give_back([rid], for_own_side=True)

    assert not await sides.stable.reap(4), "it waits"
    (again,) = await sides.canary.reap(4)
    assert not again.foreign
    await sides.canary.give_back([rid])
    sides.stable_side.canary_wanted = False

    (last,) = await sides.stable.reap(4)
    assert (last.foreign, last.abandoned) == (True, True)


async def test_an_answer_that_has_not_begun_moves_to_the_other_side(sides: Sides) -> None:
    rid = (await sides.taken_by_the_canary()).request.request_id
    await sides.canary.give_back([rid])
    await sides.canary_is_killed()
    (again,) = await sides.stable.reap(4)
    assert await sides.stable.resume(rid, again.attempt, [ChoiceState()])
    await sides.stable.give_back([rid])
    sides.stable_side.alone = False

    assert not await sides.canary.reap(4)
    (own,) = await sides.stable.reap(4)
    assert not own.foreign, "it is of the side that runs it"


async def test_engines_learn_whether_the_other_side_has_engines(backend: Backend) -> None:
    sides = Sides(backend)
    await beat(sides.stable, "a")
    assert sides.stable_side.alone
    assert not sides.stable_side.canary_wanted

    await backend.set_canary_percent(10)
    await beat(sides.canary, "b", CANARY)
    assert not sides.canary_side.alone, "stable engines need not have written a beat yet"
    stable_side = EngineSide(STABLE, OLD)
    await beat(backend.engine("c", side=stable_side), "c")

    assert (stable_side.alone, stable_side.canary_wanted) == (False, True)


async def test_comparisons_are_counted_and_claimed_once_in_their_interval(
    over_redis: OverRedis,
) -> None:
    canary, other = (RedisCanary(over_redis.connect()) for _ in range(2))
    assert await canary.plan(MODEL) == CanaryPlan()
    await canary.set_plan(MODEL, CanaryPlan(12.5, 6))
    assert await other.plan(MODEL) == CanaryPlan(12.5, 6)
    assert await canary.may_compare(MODEL, 60_000)
    assert not await other.may_compare(MODEL, 60_000)
    assert await other.may_compare("another", 60_000)
    for equal in (True, False, True):
        await canary.compared(MODEL, equal=equal)
    found = await other.agreement(MODEL)
    assert found == Agreement(equal=2, different=1)
    assert (found.compared, found.since(Agreement(1, 1))) == (3, Agreement(1, 0))
    assert found.since(Agreement(3, 0)) == found, "Redis has lost its data"

    await canary.set_plan(MODEL, None)
    assert await other.plan(MODEL) == CanaryPlan()
    assert await other.agreement(MODEL) == Agreement()


async def test_a_draining_canary_does_not_count(backend: Backend) -> None:
    sides = Sides(backend)
    await backend.set_canary_percent(10)
    await beat(sides.canary, "b", CANARY, draining=True)
    await beat(sides.stable, "a")

    assert sides.stable_side.alone
