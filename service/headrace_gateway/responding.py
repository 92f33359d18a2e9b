"""Answers one HTTP request from its generations: whole or streamed, cancelled when the client goes.

The engine is told as soon as nobody reads any more, whatever the reason: a disconnect (watched on
the socket, streaming or not), a reader that is too slow, or this gateway's own end.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace_common.errors import HeadraceError
from headrace_common.messages import GenerateRequest

from .admission import Accepted, Admission, Job, cancel_all
from .answers import Answer
from .drain import Drain
from .errors import ApiError, to_api_error, unavailable
from .observation import Observation
from .run import Piece, Run, Usage
from .sse import EventStream, Writer, encode, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How answers reach clients. Seconds."""

    keep_alive: float
    write_timeout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """All that one request's answer is made from."""

    job: Job
    requests: Sequence[GenerateRequest]
    answer: Answer
    observation: Observation
    stream: bool
    include_usage: bool
    headers: Mapping[str, str]


class GenerationResponse(Response):
    """A response that queues its request when it is sent, and ends it when it cannot be."""

    def __init__(
        self, exchange: Exchange, admission: Admission, delivery: Delivery, drain: Drain
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._admission = admission
        self._delivery = delivery
        self._drain = drain
        self._runs: list[Run] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        observation = self._exchange.observation
        error_type: str | None = "cancelled"
        writer = Writer(scope, send, self._delivery.write_timeout)
        try:
            error_type = await self._serve(writer, receive)
        except ApiError as error:
            error_type = error.code or error.kind
            raise
        except HeadraceError as error:
            error_type = error.code
            observation.rejected(error)
            raise
        finally:
            writer.close()
            observation.end(self._usage(), error_type)

    async def _serve(self, writer: Writer, receive: Receive) -> str | None:
        """The code of an error that ended the answer after it began."""
        accepted = await self._admission.submit(self._exchange.job, self._exchange.requests)
        self._exchange.observation.admitted(len(accepted))
        self._runs = self._start_runs(accepted)
        work = asyncio.create_task(self._answer(writer))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone, self._drain.expired), return_when="FIRST_COMPLETED")
            # After the last byte the server reports a disconnect whether the client stays or not.
            if not work.done() and not writer.ended:
                return await self._break_off(writer, work, client_left=gone.done())
            return await self._outcome(work)
        finally:
            complete = work.done() and not work.cancelled() and work.exception() is None
            await _stop(work, gone)
            if not complete:
                await cancel_all(accepted)

    async def _outcome(self, work: "asyncio.Task[str | None]") -> str | None:
        try:
            return await work
        except HeadraceError as error:
            raise to_api_error(error) from error

    async def _break_off(
        self, writer: Writer, work: "asyncio.Task[str | None]", *, client_left: bool
    ) -> str:
        await _stop(work)
        if client_left:
            self._exchange.observation.disconnected()
            return "slow_reader" if writer.slow_reader else "client_disconnected"
        error = unavailable("This server is shutting down; send it again.", code="shutting_down")
        if not writer.started:
            raise error
        await writer.body(event(error.body), more=False)
        return "shutting_down"

    async def _answer(self, writer: Writer) -> str | None:
        if self._exchange.stream:
            return await self._stream(writer)
        answer = self._exchange.answer
        async for piece in self._pieces():
            answer.add(piece)
        content = encode(answer.whole(self._usage()))
        await writer.whole(200, content, self._exchange.headers)
        return None

    async def _stream(self, writer: Writer) -> str | None:
        stream = EventStream(writer, keep_alive=self._delivery.keep_alive)
        await stream.open(self._exchange.headers)
        pings = asyncio.create_task(stream.keep_alive())
        try:
            return await self._events(stream)
        finally:
            await _stop(pings)

    async def _events(self, stream: EventStream) -> str | None:
        exchange = self._exchange
        request_id = exchange.requests[0].request_id
        try:
            async for piece in self._pieces():
                event_id = f"{request_id}:{self._tokens()}"
                chunks = [event(chunk, event_id) for chunk in exchange.answer.chunks(piece)]
                if chunks:
                    await stream.send(b"".join(chunks))
        except HeadraceError as error:
            # The status has been sent: the error can only travel in the stream.
            failure = to_api_error(error)
            await cancel_all([run.accepted for run in self._runs])
            await stream.close(event(failure.body))
            return failure.code
        if exchange.include_usage:
            await stream.send(event(exchange.answer.usage_chunk(self._usage())))
        await stream.close()
        return None

    def _start_runs(self, accepted: Sequence[Accepted]) -> list[Run]:
        tokenizer, per_prompt = self._exchange.job.model.tokenizer, self._exchange.job.sampling.n
        return [Run(each, tokenizer, index * per_prompt) for index, each in enumerate(accepted)]

    async def _pieces(self) -> AsyncIterator[Piece]:
        pieces = self._runs[0].pieces() if len(self._runs) == 1 else merged(self._runs)
        async for piece in pieces:
            self._exchange.observation.piece(piece)
            yield piece

    def _tokens(self) -> int:
        return sum(run.usage.completion_tokens for run in self._runs)

    def _usage(self) -> Usage:
        usage = Usage()
        for run in self._runs:
            usage.add(run.usage)
        return usage


async def merged(runs: Sequence[Run]) -> AsyncIterator[Piece]:
    """Pieces of several runs as they come. The first failure of one ends all."""
    queue: asyncio.Queue[Piece | None] = asyncio.Queue()

    async def pump(run: Run) -> None:
        async for piece in run.pieces():
            queue.put_nowait(piece)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    everyone = asyncio.gather(*tasks)
    everyone.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (piece := await queue.get()) is not None:
            yield piece
        await everyone
    finally:
        await _stop(everyone, *tasks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
