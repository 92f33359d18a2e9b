"""Answers that are made while their client is watched, and end early when it goes.

The engine is told as soon as nobody reads any more, whatever the reason: a disconnect (watched on
the socket, streaming or not), a reader that is too slow, or this gateway's own end.
"""

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace_common.errors import HeadraceError

from .drain import Drain
from .errors import ApiError, to_api_error, unavailable
from .observation import Observation
from .ports import Line
from .run import Usage
from .sse import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How answers reach clients. Seconds. `line` tells where requests are that wait."""

    keep_alive: float
    write_timeout: float
    line: Line


class WatchedResponse(Response, ABC):
    """Queues its requests when it is sent, and ends them when it cannot be."""

    def __init__(self, observation: Observation, delivery: Delivery, drain: Drain) -> None:
        super().__init__()
        self._observation = observation
        self._delivery = delivery
        self._drain = drain

    @abstractmethod
    async def _answer(self, writer: Writer) -> str | None:
        """Makes and writes the answer; the code of an error that ended it after it began."""

    @abstractmethod
    async def _leave(self, *, complete: bool) -> None:
        """Called at the end, whatever it was; `complete`: the answer was written."""

    @abstractmethod
    def _usage(self) -> Usage: ...

    async def _begin(self) -> None:
        """What comes before the client is watched."""

    async def _cut_short(self, writer: Writer) -> None:
        """Says that this gateway ends before the answer does; raises that as an error instead."""
        raise unavailable("This server is shutting down; send it again.", code="shutting_down")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error_type: str | None = "cancelled"
        writer = Writer(scope, send, self._delivery.write_timeout)
        try:
            error_type = await self._serve(writer, receive)
        except ApiError as error:
            error_type = error.code or error.kind
            raise
        except HeadraceError as error:
            error_type = error.code
            self._observation.rejected(error)
            raise to_api_error(error) from error
        finally:
            writer.close()
            self._observation.end(self._usage(), error_type)

    async def _serve(self, writer: Writer, receive: Receive) -> str | None:
        """The code of an error that ended the answer after it began."""
        await self._begin()
        work = asyncio.create_task(self._answer(writer))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((work, gone, self._drain.expired), return_when="FIRST_COMPLETED")
            # After the last byte the server reports a disconnect whether the client stays or not.
            if not work.done() and not writer.ended:
                return await self._break_off(writer, work, client_left=gone.done())
            return await work
        finally:
            complete = work.done() and not work.cancelled() and work.exception() is None
            await stop(work, gone)
            await self._leave(complete=complete)

    async def _break_off(
        self, writer: Writer, work: "asyncio.Task[str | None]", *, client_left: bool
    ) -> str:
        await stop(work)
        if client_left:
            self._observation.disconnected()
            return "slow_reader" if writer.slow_reader else "client_disconnected"
        await self._cut_short(writer)
        return "shutting_down"


async def disconnected(receive: Receive) -> None:
    """Returns once the client is gone. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def stop(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks and waits for their end, whatever it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
