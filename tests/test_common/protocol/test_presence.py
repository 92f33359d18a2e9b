"""One task detects a silent Redis, and fails all waiting commands."""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.client.presence import answered
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually

NEVER = 3600.0  # a command's own timeout; a test that waited for it would not end
PATIENCE = 0.2


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[Connection]:
    config = ConnectionConfig(url=url, command_timeout=NEVER, connect_timeout=NEVER)
    connection = Connection(config)
    connection.watch(PATIENCE)
    try:
        yield connection
    finally:
        await connection.close()


async def ping(connection: Connection) -> bool:
    try:
        await connection.attempt(lambda: connection.client.command("PING"))
    except BackendUnavailable:
        return False
    return True


async def test_commands_that_wait_for_a_paused_server_fail(
    valkey_server: ValkeyServer,
) -> None:
    async with watched(valkey_server.url) as connection:
        assert await ping(connection)
        valkey_server.pause()
        try:
            with pytest.raises(BackendUnavailable):
                await connection.attempt(lambda: connection.client.command("PING"), tries=3)
            with pytest.raises(BackendUnavailable, match="no answer within"):
                await connection.attempt(lambda: connection.client.command("PING"))
        finally:
            valkey_server.unpause()
        await eventually(lambda: ping(connection), seconds=60)


async def test_a_first_connection_that_hangs_is_given_up_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with watched(f"redis://:password@127.0.0.1:{port}/0") as connection:
            with pytest.raises(BackendUnavailable):
                await connection.attempt(lambda: connection.client.command("PING"))


async def test_a_server_that_refuses_ping_counts_as_present(valkey_server: ValkeyServer) -> None:
    connection = Connection(ConnectionConfig(url=valkey_server.url))
    client = connection.reader()
    await connection.client.command("ACL", "SETUSER", "default", "-ping")
    try:
        await answered(client, NEVER, lambda: 0)
    finally:
        await connection.client.command("ACL", "SETUSER", "default", "+ping")
        await client.close()
        await connection.close()


@asynccontextmanager
async def silent_server() -> AsyncIterator[Connection]:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        config = ConnectionConfig(url=url, command_timeout=NEVER, connect_timeout=NEVER)
        connection = Connection(config)
        try:
            yield connection
        finally:
            await connection.close()


async def test_a_server_that_answers_other_commands_counts_as_present() -> None:
    answers = itertools.count()
    async with silent_server() as connection:
        await answered(connection.reader(), PATIENCE * 8, lambda: next(answers))


async def test_a_busy_machine_is_not_taken_for_a_silent_server() -> None:
    async with silent_server() as connection:
        answering = asyncio.create_task(answered(connection.reader(), PATIENCE, lambda: 0))
        for _ in range(20):
            time.sleep(PATIENCE / 4)  # noqa: ASYNC251 - the loop is held up, as on such a machine
            await asyncio.sleep(0)
        assert not answering.done()
        with pytest.raises(RedisTimeoutError):
            await answering
