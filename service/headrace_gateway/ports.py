"""What the gateway asks of the queue's client, so that routes and tests need no Redis."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeGuard

from headrace_common.messages import GenerateRequest, Logprobs
from headrace_common.protocol.base import EngineStatus, Place, Standing


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
    """One accepted request. Iterating raises RequestFailed where it ends without an answer."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def stop_choice(self, choice: int) -> None:
        """This choice is complete: a stop string was found."""

    async def cancel(self) -> None:
        """Nobody wants the answer any more. Does nothing once it has ended."""

    def leave(self) -> None:
        """Ends it here; the request goes on, for whoever else follows it."""


class Listened(Generation, Protocol):
    """A Generation that can be read without a task that waits, between two steps of iterating."""

    @property
    def ended(self) -> bool:
        """Whether no more comes than what can be taken now."""

    def take(self) -> Delta | None:
        """The next news; None where nothing has come."""

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Has `listener` called at news and at the end. It must raise nothing."""


def can_be_heard(generation: Generation) -> TypeGuard[Listened]:
    """Whether it is Listened to as well."""
    return hasattr(generation, "listen")


class Client(Protocol):
    async def submit(self, request: GenerateRequest) -> Generation:
        """Queues a request. Raises QueueFull or BackendUnavailable."""


class Ledger(Protocol):
    """The part of a GatewayQueue that knows requests whoever follows them."""

    @property
    def gateway_id(self) -> str: ...

    async def gateway_alive(self, gateway_id: str) -> bool: ...

    async def standing(self, request_id: str, model: str) -> Standing | None: ...

    async def give_out(self, request_id: str, model: str) -> Standing | None: ...

    async def cancel(self, request_id: str, model: str) -> None: ...

    async def forget(self, request_ids: Sequence[str], model: str) -> None: ...


class Line(Protocol):
    """The part of a GatewayQueue that tells how long a request may have to wait."""

    async def place(self, request_id: str, model: str) -> Place | None: ...


class EngineList(Protocol):
    """The part of a GatewayQueue that tells which engines serve a model."""

    async def engines(self, model: str) -> Sequence[EngineStatus]: ...
