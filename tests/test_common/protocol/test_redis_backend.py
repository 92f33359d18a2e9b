"""Behaviour that needs a real server: lost replies, full memory, lost scripts, invalid entries."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from headrace_common.errors import BackendUnavailable, BackendUnfit, FailureCode, SettingsError
from headrace_common.protocol.base import AdmitState, Outcome, Progress, QueueLimits, Verdict
from headrace_common.protocol.redis import engine as redis_engine
from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    check_backend,
    translate,
)
from headrace_common.protocol.redis.engine import MOST_BEATS, RedisEngineQueue
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.wire.keys import gateway_beat
from headrace_common.wire.messages import (
    PROTOCOL_VERSION,
    REQUEST_VERSION,
    ChoiceState,
    Failed,
    Tokens,
    adapter_key,
)
from headrace_testing.backends import MODEL, OverRedis, make_request, make_status
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually, first

LIMITS = QueueLimits()


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    server = ValkeyServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def own(own_server: ValkeyServer) -> AsyncIterator[OverRedis]:
    """A backend on a server that only this test uses."""
    redis_backend = OverRedis(own_server.url)
    yield redis_backend
    await redis_backend.close()


async def test_nothing_is_left_when_all_requests_have_ended(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    requests = [make_request(priority=number % 3 - 1) for number in range(9)]
    for request in requests:
        await gateway.admit(request, LIMITS)
    for lease in await engine.take(6):
        await engine.finish(lease.request.request_id, 1, Outcome())
    for request in requests:
        await gateway.cancel(request.request_id, MODEL)
    assert await engine.take(1) == []
    for queue in over_redis.keys.queues:
        assert await over_redis.client.command("XLEN", queue) == 0
        assert (await over_redis.client.command("XPENDING", queue, "e"))["pending"] == 0
    left = await over_redis.client.command("KEYS", "[pj]:*")
    assert left == []
    for key in await over_redis.client.command("KEYS", "r:*"):
        assert await over_redis.client.command("PTTL", key) > 0


async def test_scripts_come_back_after_the_server_forgot_them(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    await gateway.admit(make_request(), LIMITS)
    await over_redis.client.command("SCRIPT FLUSH")
    (lease,) = await engine.take(1)
    await over_redis.client.command("SCRIPT FLUSH")
    item = Progress(
        request_id=lease.request.request_id,
        attempt=1,
        journaled=(0,),
        choices=(ChoiceState(token_ids=(1,)),),
    )
    beats = await engine.beat([item], make_status())
    assert beats[item.request_id].verdict is Verdict.OWNED


async def test_entries_that_are_not_requests_are_dead_letters(over_redis: OverRedis) -> None:
    engine = over_redis.engine()
    queue = over_redis.keys.queue("n")
    for fields in (("x", "y"), ("r", "0.nobody")):
        await over_redis.client.command("XADD", queue, "*", *fields)
    assert await engine.take(4) == []
    assert await over_redis.client.command("XLEN", queue) == 0
    assert await over_redis.dead_letters() == [("", "no_record"), ("0.nobody", "no_record")]


async def test_a_payload_that_cannot_be_read_is_answered(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    good, bad = make_request(), make_request()
    for request in (bad, good):
        await gateway.admit(request, LIMITS)
    await over_redis.client.command("SET", over_redis.keys.payload(bad.request_id), b"\xc1")
    assert [lease.request for lease in await engine.take(4)] == [good]
    (frame,) = await first(gateway.frames(), 1)
    (failed,) = frame.replies
    assert isinstance(failed, Failed) and failed.failure is FailureCode.MALFORMED
    assert await over_redis.dead_letters() == [(bad.request_id, "malformed")]


async def test_a_newer_protocols_request_is_left_for_others(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    request = make_request()
    await gateway.admit(request, LIMITS)
    record = over_redis.keys.record(request.request_id)
    await over_redis.client.command("HSET", record, "v", REQUEST_VERSION + 1)
    assert await engine.take(4) == []
    assert await engine.reap(4) == []
    await over_redis.client.command(
        "HSET", record, "v", 1
    )  # represents an engine that reads the next version
    assert [lease.request for lease in await over_redis.engine("e2").reap(4)] == [request]


async def test_an_engine_of_an_older_version_leaves_requests_for_loaded_adapters_to_others(
    over_redis: OverRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, older, newer = over_redis.gateway(), over_redis.engine("old"), over_redis.engine("new")
    request = replace(make_request(), lora="sql", lora_version="1" * 32)
    newer.serve_adapters([adapter_key("sql", "1" * 32)])
    await gateway.admit(request, LIMITS)
    with monkeypatch.context() as version:
        version.setattr(redis_engine, "REQUEST_VERSION", PROTOCOL_VERSION)
        assert await older.take(4) == []
        assert await older.reap(4) == []

    assert [lease.request for lease in await newer.reap(4)] == [request]


async def test_a_request_is_leased_again_if_the_reply_of_its_take_was_lost(
    over_redis: OverRedis,
) -> None:
    gateway, other = over_redis.gateway(), over_redis.engine("e2", lease_ms=1)
    request = make_request()
    await gateway.admit(request, LIMITS)
    assert len(await over_redis.engine("e1").take(1)) == 1  # its reply never arrives
    found: list[object] = []

    async def reaped() -> bool:
        found.extend(await other.reap(1))
        return bool(found)

    await eventually(reaped)


async def test_a_beat_of_many_requests_returns_the_verdict_of_each(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    requests = [make_request(priority=number % 3 - 1) for number in range(2 * MOST_BEATS + 3)]
    for request in requests:
        await gateway.admit(request, LIMITS)
    attempts: dict[str, int] = {}
    while leases := await engine.take(len(requests)):
        attempts |= {lease.request.request_id: lease.attempt for lease in leases}
    await gateway.cancel(requests[5].request_id, MODEL)
    attempts[requests[MOST_BEATS].request_id] += 1
    progress = [
        Progress(
            request_id=request.request_id,
            attempt=attempts.get(request.request_id, 1),
            journaled=(0,),
            choices=(ChoiceState(token_ids=(7,) * (number % 4)),),
        )
        for number, request in enumerate([*requests, make_request()])
    ]
    beats = await engine.beat(progress, make_status(engine.engine_id))
    verdicts = [beats[item.request_id].verdict for item in progress]
    expected = [Verdict.OWNED] * len(requests) + [Verdict.MISSING]
    expected[5], expected[MOST_BEATS] = Verdict.CANCELLED, Verdict.STOLEN
    assert verdicts == expected
    for number, item in enumerate(progress):
        if verdicts[number] is Verdict.OWNED:
            assert beats[item.request_id].journaled == (number % 4,)


async def test_idle_consumers_are_forgotten_and_busy_ones_kept(over_redis: OverRedis) -> None:
    gateway = over_redis.gateway()
    for number in range(2):
        await gateway.admit(make_request(), LIMITS)
        (lease,) = await over_redis.engine(f"e{number}", lease_ms=1).take(1)
        if number == 0:
            await over_redis.engine("e0").finish(lease.request.request_id, 1, Outcome())

    async def consumers() -> set[bytes]:
        queue = over_redis.keys.queue("n")
        found = await over_redis.client.command("XINFO CONSUMERS", queue, "e")
        return {item["name"] for item in found}

    async def forgotten() -> bool:
        await over_redis.engine("e2", lease_ms=1).reap(0)
        return await consumers() == {b"e1"}

    await eventually(forgotten)


async def test_cancelled_commands_leave_no_reply_for_others(over_redis: OverRedis) -> None:
    """CVE-2023-28858: a command cancelled in flight must not hand its reply to the next one."""
    client = over_redis.connect().client
    for number in range(50):
        task = asyncio.create_task(client.command("ECHO", f"lost{number}"))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await client.command("ECHO", f"kept{number}") == b"kept%d" % number


async def test_a_full_server_refuses_admissions_and_finishes_the_rest(own: OverRedis) -> None:
    gateway, engine = own.gateway(), own.engine()
    running, waiting = make_request(), make_request()
    for request in (running, waiting):
        await gateway.admit(request, LIMITS)
    await engine.take(1)
    await own.client.command("CONFIG SET", "maxmemory", 1)
    with pytest.raises(BackendUnavailable, match="maxmemory"):
        await gateway.admit(make_request(), LIMITS)
    with pytest.raises(BackendUnavailable, match="maxmemory"):
        await engine.publish({"g": []})
    assert await engine.finish(running.request_id, 1, Outcome())
    assert len(await engine.take(1)) == 1
    await engine.give_back([waiting.request_id])
    assert len(await engine.reap(1)) == 1
    await gateway.cancel(waiting.request_id, MODEL)
    await own.client.command("CONFIG SET", "maxmemory", 0)
    assert (await gateway.admit(make_request(), LIMITS)).state is AdmitState.ADMITTED


async def test_a_primary_without_its_replicas_is_unavailable_to_every_command(
    own: OverRedis,
) -> None:
    gateway, engine = own.gateway(), own.engine()
    request = make_request()
    await gateway.admit(request, LIMITS)
    (lease,) = await engine.take(1)
    item = Progress(
        request_id=request.request_id, attempt=1, journaled=(0,), choices=(ChoiceState(),)
    )
    refused = (
        lambda: gateway.admit(make_request(), LIMITS),
        gateway.beat,
        lambda: gateway.cancel(request.request_id, MODEL),
        lambda: engine.take(1),
        lambda: engine.reap(1),
        lambda: engine.beat([], make_status()),
        lambda: engine.beat([item], make_status()),
        lambda: engine.publish({"g": []}),
        lambda: engine.publish({"g": [], "h": []}),
        lambda: engine.resume(request.request_id, 1, ()),
        lambda: engine.give_back([request.request_id]),
        lambda: engine.finish(request.request_id, 1, Outcome()),
    )
    await own.client.command("CONFIG SET", "min-replicas-to-write", 1)
    for call in refused:
        with pytest.raises(BackendUnavailable, match="NOREPLICAS"):
            await call()
    await own.client.command("CONFIG SET", "min-replicas-to-write", 0)

    assert await engine.finish(request.request_id, lease.attempt, Outcome())


@pytest.mark.parametrize(
    "text",
    [
        "MISCONF Errors writing to the AOF file: No space left on device",
        "Command # 2 (SET a b) of pipeline caused error: ('MISCONF Errors writing to AOF',)",
        "Error running script (call to f_1): @user_script:3: -MISCONF Errors writing to AOF",
    ],
)
def test_a_temporary_error_code_anywhere_in_a_reply_means_unavailable(text: str) -> None:
    assert isinstance(translate(ResponseError(text)), BackendUnavailable)
    assert translate(ResponseError(text.replace("MISCONF", "WRONGTYPE"))) is None


async def test_reads_continue_after_a_restart(own_server: ValkeyServer, own: OverRedis) -> None:
    gateway, engine = own.gateway(), own.engine()
    await gateway.start()
    await engine.start()
    request = make_request()
    await gateway.admit(request, LIMITS)
    (lease,) = await engine.take(1)
    waiting = asyncio.create_task(engine.wait())
    frames = gateway.frames()
    reply = Tokens(request_id=request.request_id, attempt=1, choice=0, index=0, token_ids=(1,))
    await engine.publish({"g": [reply]})
    assert (await anext(frames)).replies == (reply,)
    own_server.kill()
    with pytest.raises(BackendUnavailable):
        await engine.publish({"g": [reply]})
    own_server.start()
    await gateway.admit(make_request(), LIMITS)
    await asyncio.wait_for(waiting, 30)
    again = await anext(frames)
    assert again.replies == (reply,), "after a reconnect the stream is read from its beginning"
    assert await engine.finish(request.request_id, lease.attempt, Outcome())
    await frames.aclose()  # type: ignore[attr-defined]


async def test_a_wait_that_is_cancelled_keeps_its_connection(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    await engine.start()

    async def connected() -> int:
        return int((await over_redis.client.command("INFO", "stats"))["total_connections_received"])

    await gateway.admit(make_request(), LIMITS)
    await asyncio.wait_for(engine.wait(), 30)
    await engine.take(1)
    before = await connected()
    for _ in range(20):
        waiting = asyncio.create_task(engine.wait())
        await asyncio.wait({waiting}, timeout=0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert await connected() == before
    await gateway.admit(make_request(), LIMITS)
    await asyncio.wait_for(engine.wait(), 30)


async def test_an_admitted_request_survives_a_restart(
    own_server: ValkeyServer, own: OverRedis
) -> None:
    gateway, engine = own.gateway(), own.engine()
    await gateway.start()
    own_server.kill()
    admission = asyncio.create_task(gateway.admit(make_request(), LIMITS))
    await asyncio.sleep(0)
    own_server.start()
    assert (await admission).state is AdmitState.ADMITTED
    assert len(await engine.take(4)) == 1


async def test_a_server_that_evicts_is_refused(over_redis: OverRedis) -> None:
    await over_redis.client.command("CONFIG SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(BackendUnfit, match="set maxmemory-policy noeviction"):
            await check_backend(over_redis.connection)
    finally:
        await over_redis.client.command("CONFIG SET", "maxmemory-policy", "noeviction")
    await check_backend(over_redis.connection)


async def test_a_server_without_persistence_causes_a_warning(
    over_redis: OverRedis, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await check_backend(over_redis.connection)
    assert "set appendonly yes" in caplog.text


@pytest.mark.parametrize("rules", ["+@all -evalsha -eval", "+@all -xclaim", "+@all -info"])
async def test_a_user_without_the_rights_is_refused(over_redis: OverRedis, rules: str) -> None:
    await over_redis.client.command(
        "ACL SETUSER", "limited", "reset", "on", ">pw", "~*", *rules.split()
    )
    url = over_redis.config.url.replace("redis://", "redis://limited:pw@")
    connection = Connection(ConnectionConfig(url=url))
    with pytest.raises(BackendUnfit, match="grant"):
        await check_backend(connection)
    await connection.close()


async def test_an_unreachable_server_is_unavailable() -> None:
    connection = Connection(ConnectionConfig(url="redis://127.0.0.1:1/0"))
    with pytest.raises(BackendUnavailable):
        await check_backend(connection)
    await connection.close()


@pytest.mark.parametrize("version", ["5.0.14", "6.0.20", "unknown"])
async def test_an_old_server_is_refused(
    over_redis: OverRedis, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    real = over_redis.client.command

    async def command(*args: str | bytes | int | float) -> object:
        reply = await real(*args)
        return {**reply, "redis_version": version} if args == ("INFO",) else reply

    monkeypatch.setattr(over_redis.client, "command", command)
    with pytest.raises(BackendUnfit, match="use Redis 6.2 or later"):
        await check_backend(over_redis.connection)


def test_an_invalid_url_is_refused() -> None:
    with pytest.raises(SettingsError, match="redis url"):
        Connection(ConnectionConfig(url="localhost:6379"))


async def test_a_gateway_lives_for_its_own_lease(over_redis: OverRedis) -> None:
    gateway = RedisGatewayQueue(over_redis.connect("gateway"), "g", lease_ms=5_000_000)
    await gateway.beat()
    left = await over_redis.client.command("PTTL", gateway_beat("g"))

    assert 4_000_000 < left <= 5_000_000


async def test_a_stopped_engine_leaves_no_keys(over_redis: OverRedis) -> None:
    engine = RedisEngineQueue(over_redis.connect(), "e7", MODEL)
    await engine.start()
    await engine.beat([], make_status("e7"))
    await engine.close()
    assert await over_redis.client.command("SMEMBERS", over_redis.keys.engines) in ([], set())
