"""Ends requests that wait for models that are no longer registered: no engine would ever take
them."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import EngineStatus

logger = logging.getLogger(__name__)


class Requests(Protocol):
    """This gateway's requests in flight."""

    @property
    def models(self) -> set[str]: ...

    async def withdraw(self, model: str, message: str, *, started: bool) -> None: ...


class Withdrawal:
    """`engines` lists the engines that a model still has: they drain, and end what they have
    begun."""

    def __init__(
        self, requests: Requests, engines: Callable[[str], Awaitable[Sequence[EngineStatus]]]
    ) -> None:
        self._requests = requests
        self._engines = engines

    async def look(self, ended: Callable[[str], bool]) -> None:
        """Ends the requests of models for which `ended` is true; if Redis is away, the next call
        does."""
        for model in filter(ended, self._requests.models):
            message = f"The model {model[:200]!r} was removed while the request waited for it."
            try:
                gone = not await self._engines(model)
                await self._requests.withdraw(model, message, started=gone)
            except BackendUnavailable as error:
                extra = {"model": model, "error": str(error)}
                logger.warning(
                    "redis unavailable, requests for a removed model not ended yet", extra=extra
                )
