"""Changes the adapters of models, and has those served that engines have loaded.

Gateways and commands use it. They need not know each other: each change replaces the set that was
read, or is tried again on the new one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from .adapters import (
    Adapter,
    AdapterError,
    AdapterReport,
    AdapterSet,
    AdapterSets,
    AdapterState,
    digest_reported,
    new_adapter,
)
from .base import EngineStatus

# Seconds for which an adapter that was removed stays loaded: longer than a request lives.
KEPT_S = 4200.0
POLL_S = 0.2

Engines = Callable[[str], Awaitable[Sequence[EngineStatus]]]
Change = Callable[[AdapterSet], AdapterSet]


class AdapterControl:
    """The adapters of all models. Raises BackendUnavailable.

    `engines` returns a model's engines, `clock` Unix seconds of Redis. An adapter that is removed
    stays loaded for `kept` seconds.
    """

    def __init__(
        self,
        sets: AdapterSets,
        engines: Engines,
        clock: Callable[[], float],
        *,
        kept: float = KEPT_S,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._sets = sets
        self._engines = engines
        self._clock = clock
        self._kept = kept
        self._sleep = sleep

    async def settle(self, model: str) -> AdapterSet:
        """Has adapters served that some engine has loaded, and forgets those that have expired.

        Returns the set.
        """
        while True:
            known = await self._sets.read(model)
            new = known.without_expired(self._clock())
            if known.loading:
                reports, until = await self.reports(model), self._clock() + self._kept
                for adapter in known.loading:
                    digest = digest_reported(adapter.adapter_id, reports.values())
                    if digest is not None:
                        new = new.confirmed(adapter.adapter_id, digest, until)
            if new is known or await self._sets.replace(model, known, new):
                return new

    async def load(
        self, model: str, adapter: Adapter, *, replaces: bool, patience: float
    ) -> Adapter:
        """Has the engines load an adapter, and returns it once it is served.

        `replaces` allows an adapter of the same name. Raises AdapterError, and then has changed
        nothing, if no engine has loaded it within `patience` seconds.
        """

        def add(known: AdapterSet) -> AdapterSet:
            names = {*known.ready(), *(each.name for each in known.loading)}
            if adapter.name in names and not replaces:
                raise AdapterError(f"the lora adapter {adapter.name!r} has already been loaded")
            return known.added(adapter)

        await self._change(model, add)
        served = None
        try:
            served = await self._served(model, adapter, time.monotonic() + patience)
        finally:
            if served is None:
                await self._change(model, lambda known: known.withdrawn(adapter.adapter_id))
        return served

    async def _served(self, model: str, adapter: Adapter, until: float) -> Adapter:
        while True:
            found = (await self.settle(model)).find(adapter.adapter_id)
            if found is None:
                raise AdapterError(f"another change has removed {adapter.name!r}: load it again")
            if found.state is not AdapterState.LOADING:
                return found
            if reason := await self._refusal(model, adapter.adapter_id):
                raise AdapterError(reason)
            if time.monotonic() >= until:
                raise AdapterError(
                    f"no engine of {model} has loaded the adapter yet: start one that loads "
                    "adapters (enable_lora, lora_dir), and load it again"
                )
            await self._sleep(POLL_S)

    async def _refusal(self, model: str, adapter_id: str) -> str | None:
        """The reason why no engine has an adapter, if all engines that take work refuse it."""
        working = await self._working(model)
        reports = await self._sets.reports(model, working)
        reasons = [
            each.refused[adapter_id] for each in reports.values() if adapter_id in each.refused
        ]
        return reasons[0] if working and len(reasons) == len(working) else None

    async def unload(self, model: str, name: str) -> None:
        """Serves an adapter no longer. Raises AdapterError if there is none of that name."""

        def remove(known: AdapterSet) -> AdapterSet:
            new = known.retired(name, self._clock() + self._kept)
            if new is known:
                raise AdapterError(f"the lora adapter {name!r} cannot be found")
            return new

        await self._change(model, remove)

    async def declare(self, model: str, wanted: Mapping[str, str], by: str) -> AdapterSet:
        """Has the adapters in `wanted` (folders by name) loaded, and no others of those that `by`
        has asked for.

        Returns the set at once. An adapter whose folder changes is served from its old one until
        an engine has loaded the new one. Raises AdapterError.
        """

        def change(known: AdapterSet) -> AdapterSet:
            new = known
            for each in known.adapters:
                if each.by != by or wanted.get(each.name) == each.path:
                    continue
                if each.state is AdapterState.LOADING:
                    new = new.withdrawn(each.adapter_id)
                elif each.state is AdapterState.READY and each.name not in wanted:
                    new = new.retired(each.name, self._clock() + self._kept)
            for name, path in wanted.items():
                if not new.serves_or_loads(name, path):
                    new = new.added(new_adapter(name, path, by, self._clock()))
            return new

        return await self._change(model, change)

    async def reports(self, model: str) -> Mapping[str, AdapterReport]:
        """The reports of a model's engines that take work."""
        return await self._sets.reports(model, await self._working(model))

    async def _working(self, model: str) -> list[str]:
        """The engines of a model that take work."""
        return [each.engine_id for each in await self._engines(model) if not each.draining]

    async def _change(self, model: str, change: Change) -> AdapterSet:
        """Changes a set, on the newest one."""
        while True:
            known = await self._sets.read(model)
            new = change(known)
            if new is known or await self._sets.replace(model, known, new):
                return new
