"""Stores the history of scaling in a ConfigMap, so that it survives a restart."""

import logging
from typing import Any

from .. import names
from ..cluster.cluster import Cluster
from ..desired.metadata import metadata
from ..errors import NotFound
from ..scaling.history import History
from ..spec.model_service import ModelService

logger = logging.getLogger(__name__)

SAVE_INTERVAL = 60.0
_KEY = "history.json"


class ScalingHistories:
    """The histories by ModelService: read once, written after changes and once a minute."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[str, str], History] = {}
        self._saved_at: dict[tuple[str, str], float] = {}

    async def load(self, service: ModelService) -> History:
        if service.key not in self._known:
            self._known[service.key] = await self._read(service)
        return self._known[service.key]

    async def save(self, service: ModelService, history: History, now: float) -> None:
        old = self._known.get(service.key, History())
        self._known[service.key] = history
        recent = now - self._saved_at.get(service.key, 0.0) < SAVE_INTERVAL
        if recent and history.changes == old.changes:
            return
        await self._cluster.apply(manifest(service, history))
        self._saved_at[service.key] = now

    def forget(self, key: tuple[str, str]) -> None:
        self._known.pop(key, None)
        self._saved_at.pop(key, None)

    async def _read(self, service: ModelService) -> History:
        try:
            found = await self._cluster.get(
                "v1", "ConfigMap", service.namespace, names.scaling_history(service.name)
            )
            return History.from_json(found["data"][_KEY])
        except NotFound:
            return History()
        except (KeyError, TypeError, ValueError) as error:
            logger.warning(
                "stored scaling history unreadable, begun with an empty one",
                extra={"model_service": service.name, "error": str(error)},
            )
            return History()


def manifest(service: ModelService, history: History) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, names.scaling_history(service.name)),
        "data": {_KEY: history.to_json()},
    }
