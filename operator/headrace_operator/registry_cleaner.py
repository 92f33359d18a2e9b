"""Removes models from the registry whose ModelService is gone or serves another name now.

Level-triggered: looks at all entries from time to time, and soon after a deletion. An entry goes
when it was found without a claim twice, some time apart, and no engine serves it any more: one on
its way out would register it again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.registry import ModelRegistry, RegisteredModel

from . import names
from .cluster import Cluster
from .drain import EngineDirectory
from .errors import ClusterError
from .registrations import claimed_name, watched

logger = logging.getLogger(__name__)

WAIT = 10.0  # seconds between the two looks; a dead engine's status has lapsed then
SOON = 1.0  # seconds between any two looks


class RegistryCleaner:
    """`namespace` is the one that the operator watches; None: every one. `clock` is monotonic."""

    def __init__(
        self,
        cluster: Cluster,
        registry: ModelRegistry,
        directory: EngineDirectory,
        namespace: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._registry = registry
        self._directory = directory
        self._namespace = namespace
        self._clock = clock
        self._unclaimed_since: dict[RegisteredModel, float] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """A ModelService was deleted."""
        self._wake.set()

    async def run(self, interval: float) -> None:
        """Looks every `interval` seconds, and when woken, until it is cancelled."""
        while True:
            self._wake.clear()
            await self.look()
            await asyncio.sleep(min(SOON, interval))
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._wake.wait()

    async def look(self) -> None:
        """One look. Where Redis or the API server does not answer, the next one makes up for it."""
        try:
            await self._look()
        except (BackendUnavailable, ClusterError) as error:
            logger.warning("registry of models not cleaned", extra={"error": str(error)})

    async def _look(self) -> None:
        entries = (await self._registry.models()).values()
        # Listed after: what is registered had its ModelService before.
        unclaimed = await self._unclaimed(entries)
        now = self._clock()
        since = {entry: self._unclaimed_since.get(entry, now) for entry in unclaimed}
        self._unclaimed_since = since
        for entry, first in since.items():
            if now - first >= WAIT and not await self._is_served(entry.name):
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
