"""Writes one stream's events when their tokens arrive, without a task in between.

Waking a task for each token and sending through ASGI would cost several times as much. The stream's
task handles what needs waiting: a slow client, the end, a failure.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial

from ..openai.answers import Answer, OpenAIAnswer
from ..queue_client.ports import Delta, Listenable, Write
from ..queue_client.run import Run
from ..streaming.sse import EventStream, TextEvent, event
from ..telemetry.observation import Observation


@dataclass(slots=True, kw_only=True)
class DirectStream:
    """Writes events until the stream's task must act. After that, the task calls `push` again.

    Without `observation` its pieces are not counted.
    """

    generation: Listenable
    run: Run
    answer: Answer
    stream: EventStream
    observation: Observation | None
    _text_events: dict[int, TextEvent] = field(default_factory=dict)
    _over: asyncio.Future[None] | None = None

    async def push(self) -> None:
        """Writes events; returns when the task must act. Raises what making an event raises."""
        if not self.stream.ready:
            return
        self._over = asyncio.get_running_loop().create_future()
        self.generation.listen(self._make)
        try:
            if (write := self._make()) is not None:
                write()
            await self._over
        finally:
            self.generation.listen(None)
        await self.run.settle()

    def _make(self) -> Write | None:
        """Makes the events of what has arrived. Returns the function that writes them."""
        assert self._over is not None, "it listens only during `push`"
        if self._over.done():
            return None
        try:
            content, going = self._make_all()
        except Exception as error:  # noqa: BLE001 - raised again in the stream's task
            self._over.set_exception(error)
            return None
        return partial(self._write, self._over, content, going=going)

    def _write(self, over: asyncio.Future[None], content: bytes, *, going: bool) -> None:
        try:
            if content:
                self.stream.write(content)
        except Exception as error:  # noqa: BLE001 - raised again in the stream's task
            over.set_exception(error)
        else:
            if not going:
                over.set_result(None)

    def _make_all(self) -> tuple[bytes, bool]:
        """Returns the events, and False if the stream's task must act after them."""
        events: list[bytes] = []
        going = self.stream.ready
        while going and (delta := self.generation.take()) is not None:
            text = self._text(delta)
            events.append(self._any(delta) if text is None else text)
            going = delta.finish_reason is None and not self.run.unsettled
        return b"".join(events), going and not self.generation.ended

    def _text(self, delta: Delta) -> bytes | None:
        """Returns the event of a delta that has only text; None if it may have more."""
        make = self._text_events.get(delta.choice) or self._text_event(delta.choice)
        text = None if make is None else self.run.text(delta)
        if make is None or text is None:
            return None
        if self.observation is not None:
            self.observation.tokens(delta.choice, len(delta.token_ids))
        return make(text) if text else b""

    def _text_event(self, choice: int) -> TextEvent | None:
        if not isinstance(self.answer, OpenAIAnswer):
            return None
        made = self.answer.text_event(choice)
        if made is not None:
            self._text_events[choice] = made
        return made

    def _any(self, delta: Delta) -> bytes:
        piece = self.run.read(delta)
        if piece is None:
            return b""
        if self.observation is not None:
            self.observation.piece(piece)
        named = self.answer.named
        return b"".join([event(chunk, named=named) for chunk in self.answer.chunks(piece)])
