"""The outcomes of requests, the clients that read them, and requests that are queued again.

Runs on every backend of the queue. test_redis_backend.py tests what only Redis can do.
"""

from dataclasses import replace

from headrace_common.errors import FailureCode
from headrace_common.protocol.base import MAX_REQUEUES, AdmitState, Lease, Outcome, RequestStatus
from headrace_common.protocol.failures import failed
from headrace_common.wire.messages import GenerateRequest
from headrace_testing.backends import MODEL, Backend, make_request
from headrace_testing.queue_contract import (
    LIMITS,
    ON_ALL_BACKENDS,
    beat,
    done,
    lost,
    progress,
    started,
)

pytestmark = ON_ALL_BACKENDS


async def test_any_gateway_reads_the_outcome_of_a_finished_request(backend: Backend) -> None:
    engine = backend.engine()
    lease = await started(backend, engine)
    for _ in range(2):
        assert await engine.finish(lease.request.request_id, lease.attempt, done(5, 6))
    gateway = backend.gateway()
    admission = await gateway.admit(lease.request, LIMITS, seen=1)
    assert (admission.state, admission.outcome) == (AdmitState.ENDED, done(5, 6))
    await gateway.cancel(lease.request.request_id, MODEL)
    assert (await gateway.admit(lease.request, LIMITS, seen=1)).outcome == done(5, 6)
    assert await gateway.drain_rate(MODEL) > 0


async def test_any_gateway_reads_the_status_of_a_request(backend: Backend) -> None:
    gateway, engine = backend.gateway("g1"), backend.engine()
    observer = backend.gateway("g2")
    request = make_request()
    rid = request.request_id
    assert await observer.request_status(rid, MODEL) is None
    await gateway.admit(request, LIMITS)
    assert await observer.request_status(rid, MODEL) == RequestStatus(started=False)
    await engine.take(1)
    assert await observer.request_status(rid, MODEL) == RequestStatus(started=True)
    await engine.finish(rid, 1, done(1, 2))
    assert await observer.request_status(rid, MODEL) == RequestStatus(
        started=True, outcome=done(1, 2)
    )


async def test_a_cancelled_request_has_the_outcome_cancelled(backend: Backend) -> None:
    gateway = backend.gateway()
    request = make_request()
    await gateway.admit(request, LIMITS)
    await gateway.cancel(request.request_id, MODEL)
    request_status = await gateway.request_status(request.request_id, MODEL)
    assert request_status is not None and request_status.outcome is not None
    assert request_status.outcome.failed is not None
    assert request_status.outcome.failed.failure is FailureCode.CANCELLED


async def test_a_lost_request_continues_for_its_gateway(backend: Backend) -> None:
    engine, other = backend.engine("e1"), backend.engine("e2")
    lease = await started(backend, engine)
    gateway, follower = backend.gateway("g"), backend.gateway("g2")
    rid = lease.request.request_id
    await beat(engine, progress(lease, 5, 6))
    assert await engine.finish(rid, 1, lost(lease))
    assert await follower.request_status(rid, MODEL) == RequestStatus(started=True)
    following = await follower.admit(lease.request, LIMITS, seen=1, polite=True)
    assert (following.state, following.gateway_id, following.owner) == (
        AdmitState.FOLLOWING,
        "g",
        None,
    )
    expired = replace(lease.request, deadline_ms=1)
    assert (await gateway.admit(expired, LIMITS, seen=1)).state is AdmitState.ENDED
    assert (await gateway.admit(lease.request, LIMITS, seen=1)).state is AdmitState.ADMITTED
    assert (await gateway.admit(lease.request, LIMITS, seen=1)).state is AdmitState.ATTACHED
    assert not await engine.finish(rid, 1, lost(lease))
    assert await follower.request_status(rid, MODEL) == RequestStatus(started=False)
    (again,) = await other.take(2)
    assert again == Lease(request=lease.request, attempt=2, gateway_id="g", recovered=True)
    assert await other.journal(rid) is None  # it was deleted with the lost attempt
    assert await other.finish(rid, 2, done(5, 6, 7))
    assert (await gateway.admit(lease.request, LIMITS, seen=2)).outcome == done(5, 6, 7)
    assert (await gateway.depth(MODEL)).pending == 0


async def test_a_request_that_is_lost_too_often_ends_as_lost(backend: Backend) -> None:
    engine, gateway = backend.engine(), backend.gateway()
    lease = await started(backend, engine)
    for attempt in range(1, MAX_REQUEUES + 1):
        await engine.finish(lease.request.request_id, attempt, lost(lease))
        admission = await gateway.admit(lease.request, LIMITS, seen=attempt)
        assert admission.state is AdmitState.ADMITTED
        (lease,) = await engine.take(1)
    await engine.finish(lease.request.request_id, lease.attempt, lost(lease))
    admission = await gateway.admit(lease.request, LIMITS, seen=lease.attempt)
    assert (admission.state, admission.outcome) == (AdmitState.ENDED, lost(lease))


async def test_a_lost_request_that_is_cancelled_is_not_queued_again(backend: Backend) -> None:
    engine, gateway = backend.engine(), backend.gateway()
    lease = await started(backend, engine)
    await engine.finish(lease.request.request_id, 1, lost(lease))
    await gateway.cancel(lease.request.request_id, MODEL)
    admission = await gateway.admit(lease.request, LIMITS, seen=1)
    assert admission.outcome is not None and admission.outcome.failed is not None
    assert admission.outcome.failed.failure is FailureCode.CANCELLED
    assert await engine.take(1) == []


async def test_an_abandoned_request_continues_for_the_gateway_that_adopts_it(
    backend: Backend,
) -> None:
    """It does not continue for a new client, which may start again, as after a cancelled
    request."""
    engine, other = backend.engine(), backend.gateway("g2")
    lease = await started(backend, engine)
    abandoned = failed(lease.request.request_id, 1, FailureCode.ABANDONED)
    await engine.finish(lease.request.request_id, 1, Outcome(failed=abandoned))
    new = await other.admit(lease.request, LIMITS, polite=True)
    assert (new.state, new.outcome) == (AdmitState.ENDED, Outcome(failed=abandoned))
    seen = await other.admit(lease.request, LIMITS, seen=1, polite=True)
    assert seen.state is AdmitState.ADMITTED
    (again,) = await engine.take(1)
    assert (again.attempt, again.gateway_id, again.recovered) == (2, "g2", True)


async def test_a_disputed_outcome_is_computed_again_once(backend: Backend) -> None:
    engine, gateway = backend.engine(), backend.gateway()
    lease = await started(backend, engine)
    rid = lease.request.request_id
    await engine.finish(rid, 1, done(9, 9))
    ended = await gateway.admit(lease.request, LIMITS, seen=1)
    assert (ended.state, ended.attempt, ended.outcome) == (AdmitState.ENDED, 1, done(9, 9))
    anew = await gateway.admit(lease.request, LIMITS, seen=1, disputed=True)
    assert anew.state is AdmitState.ADMITTED
    (again,) = await engine.take(1)
    assert (again.attempt, again.recovered) == (2, True)
    await engine.finish(rid, 2, done(5, 6))
    repeated = await gateway.admit(lease.request, LIMITS, seen=1, disputed=True)
    assert (repeated.state, repeated.outcome) == (AdmitState.ENDED, done(5, 6))


async def test_an_outcome_that_a_gateway_has_read_is_not_computed_again(backend: Backend) -> None:
    engine, gateway, other = backend.engine(), backend.gateway(), backend.gateway("g2")

    async def give(request: GenerateRequest, how: str) -> None:
        match how:
            case "asked":
                found = await other.deliver_outcome(request.request_id, MODEL)
                assert found == RequestStatus(started=True, outcome=done(9, 9))
            case "sent again":
                again = await other.admit(request, LIMITS, polite=True)
                assert again.outcome == done(9, 9)
            case "follows":
                await other.admit(request, LIMITS, polite=True)
            case "took over":
                await other.admit(request, LIMITS, seen=1)

    for how in ("asked", "sent again", "follows", "took over"):
        request = (await started(backend, engine)).request
        if how in ("follows", "took over"):
            await give(request, how)
        await engine.finish(request.request_id, 1, done(9, 9))
        if how in ("asked", "sent again"):
            await give(request, how)
        disputed = await gateway.admit(request, LIMITS, seen=1, disputed=True)
        assert (disputed.state, disputed.outcome) == (AdmitState.ENDED, done(9, 9)), how
    assert await engine.take(1) == []
