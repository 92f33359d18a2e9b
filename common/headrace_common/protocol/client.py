"""The least of a Redis client that the protocol needs: a command, and many in one round trip.

Raises redis' own errors and repeats nothing.
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

from .line import Line

SCAN_PAGE = 1000
BUSY_SECONDS = 0.02  # a reply that takes longer is of something large, or of a server that is away
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
        """The result of a command without keys from every server that holds data and is there.

        Raises redis' errors, of a connection where no server is there.
        """
        return [await self.command(*args)]

    async def scan(self, pattern: str) -> list[bytes]:
        """The keys of every server that match, each at least once. For tools: it reads them all."""
        return await scan_with(self.command, pattern)

    @abstractmethod
    async def reconnect(self) -> None:
        """Leaves the connections that there are; what was sent on them still has its replies."""

    @abstractmethod
    async def close(self) -> None:
        """Closes all connections."""


class LineClient(Client):
    """Commands to one server over connections that all tasks share, made when they are needed;
    `timeout` seconds for each reply.

    A connection on which something has taken `busy` seconds is passed over, up to `lines` of them.
    What tasks send in one turn of the event loop goes together, so that a server wakes up once for
    it, but a pipeline goes at once; nothing is said of which command is carried out first.
    With `single` it has one connection for its life and fails when that is lost. Otherwise a lost
    one is replaced unseen, which a reader that must begin anew then would not notice.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        timeout: float,
        *,
        lines: int = 1,
        busy: float = BUSY_SECONDS,
        single: bool = False,
    ) -> None:
        self._pool: Any = pool
        self._busy = busy
        self._timeout = timeout
        self._most = lines
        self._single = single
        self._callbacks: Mapping[Any, Any] = Redis(connection_pool=pool).response_callbacks
        self._lines: list[Line] = []
        self._opening: asyncio.Task[Line] | None = None

    async def command(self, *args: Argument) -> Any:
        line = self._line() or await self._open()
        (reply,) = await line.send(_pack(*args), 1)
        result = self._result(args, reply)
        if isinstance(result, Exception):
            raise result
        return result

    async def pipeline(
        self, commands: Sequence[Command], *, raise_on_error: bool = True
    ) -> list[Any]:
        if not commands:
            return []
        line = self._line() or await self._open()
        trip = line.send(b"".join([_pack(*command) for command in commands]), len(commands))
        line.flush()
        results = [
            self._result(command, reply)
            for command, reply in zip(commands, await trip, strict=True)
        ]
        for result in results:
            refused = isinstance(result, RedisError)
            if refused and (raise_on_error or not isinstance(result, ResponseError)):
                raise result
        return results

    def _result(self, command: Command, reply: Any) -> Any:
        """What redis-py makes of a reply, or the error that it is."""
        read = self._callbacks.get(command[0])
        return reply if read is None or isinstance(reply, Exception) else read(reply)

    def _line(self) -> Line | None:
        """One that can be used now; None where another one should be made."""
        late = asyncio.get_running_loop().time() - self._busy
        for line in self._lines:
            if not line.lost and (line.waits_since or math.inf) > late:
                return line
        return None

    async def _open(self) -> Line:
        """All that wait for a connection wait for the same one, and hear the same of a failure."""
        usable = [line for line in self._lines if not line.lost]
        if len(usable) == self._most:
            return usable[-1]
        if self._single and self._lines:
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

    def _on_opened(self, opening: "asyncio.Task[Line]") -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            known = [line for line in self._lines if not line.closed.done()]
            self._lines = [*known, opening.result()]

    async def _connected(self) -> Line:
        connection = self._pool.make_connection()
        try:
            async with asyncio.timeout(self._timeout):
                await connection.connect()
        except BaseException as error:
            await connection.disconnect()
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError(f"no connection within {self._timeout:g} s") from error
            raise
        return Line(connection, self._timeout)

    async def reconnect(self) -> None:
        for line in self._lines:
            line.retire()

    async def close(self) -> None:
        for line in self._lines:
            line.close()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        for line in self._lines:
            line.close()
            await line.closed


def _pack(*args: Argument) -> bytes:
    """A command as bytes; a first word like `XINFO GROUPS` is two."""
    name = args[0]
    words = name.split() if isinstance(name, str) else (name,)
    packed: bytes = hiredis.pack_command((*words, *args[1:]))
    return packed


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
