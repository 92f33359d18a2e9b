"""The parts of the queue's client that the gateway uses, so that routes and tests need no Redis."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeGuard

from headrace_common.protocol.base import (
    CanaryPlan,
    EngineStatus,
    QueuePosition,
    RequestStatus,
)
from headrace_common.wire.messages import GenerateRequest, Logprobs

Write = Callable[[], None]
Listener = Callable[[], Write | None]


class Delta(Protocol):
    """New tokens of one choice, in order and each once."""

    @property
    def choice(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Logprobs] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_token(self) -> int | None: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def embedding(self) -> bytes | None: ...
    @property
    def prompt_logprobs(self) -> bytes | None: ...


class Generation(Protocol):
    """One accepted request. Iterating raises RequestFailed if it ends without an answer."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def stop_choice(self, choice: int, tokens: int) -> None:
        """Ends this choice, of which the client is given `tokens`: a stop string was found."""

    async def cancel(self) -> None:
        """Cancels the request. Does nothing once it has ended."""

    def leave(self) -> None:
        """Stops following the request at this gateway; it continues for its other followers."""


class Listenable(Generation, Protocol):
    """A Generation that can be read by a callback, between two steps of iterating."""

    @property
    def ended(self) -> bool:
        """Whether no delta comes after those that can be taken now."""

    def take(self) -> Delta | None:
        """Returns the next delta; None if nothing has come."""

    def listen(self, listener: Listener | None) -> None:
        """Has `listener` called when deltas come and at the end, and then the function that it
        returns. Neither may raise."""


def is_listenable(generation: Generation) -> TypeGuard[Listenable]:
    """Whether the generation is Listenable as well."""
    return hasattr(generation, "listen")


class Client(Protocol):
    async def submit(self, request: GenerateRequest) -> Generation:
        """Queues a request. Raises QueueFull or BackendUnavailable."""


class RequestDirectory(Protocol):
    """The part of a GatewayQueue that knows all requests, whichever gateway follows them."""

    @property
    def gateway_id(self) -> str: ...

    async def gateway_alive(self, gateway_id: str) -> bool: ...

    async def request_status(self, request_id: str, model: str) -> RequestStatus | None: ...

    async def deliver_outcome(self, request_id: str, model: str) -> RequestStatus | None: ...

    async def cancel(self, request_id: str, model: str) -> None: ...

    async def forget(self, request_ids: Sequence[str], model: str) -> None: ...


class QueuePositions(Protocol):
    """The part of a GatewayQueue that tells how long a request may have to wait."""

    async def queue_positions(
        self, request_ids: Sequence[str], model: str
    ) -> list[QueuePosition | None]: ...


class EngineList(Protocol):
    """The part of a GatewayQueue that tells which engines serve a model."""

    async def engines(self, model: str) -> Sequence[EngineStatus]: ...

    async def canary_plan(self, model: str) -> CanaryPlan: ...
