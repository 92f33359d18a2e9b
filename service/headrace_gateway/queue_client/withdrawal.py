"""Ends requests that wait for models that are no longer registered, which no engine would take."""

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


async def withdraw_removed(
    requests: Requests,
    engines: Callable[[str], Awaitable[Sequence[EngineStatus]]],
    removed: Callable[[str], bool],
) -> None:
    """Ends the requests of removed models; if Redis is unreachable, the next call does.

    `engines` lists the engines that a model still has: they drain, and end what they have begun.
    """
    for model in filter(removed, requests.models):
        message = f"The model {model[:200]!r} was removed while the request waited for it."
        try:
            gone = not await engines(model)
            await requests.withdraw(model, message, started=gone)
        except BackendUnavailable as error:
            extra = {"model": model, "error": str(error)}
            logger.warning(
                "redis unavailable, requests for a removed model not ended yet", extra=extra
            )
