"""The queue behind Sentinels: a failover moves reads and writes, and loses no request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from headrace_common.errors import BackendUnavailable, BackendUnfit
from headrace_common.protocol.base import AdmitState, Outcome, QueueLimits
from headrace_common.protocol.redis.client.client import Command, MultiplexedClient, RedisClient
from headrace_common.protocol.redis.client.connection import (
    Connection,
    ConnectionConfig,
    check_backend,
)
from headrace_common.protocol.redis.client.endpoint import Address
from headrace_common.protocol.redis.client.sentinel import MasterReader
from headrace_common.wire.messages import Tokens
from headrace_testing.backends import OverRedis, make_request
from headrace_testing.redis_sets import SentinelSet
from headrace_testing.waiting import eventually

LIMITS = QueueLimits()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[SentinelSet]:
    """Servers for this test alone, since a failover changes them."""
    servers = SentinelSet(tmp_path)
    try:
        await asyncio.to_thread(servers.start)
        yield servers
    finally:
        servers.stop()


@pytest.fixture
async def redis_backend(servers: SentinelSet) -> AsyncIterator[OverRedis]:
    redis_backend = OverRedis(servers.url)
    yield redis_backend
    await redis_backend.close()


async def done(action: Callable[[], Awaitable[object]]) -> None:
    """Repeats an action while Redis is unreachable, as gateways and engines do."""

    async def once() -> bool:
        try:
            await action()
        except BackendUnavailable:
            return False
        return True

    await eventually(once)


def tokens(request_id: str, *token_ids: int) -> Tokens:
    return Tokens(request_id=request_id, attempt=1, choice=0, index=0, token_ids=token_ids)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "demoted"])
async def test_blocked_reads_and_writes_continue_at_the_new_master(
    servers: SentinelSet, redis_backend: OverRedis, killed: bool
) -> None:
    gateway, engine = redis_backend.gateway(), redis_backend.engine()
    await gateway.start()
    await engine.start()
    request = make_request()
    await gateway.admit(request, LIMITS)
    (lease,) = await engine.take(1)
    frames = gateway.frames()
    await engine.publish({"g": [tokens(request.request_id, 1)]})
    await anext(frames)
    await redis_backend.client.command("WAIT", 1, 0)
    frame = asyncio.ensure_future(anext(frames))
    waiting = asyncio.create_task(engine.wait())
    await asyncio.wait({frame, waiting}, timeout=0.05)
    if killed:
        servers.master.kill()
        await asyncio.to_thread(servers.until_promoted)
        await done(lambda: engine.publish({"g": [tokens(request.request_id, 1, 2)]}))
    else:
        await asyncio.to_thread(servers.fail_over)
        await engine.publish({"g": [tokens(request.request_id, 1, 2)]})
    assert (await asyncio.wait_for(frame, 30)).replies == (tokens(request.request_id, 1),)
    assert (await anext(frames)).replies == (tokens(request.request_id, 1, 2),)
    await gateway.admit(make_request(), LIMITS)
    await asyncio.wait_for(waiting, 30)
    assert await engine.finish(request.request_id, lease.attempt, Outcome())
    await frames.aclose()  # type: ignore[attr-defined]


async def test_a_request_that_a_failover_lost_is_admitted_again(
    servers: SentinelSet, redis_backend: OverRedis
) -> None:
    gateway, engine = redis_backend.gateway(), redis_backend.engine()
    await gateway.start()
    servers.cut_replica_off()
    request = make_request()
    await gateway.admit(request, LIMITS)
    servers.master.kill()
    servers.replica.unpause()
    await asyncio.to_thread(servers.until_promoted)
    assert await engine.take(1) == []
    assert (await gateway.admit(request, LIMITS, seen=0)).state is AdmitState.ADMITTED
    assert [lease.request for lease in await engine.take(1)] == [request]


async def test_a_replica_is_not_taken_for_a_master(sentinel_set: SentinelSet) -> None:
    """A Sentinel may have old information: this one returns the address of the replica."""
    redis_backend = OverRedis(sentinel_set.url)
    pool = redis_backend.client._pool  # type: ignore[attr-defined]

    async def located() -> Address:
        return "127.0.0.1", sentinel_set.replica.port

    pool.connection_kwargs["locate"] = located
    with pytest.raises(BackendUnavailable, match="is slave and not the master"):
        await check_backend(redis_backend.connection)
    await redis_backend.close()


async def test_an_unknown_master_is_unavailable(sentinel_set: SentinelSet) -> None:
    connection = Connection(ConnectionConfig(url=sentinel_set.url.replace("/main/", "/other/")))
    with pytest.raises(BackendUnavailable, match="no Sentinel of 2 knows the master 'other'"):
        await check_backend(connection)
    await connection.close()


async def test_a_sentinel_is_not_taken_for_a_server(sentinel_set: SentinelSet) -> None:
    connection = Connection(ConnectionConfig(url=f"redis://127.0.0.1:{sentinel_set.port}/0"))
    with pytest.raises(BackendUnfit, match=r"use a URL like redis\+sentinel://"):
        await check_backend(connection)
    await connection.close()


class Silent(MultiplexedClient):
    """A blocked read that receives nothing."""

    def __init__(self, locate: Callable[[], Awaitable[Address]]) -> None:
        self._locate = locate

    async def command(self, *_args: str | bytes | int | float) -> Any:
        return None


def reader(answers: Sequence[Address | None]) -> RedisClient:
    """A reader whose Sentinels give these answers; None stands for no answer."""
    left = list(answers)

    async def locate() -> Address:
        answer = left.pop(0)
        if answer is None:
            raise RedisConnectionError("no Sentinel")
        return answer

    return MasterReader(locate, Silent)


READ: Command = ("XREAD", "BLOCK", 1, "STREAMS", "k", "0-0")
HERE, THERE = ("here", 1), ("there", 1)


async def test_a_reader_at_a_master_that_was_cut_off_notices() -> None:
    found = reader([HERE, HERE, THERE])
    await found._client._locate()  # type: ignore[attr-defined]
    assert await found.command(*READ) is None
    with pytest.raises(RedisConnectionError, match="another one now"):
        await found.command(*READ)


async def test_a_reader_stays_while_no_sentinel_answers() -> None:
    found = reader([HERE, None])
    await found._client._locate()  # type: ignore[attr-defined]
    assert await found.command(*READ) is None
