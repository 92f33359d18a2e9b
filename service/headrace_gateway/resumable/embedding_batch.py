"""The vectors of several inputs, each a request in the queue, only some of them at a time.

One client's thousand inputs thus neither fill the queue nor delay all other clients. Knows neither
HTTP nor the vectors' reader.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace_common.errors import FailureCode, QueueFull, RequestFailed
from headrace_common.wire.messages import GenerateRequest

from ..queue_client.ports import Generation
from ..streaming.disconnecting_response import stop

IN_FLIGHT = 64
LONGEST_PAUSE_S = 1.0

Submit = Callable[[GenerateRequest], Awaitable[Generation]]
Made = Callable[[GenerateRequest, int], None]


def no_embedding() -> RequestFailed:
    """Returns the failure of an engine that does not know embeddings and generated a token."""
    return RequestFailed(
        FailureCode.INTERNAL, "the model's engine is of a version that makes no embeddings"
    )


class EmbeddingBatch:
    """Queues inputs and collects their vectors. `known` are vectors that exist, by their requests'
    ids.

    `made` is called with each request whose vector has come, and with the number of its cached
    tokens. `clock` gives Unix seconds of Redis.
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
        self._first: Generation | None = None

    @property
    def _missing(self) -> list[GenerateRequest]:
        return [each for each in self._requests if each.request_id not in self._found]

    @property
    def begun(self) -> bool:
        """Whether an input is done or in the queue."""
        return bool(self._generations or self._found)

    async def begin(self) -> None:
        """Queues the first missing input. Raises the same errors as the queue's client."""
        for request in self._missing[:1]:
            self._first = await self._queue(request)

    async def all(self) -> list[bytes]:
        """Returns the vectors in the order of their requests. Raises RequestFailed, and
        the same errors as the queue's client."""
        tasks = [asyncio.create_task(self._embed(each)) for each in self._missing]
        try:
            await asyncio.gather(*tasks)
        finally:
            await stop(*tasks)
        return [self._found[each.request_id] for each in self._requests]

    async def cancel(self) -> None:
        """Ends the queued inputs, even if the caller is cancelled in the meantime."""
        if self._generations:
            await asyncio.shield(asyncio.gather(*(each.cancel() for each in self._generations)))

    def leave(self) -> None:
        """Stops following the queued inputs, which continue."""
        for generation in self._generations:
            generation.leave()

    async def _embed(self, request: GenerateRequest) -> None:
        async with self._places:
            generation, self._first = self._first, None
            if generation is None:
                generation = await self._queue(request)
            async for delta in generation:
                if delta.embedding is not None:
                    self._found[request.request_id] = delta.embedding
                    self._made(request, delta.cached_tokens)
                    return
        raise no_embedding()

    async def _queue(self, request: GenerateRequest) -> Generation:
        """Queues a request. Once one input is queued, the others wait while the queue is full."""
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
