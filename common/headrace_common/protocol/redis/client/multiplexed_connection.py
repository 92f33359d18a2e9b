"""One connection to Redis that many tasks share; replies come in the order of the commands.

redis-py opens the connection, with users, TLS and databases, and is not used afterwards: its
streams, locks and tasks cost several times as much as a command. Knows no commands.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .detachable import DetachableConnection

_NOT_ALL = object()  # hiredis returns this for an incomplete reply


@dataclass(slots=True)
class PendingReplies:
    """Commands that were sent together, and their replies so far. `since` is the loop's time."""

    count: int
    since: float
    done: asyncio.Future[list[Any]]
    replies: list[Any] = field(default_factory=list)


class MultiplexedConnection(asyncio.Protocol):
    """A shared connection until it is lost.

    If a reply takes longer than `timeout` seconds, the connection is closed. `closed` is done when
    the socket is closed.
    """

    def __init__(self, connection: DetachableConnection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = connection.transport
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection.parse_error,
            notEnoughData=_NOT_ALL,
        )
        self._pending: deque[PendingReplies] = deque()
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._transport.set_protocol(self)
        if self._transport.is_closing():  # too early for a callback
            self.connection_lost(None)

    @property
    def lost(self) -> bool:
        return self._closing or self._transport.is_closing()

    @property
    def waits_since(self) -> float | None:
        """When the oldest unanswered command was sent, in the loop's time."""
        return self._pending[0].since if self._pending else None

    def send(self, packed: bytes, count: int) -> asyncio.Future[list[Any]]:
        """Queues `count` packed commands; returns a future of their replies, errors among them.

        They go out at the end of the event loop's turn at the latest, with those of other tasks.
        The future fails if the connection is lost. Cancelling it drops the replies; Redis still
        executes the commands.
        """
        pending = PendingReplies(count, self._loop.time(), self._loop.create_future())
        if self.lost:
            pending.done.set_exception(RedisConnectionError("the connection is closed"))
            return pending.done
        self._pending.append(pending)
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(packed)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout, self._check)
        return pending.done

    def flush(self) -> None:
        """Sends the queued commands."""
        if self._unsent and not self.lost:
            unsent, self._unsent = self._unsent, []
            self._transport.write(b"".join(unsent))

    def retire(self) -> None:
        """Closes the connection once all replies have come; send nothing after this."""
        self.flush()
        self._closing = True
        if not self._pending:
            self._transport.close()

    def close(self, error: RedisError | None = None) -> None:
        """Closes the connection now; pending commands fail with the error."""
        self._closing = True
        self._transport.abort()
        self._fail(error or RedisConnectionError("the connection was closed"))

    # Callbacks of the transport

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOT_ALL:
                self._take(reply)
        except InvalidResponse as error:
            self.close(error)

    def connection_lost(self, exc: Exception | None) -> None:
        why = exc or "the server closed it"
        self._fail(RedisConnectionError(f"connection lost: {why}"))
        if self._timer is not None:
            self._timer.cancel()
        self._connection.detach()
        if not self.closed.done():
            self.closed.set_result(None)

    def _take(self, reply: Any) -> None:
        if not self._pending:
            raise InvalidResponse("a reply without a command")
        pending = self._pending[0]
        pending.replies.append(reply)
        if len(pending.replies) < pending.count:
            return
        self._pending.popleft()
        if not pending.done.done():
            pending.done.set_result(pending.replies)
        if self._closing and not self._pending:
            self._transport.close()

    def _fail(self, error: RedisError) -> None:
        waiting, self._pending = self._pending, deque()
        for pending in waiting:
            if not pending.done.done():
                pending.done.set_exception(error)

    def _check(self) -> None:
        self._timer = None
        if not self._pending:
            return
        due = self._pending[0].since + self._timeout
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._check)
        else:
            self.close(RedisTimeoutError(f"no reply within {self._timeout:g} s"))
