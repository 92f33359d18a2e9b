"""Responses that watch their client while they are made, and end early when it leaves.

A request is cancelled as soon as no client reads, for any reason: a disconnect (watched on the
socket, streaming or not), a client that reads too slowly, or this gateway's own end.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace_common.errors import FailureCode, HeadraceError, RequestFailed

from ..errors import ApiError, to_api_error, unavailable
from ..queue_client.drain import Drain
from ..queue_client.run import Usage
from ..telemetry.observation import Observation
from .keep_alive import KeepAlives
from .sse import CHANNEL, Channel, Writer

# The key of a request's state for the response that its endpoint returned.
RESPONSE = "headrace.response"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How answers reach clients. `write_timeout` in seconds."""

    write_timeout: float
    keep_alives: KeepAlives


class DisconnectingResponse(Response, ABC):
    """Answers requests that are in the queue; ends them if their client cannot be answered."""

    def __init__(self, observation: Observation, delivery: Delivery, drain: Drain) -> None:
        super().__init__()
        self._observation = observation
        self._delivery = delivery
        self._drain = drain
        self.due = False  # whether the framework has come to send it
        self._sent = False

    @abstractmethod
    async def _answer(self, writer: Writer) -> str | None:
        """Makes and writes the answer; returns the code of an error that ended it midway."""

    @abstractmethod
    async def _leave(self, *, complete: bool) -> None:
        """Called once at the end. `complete`: the answer was written."""

    @abstractmethod
    def _usage(self) -> Usage: ...

    async def _cut_short(self, writer: Writer) -> None:
        """Tells the client that this gateway shuts down, in the answer or by an error."""
        raise unavailable("This server is shutting down; send it again.", code="shutting_down")

    async def discard(self) -> None:
        """Ends the requests of a response that was never sent."""
        if not self._sent:
            self._sent = True
            self._observation.end(self._usage(), "cancelled")
            await self._leave(complete=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent = True
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
        """Returns the code of an error that ended the answer midway."""
        work = asyncio.create_task(self._answer(writer))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((work, gone, self._drain.expired), return_when="FIRST_COMPLETED")
            # After the last byte the server reports a disconnect, whether or not the client stays.
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


class _Deferred(Response):
    """Stands for a response in the framework, and sends nothing."""

    def __init__(self, response: DisconnectingResponse) -> None:
        super().__init__()
        self._response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._response.due = True


def answering(state: MutableMapping[str, Any], response: Response) -> Response:
    """Notes a response that waits for engines, and returns what the framework sends in its place.

    `take_due` gives the response to the middleware that sends it. So a request that waits keeps
    nothing of the framework.
    """
    if not isinstance(response, DisconnectingResponse):
        return response
    state[RESPONSE] = response
    return _Deferred(response)


def take_due(state: MutableMapping[str, Any]) -> DisconnectingResponse | None:
    """Returns the response that the framework has come to send, once; None if there is none."""
    response: DisconnectingResponse | None = state.get(RESPONSE)
    return state.pop(RESPONSE) if response is not None and response.due else None


def check_client(state: MutableMapping[str, Any]) -> None:
    """Raises RequestFailed if the client of a request has left already."""
    channel: Channel | None = state.get(CHANNEL)
    if channel is not None and channel.has_left:
        raise RequestFailed(FailureCode.CANCELLED, "the client has left")


async def discard_unsent(state: MutableMapping[str, Any]) -> None:
    """Ends the requests of a response that was not sent."""
    response: DisconnectingResponse | None = state.pop(RESPONSE, None)
    if response is not None:
        await response.discard()


async def disconnected(receive: Receive) -> None:
    """Returns once the client has left. Expects that the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def stop(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels tasks and waits until they end; ignores how."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
