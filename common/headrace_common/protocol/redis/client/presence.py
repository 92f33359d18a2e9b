"""One task that finds out whether Redis answers, so that requests need not wait for timeouts.

When a server's node is gone, connections hang instead of being refused, and every command would
notice that by itself after several timeouts. Watches one server, or the one that Sentinels name. It
sends nothing while commands are answered quickly: an idle process stays idle.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ....errors import BackendUnavailable
from .client import RedisClient

logger = logging.getLogger(__name__)

PAUSE = 0.1  # seconds after which a command is late, and between two checks
TICKS = 8  # as fractions of the patience
# If a tick takes this much longer than planned, this machine is busy rather than Redis unreachable,
# so it is not counted.
LATE_TICK = 1.5


class Presence:
    """Knows whether Redis answers.

    `connect` makes a client with one connection; `fail_pending` fails the commands that wait.
    """

    def __init__(
        self, connect: Callable[[], RedisClient], fail_pending: Callable[[RedisError], None]
    ) -> None:
        self._connect = connect
        self._fail_pending = fail_pending
        self._watching: asyncio.Task[None] | None = None
        self._late = asyncio.Event()
        self._away: RedisError | None = None
        self._answers = 0  # answers to commands

    def needed(self) -> AbstractContextManager[None]:
        """A context for a command.

        Raises BackendUnavailable if the server is known to be unreachable.
        """
        if self._away is not None:
            raise BackendUnavailable(f"redis: {self._away}") from self._away
        return _UNWATCHED if self._watching is None else _WatchedCommand(self._late, self._answered)

    def _answered(self) -> None:
        self._answers += 1

    def watch(self, patience: float) -> None:
        """From now on until `close`, asks the server while commands are late.

        A server that has not answered for `patience` seconds counts as unreachable.
        """
        self._watching = asyncio.create_task(self._watch(patience), name="presence of redis")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self, patience: float) -> None:
        while True:
            await self._late.wait()
            client = self._connect()
            try:
                while self._late.is_set():
                    self._late.clear()
                    await answered(client, patience, lambda: self._answers)
                    self._is_back()
                    await asyncio.sleep(PAUSE)
            except RedisError as error:
                self._has_gone(error)
            finally:
                await client.close()
            await asyncio.sleep(PAUSE)

    def _is_back(self) -> None:
        if self._away is not None:
            logger.info("redis answers again")
        self._away = None

    def _has_gone(self, error: RedisError) -> None:
        """Marks the server as unreachable and asks it until it answers, with or without
        commands."""
        if self._away is None:
            logger.warning("redis is unreachable; requests get 503", extra={"error": str(error)})
        self._away = error
        self._late.set()
        self._fail_pending(error)


class _WatchedCommand:
    """Reports while its block runs that the command is late, and then that it was answered.

    It is a class because a generator would cost each command several times as much.
    """

    __slots__ = ("_answered", "_handle", "_late", "_loop")

    def __init__(self, late: asyncio.Event, answered: Callable[[], None]) -> None:
        self._late = late
        self._answered = answered
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        self._handle = self._loop.call_later(PAUSE, self._tell)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handle.cancel()
        if kind is None:
            self._answered()

    def _tell(self) -> None:
        self._late.set()
        self._handle = self._loop.call_later(PAUSE, self._tell)


_UNWATCHED = nullcontext()


async def answered(client: RedisClient, patience: float, answers: Callable[[], int]) -> None:
    """Returns when PING or any other command is answered; `answers` counts the latter.

    An error reply is an answer. Raises redis' connection errors.
    """
    asked = asyncio.create_task(client.command("PING"))
    time, tick, before = asyncio.get_running_loop().time, patience / TICKS, answers()
    left = TICKS
    try:
        while left:
            began = time()
            done, _ = await asyncio.wait([asked], timeout=tick)
            if done:
                asked.result()
                return
            if answers() != before:
                return
            left -= time() - began < LATE_TICK * tick
    except ResponseError:
        return
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    raise RedisTimeoutError(f"no answer within {patience:g} s")
