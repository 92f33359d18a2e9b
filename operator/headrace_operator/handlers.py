"""What kopf is asked to watch. Every event ends in a wake-up of its ModelService's task."""

import asyncio
from typing import Any

import kopf

from . import names
from .controller import Controller
from .reconciler import Reconciler
from .registry_cleaner import RegistryCleaner


def register(
    registry: kopf.OperatorRegistry,
    controller: Controller,
    reconciler: Reconciler,
    cleaner: RegistryCleaner,
    interval: float,
) -> None:
    """Adds the handlers to an explicit registry; kopf's global one stays empty.

    `interval` seconds are between two looks at the registry of models.
    """
    cleaning: list[asyncio.Task[None]] = []
    seen: dict[tuple[str, str], tuple[str, int]] = {}

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def model_service(
        type: str | None, namespace: str | None, name: str | None, body: kopf.Body, **_: Any
    ) -> None:
        """First listing, creation, change of the spec, deletion. Our own status wakes nobody."""
        key = (namespace or "", name or "")
        if type == "DELETED":
            seen.pop(key, None)
            controller.forget(key)
            reconciler.forget(key)
            cleaner.wake()
            return
        version = (body.metadata.get("uid", ""), int(body.metadata.get("generation", 0)))
        if seen.get(key) != version:
            seen[key] = version
            controller.wake(key)

    @kopf.on.event(
        "apps",
        "v1",
        "deployments",
        registry=registry,
        labels={names.MANAGED_BY: names.FIELD_MANAGER},
    )
    async def deployment(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        """Engines became ready or went, or somebody changed or deleted the Deployment."""
        controller.nudge((namespace or "", labels.get(names.MODEL_SERVICE, "")))

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        cleaning.append(asyncio.create_task(cleaner.run(interval), name="registry of models"))

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        """Before kopf waits for tasks that it takes for hung."""
        await controller.close()
        for task in cleaning:
            task.cancel()
        await asyncio.gather(*cleaning, return_exceptions=True)


def configure(settings: kopf.OperatorSettings) -> None:
    """One operator works at a time by its Lease, so kopf's peering is off, and with it its CRDs.

    Nothing is written on objects by kopf: no finalizer, no annotation, no Event.
    """
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.request_timeout = 30
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
