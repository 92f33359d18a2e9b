"""The consoles' data in Redis: complete, bounded, and checked before use."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from redis.exceptions import NoPermissionError

from headrace_common.errors import BackendUnfit, MessageError
from headrace_common.protocol import live
from headrace_common.protocol.live import (
    MAX_SEQUENCES,
    MAX_SNAPSHOT_BYTES,
    EngineSnapshot,
    EngineStart,
    ScalingDecision,
    decode_decision,
    decode_snapshot,
    encode_decision,
    encode_snapshot,
)
from headrace_common.protocol.redis.live import (
    RedisDecisionWriter,
    RedisLiveStore,
    RedisSharedRequests,
    RedisSnapshotWriter,
)
from headrace_common.protocol.redis.starts import RedisStarts
from headrace_common.wire.keys import ShardKeys
from headrace_common.wire.messages import Control, Watch
from headrace_testing.backends import MODEL, make_status
from headrace_testing.live import make_sequence, make_snapshot
from headrace_testing.redis_users import OTHER, OverUsers
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import first

DECISION = ScalingDecision(desired=2, ready=1, reason="Backlog", message="Requests wait.")


@pytest.fixture
async def redis_backend(user_server: ValkeyServer) -> AsyncIterator[OverUsers]:
    redis_backend = OverUsers(user_server, engine=MODEL)
    await redis_backend.wipe()
    yield redis_backend
    await redis_backend.close()


async def unsent(_engine_id: str, _model: str, _control: Control) -> None:
    raise AssertionError("reading sends nothing")


def test_a_snapshot_is_read_as_it_was_written() -> None:
    snapshot = make_snapshot(
        make_sequence(request_id="0.a", tenant="one", state="prefill"),
        make_sequence(request_id="0.b", tenant="two", choice=1, state="swapped"),
        sequences_left_out=7,
    )
    decoded = decode_snapshot(encode_snapshot(snapshot))
    assert decoded == snapshot
    assert decoded.time == snapshot.time


def test_the_largest_snapshot_fits() -> None:
    name = "x" * 256
    sequences = [
        make_sequence(request_id=f"{n}{name}"[:256], tenant=name, prompt=2**21, computed=2**21)
        for n in range(MAX_SEQUENCES)
    ]
    assert len(encode_snapshot(make_snapshot(*sequences))) < MAX_SNAPSHOT_BYTES


def _change(place: tuple[int, ...], value: object) -> Callable[[list[Any]], None]:
    def change(body: list[Any]) -> None:
        *path, last = place
        for step in path:
            body = body[step]
        body[last] = value

    return change


HOSTILE = {
    "another version": _change((0,), 2),
    "no list": _change((1,), "x"),
    "too short": _change((1,), [1.0]),
    "time is text": _change((1, 0), "now"),
    "not a number": _change((1, 2), float("nan")),
    "negative": _change((1, 5), -1),
    "huge": _change((1, 5), 2**60),
    "true as a count": _change((1, 5), True),
    "blocks that do not add up": _change((2, 0), 1),
    "more shared than used blocks": _change((2, 2), 10**6),
    "a tenant without a name": _change((3,), [""]),
    "too many tenants": _change((3,), ["t"] * (MAX_SEQUENCES + 1)),
    "too many sequences": _change((4,), [["0.a", 0, 0, 0, 1, 1, 1, 1, 1, 0.0]] * 129),
    "a sequence that is not a list": _change((4,), ["x"]),
    "an unknown tenant": _change((4, 0, 1), 1),
    "an unknown state": _change((4, 0, 3), len(live.STATES)),
    "a request id of 10,000 characters": _change((4, 0, 0), "x" * 10_000),
    "a request id that is none": _change((4, 0, 0), {"a": 1}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_snapshot_is_refused(name: str) -> None:
    body = msgpack.unpackb(encode_snapshot(make_snapshot(make_sequence())))
    HOSTILE[name](body)
    with pytest.raises(MessageError):
        decode_snapshot(msgpack.packb(body))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x00", b"x" * (MAX_SNAPSHOT_BYTES + 1)])
def test_bytes_that_are_not_a_snapshot_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_snapshot(data)
    with pytest.raises(MessageError):
        decode_decision(data)


def test_a_decision_is_read_as_it_was_written_and_its_texts_are_cut() -> None:
    assert decode_decision(encode_decision(DECISION)) == DECISION
    long = replace(DECISION, reason="x" * 1000, message="y" * 10_000)
    found = decode_decision(encode_decision(long))
    assert (len(found.reason), len(found.message)) == (64, 1024)


@pytest.mark.parametrize("place", [1, 3, 4])
def test_a_hostile_decision_is_refused(place: int) -> None:
    body = msgpack.unpackb(encode_decision(DECISION))
    body[place] = ["x"]
    with pytest.raises(MessageError):
        decode_decision(msgpack.packb(body))


async def test_each_role_writes_and_reads_what_it_should(redis_backend: OverUsers) -> None:
    engine, gateway = redis_backend.connect("engine"), redis_backend.connect("gateway")
    await redis_backend.engine("e").beat((), make_status(engine_id="e"))
    snapshot = make_snapshot(make_sequence())
    await RedisSnapshotWriter(engine, "e", MODEL).write(snapshot)
    await RedisDecisionWriter(redis_backend.connect("operator")).write(MODEL, DECISION)
    store = RedisLiveStore(gateway, unsent)

    found = await store.read(MODEL, ["e", "unknown"])

    assert found.decision == DECISION
    assert [sight.snapshot for sight in found.engines] == [snapshot, None]
    assert 0 <= found.engines[0].age < 60
    assert (await store.read(OTHER, [])).decision is None


async def test_gateways_share_requests_of_tenants_that_a_console_shows(
    redis_backend: OverUsers,
) -> None:
    one = RedisSharedRequests(redis_backend.connect("gateway"), "g1")
    other = RedisSharedRequests(redis_backend.connect("gateway"), "g2")
    await one.show("t", until=4_000_000_000.0)
    await one.show("gone", until=1.0)
    assert await other.shown() == ["t"]
    await other.write("t", b"[]")
    assert await one.read("t") == {"g2": b"[]"}
    assert await one.read("u") == {}


async def test_unreadable_entries_are_left_out(redis_backend: OverUsers) -> None:
    shard = ShardKeys(MODEL)
    engine = redis_backend.connect("engine").client
    await engine.command("SET", shard.snapshot("e"), b"\xc1")
    await engine.command("HSET", shard.snapshot("f"), "another", "type")
    await RedisSnapshotWriter(redis_backend.connect("engine"), "g", MODEL).write(make_snapshot())
    await redis_backend.client.command("SET", shard.decision, b"{}")

    found = await RedisLiveStore(redis_backend.connect("gateway"), unsent).read(
        MODEL, ["e", "f", "g"]
    )

    assert [sight.snapshot is None for sight in found.engines] == [True, True, False]
    assert found.decision is None


async def test_engines_cannot_write_another_models_snapshots_or_decisions(
    redis_backend: OverUsers,
) -> None:
    stranger = redis_backend.connect("engine")
    with pytest.raises(BackendUnfit):
        await RedisSnapshotWriter(stranger, "e", OTHER).write(make_snapshot())
    for model in (MODEL, OTHER):
        with pytest.raises(NoPermissionError):
            await stranger.client.command("SET", ShardKeys(model).decision, b"x")


async def test_engines_that_start_are_not_among_those_that_serve(
    redis_backend: OverUsers,
) -> None:
    engine, gateway = redis_backend.connect("engine"), redis_backend.connect("gateway")
    store = RedisLiveStore(gateway, unsent)
    first, second = (
        EngineStart(engine_id=f"e.{seconds}", name="", phase="weights", seconds=seconds)
        for seconds in (20.0, 3.0)
    )
    for start in (second, first):
        await RedisStarts(engine, MODEL).write(start)
    assert (await store.read(MODEL, [])).starts == (first, second)
    assert await redis_backend.gateway("g").engines(MODEL) == []
    assert (await store.read(OTHER, [])).starts == ()

    await RedisStarts(engine, MODEL).remove(first.engine_id)
    assert (await store.read(MODEL, [])).starts == (second,)
    with pytest.raises(BackendUnfit):
        await RedisStarts(engine, OTHER).write(first)


async def test_unreadable_starts_are_left_out(redis_backend: OverUsers) -> None:
    shard, engine = ShardKeys(MODEL), redis_backend.connect("engine")
    start = EngineStart(engine_id="g", name="", phase="weights", seconds=1.0)
    await RedisStarts(engine, MODEL).write(start)
    await engine.client.command("SADD", shard.starts, "e", "f", "h")
    await engine.client.command("SET", shard.start("e"), b"\xc1")
    await engine.client.command("HSET", shard.start("f"), "another", "type")
    await engine.client.command("SET", shard.start("h"), msgpack.packb([1, "h", "", "x" * 65, 0]))
    reader = RedisStarts(redis_backend.connect("gateway"), MODEL)
    assert await reader.read() == [start]
    await engine.client.command("DEL", shard.starts)
    await engine.client.command("HSET", shard.starts, "another", "type")
    assert await reader.read() == ()


async def test_engines_are_asked_for_snapshots(redis_backend: OverUsers) -> None:
    engine, gateway = redis_backend.engine("e"), redis_backend.gateway("g")
    await RedisLiveStore(redis_backend.connect("gateway"), gateway.send).watch(MODEL, ["e"])
    (control,) = await first(engine.controls(), 1)
    assert isinstance(control, Watch)
    assert 0 < control.duration_ms <= live.MAX_WATCH_MS


def test_the_time_of_a_snapshot_does_not_count_in_comparisons() -> None:
    snapshot: EngineSnapshot = make_snapshot()
    assert replace(snapshot, time=snapshot.time + 1) == snapshot
