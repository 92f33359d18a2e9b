"""Writes the adapters of a ModelService to the queue's set, and reads which engines have them."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from headrace_common.errors import BackendUnavailable, BackendUnfit
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.adapters import (
    Adapter,
    AdapterError,
    AdapterReport,
    AdapterSet,
    AdapterState,
)

from ..desired.adapters import folders, in_queue
from ..spec.model_service import ModelService

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """One adapter of the spec: how many engines have it, and why others, or all, have not.

    `served` says that clients can use the name; perhaps still in an earlier version.
    """

    name: str
    served: bool
    engines: int
    message: str = ""


class AdapterSync:
    """Keeps the queue's sets as ModelServices say. `measure` measures Redis' clock for a model."""

    def __init__(self, control: AdapterControl, measure: Callable[[str], Awaitable[None]]) -> None:
        self._control = control
        self._measure = measure

    async def sync(self, service: ModelService) -> tuple[AdapterStatus, ...] | None:
        """Writes the set if it differs; returns the adapters' states, None if they are unknown."""
        if not in_queue(service.spec):
            return ()
        model, wanted = service.served_name, folders(service.spec)
        try:
            await self._measure(model)
            await self._control.declare(model, wanted, service.owner)
            known = await self._control.settle(model)
            reports = await self._control.reports(model) if wanted else {}
        except (BackendUnavailable, BackendUnfit, AdapterError) as error:
            extra = {"model_service": service.name, "error": str(error)}
            logger.warning("adapters not written to the queue", extra=extra)
            return None
        return tuple(_status(name, path, known, reports) for name, path in wanted.items())

    async def remove(self, model: str, owner: str) -> None:
        """Removes the adapters of a ModelService that is gone. Raises BackendUnavailable."""
        try:
            await self._measure(model)
            await self._control.declare(model, {}, owner)
        except AdapterError as error:
            extra = {"model": model, "error": str(error)}
            logger.warning("adapters not removed from the queue", extra=extra)


def _status(
    name: str, path: str, known: AdapterSet, reports: Mapping[str, AdapterReport]
) -> AdapterStatus:
    wanted = next(
        (
            each
            for each in reversed(known.adapters)
            if (each.name, each.path) == (name, path) and each.state is not AdapterState.RETIRED
        ),
        None,
    )
    served = name in known.ready()
    if wanted is None:
        return AdapterStatus(name, served, 0, "another change of the adapters is under way")
    return AdapterStatus(name, served, *_engines(wanted, reports))


def _engines(adapter: Adapter, reports: Mapping[str, AdapterReport]) -> tuple[int, str]:
    """The number of engines that have an adapter, and a reason why others have not."""
    has = sum(adapter.adapter_id in each.loaded for each in reports.values())
    reasons = [
        each.refused[adapter.adapter_id]
        for each in reports.values()
        if adapter.adapter_id in each.refused
    ]
    return has, reasons[0] if reasons else ""
