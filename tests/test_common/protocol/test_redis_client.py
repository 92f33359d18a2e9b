"""Commands that several tasks send over one connection: each gets its own result, even if others
fail."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import hiredis
import pytest
import uvloop
from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.redis.client.client import MultiplexedClient
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.client.detachable import TcpConnection
from headrace_common.protocol.redis.client.multiplexed_connection import MultiplexedConnection
from headrace_testing.backends import OverRedis

MANY = 200
# Seconds that a connection may wait for a reply before the client uses another one.
NEVER_BUSY, ALWAYS_BUSY = 60.0, -1.0


async def test_each_of_many_commands_has_its_own_result(over_redis: OverRedis) -> None:
    client = over_redis.client
    counted = await asyncio.gather(*(client.command("INCR", "counted") for _ in range(MANY)))
    assert sorted(counted) == list(range(1, MANY + 1))


async def test_pipelines_beyond_max_connections_wait(over_redis: OverRedis) -> None:
    count = 3 * over_redis.config.max_connections
    pipelines = (over_redis.client.pipeline([("INCR", "counted")]) for _ in range(count))
    assert sorted(sum(await asyncio.gather(*pipelines), [])) == list(range(1, count + 1))


async def test_an_error_reaches_only_its_own_command(over_redis: OverRedis) -> None:
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


async def test_a_cancelled_command_leaves_the_replies_of_other_commands(
    over_redis: OverRedis,
) -> None:
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
    # The client may not have noticed the loss when it tries again first.
    found = await connection.attempt(lambda: connection.client.command("CLIENT", "ID"), tries=2)
    assert found != lost


async def test_all_commands_on_a_lost_connection_fail() -> None:
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


class Server:
    """A server that sends what a test passes to `say`. If `greets` is False, it closes new
    connections."""

    def __init__(self) -> None:
        self.greets = True
        self.received: asyncio.Queue[tuple[int, Sequence[bytes]]] = asyncio.Queue()
        self.writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, commands = len(self.writers), hiredis.Reader()
        self.writers.append(writer)
        if not self.greets:
            writer.close()
        with contextlib.closing(writer):
            while data := await reader.read(2**16):
                commands.feed(data)
                while command := commands.gets():
                    if command[:2] == [b"CLIENT", b"SETINFO"]:
                        writer.write(b"+OK\r\n")
                    else:
                        self.received.put_nowait((number, command))

    def say(self, reply: bytes, connection: int = 0) -> None:
        self.writers[connection].write(reply)

    def client(self, **options: Any) -> MultiplexedClient:
        pool = ConnectionPool(TcpConnection, host="127.0.0.1", port=self.port, protocol=2)
        return MultiplexedClient(pool, **{"timeout": 60.0, **options})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    for writer in made.writers:
        writer.close()
    listening.close()
    await listening.wait_closed()


@asynccontextmanager
async def asking(client: MultiplexedClient, *commands: Any) -> AsyncIterator["asyncio.Task[Any]"]:
    """A task that waits for the replies to the commands. Closes the client at the end."""
    task = asyncio.create_task(client.pipeline(commands))
    try:
        yield task
    finally:
        await client.close()
        await asyncio.gather(task, return_exceptions=True)


async def test_replies_may_arrive_in_pieces(server: Server) -> None:
    async with asking(server.client(), ("GET", "a"), ("GET", "b")) as replies:
        await server.received.get()
        for piece in b"$3\r\none\r\n$3\r\ntwo\r\n":
            server.say(bytes([piece]))
            await asyncio.sleep(0)
        assert await replies == [b"one", b"two"]


async def test_a_pipeline_raises_an_error_or_returns_it_among_the_results(server: Server) -> None:
    client = server.client()
    async with asking(client) as nothing:
        assert await nothing == []
        for raised in (True, False):
            commands = [("EVALSHA", "x", 0), ("GET", "a")]
            replies = asyncio.create_task(client.pipeline(commands, raise_on_error=raised))
            await server.received.get()
            server.say(b"-NOSCRIPT not here\r\n$3\r\none\r\n")
            if raised:
                with pytest.raises(NoScriptError, match="not here"):
                    await replies
            else:
                error, found = await replies
                assert isinstance(error, NoScriptError) and found == b"one"


@pytest.mark.parametrize(
    "response", [b"?nonsense\r\n", b"+OK\r\n+OK\r\n"], ids=["bytes", "unasked"]
)
async def test_after_an_invalid_reply_the_connection_is_replaced(
    server: Server, response: bytes
) -> None:
    client = server.client()
    async with asking(client, ("GET", "a")) as reply:
        await server.received.get()
        server.say(response)
        if response.startswith(b"?"):
            with pytest.raises(InvalidResponse):
                await reply
        else:
            assert await reply == [b"OK"]
        again = asyncio.create_task(client.command("GET", "b"))
        number, _ = await server.received.get()
        server.say(b"$3\r\ntwo\r\n", number)
        assert number == 1 and await again == b"two"


async def test_a_missing_reply_is_an_error_after_the_timeout(server: Server) -> None:
    client = server.client(timeout=0.05)
    async with asking(client, ("GET", "a")) as reply:
        with pytest.raises(RedisTimeoutError, match=r"within 0\.05 s"):
            await reply


async def test_commands_share_a_connection(server: Server) -> None:
    client = server.client(max_connections=2, busy=NEVER_BUSY)
    async with asking(client, ("GET", "a")) as reply:
        others = asyncio.gather(*(client.command("GET", "b") for _ in range(MANY)))
        assert {(await server.received.get())[0] for _ in range(1 + MANY)} == {0}
        server.say(b"$3\r\none\r\n" * (1 + MANY))
        assert await reply == [b"one"] and await others == [b"one"] * MANY


async def test_all_commands_that_wait_for_a_connection_fail_with_it(server: Server) -> None:
    server.greets = False
    client = server.client(max_connections=2)
    results = await asyncio.gather(
        *(client.command("GET", "a") for _ in range(MANY)), return_exceptions=True
    )
    assert {type(result) for result in results} == {RedisConnectionError}
    assert len(server.writers) == 1
    server.greets = True
    async with asking(client, ("GET", "a")) as reply:
        number, _ = await server.received.get()
        server.say(b"$3\r\none\r\n", number)
        assert await reply == [b"one"]


async def test_a_command_that_waits_for_a_connection_fails_when_the_client_is_closed(
    server: Server,
) -> None:
    client = server.client()
    reply = asyncio.create_task(client.command("GET", "a"))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(RedisConnectionError, match="the client was closed"):
        await reply


async def test_cancelling_close_still_closes_the_client(server: Server) -> None:
    client = server.client(max_connections=2, busy=ALWAYS_BUSY)
    async with asking(client, ("GET", "a")) as sent:
        await server.received.get()
        waiting = asyncio.create_task(client.command("GET", "b"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        for task in (sent, waiting):
            with pytest.raises(RedisConnectionError, match="was closed"):
                await task


async def test_a_slow_command_does_not_delay_others(server: Server) -> None:
    """While a connection transfers a large value or runs a long script, others use another one."""
    client = server.client(max_connections=2, busy=ALWAYS_BUSY)
    async with asking(client, ("GET", "large")) as large:
        await server.received.get()
        small = asyncio.create_task(client.command("GET", "small"))
        assert (await server.received.get())[0] == 1
        server.say(b"$3\r\ntwo\r\n", 1)
        assert await small == b"two" and not large.done()
        server.say(b"$3\r\none\r\n")
        assert await large == [b"one"]


async def test_after_reconnect_the_old_connection_still_delivers_its_replies(
    server: Server,
) -> None:
    client = server.client()
    async with asking(client, ("GET", "a")) as reply:
        await server.received.get()
        await client.reconnect()
        other = asyncio.create_task(client.command("GET", "b"))
        number, _ = await server.received.get()
        server.say(b"$3\r\none\r\n", 0)
        server.say(b"$3\r\ntwo\r\n", number)
        assert number == 1
        assert await reply == [b"one"] and await other == b"two"
        await server.writers[0].wait_closed()  # the client closes it after its last reply


async def test_a_connection_that_is_lost_during_its_handshake_reports_that_it_is_closed(
    server: Server,
) -> None:
    connection = TcpConnection(host="127.0.0.1", port=server.port, protocol=2)
    await connection.connect()  # type: ignore[no-untyped-call]
    connection.transport.abort()
    reader = connection._reader
    assert reader is not None
    with contextlib.suppress(OSError):
        await reader.read()  # until redis-py has noticed the loss
    multiplexed = MultiplexedConnection(connection, 60.0)
    await multiplexed.closed
    with pytest.raises(RedisConnectionError, match="closed"):
        await multiplexed.send(b"", 1)


async def test_a_client_with_a_single_connection_reports_its_loss(server: Server) -> None:
    client = server.client(single=True)
    async with asking(client, ("GET", "a")) as reply:
        await server.received.get()
        server.writers[0].close()
        for task in (reply, client.command("GET", "b")):
            with pytest.raises(RedisConnectionError, match="lost"):
                await task
    assert len(server.writers) == 1


def test_a_lookup_that_fails_after_its_client_was_closed_is_not_logged() -> None:
    async def close_while_it_looks_up() -> None:
        pool = ConnectionPool(TcpConnection, socket_connect_timeout=30, host="redis.invalid")
        client = MultiplexedClient(pool, 30.0)
        ping = asyncio.create_task(client.command("PING"))
        for _ in range(10):
            await asyncio.sleep(0)  # until the lookup has begun
        await client.close()
        await asyncio.gather(ping, return_exceptions=True)

    async def logged() -> list[str]:
        """The errors that the event loop has reported."""
        loop, found = asyncio.get_running_loop(), list[str]()
        loop.set_exception_handler(lambda _, context: found.append(context["message"]))
        await close_while_it_looks_up()
        for _ in range(8):  # more than there are threads for lookups
            with pytest.raises(socket.gaierror):
                await loop.getaddrinfo("redis.invalid", 6379)
        gc.collect()
        return found

    assert uvloop.run(logged()) == []
