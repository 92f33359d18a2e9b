"""The least of a Redis client that the protocol needs: a command, and many in one round trip.

Raises redis' own errors and repeats nothing. Timeouts are made here and not by the library: in
Python 3.11 its way (asyncio.wait_for around each write) can swallow a task's cancellation.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

T = TypeVar("T")

SCAN_PAGE = 1000
MOST_TOGETHER = 64  # commands in one round trip
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

    Commands that tasks send in one turn of the event loop go together, so that a server wakes up
    once for them. Each has its own result; nothing is said of which is carried out first.
    With `single` it has one connection for its life and fails when that is lost. Otherwise a lost
    one is replaced unseen, which a reader that must begin anew then would not notice.
    """

    def __init__(self, pool: ConnectionPool, timeout: float, *, single: bool = False) -> None:
        self._pool: Any = pool
        self._timeout = timeout
        self._single = single
        self._redis: Any = Redis(connection_pool=pool, single_connection_client=single)
        self._idle: list[Any] = []  # connections that were taken from the pool, for the next use
        # Who finds all in use waits here: what becomes idle does not go back to the pool.
        self._places = asyncio.Semaphore(pool.max_connections)
        self._turn: list[tuple[Command, asyncio.Future[Any]]] = []
        self._trips: set[asyncio.Task[None]] = set()

    async def command(self, *args: Argument) -> Any:
        if self._single:
            return await self._timed(self._read(args))
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._turn.append((args, reply))
        if len(self._turn) == 1:
            loop.call_soon(self._send_turn)
        return await reply

    def _send_turn(self) -> None:
        turn, self._turn = self._turn, []
        for start in range(0, len(turn), MOST_TOGETHER):
            trip = asyncio.create_task(self._answer(turn[start : start + MOST_TOGETHER]))
            self._trips.add(trip)
            trip.add_done_callback(self._trips.discard)

    async def _answer(self, turn: Sequence[tuple[Command, asyncio.Future[Any]]]) -> None:
        """Sends commands of several tasks, and gives each its result or error."""
        try:
            results = await self._timed(self._exchange([command for command, _ in turn]))
        except Exception as error:  # noqa: BLE001 - raised in each task that waits
            results = [error] * len(turn)
        for (_, reply), result in zip(turn, results, strict=True):
            if reply.done():
                continue  # who asked has left
            if isinstance(result, Exception):
                reply.set_exception(result)
            else:
                reply.set_result(result)

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
        results = await self._timed(self._pipeline(commands))
        if raise_on_error:
            for result in results:
                if isinstance(result, RedisError):
                    raise result
        return results

    async def _pipeline(self, commands: Sequence[Command]) -> list[Any]:
        if not self._single:
            return await self._exchange(commands)
        await self._redis.initialize()
        return await self._over(self._redis.connection, commands)

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Results or errors of commands, over one connection of the pool."""
        async with self._places:
            connection = await self._connected()
            try:
                results = await self._over(connection, commands)
            except BaseException:
                await connection.disconnect(nowait=True)
                await self._pool.release(connection)
                raise
            self._idle.append(connection)
            return results

    async def _connected(self) -> Any:
        """A connection that nobody uses, and on which nothing has come unasked. Those of the last
        commands stay here: the pool does much for each use that is not needed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_connected and not await self._stale(connection):
                return connection
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)
        return await self._pool.get_connection()

    @staticmethod
    async def _stale(connection: Any) -> bool:
        try:
            return bool(await connection.can_read())
        except RedisError:
            return True

    async def _over(self, connection: Any, commands: Sequence[Command]) -> list[Any]:
        packed = [part for command in commands for part in connection.pack_command(*command)]
        await connection.send_packed_command(b"".join(packed))
        results: list[Any] = []
        for command in commands:
            try:
                results.append(await self._redis.parse_response(connection, command[0]))
            except ResponseError as error:
                results.append(error)
        return results

    async def _timed(self, reply: Awaitable[T]) -> T:
        """Leaving early closes the connection: no later command can get this one's reply."""
        try:
            async with asyncio.timeout(self._timeout):
                return await reply
        except TimeoutError as error:
            raise RedisTimeoutError(f"no reply within {self._timeout:g} s") from error

    async def reconnect(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)
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
