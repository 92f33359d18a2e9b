"""Counts the tokens of requests in the queue for the limits of their keys.

It wraps the queue's client, so a request is charged until it has ended in the queue, even if its
HTTP connection has ended before. Requests of keys without limits pass unchanged.
"""

from collections.abc import AsyncIterator

from headrace_common.errors import HeadraceError
from headrace_common.wire.messages import GenerateRequest

from ..limits.rate_limits import Grant, RateLimits
from ..queue_client.ports import Client, Delta, Generation, Listenable, Listener, is_listenable


class MeteredClient:
    """A Client that meters the requests of keys with limits."""

    def __init__(self, client: Client, limits: RateLimits) -> None:
        self._client = client
        self._limits = limits

    async def submit(self, request: GenerateRequest) -> Generation:
        grant = self._limits.find(request.request_id)
        if grant is None:
            return await self._client.submit(request)
        try:
            generation = await self._client.submit(request)
        except HeadraceError:
            grant.refused = True
            raise
        grant.submit(request)
        if is_listenable(generation):
            return MeteredListenable(generation, request, grant, self._limits)
        return MeteredGeneration(generation, request, grant, self._limits)


class MeteredGeneration:
    """A Generation whose tokens are counted when they arrive."""

    def __init__(
        self, generation: Generation, request: GenerateRequest, grant: Grant, limits: RateLimits
    ) -> None:
        self._generation = generation
        self._request_id = request.request_id
        self._grant = grant
        self._limits = limits
        self._open = set(range(request.sampling.n))
        self._deltas: AsyncIterator[Delta] | None = None

    def __aiter__(self) -> AsyncIterator[Delta]:
        if self._deltas is None:
            self._deltas = aiter(self._generation)
        return self

    async def __anext__(self) -> Delta:
        assert self._deltas is not None, "aiter comes before anext"
        try:
            delta = await anext(self._deltas)
        except (StopAsyncIteration, HeadraceError):
            self._end()
            raise
        self._charge(delta)
        return delta

    async def stop_choice(self, choice: int, tokens: int) -> None:
        self._close(choice)
        await self._generation.stop_choice(choice, tokens)

    async def cancel(self) -> None:
        self._end()
        await self._generation.cancel()

    def leave(self) -> None:
        self._end()
        self._generation.leave()

    def _charge(self, delta: Delta) -> None:
        self._grant.receive(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._close(delta.choice)

    def _close(self, choice: int) -> None:
        self._open.discard(choice)
        if not self._open:
            self._end()

    def _end(self) -> None:
        self._limits.ended(self._grant, self._request_id)


class MeteredListenable(MeteredGeneration):
    """A MeteredGeneration that can be listened to."""

    def __init__(
        self, generation: Listenable, request: GenerateRequest, grant: Grant, limits: RateLimits
    ) -> None:
        super().__init__(generation, request, grant, limits)
        self._listened = generation

    @property
    def ended(self) -> bool:
        return self._listened.ended

    def take(self) -> Delta | None:
        delta = self._listened.take()
        if delta is not None:
            self._charge(delta)
        return delta

    def listen(self, listener: Listener | None) -> None:
        self._listened.listen(listener)
