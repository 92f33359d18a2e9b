"""Writes the canary's share of a model's requests to the queue, where gateways read it."""

import logging
from typing import Protocol

from headrace_common.errors import BackendUnavailable, BackendUnfit

from ..spec.model_service import ModelService

logger = logging.getLogger(__name__)


class CanaryShares(Protocol):
    """The shares in the queue. Raises BackendUnavailable."""

    async def set_percent(self, model: str, percent: float | None) -> None: ...


class CanarySync:
    """Keeps the shares as ModelServices say. Those of models without a canary are removed."""

    def __init__(self, shares: CanaryShares) -> None:
        self._shares = shares

    async def remove(self, model: str) -> None:
        """Removes the share of a ModelService that is gone. Raises BackendUnavailable."""
        await self._shares.set_percent(model, None)

    async def sync(self, service: ModelService) -> None:
        """Writes the share, best effort: the next reconciliation does it again."""
        canary = service.spec.canary
        percent = None if canary is None else canary.traffic_percent
        try:
            await self._shares.set_percent(service.served_name, percent)
        except (BackendUnavailable, BackendUnfit) as error:
            extra = {"model_service": service.name, "error": str(error)}
            logger.warning("share of a canary not written to the queue", extra=extra)
