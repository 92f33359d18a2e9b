"""Follows the adapters that engines load while they serve."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace_common.errors import BackendUnfit
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.adapters import (
    AdapterError,
    AdapterSet,
    AdapterSets,
    AdapterState,
)

logger = logging.getLogger(__name__)

# Seconds for which sets are kept that Redis has lost, until engines have written them again.
LOST_S = 90.0


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that is served: its model, and the version of its files."""

    model: str
    version: str


class LoadedAdapters:
    """The served adapters of all models by name, as of the last `refresh`.

    A set with an adapter that loads is read every time: the first gateway that finds an engine with
    it has it served. `now` returns Unix seconds of Redis; `clock` is monotonic.
    """

    def __init__(
        self,
        sets: AdapterSets,
        control: AdapterControl,
        now: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sets = sets
        self._control = control
        self._now = now
        self._clock = clock
        self._known: dict[str, AdapterSet] = {}
        self._missing_since: dict[str, float] = {}
        self._forbidden = False
        self.by_name: Mapping[str, LoadedAdapter] = {}

    async def refresh(self) -> None:
        """Reads what has changed. Raises BackendUnavailable.

        A Redis user of an older version may not read the sets; models are served nevertheless.
        """
        try:
            await self._refresh()
        except BackendUnfit as error:
            if not self._forbidden:
                logger.warning("sets of adapters cannot be read", extra={"error": str(error)})
            self._forbidden = True

    async def _refresh(self) -> None:
        versions = await self._sets.versions()
        for model, version in versions.items():
            known = self._known.get(model)
            if known is None or known.version != version or self._is_due(known):
                await self._settle(model)
        self._forget_missing(versions)
        self.by_name = {
            name: LoadedAdapter(model, adapter.digest)
            for model, known in sorted(self._known.items())
            for name, adapter in known.ready().items()
        }

    def _is_due(self, known: AdapterSet) -> bool:
        """Whether a set may have to be changed, although no process has changed it."""
        now = self._now()
        return bool(known.loading) or any(
            each.state is AdapterState.RETIRED and each.until <= now for each in known.adapters
        )

    async def _settle(self, model: str) -> None:
        try:
            self._known[model] = await self._control.settle(model)
        except AdapterError as error:
            extra = {"model": model, "error": str(error)}
            logger.warning("set of adapters unreadable, kept", extra=extra)

    def _forget_missing(self, versions: Mapping[str, str]) -> None:
        missing, now = self._known.keys() - versions.keys(), self._clock()
        self._missing_since = {m: self._missing_since.get(m, now) for m in missing}
        for model, since in self._missing_since.items():
            if now - since >= LOST_S:
                del self._known[model]
