"""One connection to Redis that many tasks share: replies come in the order of what was sent.

redis-py makes the connection, with all that belongs to users, TLS and databases, and is not asked
again: its streams, locks and tasks cost several times what a command does. Knows no commands.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .taken_connections import TakenConnection

_NOT_ALL = object()  # what hiredis says where a reply has not come whole


@dataclass(slots=True)
class _Trip:
    """What was sent together, and the replies that have come. `since`: seconds of the loop."""

    count: int
    since: float
    done: asyncio.Future[list[Any]]
    replies: list[Any] = field(default_factory=list)


class Line(asyncio.Protocol):
    """A connection until it is lost. `timeout`: seconds for any reply, whose lack is the end of it.
    `closed` is done when nothing of it is left.
    """

    def __init__(self, connection: TakenConnection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = connection.transport
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection.parse_error,
            notEnoughData=_NOT_ALL,
        )
        self._trips: deque[_Trip] = deque()
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._transport.set_protocol(self)
        if self._transport.is_closing():  # so early that nobody may be told
            self.connection_lost(None)

    @property
    def lost(self) -> bool:
        return self._closing or self._transport.is_closing()

    @property
    def waits_since(self) -> float | None:
        """When the oldest command was sent whose reply has not come, in seconds of the loop."""
        return self._trips[0].since if self._trips else None

    def send(self, packed: bytes, count: int) -> asyncio.Future[list[Any]]:
        """Takes so many packed commands, which go out at the end of the loop's turn at the latest,
        with what others send in it. Their replies, errors among them; raises where the connection
        is lost. Who cancels it has no reply, but the command is carried out.
        """
        trip = _Trip(count, self._loop.time(), self._loop.create_future())
        if self.lost:
            trip.done.set_exception(RedisConnectionError("the connection is closed"))
            return trip.done
        self._trips.append(trip)
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(packed)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout, self._check)
        return trip.done

    def flush(self) -> None:
        """Sends what was taken."""
        if self._unsent and not self.lost:
            unsent, self._unsent = self._unsent, []
            self._transport.write(b"".join(unsent))

    def retire(self) -> None:
        """Closes it once all replies have come; nothing must be sent from now on."""
        self.flush()
        self._closing = True
        if not self._trips:
            self._transport.close()

    def close(self, error: RedisError | None = None) -> None:
        """Closes it now; who waits gets the error."""
        self._closing = True
        self._transport.abort()
        self._fail(error or RedisConnectionError("the connection was closed"))

    # What the transport says

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
        self._connection.forget()
        if not self.closed.done():
            self.closed.set_result(None)

    def _take(self, reply: Any) -> None:
        if not self._trips:
            raise InvalidResponse("a reply that nobody asked for")
        trip = self._trips[0]
        trip.replies.append(reply)
        if len(trip.replies) < trip.count:
            return
        self._trips.popleft()
        if not trip.done.done():
            trip.done.set_result(trip.replies)
        if self._closing and not self._trips:
            self._transport.close()

    def _fail(self, error: RedisError) -> None:
        trips, self._trips = self._trips, deque()
        for trip in trips:
            if not trip.done.done():
                trip.done.set_exception(error)

    def _check(self) -> None:
        self._timer = None
        if not self._trips:
            return
        due = self._trips[0].since + self._timeout
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._check)
        else:
            self.close(RedisTimeoutError(f"no reply within {self._timeout:g} s"))
