"""Replies and control messages in streams of their model, and in those of older versions."""

import asyncio
from dataclasses import replace

import pytest

from headrace_common.protocol.frames import encode_control, encode_frame
from headrace_common.protocol.redis.engine import RedisEngineQueue
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.wire import keys
from headrace_common.wire.messages import Cancel, ChoiceState, Disown, Frame, Resend
from headrace_testing.backends import MODEL, OverRedis, make_request
from headrace_testing.queue_contract import LIMITS, done, progress, tokens
from headrace_testing.waiting import first

OTHER = "org/model-2"
OLDER_GATEWAY, OLDER_ENGINE = "gateway.1.0123456789ab", "engine.1.0123456789ab"


async def test_a_waiting_reader_gets_frames_of_a_new_models_engines(over_redis: OverRedis) -> None:
    gateway = RedisGatewayQueue(over_redis.connect(), "g")
    engine = RedisEngineQueue(over_redis.connect(), "e", MODEL)
    await gateway.start()
    received = asyncio.ensure_future(first(gateway.frames(), 1))
    await asyncio.wait({received}, timeout=0.05)
    await gateway.admit(make_request(), LIMITS)
    (lease,) = await engine.take(1)
    await engine.publish({"g": [tokens(lease, 0, 1)]})
    assert await received == [Frame("e", (tokens(lease, 0, 1),), MODEL)]
    await engine.close()


async def test_a_frame_names_the_model_whose_engines_may_write_it(over_redis: OverRedis) -> None:
    gateway = RedisGatewayQueue(over_redis.connect(), "g", models=[MODEL, OTHER])
    for engine_id, model in (("e", MODEL), ("e", OTHER), (OLDER_ENGINE, MODEL)):
        engine = RedisEngineQueue(over_redis.connect(), engine_id, model)
        await engine.publish({"g": []})
        await engine.close()
    frames = await first(gateway.frames(), 3)
    assert sorted((frame.engine_id, frame.model) for frame in frames) == [
        ("e", MODEL),
        ("e", OTHER),
        (OLDER_ENGINE, ""),
    ]


async def test_an_older_engine_serves_a_gateway_and_rebuilds_its_requests(
    over_redis: OverRedis,
) -> None:
    gateway = over_redis.gateway()
    await gateway.start()
    older = RedisEngineQueue(over_redis.connect(), OLDER_ENGINE, MODEL)
    await gateway.admit(make_request(), LIMITS)
    (lease,) = await older.take(1)
    rid = lease.request.request_id
    await older.renew([progress(lease, 1)])
    await older.publish({"g": [tokens(lease, 1, 2)]})
    assert await over_redis.client.command("XLEN", keys.shared_frames("g")) == 2
    assert (await first(gateway.frames(), 1))[0].replies == (tokens(lease, 1, 2),)
    rebuilt = await RedisEngineQueue(over_redis.connect(), "e", MODEL).journal(rid)
    assert rebuilt == (ChoiceState(token_ids=(1, 2)),)
    await gateway.send(OLDER_ENGINE, MODEL, Cancel(request_id=rid))
    key = keys.shared_controls(OLDER_ENGINE)
    ((_, fields),) = await over_redis.client.command("XRANGE", key, "-", "+")
    assert fields == {b"c": encode_control(Cancel(request_id=rid))}
    assert await over_redis.client.command("EXISTS", keys.gateway_beat("g")) == 1
    await older.close()


async def test_an_engine_serves_an_older_gateway(over_redis: OverRedis) -> None:
    older, engine = over_redis.gateway(OLDER_GATEWAY), over_redis.engine()
    await over_redis.client.command("SET", keys.gateway_beat(OLDER_GATEWAY), "")
    await engine.start()
    request = make_request()
    await older.admit(request, LIMITS)
    (lease,) = await engine.take(1)
    assert await engine.gateway_alive(OLDER_GATEWAY)
    await engine.publish({OLDER_GATEWAY: [tokens(lease, 0, 1)]})
    key = keys.shared_frames(OLDER_GATEWAY)
    written = await over_redis.client.command("XREVRANGE", key, "+", "-", "COUNT", 1)
    assert written[0][1] == {b"f": encode_frame(Frame("e", (tokens(lease, 0, 1),)))}
    disown = Disown(request_id=request.request_id, attempt=1, superseded=False)
    await over_redis.client.command(
        "XADD", keys.shared_controls("e"), "*", "c", encode_control(disown)
    )
    assert await first(engine.controls(), 1) == [disown]
    assert await engine.finish(request.request_id, 1, done(1))


async def test_both_streams_of_control_messages_are_read(over_redis: OverRedis) -> None:
    gateway, engine = over_redis.gateway(), over_redis.engine()
    received = asyncio.ensure_future(first(engine.controls(), 2))
    await asyncio.wait({received}, timeout=0.05)
    resend, cancel = Resend(request_id="0.r", choice=0, index=0), Cancel(request_id="0.r")
    await gateway.send("e", MODEL, resend)
    key = keys.shared_controls("e")
    await over_redis.client.command("XADD", key, "*", "c", encode_control(cancel))
    assert set(await received) == {resend, cancel}


async def test_a_stream_key_of_another_type_does_not_affect_other_streams(
    over_redis: OverRedis,
) -> None:
    gateway = RedisGatewayQueue(over_redis.connect(), "g", models=[MODEL, OTHER])
    await over_redis.client.command("SET", keys.frames("g", OTHER), "no stream")
    engine = RedisEngineQueue(over_redis.connect(), "e", MODEL)
    await engine.publish({"g": []})
    assert await first(gateway.frames(), 1) == [Frame("e", (), MODEL)]
    assert await over_redis.client.command("EXISTS", keys.frames("g", OTHER)) == 0
    await engine.close()


@pytest.mark.parametrize("model", ["a:b", "a}b", "a*", "a b", "ä", "a.0", "{m}"])
def test_no_model_has_the_streams_of_another(model: str) -> None:
    names = [keys.frames("g", model), keys.controls("e", model), keys.gateway_beat_to("g", model)]
    for name in names:
        assert name.rsplit(":", 1)[0].endswith("}")
        assert not set("*?[]\\ ") & set(name)


def test_ids_of_this_version_name_models() -> None:
    assert keys.names_models(keys.new_incarnation("host.1"))
    assert not keys.names_models(OLDER_ENGINE)


def test_the_model_of_a_frame_is_not_sent() -> None:
    frame = Frame("e", ())
    assert encode_frame(frame) == encode_frame(replace(frame, model=MODEL))


async def test_a_control_stream_of_a_wrong_type_fails_no_request(
    over_redis: OverRedis,
) -> None:
    await over_redis.client.command("SET", keys.controls("e", MODEL), "no stream")
    await over_redis.gateway().send("e", MODEL, Cancel(request_id="0.r"))
