"""Sealing over a real Valkey: what is stored, what happens to swapped values, and who may start."""

from dataclasses import replace
from typing import Any

import pytest

from headrace_common.errors import BackendUnfit, FailureCode, RequestConflict
from headrace_common.protocol.base import AdmitState, Outcome, Progress, QueueLimits
from headrace_common.protocol.batches import BatchProgress, BatchRequest, StoredFile
from headrace_common.protocol.redis.batches import RedisBatches
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.files import RedisFiles
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.protocol.redis.sealing_check import SealingCheck
from headrace_common.protocol.redis.store import RedisRequestStore
from headrace_common.protocol.store import StoredRequest
from headrace_common.sealing.aes import AesSealer
from headrace_common.sealing.keyring import Keyring, SealingKey, new_key
from headrace_common.sealing.sealer import NULL_SEALER, Sealer, SealingError
from headrace_common.wire import keys
from headrace_common.wire.messages import ChoiceState, Drain, Recall, Resume, Tokens
from headrace_testing.backends import MODEL, OverRedis, make_request, make_status
from headrace_testing.redis_dump import dump

LIMITS = QueueLimits()
PROMPT = tuple(range(7_000_001, 7_000_033))
OUTPUT = tuple(range(8_000_001, 8_000_033))


@pytest.fixture
async def redis_backend(over_redis: OverRedis) -> OverRedis:
    over_redis.ring = Keyring([new_key()])
    return over_redis


def connect(redis_backend: OverRedis, sealer: Sealer) -> Connection:
    connection = redis_backend.connect()
    connection.sealer = sealer
    return connection


def gateway_of(redis_backend: OverRedis, sealer: Sealer, name: str = "g") -> RedisGatewayQueue:
    return RedisGatewayQueue(connect(redis_backend, sealer), name)


def engine_of(redis_backend: OverRedis, sealer: Sealer, name: str = "e") -> RedisEngineQueue:
    return RedisEngineQueue(connect(redis_backend, sealer), name, MODEL)


def progress(request_id: str, attempt: int, *tokens: int, at: int = 0) -> Progress:
    made = ChoiceState(token_ids=tokens)
    return Progress(request_id=request_id, attempt=attempt, journaled=(at,), choices=(made,))


async def swap(redis_backend: OverRedis, one: str, other: str, *fields: str) -> None:
    """Swaps the values of two strings, or of two fields of hashes."""
    client: Any = redis_backend.client
    get, put = ("HGET", "HSET") if fields else ("GET", "SET")
    first, second = (
        await client.command(get, one, *fields),
        await client.command(get, other, *fields),
    )
    assert first and second
    await client.command(put, one, *fields, second)
    await client.command(put, other, *fields, first)


async def test_no_part_of_prompts_and_answers_is_in_redis(redis_backend: OverRedis) -> None:
    gateway, engine = redis_backend.gateway(), redis_backend.engine()
    await gateway.start()
    await engine.start()
    request = make_request(prompt=PROMPT)
    await gateway.admit(request, LIMITS)
    (lease,) = await engine.take(1)
    assert lease.request.prompt_token_ids == PROMPT
    rid = request.request_id
    await engine.beat([progress(rid, 1, *OUTPUT)], make_status())
    await engine.publish({"g": [Tokens(rid, 1, 0, 0, OUTPUT)]})
    found = await anext(gateway.frames())
    assert found.replies == (Tokens(rid, 1, 0, 0, OUTPUT),)
    assert await engine.journal(rid) == (ChoiceState(token_ids=OUTPUT),)
    state = ChoiceState(token_ids=OUTPUT)
    await gateway.send("e", MODEL, Resume(request_id=rid, attempt=1, choices=(state,)))
    during = await dump(redis_backend.client)
    await engine.finish(rid, 1, Outcome(choices=(replace(state, finish_reason="stop"),)))
    request_status = await gateway.request_status(rid, MODEL)
    assert request_status is not None and request_status.outcome is not None
    assert request_status.outcome.choices[0].token_ids == OUTPUT

    assert during.finds(PROMPT) == during.finds(OUTPUT) == []
    after = await dump(redis_backend.client)
    assert after.finds(PROMPT) == after.finds(OUTPUT) == []
    redis_backend.ring = None
    await redis_backend.wipe()
    await redis_backend.gateway().admit(request, LIMITS)
    assert (await dump(redis_backend.client)).finds(PROMPT) != []  # it would have been found


async def test_a_prompt_in_the_place_of_another_ends_with_an_error(
    redis_backend: OverRedis,
) -> None:
    gateway, engine, shard = redis_backend.gateway(), redis_backend.engine(), redis_backend.keys
    first, second = make_request(), make_request(prompt=(7, 8))
    for request in (first, second):
        await gateway.admit(request, LIMITS)
    await swap(redis_backend, shard.payload(first.request_id), shard.payload(second.request_id))

    assert await engine.take(2) == []
    for request in (first, second):
        request_status = await gateway.request_status(request.request_id, MODEL)
        assert request_status is not None and request_status.outcome is not None
        assert request_status.outcome.failed is not None
        assert request_status.outcome.failed.failure is FailureCode.SEALED


async def test_an_answer_in_the_place_of_another_is_an_error(redis_backend: OverRedis) -> None:
    gateway, engine, shard = redis_backend.gateway(), redis_backend.engine(), redis_backend.keys
    rids = []
    for token in (5, 6):
        request = make_request()
        await gateway.admit(request, LIMITS)
        await engine.take(1)
        state = ChoiceState(token_ids=(token,), finish_reason="stop")
        await engine.finish(request.request_id, 1, Outcome(choices=(state,)))
        rids.append(request.request_id)
    await swap(redis_backend, shard.record(rids[0]), shard.record(rids[1]), "out")

    for rid in rids:
        for request_status in (
            await gateway.request_status(rid, MODEL),
            await gateway.deliver_outcome(rid, MODEL),
        ):
            assert request_status is not None and request_status.outcome is not None
            assert request_status.outcome.failed is not None
            assert request_status.outcome.failed.failure is FailureCode.SEALED


async def test_a_journal_s_pieces_in_another_order_are_not_used(redis_backend: OverRedis) -> None:
    gateway, engine, shard = redis_backend.gateway(), redis_backend.engine(), redis_backend.keys
    request = make_request()
    rid = request.request_id
    await gateway.admit(request, LIMITS)
    await engine.take(1)
    await engine.beat([progress(rid, 1, 5, 6)], make_status())
    await engine.beat([progress(rid, 1, 7, 8, at=2)], make_status())
    assert await engine.journal(rid) == (ChoiceState(token_ids=(5, 6, 7, 8)),)
    client: Any = redis_backend.client
    first = await client.command("HGET", shard.journal(rid), "0:0")
    await client.command("HSET", shard.journal(rid), "0:2", first)

    assert await engine.journal(rid) is None


async def test_a_frame_to_another_gateway_is_left_out(redis_backend: OverRedis) -> None:
    gateway, engine = redis_backend.gateway("other"), redis_backend.engine()
    await engine.publish({"g": [Tokens("0.r", 1, 0, 0, (5,))]})
    client: Any = redis_backend.client
    ((_, fields),) = await client.command("XRANGE", keys.frames("g", MODEL), "-", "+")
    await client.command("XADD", keys.frames("other", MODEL), "*", "f", fields[b"f"])
    await engine.publish({"other": [Tokens("0.s", 1, 0, 0, (6,))]})

    frame = await anext(gateway.frames())
    assert frame.replies == (Tokens("0.s", 1, 0, 0, (6,)),)


async def test_an_operator_without_keys_can_only_drain_and_recall_an_engine(
    redis_backend: OverRedis,
) -> None:
    engine, operator = redis_backend.engine(), gateway_of(redis_backend, NULL_SEALER)
    await operator.send("e", MODEL, Resume(request_id="0.r", attempt=1, choices=()))
    await operator.send("e", MODEL, Drain(within_ms=5000))
    await operator.send("e", MODEL, Recall())

    controls = engine.controls()
    assert [await anext(controls), await anext(controls)] == [
        Drain(within_ms=5000),
        Recall(),
    ]


# Stores


def stored(request_id: str, text: str) -> StoredRequest:
    return StoredRequest(
        request_id=request_id,
        operation="completions",
        fingerprint=b"f",
        created=1,
        expires_ms=make_request().deadline_ms,
        requests=(make_request(),),
        stop=(text,),
    )


async def test_a_stored_request_in_the_place_of_another_is_refused(
    redis_backend: OverRedis,
) -> None:
    store = RedisRequestStore(redis_backend.connect())
    for name, text in (("a", "said by one tenant"), ("b", "said by another one")):
        kept = stored(name, text)
        assert await store.put(kept) == kept == await store.get(name)
    found = await dump(redis_backend.client)
    assert found.finds("said by one tenant") == found.finds("said by another one") == []
    await swap(redis_backend, keys.stored_request("a"), keys.stored_request("b"), "b")

    with pytest.raises(SealingError):
        await store.get("a")


async def test_files_are_sealed_piece_by_piece(redis_backend: OverRedis) -> None:
    files = RedisFiles(redis_backend.connect())
    file = StoredFile(
        id="f1", tenant="t", filename="secret plans.jsonl", purpose="batch", bytes=36, chunks=2,
        created_at=1, expires_at=make_request().deadline_ms // 1000,
    )  # fmt: skip
    await files.add(file)
    await files.write(file, enumerate((b"what the first says", b"the second piece.")))
    await files.finish(file)

    assert await files.get("f1", "t") == file
    assert await files.content(file) == b"what the first saysthe second piece."
    found = await dump(redis_backend.client)
    for text in ("secret plans", "what the first says", "the second piece"):
        assert found.finds(text) == []
    client: Any = redis_backend.client
    piece = await client.command("HGET", keys.stored_file("f1"), "1")
    await client.command("HSET", keys.stored_file("f1"), "0", piece)
    with pytest.raises(SealingError):
        await files.content(file)


async def test_batches_and_their_results_are_sealed(redis_backend: OverRedis) -> None:
    batches = RedisBatches(redis_backend.connect())
    batch = await batches.create(
        BatchRequest(
            id="b1", tenant="t", key_id="", endpoint="/v1/completions", input_file_id="f1",
            completion_window="24h", created_at=1, expires_at=2**31, output_ttl=60,
            kept_until=2**31, metadata={"project": "top secret"},
        )
    )  # fmt: skip
    for line, text in enumerate((b"the first answer", b"the second answer")):
        assert await batches.keep(batch, line, text, answered=True)
    await batches.progress(batch, BatchProgress(errors=({"message": "quotes the input"},)))

    assert (await batches.get("b1")).progress.errors == ({"message": "quotes the input"},)
    assert [one.request for one in await batches.all_open()] == [batch.request]
    assert await batches.results(batch, [0, 1]) == [b"the first answer", b"the second answer"]
    found = await dump(redis_backend.client)
    for secret in ("top secret", "quotes the input", "first answer", "second answer"):
        assert found.finds(secret) == []
    client: Any = redis_backend.client
    second = await client.command("HGET", keys.batch_results("b1"), "1")
    await client.command("HSET", keys.batch_results("b1"), "0", second)
    with pytest.raises(SealingError):
        await batches.results(batch, [0])


# Which processes may start


async def test_a_process_with_other_keys_does_not_start(redis_backend: OverRedis) -> None:
    await redis_backend.gateway().start()
    other = AesSealer(Keyring([new_key()]))

    with pytest.raises(BackendUnfit, match="which is not in sealing_keys_file: add it"):
        await gateway_of(redis_backend, other).start()
    with pytest.raises(BackendUnfit, match="which is not in sealing_keys_file: add it"):
        await engine_of(redis_backend, other).start()


async def test_a_process_without_keys_does_not_start_where_others_seal(
    redis_backend: OverRedis,
) -> None:
    await redis_backend.gateway().start()

    with pytest.raises(BackendUnfit, match="set sealing_keys_file to the keys of the other"):
        await gateway_of(redis_backend, NULL_SEALER).start()
    with pytest.raises(BackendUnfit, match="set sealing_keys_file to the keys of the other"):
        await engine_of(redis_backend, NULL_SEALER).start()


async def test_processes_that_only_decrypt_may_start_first(redis_backend: OverRedis) -> None:
    assert redis_backend.ring is not None
    await gateway_of(redis_backend, AesSealer(redis_backend.ring, "open")).start()
    await gateway_of(redis_backend, NULL_SEALER).start()

    await gateway_of(redis_backend, AesSealer(redis_backend.ring, "accept")).start()


async def key_of_the_check(redis_backend: OverRedis) -> bytes:
    client: Any = redis_backend.client
    return bytes((await client.command("GET", keys.SEALING_CHECK))[4:12])


async def test_the_check_is_sealed_again_after_a_key_change_or_a_loss_in_redis(
    redis_backend: OverRedis,
) -> None:
    old, new = new_key(), new_key()
    sealer = AesSealer(Keyring([old]))
    gateway = gateway_of(redis_backend, sealer)
    await gateway.start()
    digests = sealer.digests(b"d" * 16)
    assert await key_of_the_check(redis_backend) == old.id
    sealer.replace(Keyring([new, old]))
    await gateway.beat()
    assert await key_of_the_check(redis_backend) == new.id
    await redis_backend.wipe()
    await gateway.beat()
    await gateway_of(redis_backend, another := AesSealer(Keyring([new]))).start()

    assert another.digests(b"d" * 16) == digests


async def test_gateways_agree_on_the_first_secret_in_an_emptied_redis(
    redis_backend: OverRedis,
) -> None:
    assert redis_backend.ring is not None
    one, other = AesSealer(redis_backend.ring), AesSealer(redis_backend.ring)
    gateway = gateway_of(redis_backend, one)
    await gateway.start()
    await redis_backend.wipe()
    await gateway_of(redis_backend, other).start()
    assert one.digests(b"d" * 16) != other.digests(b"d" * 16)
    await gateway.beat()

    assert one.digests(b"d" * 16) == other.digests(b"d" * 16)


# While sealing is being switched on


def modes(key: SealingKey) -> tuple[Sealer, Sealer, Sealer]:
    ring = Keyring([key])
    return AesSealer(ring, "open"), AesSealer(ring, "accept"), AesSealer(ring)


async def test_processes_of_each_step_understand_those_of_the_next(
    redis_backend: OverRedis,
) -> None:
    only_opens, accepts, requires = modes(new_key())
    for one, other in ((NULL_SEALER, only_opens), (only_opens, accepts), (accepts, requires)):
        for here, there in ((one, other), (other, one)):
            await redis_backend.wipe()
            gateway, engine = gateway_of(redis_backend, here), engine_of(redis_backend, there)
            request = make_request(prompt=PROMPT)
            await gateway.admit(request, LIMITS)
            (lease,) = await engine.take(1)
            assert lease.request.prompt_token_ids == PROMPT


async def test_a_gateway_of_the_next_step_attaches_to_a_request(redis_backend: OverRedis) -> None:
    only_opens, accepts, _ = modes(new_key())
    await SealingCheck(connect(redis_backend, accepts)).start()
    await SealingCheck(connect(redis_backend, only_opens)).start()
    for one, other in ((only_opens, accepts), (accepts, only_opens)):
        request = make_request()
        await gateway_of(redis_backend, one).admit(request, LIMITS)
        admission = await gateway_of(redis_backend, other, "other").admit(request, LIMITS, seen=0)
        assert admission.state is AdmitState.ATTACHED
        with pytest.raises(RequestConflict):
            await gateway_of(redis_backend, other).admit(replace(request, tenant="x"), LIMITS)


async def test_redis_cannot_recognise_a_prompt_by_its_digest(redis_backend: OverRedis) -> None:
    """Otherwise a thief of the data could compare guessed prompts with the fingerprints."""
    request, client = make_request(), redis_backend.client
    prints = set()
    for ring in (Keyring([new_key()]), Keyring([new_key()])):
        await redis_backend.wipe()
        gateway = gateway_of(redis_backend, AesSealer(ring))
        await gateway.start()
        await gateway.admit(request, LIMITS)
        record = redis_backend.keys.record(request.request_id)
        prints.add(await client.command("HGET", record, "fp"))

    assert len(prints) == 2
