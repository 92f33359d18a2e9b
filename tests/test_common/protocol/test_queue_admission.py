"""Admission of requests, the order in which engines get them, and when engines are woken.

On every backend of the queue. What only Redis can do is elsewhere.
"""

import asyncio

import pytest

from headrace_common.errors import QueueFull, RequestConflict
from headrace_common.protocol.base import AdmitState, Lease, QueueLimits
from headrace_common.wire.messages import Reroute
from headrace_testing.backends import MODEL, Backend, make_request
from headrace_testing.queue_contract import LIMITS, ON_ALL_BACKENDS, beat, progress, started
from headrace_testing.waiting import first

pytestmark = ON_ALL_BACKENDS


async def test_a_request_arrives_as_it_was_sent(backend: Backend) -> None:
    gateway, engine = backend.gateway("g1"), backend.engine()
    request = make_request(prompt=(1, 0, 2**32 - 1), n=2)
    assert (await gateway.admit(request, LIMITS)).state is AdmitState.ADMITTED
    (lease,) = await engine.take(4)
    assert lease == Lease(request=request, attempt=1, gateway_id="g1")


async def test_admitting_again_delivers_once(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    request = make_request()
    await gateway.admit(request, LIMITS)
    again = await gateway.admit(request, LIMITS, seen=0)
    assert (again.state, again.owner) == (AdmitState.ATTACHED, None)
    assert len(await engine.take(4)) == 1
    third = await gateway.admit(request, LIMITS, seen=0)
    assert (third.owner, third.attempt) == ("e", 1)


async def test_another_request_under_a_used_id_is_refused(backend: Backend) -> None:
    gateway = backend.gateway()
    request = make_request()
    await gateway.admit(request, LIMITS)
    with pytest.raises(RequestConflict):
        await gateway.admit(make_request(request_id=request.request_id, prompt=(9,)), LIMITS)


async def test_a_second_gateway_gets_the_stream(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    other = backend.gateway("g2")
    admission = await other.admit(lease.request, LIMITS)
    assert (admission.state, admission.owner) == (AdmitState.ATTACHED, "e")
    (control,) = await first(engine.controls(), 1)
    assert control == Reroute(request_id=lease.request.request_id, gateway_id="g2")
    assert (await beat(engine, progress(lease))).gateway_id == "g2"


async def test_the_queue_is_bounded_in_requests(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    limits = QueueLimits(max_requests=2)
    known = make_request()
    for request in (known, make_request()):
        await gateway.admit(request, limits)
    with pytest.raises(QueueFull) as full:
        await gateway.admit(make_request(), limits)
    assert full.value.retry_after > 0
    assert (await gateway.admit(known, limits, seen=0)).state is AdmitState.ATTACHED
    await engine.take(1)
    await gateway.admit(make_request(), limits)


async def test_the_queue_is_bounded_in_tokens(backend: Backend) -> None:
    gateway = backend.gateway()
    limits = QueueLimits(max_tokens=40)
    await gateway.admit(make_request(max_tokens=30), limits)
    with pytest.raises(QueueFull):
        await gateway.admit(make_request(max_tokens=30), limits)
    assert (await gateway.depth(MODEL)).waiting_tokens == 33


async def test_an_accepted_request_is_never_refused_again(backend: Backend) -> None:
    gateway = backend.gateway()
    await gateway.admit(make_request(), QueueLimits(max_requests=1))
    lost = make_request()  # Redis knows nothing of it
    again = await gateway.admit(lost, QueueLimits(max_requests=1), seen=2)
    assert again.state is AdmitState.ADMITTED
    engine = backend.engine()
    leases = await engine.take(4)
    assert [(le.attempt, le.recovered) for le in leases] == [(1, False), (3, True)]


async def test_priorities_are_served_in_order(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    for priority in (5, 0, -1, 0, -3):
        await gateway.admit(make_request(priority=priority), LIMITS)
    leases = await engine.take(9)
    assert [lease.request.priority for lease in leases] == [-1, -3, 0, 0, 5]


async def test_low_priorities_are_not_starved(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    for priority in [-1] * 40 + [1, 1]:
        await gateway.admit(make_request(priority=priority), LIMITS)
    served = [(await engine.take(1))[0].request.priority for _ in range(36)]
    assert served.count(1) == 2


async def test_a_request_that_does_not_fit_stays_first(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await engine.start()
    large = make_request(prompt=(1,) * 50)
    for request in (make_request(), large, make_request()):
        await gateway.admit(request, LIMITS)
    assert len(await engine.take(9, 40)) == 1
    assert await engine.take(9, 40) == []
    assert (await gateway.depth(MODEL)).waiting == 2
    leases = await engine.take(9, 60)
    assert [lease.request for lease in leases][0] == large
    assert len(leases) == 2


async def test_waiting_ends_only_when_there_is_something_new(backend: Backend) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    await engine.start()
    await gateway.admit(make_request(prompt=(1,) * 50), LIMITS)
    assert await engine.take(9, 10) == []
    waiting = asyncio.create_task(engine.wait())
    done_early, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done_early, "an entry that did not fit is not new"
    await gateway.admit(make_request(priority=-1), LIMITS)
    await asyncio.wait_for(waiting, 20)
