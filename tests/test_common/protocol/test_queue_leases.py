"""Leases: which engine runs a request, how another takes it over, and how it ends early.

On every backend of the queue. What only Redis can do is elsewhere.
"""

import asyncio

import pytest

from headrace_common.errors import FailureCode
from headrace_common.protocol.base import Lease, Verdict
from headrace_common.wire.messages import Cancel, ChoiceState, Failed
from headrace_testing.backends import MODEL, Backend, make_request
from headrace_testing.queue_contract import (
    LIMITS,
    ON_ALL_BACKENDS,
    beat,
    done,
    moved,
    progress,
    started,
)
from headrace_testing.waiting import eventually, first

pytestmark = ON_ALL_BACKENDS

WRONG_CLOCKS = pytest.mark.parametrize("ahead", [-90_000.0, 90_000.0])


async def test_waiting_ends_when_a_started_request_is_free_again(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    await other.start()
    waiting = asyncio.create_task(other.wait())
    await asyncio.sleep(0)
    await engine.give_back([lease.request.request_id])
    await asyncio.wait_for(waiting, 20)
    assert len(await other.reap(1)) == 1


async def test_an_expired_request_is_answered_and_not_run(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await gateway.start()
    request = make_request(seconds=-1)
    await gateway.admit(request, LIMITS)
    assert await engine.take(4) == []
    (frame,) = await first(gateway.frames(), 1)
    assert isinstance(frame.replies[0], Failed)
    assert frame.replies[0].failure is FailureCode.DEADLINE
    ended = await gateway.admit(request, LIMITS, seen=0)
    assert ended.outcome is not None and ended.outcome.failed is not None
    assert ended.outcome.failed.failure is FailureCode.DEADLINE


@WRONG_CLOCKS
async def test_a_remaining_timeout_does_not_depend_on_the_gateways_clock(
    backend: Backend, ahead: float
) -> None:
    gateway, engine, other = backend.gateway(ahead=ahead), backend.engine("e1"), backend.engine()
    await gateway.admit(make_request(seconds=100 + ahead), LIMITS)
    (lease,) = await engine.take(4)
    assert 0 < lease.left <= 100
    assert 0 <= lease.waited < 100
    assert (await beat(engine, progress(lease))).verdict is Verdict.OWNED
    await engine.give_back([lease.request.request_id])
    (moved_lease,) = await other.reap(1)
    assert 0 < moved_lease.left <= lease.left
    assert moved_lease.waited >= lease.waited


@WRONG_CLOCKS
async def test_an_expired_timeout_does_not_depend_on_the_gateways_clock(
    backend: Backend, ahead: float
) -> None:
    gateway = backend.gateway(ahead=ahead)
    await gateway.admit(make_request(seconds=ahead - 1), LIMITS)
    assert await backend.engine().take(4) == []
    assert (await gateway.depth(MODEL)).waiting == 0


async def test_a_running_request_expires(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    for seconds in (0.05, 0.5, 5.0, 50.0):  # on a busy machine it may expire before it is taken
        await gateway.admit(make_request(seconds=seconds), LIMITS)
        await engine.wait()  # an empty stream is not read again before this
        if leases := await engine.take(1):
            break
    (lease,) = leases

    async def expired() -> bool:
        return (await beat(engine, progress(lease))).verdict is Verdict.EXPIRED

    await eventually(expired)


async def test_a_cancelled_waiting_request_is_never_run(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    request = make_request()
    await gateway.admit(request, LIMITS)
    for _ in range(2):
        await gateway.cancel(request.request_id, MODEL)
    assert await engine.take(4) == []
    assert (await gateway.depth(MODEL)).waiting == 0
    assert (await gateway.depth(MODEL)).waiting_tokens == 0
    await gateway.cancel("0.unknown", MODEL)


async def test_the_engine_of_a_cancelled_request_is_notified(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    gateway = backend.gateway()
    await gateway.cancel(lease.request.request_id, MODEL)
    (control,) = await first(engine.controls(), 1)
    assert control == Cancel(request_id=lease.request.request_id)
    assert (await beat(engine, progress(lease))).verdict is Verdict.CANCELLED
    assert not await engine.finish(lease.request.request_id, lease.attempt, done(1))
    assert (await gateway.depth(MODEL)).pending == 0


async def test_a_frozen_engine_cannot_take_its_request_back(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    again = await moved(backend, lease, engine, other)
    assert (again.attempt, again.recovered, again.suspect) == (2, True, False)
    assert (await beat(engine, progress(lease, 1))).verdict is Verdict.STOLEN
    assert not await engine.finish(lease.request.request_id, 1, done(1))
    assert not await engine.resume(lease.request.request_id, 1, [ChoiceState()])
    await engine.give_back([lease.request.request_id])
    assert await backend.engine("e3").reap(4) == []
    assert (await beat(other, progress(again))).verdict is Verdict.OWNED


async def test_a_lease_lapses_without_beats(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2", lease_ms=20)
    lease = await started(backend, engine)
    assert await backend.engine("e3").reap(4) == []
    found: list[Lease] = []

    async def reaped() -> bool:
        found.extend(await other.reap(4))
        return bool(found)

    await eventually(reaped)
    assert found[0].request == lease.request


async def test_only_the_owner_is_released(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    gateway = backend.gateway()
    for engine_id, attempt in (("e2", 1), ("e1", 2)):
        await gateway.release(lease.request.request_id, MODEL, engine_id, attempt)
    assert await other.reap(4) == []


async def test_poison_becomes_a_dead_letter(backend: Backend) -> None:
    engines = [backend.engine(f"e{number}") for number in range(6)]
    lease = await started(backend, engines[0])
    suspects = []
    for old, new in zip(engines, engines[1:4], strict=False):
        await beat(old, progress(lease))
        lease = await moved(backend, lease, old, new)
        suspects.append(lease.suspect)
    assert suspects == [False, True, True]
    await beat(engines[3], progress(lease))
    gateway = backend.gateway()
    await gateway.release(lease.request.request_id, MODEL, "e3", lease.attempt)
    assert await engines[4].reap(4) == []
    (frame,) = await first(gateway.frames(), 1)
    assert isinstance(frame.replies[0], Failed)
    assert frame.replies[0].failure is FailureCode.POISONED
    assert await backend.dead_letters() == [(lease.request.request_id, "poisoned")]
    ended = await gateway.admit(lease.request, LIMITS, seen=4)
    assert ended.outcome is not None and ended.outcome.failed is not None
    assert ended.outcome.failed.failure is FailureCode.POISONED


async def test_an_engine_that_takes_no_suspects_leaves_them_in_the_queue(backend: Backend) -> None:
    engines = [backend.engine(f"e{number}") for number in range(4)]
    lease = await started(backend, engines[0])
    for old, new in zip(engines, engines[1:2], strict=False):
        await beat(old, progress(lease))
        lease = await moved(backend, lease, old, new)
    await beat(engines[1], progress(lease))
    await backend.gateway().release(lease.request.request_id, MODEL, "e1", 2)
    assert await engines[2].reap(4, suspects=False) == []
    assert [item.suspect for item in await engines[2].reap(4)] == [True]


async def test_requests_that_did_not_cause_a_crash_are_not_counted(backend: Backend) -> None:
    """Requests that made tokens, only waited or were given back are not counted."""
    engines = [backend.engine(f"e{number}") for number in range(14)]
    lease = await started(backend, engines[0])
    rid = lease.request.request_id
    made: list[int] = []
    for number, (old, new) in enumerate(zip(engines, engines[1:], strict=False)):
        await old.resume(rid, lease.attempt, [ChoiceState(token_ids=tuple(made))])
        if number % 3 == 0:
            await beat(old, progress(lease, number, journaled=len(made)))
            made.append(number)
        elif number % 3 == 1:
            await old.give_back([rid])
        else:
            lease = await moved(backend, lease, old, new)
            await backend.gateway().release(rid, MODEL, new.engine_id, lease.attempt)
            (lease,) = await engines[13].reap(1)
            await engines[13].give_back([rid])
        if number % 3 == 0:
            lease = await moved(backend, lease, old, new)
        else:
            (lease,) = await new.reap(1)
        assert not lease.suspect


async def test_requests_continue_after_redis_lost_all_data(backend: Backend) -> None:
    engine = backend.engine("e1")
    lease = await started(backend, engine)
    await backend.wipe()
    assert (await beat(engine, progress(lease, 1))).verdict is Verdict.MISSING
    assert not await engine.finish(lease.request.request_id, 1, done(1))
    gateway = backend.gateway()
    assert await engine.take(1) == [] and await engine.reap(1) == []
    await gateway.admit(lease.request, LIMITS, seen=1)
    (again,) = await backend.engine("e2").take(1)
    assert (again.attempt, again.recovered) == (2, True)


async def test_a_lease_given_twice_with_one_attempt_number_asks_first(backend: Backend) -> None:
    engine = backend.engine("e1")
    lease = await started(backend, engine)
    await backend.wipe()
    # as after a rollback: nothing has been seen
    await backend.gateway().admit(lease.request, LIMITS)
    (again,) = await engine.take(1)
    assert (again.attempt, again.recovered) == (1, True)
