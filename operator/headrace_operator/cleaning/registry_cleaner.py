"""Removes models from the registry whose ModelService is gone or serves another name now.

Level-triggered: checks all entries at intervals, and soon after a deletion. An entry is removed
after it was found twice without a ModelService, some time apart, and when no engine serves it any
more, since a terminating engine would register it again.
"""

import logging
import time
from collections.abc import Callable, Iterable

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.registry import ModelRegistry, RegisteredModel

from .. import names
from ..cluster.cluster import Cluster
from ..cluster.drain import EngineControl
from ..errors import ClusterError
from ..reconciliation.adapter_sync import AdapterSync
from ..reconciliation.canary_sync import CanarySync
from ..reconciliation.registrations import claimed_name, watched
from .periodic_task import PeriodicTask

logger = logging.getLogger(__name__)

WAIT = 10.0  # seconds between the two checks; a dead engine's status has expired then


class RegistryCleaner(PeriodicTask):
    """Removes entries, with the adapters and the canary's share of their ModelService.

    `namespace` is the watched one (None: all). `clock` is monotonic.
    """

    def __init__(
        self,
        cluster: Cluster,
        registry: ModelRegistry,
        directory: EngineControl,
        namespace: str | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        adapters: AdapterSync | None = None,
        canaries: CanarySync | None = None,
    ) -> None:
        super().__init__()
        self._canaries = canaries
        self._adapters = adapters
        self._cluster = cluster
        self._registry = registry
        self._directory = directory
        self._namespace = namespace
        self._clock = clock
        self._unclaimed_since: dict[RegisteredModel, float] = {}

    def _wait(self, interval: float) -> float:
        # Requests that wait for a model are answered only when it is removed.
        return min(interval, WAIT) if self._unclaimed_since else interval

    async def run_once(self) -> None:
        """Checks once. If Redis or the API server does not answer, the next check does its work."""
        try:
            await self._run_once()
        except (BackendUnavailable, ClusterError) as error:
            logger.warning("registry not cleaned, tried again", extra={"error": str(error)})

    async def _run_once(self) -> None:
        entries = (await self._registry.models()).values()
        # Listed after the registry: the ModelService of a registered model existed before.
        unclaimed = await self._unclaimed(entries)
        now = self._clock()
        since = {entry: self._unclaimed_since.get(entry, now) for entry in unclaimed}
        self._unclaimed_since = since
        for entry, first in since.items():
            if now - first >= WAIT and not await self._is_served(entry.name):
                if self._adapters is not None:
                    await self._adapters.remove(entry.name, entry.owner)
                if self._canaries is not None:
                    await self._canaries.remove(entry.name)
                await self._registry.remove(entry.name, entry.owner)
                text = {"model": entry.name, "owner": entry.owner}
                logger.info("model removed from the registry", extra=text)

    async def _unclaimed(self, entries: Iterable[RegisteredModel]) -> list[RegisteredModel]:
        ours = [entry for entry in entries if watched(entry.owner, self._namespace)]
        if not ours:
            return []
        found = await self._cluster.list(names.API_VERSION, names.KIND, self._namespace, {})
        claims = {
            (f"{body['metadata']['namespace']}/{body['metadata']['name']}", claimed_name(body))
            for body in found
        }
        return [entry for entry in ours if (entry.owner, entry.name) not in claims]

    async def _is_served(self, model: str) -> bool:
        engines = await self._directory.engines(model)
        return any(not engine.draining for engine in engines)
