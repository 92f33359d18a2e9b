"""The administrators' view of queues, and their commands."""

from dataclasses import replace

import pytest

from headrace_common.errors import FailureCode
from headrace_common.protocol.base import (
    AdmitState,
    EngineQueue,
    Lease,
    Outcome,
    Progress,
    QueueLimits,
)
from headrace_common.protocol.redis.admin import QueueAdmin
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.wire.messages import ChoiceState, Failed
from headrace_testing.backends import MODEL, OverRedis, make_request, make_status
from headrace_testing.redis_sets import ClusterSet
from headrace_testing.waiting import first

LIMITS = QueueLimits()


@pytest.fixture
def admin(over_redis: OverRedis) -> QueueAdmin:
    return QueueAdmin(over_redis.connection)


async def beaten(engine: EngineQueue, lease: Lease) -> None:
    item = Progress(
        request_id=lease.request.request_id,
        attempt=lease.attempt,
        journaled=(0,),
        choices=(ChoiceState(),),
    )
    await engine.beat([item], make_status(engine.engine_id))


async def poisoned(backend: OverRedis) -> str:
    """A request that crashed four engines."""
    gateway = backend.gateway("g")
    request = make_request()
    await gateway.admit(request, LIMITS)
    engines = [backend.engine(f"e{number}") for number in range(5)]
    (lease,) = await engines[0].take(1)
    for old, new in zip(engines, engines[1:], strict=False):
        await beaten(old, lease)
        await gateway.release(request.request_id, MODEL, old.engine_id, lease.attempt)
        leases = await new.reap(1)
        if leases:
            (lease,) = leases
    return request.request_id


async def test_status_counts_waiting_and_running_requests(
    over_redis: OverRedis, admin: QueueAdmin
) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    for number in range(3):
        await gateway.admit(make_request(priority=number - 1), LIMITS)
    (lease,) = await engine.take(1)
    await beaten(engine, lease)
    assert await admin.models() == {MODEL: 1}
    status = await admin.status(MODEL)
    assert (status.depth.waiting, status.depth.pending) == (2, 1)
    assert [one.engine_id for one in status.engines] == ["e"]
    assert status.drain_rate == 0


async def test_models_without_requests_are_known_by_their_engines(
    over_redis: OverRedis, admin: QueueAdmin
) -> None:
    queue = RedisEngineQueue(over_redis.connect("engine"), "e", "a/b.c 1", shard=3)
    await queue.beat((), replace(make_status("e"), model="a/b.c 1"))
    assert await admin.models() == {"a/b.c 1": 4}


async def test_models_are_found_on_all_nodes_of_a_cluster(cluster_set: ClusterSet) -> None:
    backend = OverRedis(cluster_set.url)
    await backend.wipe()
    names = [f"model-{number}" for number in range(12)]
    for name in names:
        await backend.gateway().admit(replace(make_request(), model=name), LIMITS)
    assert await QueueAdmin(backend.connection).models() == dict.fromkeys(sorted(names), 1)
    await backend.close()


async def test_peek_shows_the_next_requests_without_their_prompts(
    over_redis: OverRedis, admin: QueueAdmin
) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    requests = [make_request(priority=number, prompt=(7,) * 5) for number in (0, 1, -1)]
    for request in requests:
        await gateway.admit(replace(request, tenant="acme"), LIMITS)
    waiting = await admin.peek(MODEL, limit=10)
    assert [one.request_id for one in waiting] == [
        requests[number].request_id for number in (2, 0, 1)
    ]
    assert [one.priority for one in waiting] == ["hi", "n", "lo"]
    assert {(one.tenant, one.prompt_tokens, one.state) for one in waiting} == {
        ("acme", 5, "queued")
    }
    assert len(await admin.peek(MODEL, limit=2)) == 2
    await engine.take(1)
    (running,) = await admin.peek(MODEL, limit=10, running=True)
    assert (running.owner, running.attempt, running.state) == ("e", 1, "running")
    assert len(await admin.peek(MODEL, limit=10)) == 2


async def test_a_poisonous_request_is_kept_for_a_replay(
    over_redis: OverRedis, admin: QueueAdmin
) -> None:
    rid = await poisoned(over_redis)
    (letter,) = await admin.dead(MODEL, limit=10)
    assert (letter.request_id, letter.why, letter.failures) == (rid, "poisoned", 4)
    assert letter.replayable
    assert 0 < await over_redis.client.command("PTTL", over_redis.keys.payload(rid)) <= 86_400_000


async def test_a_replayed_request_runs_without_a_reader(
    over_redis: OverRedis, admin: QueueAdmin
) -> None:
    rid = await poisoned(over_redis)
    (letter,) = await admin.dead(MODEL, limit=10)
    assert await admin.replay(MODEL, letter, seconds=60)
    assert not await admin.replay(MODEL, letter, seconds=60)
    assert await admin.dead(MODEL, limit=10) == []
    engine = over_redis.engine("mended")
    (lease,) = await engine.take(1)
    assert (lease.request.request_id, lease.attempt, lease.suspect) == (rid, 5, False)
    assert lease.recovered and not await engine.gateway_alive(lease.gateway_id)
    assert lease.request.window_ms == 60_000
    states = await engine.journal(rid)
    assert states == (ChoiceState(),)
    assert await engine.resume(rid, 5, states)
    assert await engine.finish(rid, 5, Outcome(choices=(ChoiceState(finish_reason="stop"),)))
    ended = await over_redis.gateway().admit(lease.request, LIMITS, seen=5)
    assert ended.state is AdmitState.ENDED
    assert ended.outcome is not None and ended.outcome.failed is None


async def test_a_replay_that_fails_again_is_a_dead_letter_again(
    over_redis: OverRedis, admin: QueueAdmin
) -> None:
    await poisoned(over_redis)
    (letter,) = await admin.dead(MODEL, limit=10)
    assert await admin.replay(MODEL, letter, seconds=60)
    engines = [over_redis.engine(f"again{number}", lease_ms=1) for number in range(5)]
    (lease,) = await engines[0].take(1)
    assert await engines[0].resume(lease.request.request_id, lease.attempt, [ChoiceState()])
    for old, new in zip(engines, engines[1:], strict=False):
        await beaten(old, lease)
        await old.give_back(())
        gateway = over_redis.gateway()
        await gateway.release(lease.request.request_id, MODEL, old.engine_id, lease.attempt)
        leases = await new.reap(1)
        if leases:
            (lease,) = leases
    (again,) = await admin.dead(MODEL, limit=10)
    assert again.failures == 4 and again.letter_id != letter.letter_id


async def test_a_purge_of_dead_letters_deletes_the_named_ones(
    over_redis: OverRedis, admin: QueueAdmin
) -> None:
    rid = await poisoned(over_redis)
    letters = await admin.dead(MODEL, limit=10)
    assert await admin.purge_dead(MODEL, letters) == 1
    assert await admin.dead(MODEL, limit=10) == []
    assert await over_redis.client.command("EXISTS", over_redis.keys.payload(rid)) == 0


async def test_a_purge_of_a_queue_cancels_waiting_requests_and_tells_their_clients(
    over_redis: OverRedis, admin: QueueAdmin
) -> None:
    gateway, engine = over_redis.gateway("g"), over_redis.engine()
    requests = [make_request(priority=number % 3 - 1) for number in range(7)]
    for request in requests:
        await gateway.admit(request, LIMITS)
    taken = [lease.request.request_id for lease in await engine.take(2)]
    assert await admin.purge_waiting(MODEL) == 5
    frames = await first(gateway.frames(), 5)
    replies = {reply.request_id: reply for frame in frames for reply in frame.replies}
    assert set(replies) == {r.request_id for r in requests} - set(taken)
    assert all(
        isinstance(reply, Failed) and reply.failure is FailureCode.CANCELLED
        for reply in replies.values()
    )
    depth = await gateway.depth(MODEL)
    assert (depth.waiting, depth.waiting_tokens, depth.pending) == (0, 0, 2)
    assert await admin.purge_waiting(MODEL) == 0
