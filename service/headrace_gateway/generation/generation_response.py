"""Answers one HTTP request from its generations, whole or streamed.

Decides which bytes are sent and in which order; the answer decides what they look like.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass

from headrace_common.errors import HeadraceError
from headrace_common.text.tokenizer import Tokenizer

from ..errors import ApiError, to_api_error, unavailable
from ..openai.answers import Answer
from ..queue_client.drain import Drain
from ..queue_client.ports import is_listenable
from ..queue_client.run import Accepted, Piece, Run, Usage, cancel_all
from ..resumable.event_ids import ResumableEvents
from ..streaming.disconnecting_response import Delivery, DisconnectingResponse, stop
from ..streaming.sse import RETRY, EventStream, Writer, encode, event
from ..telemetry.observation import Observation
from .direct_stream import DirectStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The data from which one request's answer is made.

    `resumable_id` is set for a request that continues without this response; `events` numbers its
    stream. `admits` says that this response queued the request and counts it.
    """

    tokenizer: Tokenizer
    choices_per_prompt: int
    answer: Answer
    observation: Observation
    stream: bool
    headers: Mapping[str, str]
    resumable_id: str | None = None
    events: ResumableEvents | None = None
    admits: bool = True


async def queued(
    queueing: Awaitable[Sequence[Accepted]], observation: Observation, *, admits: bool = True
) -> Sequence[Accepted]:
    """Waits until a request is in the queue; counts it if `admits`.

    Raises the error of a refusal, and counts it.
    """
    try:
        accepted = await queueing
    except HeadraceError as error:
        observation.rejected(error)
        raise
    if admits:
        low = any(each.request.priority > 0 for each in accepted)
        observation.admitted(len(accepted), low_priority=low)
    return accepted


class GenerationResponse(DisconnectingResponse):
    """The answer of one request's generations, whole or streamed."""

    def __init__(
        self, exchange: Exchange, accepted: Sequence[Accepted], delivery: Delivery, drain: Drain
    ) -> None:
        super().__init__(exchange.observation, delivery, drain)
        self._exchange = exchange
        tokenizer, per_prompt = exchange.tokenizer, exchange.choices_per_prompt
        self._runs = [
            Run(each, tokenizer, index * per_prompt) for index, each in enumerate(accepted)
        ]

    async def _leave(self, *, complete: bool) -> None:
        if not complete or self._exchange.resumable_id is not None:
            await cancel_all([run.accepted for run in self._runs])

    async def _cut_short(self, writer: Writer) -> None:
        resumable_id = self._exchange.resumable_id
        remedy = (
            "send it again"
            if resumable_id is None
            else f"read on at GET /v1/requests/{resumable_id}/events"
        )
        error = unavailable(f"This server is shutting down; {remedy}.", code="shutting_down")
        if not writer.started:
            raise error
        await writer.body(self._last_event(error), more=False)

    async def _answer(self, writer: Writer) -> str | None:
        try:
            if self._exchange.stream:
                return await self._stream(writer)
            await self._whole(writer)
        except HeadraceError as error:
            raise to_api_error(error) from error
        return None

    async def _whole(self, writer: Writer) -> None:
        answer = self._exchange.answer
        async for piece in self._pieces():
            answer.add(piece)
        content = encode(answer.whole(self._total()))
        await writer.whole(200, content, self._exchange.headers)

    async def _stream(self, writer: Writer) -> str | None:
        events = self._exchange.events
        stream = EventStream(writer, self._exchange.headers)
        if events is not None and events.caught_up:
            await stream.open(RETRY)
        # In streams with ids an empty line ends an event for some clients, even after a comment.
        end, request = b"\n" if events is None else b"", self._runs[0].accepted.request
        with self._delivery.keep_alives.of(
            stream, request.request_id, request.model, end=end, open_soon=events is None
        ):
            return await self._events(stream)

    async def _events(self, stream: EventStream) -> str | None:
        try:
            if self._exchange.events is None:
                await self._send_events(stream)
            else:
                await self._send_missing_events(stream, self._exchange.events)
        except (HeadraceError, ApiError) as error:
            if not stream.opened:
                raise
            # The status has been sent: the error can only travel in the stream.
            failure = error if isinstance(error, ApiError) else to_api_error(error)
            await cancel_all([run.accepted for run in self._runs])
            await stream.close(self._last_event(failure))
            return failure.code
        await stream.close(self._exchange.answer.done)
        return None

    async def _send_events(self, stream: EventStream) -> None:
        answer, pushed = self._exchange.answer, self._pushed(stream)
        async for piece in self._pieces():
            chunks = [event(chunk, named=answer.named) for chunk in answer.chunks(piece)]
            if chunks:
                await stream.send(b"".join(chunks))
            if pushed is not None:
                await pushed.push()
        for chunk in answer.closing(self._total()):
            await stream.send(event(chunk, named=answer.named))

    def _pushed(self, stream: EventStream) -> DirectStream | None:
        """Returns the object that writes most of the stream's events; None if `_pieces` must make
        each."""
        (run, *others), exchange = self._runs, self._exchange
        generation = run.accepted.generation
        if others or not is_listenable(generation):
            return None
        return DirectStream(
            generation=generation,
            run=run,
            answer=exchange.answer,
            stream=stream,
            observation=exchange.observation if exchange.admits else None,
        )

    async def _send_missing_events(self, stream: EventStream, events: ResumableEvents) -> None:
        """Sends the events after those that the client has, once these are known to fit."""
        answer = self._exchange.answer
        async for piece in self._pieces():
            missing = events.piece(piece, answer.chunks(piece))
            if missing:
                await stream.send(missing)
        for chunk in answer.closing(self._total()):
            missing = events.closing(chunk)
            if missing:
                await stream.send(missing)
        events.end()

    def _last_event(self, error: ApiError) -> bytes:
        answer = self._exchange.answer
        return event(answer.failure(error), named=answer.named)

    async def _pieces(self) -> AsyncIterator[Piece]:
        pieces = self._runs[0].pieces() if len(self._runs) == 1 else merged(self._runs)
        async for piece in pieces:
            if self._exchange.admits:
                self._exchange.observation.piece(piece)
            yield piece

    def _usage(self) -> Usage:
        return self._total() if self._exchange.admits else Usage()

    def _total(self) -> Usage:
        usage = Usage()
        for run in self._runs:
            usage.add(run.usage)
        return usage


async def merged(runs: Sequence[Run]) -> AsyncIterator[Piece]:
    """Yields the pieces of several runs as they arrive. The first failure ends all runs."""
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
        await stop(everyone, *tasks)
