"""A minimal Redis client for the protocol: one command, and many commands in one round trip.

It raises redis' own errors and repeats nothing.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .multiplexed_connection import MultiplexedConnection

SCAN_PAGE = 1000
# If a reply takes longer, it is large or the server is unreachable: other connections are used.
BUSY_SECONDS = 0.02
Argument = str | bytes | int | float
Command = tuple[Argument, ...]


class RedisClient(ABC):
    """Sends commands to the servers that have their keys."""

    @abstractmethod
    async def command(self, *args: Argument) -> Any:
        """The command's result."""

    @abstractmethod
    async def pipeline(
        self, commands: Sequence[Command], *, raise_on_error: bool = True
    ) -> list[Any]:
        """The commands' results; raises the first error, or returns errors among the results."""

    async def each(self, *args: Argument) -> list[Any]:
        """The results of a command without keys from every reachable server with data.

        Raises redis' errors; a connection error if no server is reachable.
        """
        return [await self.command(*args)]

    async def scan(self, pattern: str) -> list[bytes]:
        """The matching keys of every server, each at least once. For tools: it scans all keys."""
        return await scan_with(self.command, pattern)

    @abstractmethod
    async def reconnect(self) -> None:
        """Replaces the present connections; commands that were sent on them still get replies."""

    @abstractmethod
    def fail_pending(self, error: RedisError) -> None:
        """Fails, with this error, the commands that wait for unreachable servers."""

    @abstractmethod
    async def close(self) -> None:
        """Closes all connections."""


class MultiplexedClient(RedisClient):
    """Sends commands to one server over connections that all tasks share.

    Connections are made when they are needed. A reply may take `timeout` seconds. While a
    connection has waited `busy` seconds for a reply, others are used, up to `max_connections`.
    Commands that tasks send in one turn of the event loop go out together, so that the server
    wakes up once for them; a pipeline goes out at once. The order of execution is not defined.
    With `single` the client has one connection, every command goes out at once, and all commands
    fail once the connection is lost. Otherwise a lost connection is replaced silently. A reader
    that must then start from the beginning uses `single`.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        timeout: float,
        *,
        max_connections: int = 1,
        busy: float = BUSY_SECONDS,
        single: bool = False,
    ) -> None:
        self._pool: Any = pool
        self._busy = busy
        self._timeout = timeout
        self._max_connections = max_connections
        self._single = single
        self._callbacks: Mapping[Any, Any] = Redis(connection_pool=pool).response_callbacks
        self._connections: list[MultiplexedConnection] = []
        self._opening: asyncio.Task[MultiplexedConnection] | None = None

    async def command(self, *args: Argument) -> Any:
        connection = self._usable() or await self._open()
        pending = connection.send(_pack(*args), 1)
        if self._single:  # a reader, which has no other commands to send with this one
            connection.flush()
        (reply,) = await pending
        result = self._result(args, reply)
        if isinstance(result, Exception):
            raise result
        return result

    async def pipeline(
        self, commands: Sequence[Command], *, raise_on_error: bool = True
    ) -> list[Any]:
        if not commands:
            return []
        connection = self._usable() or await self._open()
        pending = connection.send(
            b"".join([_pack(*command) for command in commands]), len(commands)
        )
        connection.flush()
        results = [
            self._result(command, reply)
            for command, reply in zip(commands, await pending, strict=True)
        ]
        for result in results:
            refused = isinstance(result, RedisError)
            if refused and (raise_on_error or not isinstance(result, ResponseError)):
                raise result
        return results

    def _result(self, command: Command, reply: Any) -> Any:
        """The reply as redis-py converts it, or the error that it is."""
        read = self._callbacks.get(command[0])
        return reply if read is None or isinstance(reply, Exception) else read(reply)

    def _usable(self) -> MultiplexedConnection | None:
        """A connection that can be used now; None if another one should be opened."""
        late = asyncio.get_running_loop().time() - self._busy
        for connection in self._connections:
            if not connection.lost and (connection.waits_since or math.inf) > late:
                return connection
        return None

    async def _open(self) -> MultiplexedConnection:
        """Opens a connection; concurrent callers share it, or the error."""
        usable = [connection for connection in self._connections if not connection.lost]
        if len(usable) == self._max_connections:
            return usable[-1]
        if self._single and self._connections:
            raise RedisConnectionError("the connection was lost")
        opening = self._opening
        if opening is None:
            opening = self._opening = asyncio.create_task(self._connected())
            opening.add_done_callback(self._on_opened)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise RedisConnectionError("the client was closed") from None
            raise

    def _on_opened(self, opening: "asyncio.Task[MultiplexedConnection]") -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            known = [connection for connection in self._connections if not connection.closed.done()]
            self._connections = [*known, opening.result()]

    async def _connected(self) -> MultiplexedConnection:
        connection = self._pool.make_connection()
        try:
            async with asyncio.timeout(self._timeout):
                await connection.connect()
        except BaseException as error:
            await connection.disconnect()
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError(f"no connection within {self._timeout:g} s") from error
            raise
        return MultiplexedConnection(connection, self._timeout)

    async def reconnect(self) -> None:
        for connection in self._connections:
            connection.retire()

    def fail_pending(self, error: RedisError) -> None:
        for connection in self._connections:
            connection.close(error)
        if self._opening is not None:
            self._opening.cancel()

    async def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        for connection in self._connections:
            connection.close()
            await connection.closed


def _pack(*args: Argument) -> bytes:
    """A command as bytes; a name such as `XINFO GROUPS` becomes two words."""
    name = args[0]
    words = name.split() if isinstance(name, str) else (name,)
    packed: bytes = hiredis.pack_command((*words, *args[1:]))
    return packed


async def scan_with(command: Callable[..., Awaitable[Any]], pattern: str) -> list[bytes]:
    """The matching keys of one server; `command` sends it a command."""
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
