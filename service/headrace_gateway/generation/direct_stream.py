"""Writes one stream's events when their tokens arrive, without a task in between.

Waking a task for each token and sending through ASGI would cost several times as much. The stream's
task handles what needs waiting: a slow client, the end, a failure.
"""

import asyncio
from dataclasses import dataclass, field

from ..openai.answers import Answer, OpenAIAnswer
from ..queue_client.ports import Delta, Listenable
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
        self.generation.listen(self._write)
        try:
            self._write()
            await self._over
        finally:
            self.generation.listen(None)
        await self.run.settle()

    def _write(self) -> None:
        assert self._over is not None, "it listens only during `push`"
        if self._over.done():
            return
        try:
            going = self._write_all()
        except Exception as error:  # noqa: BLE001 - raised again in the stream's task
            self._over.set_exception(error)
        else:
            if not going:
                self._over.set_result(None)

    def _write_all(self) -> bool:
        """Writes what has arrived. Returns False if the stream's task must act."""
        events: list[bytes] = []
        going = self.stream.ready
        while going and (delta := self.generation.take()) is not None:
            text = self._text(delta)
            events.append(self._any(delta) if text is None else text)
            going = delta.finish_reason is None and not self.run.unsettled
        content = b"".join(events)
        if content:
            self.stream.write(content)
        return going and not self.generation.ended

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
