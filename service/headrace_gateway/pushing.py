"""One stream's events, written as their tokens come in, with no task in between.

A task that wakes up for each token, and the layers between it and the socket, would cost several
times what is done here. What needs waiting for is left to the task that began: a client that reads
too slowly, an ending, a failure.
"""

import asyncio
from dataclasses import dataclass

from .answers import Answer, OpenAIStream
from .observation import Observation
from .ports import Delta, Listened
from .run import Run
from .sse import EventStream, TextEvent, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushing:
    """What a stream is made from. `observation` None: its pieces are not counted."""

    generation: Listened
    run: Run
    answer: Answer
    stream: EventStream
    observation: Observation | None


class PushedStream:
    """For one task, which calls `push` again whenever it has dealt with what ended it."""

    def __init__(self, parts: Pushing) -> None:
        self._generation = parts.generation
        self._run = parts.run
        self._answer = parts.answer
        self._stream = parts.stream
        self._observation = parts.observation
        self._text_events: dict[int, TextEvent | None] = {}
        self._over: asyncio.Future[None] | None = None

    async def push(self) -> None:
        """Returns when it cannot go on alone. Raises what making an event does."""
        if not self._stream.ready:
            return
        self._over = asyncio.get_running_loop().create_future()
        self._generation.listen(self._write)
        try:
            self._write()
            await self._over
        finally:
            self._generation.listen(None)
        await self._run.settle()

    def _write(self) -> None:
        assert self._over is not None, "it listens only while it pushes"
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
        """Writes what has come, at once. Whether more may come that is as simple."""
        events: list[bytes] = []
        going = self._stream.ready
        while going and (delta := self._generation.take()) is not None:
            text = self._text(delta)
            events.append(self._any(delta) if text is None else text)
            going = delta.finish_reason is None and not self._run.unsettled
        content = b"".join(events)
        if content:
            self._stream.write(content)
        return going and not self._generation.ended

    def _text(self, delta: Delta) -> bytes | None:
        """The event of a delta that is nothing but tokens; None where it may be more."""
        make = self._text_event(delta.choice)
        new = None if make is None else self._run.text(delta)
        if make is None or new is None:
            return None
        if self._observation is not None:
            self._observation.tokens(delta.choice, new.tokens)
        return make(new.text) if new.text else b""

    def _text_event(self, choice: int) -> TextEvent | None:
        found = self._text_events.get(choice)
        if found is None and isinstance(self._answer, OpenAIStream):
            found = self._text_events[choice] = self._answer.text_event(choice)
        return found

    def _any(self, delta: Delta) -> bytes:
        piece = self._run.read(delta)
        if piece is None:
            return b""
        if self._observation is not None:
            self._observation.piece(piece)
        named = self._answer.named
        return b"".join([event(chunk, named=named) for chunk in self._answer.chunks(piece)])
