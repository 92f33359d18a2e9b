"""The ledger: each request is entered once, by the script that ends it, with what it used.

Runs on every backend of the queue. The bounds of the stream are tested with Redis alone.
"""

from dataclasses import replace

import msgpack
import pytest

from headrace_common.errors import BackendUnfit, FailureCode, MessageError
from headrace_common.protocol.base import AdmitState, EngineQueue, Lease, Outcome
from headrace_common.protocol.failures import failed
from headrace_common.protocol.ledger import (
    AttemptUsage,
    LedgerBounds,
    UsageEntry,
    UsageOutcome,
    read_entry,
)
from headrace_common.protocol.redis.admin import QueueAdmin
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.protocol.redis.ledger import LedgerReader, registered_models
from headrace_common.protocol.registry import RegisteredModel, digest_of
from headrace_common.protocol.variants import COMPARISON_TENANT
from headrace_common.wire.keys import new_request_id
from headrace_testing.backends import MODEL, Backend, OverRedis, make_request
from headrace_testing.queue_contract import (
    LIMITS,
    ON_ALL_BACKENDS,
    beat,
    done,
    lost,
    moved,
    progress,
    started,
)


async def the_entry(backend: Backend) -> UsageEntry:
    (entry,) = await backend.ledger()
    return entry


def used(entry: UsageEntry) -> tuple[UsageOutcome, int, int]:
    """How a request ended, with its prompt and output tokens."""
    return entry.outcome, entry.prompt_tokens, entry.output_tokens


class TestLedger:
    pytestmark = ON_ALL_BACKENDS

    async def test_a_finished_request_is_entered_with_what_it_used(self, backend: Backend) -> None:
        gateway, engine = backend.gateway(), backend.engine()
        request = replace(make_request(), tenant="acme", key="alice", lora="french")
        await gateway.admit(request, LIMITS)
        (lease,) = await engine.take(1)
        usage = AttemptUsage(engine_ms=1500, kv_byte_seconds=7_000_000_000, cached_tokens=2)
        for _ in range(2):
            assert await engine.finish(request.request_id, lease.attempt, done(5, 6), usage)
        entry = await the_entry(backend)
        assert entry == UsageEntry(
            request_id=request.request_id,
            part=0,
            model=MODEL,
            key="alice",
            tenant="acme",
            adapter="french",
            outcome=UsageOutcome.FINISHED,
            prompt_tokens=3,
            cached_tokens=2,
            output_tokens=2,
            engine_ms=1500,
            kv_byte_seconds=7_000_000_000,
            attempts=1,
            accepted_ms=entry.accepted_ms,
            ended_ms=entry.ended_ms,
        )
        assert entry.accepted_ms <= entry.ended_ms
        assert entry.entry_id == request.request_id

    async def test_a_request_that_compares_a_canary_is_not_entered(self, backend: Backend) -> None:
        gateway, engine = backend.gateway(), backend.engine()
        request = replace(make_request(), tenant=COMPARISON_TENANT)
        await gateway.admit(request, LIMITS)
        (lease,) = await engine.take(1)
        assert await engine.finish(request.request_id, lease.attempt, done(5, 6))
        assert not await backend.ledger()

    async def test_a_request_that_never_ran_costs_nothing(self, backend: Backend) -> None:
        gateway, request = backend.gateway(), make_request()
        await gateway.admit(request, LIMITS)
        for _ in range(2):
            await gateway.cancel(request.request_id, MODEL, 0)
        assert used(await the_entry(backend)) == (UsageOutcome.CANCELLED, 0, 0)

    async def test_a_request_whose_deadline_passed_in_the_queue_costs_nothing(
        self, backend: Backend
    ) -> None:
        gateway, engine = backend.gateway(), backend.engine()
        await gateway.admit(make_request(seconds=-1), LIMITS)
        assert await engine.take(1) == []
        assert used(await the_entry(backend)) == (UsageOutcome.EXPIRED, 0, 0)

    async def test_a_client_that_leaves_pays_what_its_gateway_had(self, backend: Backend) -> None:
        engine = backend.engine()
        lease = await started(backend, engine)
        await beat(engine, progress(lease, 5, usage=AttemptUsage(900, 50, 3)))
        await backend.gateway().cancel(lease.request.request_id, MODEL, 4)
        assert not await engine.finish(lease.request.request_id, 1, done(5, 6, 7))
        entry = await the_entry(backend)
        assert used(entry) == (UsageOutcome.CANCELLED, 3, 4)
        assert (entry.engine_ms, entry.kv_byte_seconds, entry.cached_tokens) == (900, 50, 3)

    async def test_without_a_count_the_journal_says_what_a_cancelled_request_made(
        self, backend: Backend
    ) -> None:
        engine = backend.engine()
        lease = await started(backend, engine)
        await beat(engine, progress(lease, 5, 6))
        await backend.gateway().cancel(lease.request.request_id, MODEL)
        assert used(await the_entry(backend)) == (UsageOutcome.CANCELLED, 3, 2)

    async def test_a_client_that_leaves_at_the_end_pays_what_it_was_given(
        self, backend: Backend
    ) -> None:
        engine = backend.engine()
        lease = await started(backend, engine)
        await engine.finish(lease.request.request_id, 1, done(5, 6, 7), AttemptUsage(40, 9, 1))
        for _ in range(2):
            await backend.gateway().cancel(lease.request.request_id, MODEL, 1)
        first, correction = await backend.ledger()
        assert used(first) == (UsageOutcome.FINISHED, 3, 3)
        assert used(correction) == (UsageOutcome.FINISHED, 0, -2)
        assert (correction.engine_ms, correction.kv_byte_seconds, correction.part) == (0, 0, 1)
        assert correction.entry_id == f"{lease.request.request_id}:1"

    async def test_a_stored_answer_is_paid_in_full_whoever_leaves_it(
        self, backend: Backend
    ) -> None:
        gateway, engine = backend.gateway(), backend.engine()
        request = replace(make_request(), keep_ms=60_000)
        await gateway.admit(request, LIMITS)
        await engine.take(1)
        await engine.finish(request.request_id, 1, done(5, 6, 7))
        await gateway.cancel(request.request_id, MODEL, 1)
        assert used(await the_entry(backend)) == (UsageOutcome.FINISHED, 3, 3)

    @pytest.mark.parametrize("when", ["before", "after"])
    async def test_tokens_after_a_stop_string_are_not_paid(
        self, backend: Backend, when: str
    ) -> None:
        engine, gateway = backend.engine(), backend.gateway()
        lease = await started(backend, engine)
        rid = lease.request.request_id
        if when == "before":
            await gateway.note_given(rid, MODEL, 2)
        await engine.finish(rid, 1, done(5, 6, 7))
        for _ in range(2):
            await gateway.note_given(rid, MODEL, 2)
        entries = await backend.ledger()
        assert sum(entry.output_tokens for entry in entries) == 2
        assert sum(entry.prompt_tokens for entry in entries) == 3
        assert len(entries) == (1 if when == "before" else 2)

    async def test_a_request_that_moves_is_entered_once_with_the_seconds_of_all_engines(
        self, backend: Backend
    ) -> None:
        engine, other = backend.engine("e1"), backend.engine("e2")
        lease = await started(backend, engine)
        await beat(engine, progress(lease, 5, 6, usage=AttemptUsage(1000, 70, 2)))
        again = await moved(backend, lease, engine, other)
        rid = again.request.request_id
        assert await other.resume(rid, 2, done(5, 6).choices)
        assert not await engine.finish(rid, 1, done(5, 6, 7), AttemptUsage(9000, 900, 2))
        assert await other.finish(rid, 2, done(5, 6, 7, 8), AttemptUsage(500, 30, 0))
        entry = await the_entry(backend)
        assert used(entry) == (UsageOutcome.FINISHED, 3, 4)
        assert (entry.engine_ms, entry.kv_byte_seconds, entry.attempts) == (1500, 100, 2)
        assert entry.cached_tokens == 2

    async def test_a_failure_is_entered_with_the_tokens_before_it(self, backend: Backend) -> None:
        engine = backend.engine()
        lease = await started(backend, engine)
        broken = failed(lease.request.request_id, 1, FailureCode.INTERNAL)
        await engine.finish(
            lease.request.request_id, 1, Outcome(choices=done(5).choices, failed=broken)
        )
        assert used(await the_entry(backend)) == (UsageOutcome.FAILED, 3, 1)

    async def test_a_request_that_is_queued_again_after_its_end_is_paid_once(
        self, backend: Backend
    ) -> None:
        engine, gateway = backend.engine(), backend.gateway()
        lease = await started(backend, engine)
        rid = lease.request.request_id
        await beat(engine, progress(lease, 5, 6, usage=AttemptUsage(100, 10, 1)))
        assert await engine.finish(rid, 1, lost(lease), AttemptUsage(120, 12, 1))
        admission = await gateway.admit(lease.request, LIMITS, seen=1)
        assert admission.state is AdmitState.ADMITTED
        await engine.take(1)
        assert await engine.finish(rid, 2, done(5, 6, 7), AttemptUsage(50, 5, 3))
        first, second = await backend.ledger()
        assert used(first) == (UsageOutcome.FAILED, 3, 2)
        assert used(second) == (UsageOutcome.FINISHED, 0, 1)
        assert (first.engine_ms, second.engine_ms) == (120, 50)
        assert (first.cached_tokens, second.cached_tokens) == (1, 2)
        assert [first.part, second.part] == [0, 1]

    async def test_what_a_client_had_is_not_given_back_if_its_request_then_expires(
        self, backend: Backend
    ) -> None:
        engine, gateway = backend.engine(), backend.gateway()
        lease = await started(backend, engine)
        await beat(engine, progress(lease, 5, 6))
        await engine.finish(lease.request.request_id, 1, lost(lease))
        await gateway.admit(lease.request, LIMITS, seen=1)
        await gateway.cancel(lease.request.request_id, MODEL)
        entries = await backend.ledger()
        assert [used(entry) for entry in entries] == [
            (UsageOutcome.FAILED, 3, 2),
            (UsageOutcome.CANCELLED, 0, 0),
        ]

    async def test_a_poisonous_request_is_entered_as_dead_lettered(self, backend: Backend) -> None:
        lease = await dead_lettered(backend)
        entry = await the_entry(backend)
        assert used(entry) == (UsageOutcome.DEAD_LETTERED, 0, 0)
        assert (entry.request_id, entry.attempts) == (lease.request.request_id, 4)


async def dead_lettered(backend: Backend) -> Lease:
    """A request that has killed four engines."""
    engine: EngineQueue = backend.engine("e0")
    first = lease = await started(backend, engine)
    for number in range(1, 5):
        await beat(engine, progress(lease))
        other = backend.engine(f"e{number}")
        if number == 4:
            gateway = backend.gateway()
            await gateway.release(lease.request.request_id, MODEL, engine.engine_id, lease.attempt)
            assert await other.reap(1) == []
        else:
            lease, engine = await moved(backend, lease, engine, other), other
    return first


async def test_a_replayed_request_is_entered_again(over_redis: OverRedis) -> None:
    admin = QueueAdmin(over_redis.connection)
    lease = await dead_lettered(over_redis)
    await over_redis.client.command("DEL", over_redis.keys.record(lease.request.request_id))
    (letter,) = await admin.dead(MODEL, limit=1)
    assert await admin.replay(MODEL, letter, seconds=60)
    engine = over_redis.engine("mended")
    (again,) = await engine.take(1)
    assert await engine.finish(again.request.request_id, again.attempt, done(5, 6))
    _, entry = await over_redis.ledger()
    assert used(entry) == (UsageOutcome.FINISHED, 3, 2)
    assert entry.entry_id == f"{again.request.request_id}:1"


def gateway_with(over_redis: OverRedis, bounds: LedgerBounds) -> RedisGatewayQueue:
    return RedisGatewayQueue(over_redis.connect("gateway"), "g", models=[MODEL], ledger=bounds)


async def end_requests(over_redis: OverRedis, bounds: LedgerBounds, count: int) -> None:
    gateway, engine = gateway_with(over_redis, bounds), over_redis.engine()
    for _ in range(count):
        await gateway.admit(make_request(), LIMITS)
        (lease,) = await engine.take(1)
        await engine.finish(lease.request.request_id, lease.attempt, done(5))


async def test_nothing_is_entered_where_the_ledger_is_off(over_redis: OverRedis) -> None:
    await end_requests(over_redis, LedgerBounds(entries=0), 1)
    assert not await over_redis.client.command("EXISTS", over_redis.keys.ledger)


async def test_the_ledger_keeps_a_bounded_number_of_entries(over_redis: OverRedis) -> None:
    """Redis removes whole nodes of a stream, of at most 100 entries."""
    await end_requests(over_redis, LedgerBounds(entries=10), 300)
    assert await over_redis.client.command("XLEN", over_redis.keys.ledger) <= 110


async def test_the_ledger_expires_when_nothing_is_entered(over_redis: OverRedis) -> None:
    """One entry in 16 renews the expiry, by chance."""
    await end_requests(over_redis, LedgerBounds(kept_ms=60_000), 300)
    assert 0 < await over_redis.client.command("PTTL", over_redis.keys.ledger) <= 60_000


async def test_old_entries_are_removed_while_new_ones_come(over_redis: OverRedis) -> None:
    old = [("XADD", over_redis.keys.ledger, f"{n}-1", "e", "x" * 100) for n in range(1, 500)]
    await over_redis.client.pipeline(old)
    await end_requests(over_redis, LedgerBounds(), 300)
    assert await over_redis.client.command("XLEN", over_redis.keys.ledger) <= 400


async def test_an_engine_of_a_queue_without_a_ledger_ends_requests(over_redis: OverRedis) -> None:
    """As a gateway of an older version admits them."""
    request = make_request()
    await over_redis.gateway().admit(request, LIMITS)
    record = over_redis.keys.record(request.request_id)
    await over_redis.client.command("HDEL", record, "ul", "ki", "ad")
    engine = RedisEngineQueue(over_redis.connect("engine"), "e", MODEL)
    await engine.take(1)
    assert await engine.finish(request.request_id, 1, done(5))
    assert await over_redis.ledger() == []


@pytest.mark.parametrize("data", [b"", b"x", msgpack.packb([1, 2]), msgpack.packb(["r"] * 20)])
def test_an_invalid_entry_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="ledger entry"):
        read_entry(MODEL, b"1-1", {b"e": data} if data else {})


@pytest.mark.parametrize("backend", ["redis*3", "cluster*3", "users"], indirect=True)
async def test_a_group_gets_the_entries_of_all_shards_until_it_acknowledges_them(
    backend: OverRedis,
) -> None:
    gateway, engine = backend.gateway(), backend.engine()
    requests = [make_request(request_id=new_request_id(n)) for n in range(backend.shards)]
    for request in requests:
        await gateway.admit(request, LIMITS)
    for lease in await engine.take(9):
        await engine.finish(lease.request.request_id, 1, done(5))
    reader = LedgerReader(backend.connect("gateway"), {MODEL: backend.shards})
    await reader.join("g")

    async def read(*, again: bool = False) -> set[str]:
        return {entry.request_id for entry in (await reader.next("g", 9, again=again)).entries}

    ids = {request.request_id for request in requests}
    assert await read() == ids
    assert await read() == set()
    await reader.acknowledge("g", await reader.next("g", 9, again=True))
    assert await read(again=True) == set()


async def test_a_group_goes_on_after_redis_was_emptied(over_redis: OverRedis) -> None:
    reader = LedgerReader(over_redis.connect(), {MODEL: 1})
    await reader.join("g")
    await over_redis.wipe()
    await end_requests(over_redis, LedgerBounds(), 1)
    assert not await reader.next("g", 9)
    assert len((await reader.next("g", 9)).entries) == 1


@pytest.mark.parametrize("backend", ["users"], indirect=True)
async def test_a_user_that_may_not_look_for_keys_knows_the_registered_models(
    backend: OverRedis,
) -> None:
    files = {"tokenizer.json": b"{}"}
    model = RegisteredModel(name=MODEL, digest=digest_of(files), max_model_len=9, created=1)
    await backend.registry().register(model, files)
    connection = backend.connect("gateway")
    with pytest.raises(BackendUnfit):
        await QueueAdmin(connection).models()
    assert await registered_models(connection) == {MODEL: 1}
