"""The vectors of some inputs, each a request in the queue, of which only some are there at a time.

So one client's thousand inputs neither fill the queue nor stand before everybody else's. Knows
neither HTTP nor who wants them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace_common.errors import FailureCode, QueueFull, RequestFailed
from headrace_common.messages import GenerateRequest

from .ports import Generation
from .watched import stop

IN_FLIGHT = 64
LONGEST_PAUSE_S = 1.0

Submit = Callable[[GenerateRequest], Awaitable[Generation]]
Made = Callable[[GenerateRequest, int], None]


def no_embedding() -> RequestFailed:
    """The failure of an engine that does not know embeddings, and made a token."""
    return RequestFailed(
        FailureCode.INTERNAL, "the model's engine is of a version that makes no embeddings"
    )


class Vectors:
    """`known` are the vectors that are there already, by their requests' ids.

    `made` is called with each request whose vector has come, and how many tokens of its prompt were
    cached. `clock` gives Unix seconds of Redis.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        submit: Submit,
        made: Made,
        known: Mapping[str, bytes],
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._submit = submit
        self._made = made
        self._clock = clock
        self._found = dict(known)
        self._generations: list[Generation] = []
        self._places = asyncio.Semaphore(IN_FLIGHT)

    @property
    def begun(self) -> bool:
        """Whether any of it is done or in the queue."""
        return bool(self._generations or self._found)

    async def all(self) -> list[bytes]:
        """In the order of their requests. Raises as the queue's client does, and RequestFailed."""
        missing = [each for each in self._requests if each.request_id not in self._found]
        tasks = [asyncio.create_task(self._embed(each)) for each in missing]
        try:
            await asyncio.gather(*tasks)
        finally:
            await stop(*tasks)
        return [self._found[each.request_id] for each in self._requests]

    async def cancel(self) -> None:
        """Ends what is in the queue, to the end even where the caller is being cancelled."""
        if self._generations:
            await asyncio.shield(asyncio.gather(*(each.cancel() for each in self._generations)))

    def leave(self) -> None:
        """Follows what is in the queue no longer; it goes on."""
        for generation in self._generations:
            generation.leave()

    async def _embed(self, request: GenerateRequest) -> None:
        async with self._places:
            generation = await self._queue(request)
            async for delta in generation:
                if delta.embedding is not None:
                    self._found[request.request_id] = delta.embedding
                    self._made(request, delta.cached_tokens)
                    return
        raise no_embedding()

    async def _queue(self, request: GenerateRequest) -> Generation:
        """Once one of them is in the queue, the others wait until there is room for them."""
        while True:
            try:
                generation = await self._submit(request)
            except QueueFull as error:
                if not self.begun or self._clock() * 1000 > request.deadline_ms:
                    raise
                await asyncio.sleep(min(error.retry_after, LONGEST_PAUSE_S))
            else:
                self._generations.append(generation)
                return generation
