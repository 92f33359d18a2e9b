"""The least of a Redis client that the protocol needs: a command, and many in one round trip.

Raises redis' own errors and repeats nothing. Timeouts are made here and not by the library: in
Python 3.11 its way (asyncio.wait_for around each write) can swallow a task's cancellation.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import TimeoutError as RedisTimeoutError

SCAN_PAGE = 1000
Argument = str | bytes | int | float
Command = tuple[Argument, ...]


class Client(ABC):
    """Sends commands to where their keys are."""

    @abstractmethod
    async def command(self, *args: Argument) -> Any:
        """The command's result."""

    @abstractmethod
    async def pipeline(
        self, commands: Sequence[Command], *, raise_on_error: bool = True
    ) -> list[Any]:
        """The commands' results; raises the first error, or has errors among the results."""

    async def each(self, *args: Argument) -> list[Any]:
        """The result of a command without keys from every server that holds data."""
        return [await self.command(*args)]

    async def scan(self, pattern: str) -> list[bytes]:
        """The keys of every server that match, each at least once. For tools: it reads them all."""
        return await scan_with(self.command, pattern)

    @abstractmethod
    async def reconnect(self) -> None:
        """Leaves the connections that are idle now."""

    @abstractmethod
    async def close(self) -> None:
        """Closes all connections."""


class PoolClient(Client):
    """Commands over the connections of one pool; `timeout` seconds for each round trip.

    With `single` it has one connection for its life and fails when that is lost. Otherwise a lost
    one is replaced unseen, which a reader that must begin anew then would not notice.
    """

    def __init__(self, pool: ConnectionPool, timeout: float, *, single: bool = False) -> None:
        self._pool = pool
        self._timeout = timeout
        self._single = single
        self._redis: Any = Redis(connection_pool=pool, single_connection_client=single)

    async def command(self, *args: Argument) -> Any:
        if self._single:
            return await self._timed(self._read(args))
        return await self._timed(self._redis.execute_command(*args))

    async def _read(self, args: Command) -> Any:
        """On the one connection, without what the library does around each command: a gateway
        reads many times a second. One task reads at a time.
        """
        await self._redis.initialize()
        connection = self._redis.connection
        await connection.send_command(*args)
        return await self._redis.parse_response(connection, args[0])

    async def pipeline(
        self, commands: Sequence[Command], *, raise_on_error: bool = True
    ) -> list[Any]:
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(await self._timed(pipeline.execute(raise_on_error=raise_on_error)))

    async def _timed(self, reply: Awaitable[Any]) -> Any:
        """Leaving early closes the connection: no later command can get this one's reply."""
        try:
            async with asyncio.timeout(self._timeout):
                return await reply
        except TimeoutError as error:
            raise RedisTimeoutError(f"no reply within {self._timeout:g} s") from error

    async def reconnect(self) -> None:
        await self._pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.disconnect()


async def scan_with(command: Callable[..., Awaitable[Any]], pattern: str) -> list[bytes]:
    """The keys of one server that match; `command` sends it a command."""
    found: list[bytes] = []
    cursor = 0
    while True:
        position, batch = await command("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_PAGE)
        found += batch
        cursor = int(position)
        if cursor == 0:
            return found


async def backoff(attempt: int, first: float = 0.02, longest: float = 1.0) -> None:
    """Sleeps before the next try; doubles from `first` seconds up to `longest`."""
    await asyncio.sleep(min(longest, first * 2 ** min(attempt, 16)))
