"""Commands of several tasks over one connection: each has its own result, whatever becomes of the
others."""

import asyncio

import pytest
from redis.exceptions import ResponseError

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.client import MOST_TOGETHER
from headrace_common.protocol.connection import Connection, ConnectionConfig
from headrace_testing.backends import OverRedis

MANY = 3 * MOST_TOGETHER


async def test_commands_of_one_turn_share_connections(over_redis: OverRedis) -> None:
    client = over_redis.client
    ids = await asyncio.gather(*(client.command("CLIENT", "ID") for _ in range(MANY)))
    assert len(set(ids)) <= MANY // MOST_TOGETHER
    counted = await asyncio.gather(*(client.command("INCR", "counted") for _ in range(MANY)))
    assert sorted(counted) == list(range(1, MANY + 1))


async def test_more_at_once_than_there_are_connections_take_turns(over_redis: OverRedis) -> None:
    count = 3 * over_redis.config.max_connections
    trips = (over_redis.client.pipeline([("INCR", "turns")]) for _ in range(count))
    assert sorted(sum(await asyncio.gather(*trips), [])) == list(range(1, count + 1))


async def test_an_error_is_of_its_command_alone(over_redis: OverRedis) -> None:
    client = over_redis.client
    await client.command("SET", "text", "a")
    results = await asyncio.gather(
        client.command("APPEND", "text", "b"),
        client.command("LPUSH", "text", "c"),
        client.command("GET", "text"),
        return_exceptions=True,
    )
    assert results[0] == 2
    assert isinstance(results[1], ResponseError)
    assert results[2] == b"ab"


async def test_who_leaves_takes_no_reply_of_others(over_redis: OverRedis) -> None:
    client = over_redis.client
    await client.command("SET", "text", "a")
    tasks = [asyncio.create_task(client.command("APPEND", "text", "b")) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [3, 4, 5]
    assert await client.command("GET", "text") == b"abbbb"


async def test_a_connection_that_was_lost_while_idle_is_replaced(over_redis: OverRedis) -> None:
    connection = over_redis.connect()
    lost = await connection.client.command("CLIENT", "ID")
    await over_redis.client.command("CLIENT", "KILL", "ID", lost)
    # The first try may be before the loss is known here.
    found = await connection.attempt(lambda: connection.client.command("CLIENT", "ID"), tries=2)
    assert found != lost


async def test_all_that_share_a_lost_connection_hear_of_it() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = Connection(ConnectionConfig(url=f"redis://127.0.0.1:{port}/0"))
    results = await asyncio.gather(
        *(connection.attempt(lambda: connection.client.command("PING")) for _ in range(3)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [BackendUnavailable] * 3
    with pytest.raises(BackendUnavailable):
        await connection.attempt(lambda: connection.client.pipeline([("PING",)]))
    await connection.close()
    server.close()
    await server.wait_closed()
