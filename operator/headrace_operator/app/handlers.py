"""Registers kopf's handlers. Every event wakes the task of its ModelService."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import kopf

from .. import names
from ..reconciliation.node_notices import NodeNotices
from ..reconciliation.reconciler import Reconciler
from .controller import Controller


class BackgroundTask(Protocol):
    """A task that checks all ModelServices at intervals, and soon after it is woken."""

    def wake(self) -> None: ...

    async def run(self, interval: float) -> None: ...


def register(
    registry: kopf.OperatorRegistry,
    controller: Controller,
    reconciler: Reconciler,
    background_tasks: Sequence[BackgroundTask],
    interval: float,
    *,
    leader_worker_sets: bool,
) -> None:
    """Adds the handlers to an explicit registry; kopf's global one stays empty.

    Each of the `background_tasks` runs every `interval` seconds. `leader_worker_sets`: the cluster
    has this API.
    """
    running: list[asyncio.Task[None]] = []

    def wake_all() -> None:
        for each in background_tasks:
            each.wake()

    seen: dict[tuple[str, str], tuple[str, int]] = {}

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def model_service(
        type: str | None, namespace: str | None, name: str | None, body: kopf.Body, **_: Any
    ) -> None:
        """Handles the first listing, creation, changes of the spec and deletion, but not changes of
        the status."""
        key = (namespace or "", name or "")
        if type == "DELETED":
            seen.pop(key, None)
            controller.forget(key)
            reconciler.forget(key)
            wake_all()
            return
        version = (body.metadata.get("uid", ""), int(body.metadata.get("generation", 0)))
        if seen.get(key) != version:
            seen[key] = version
            controller.wake(key)
            wake_all()

    _watch_workloads(registry, controller, leader_worker_sets=leader_worker_sets)

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        running.extend(asyncio.create_task(each.run(interval)) for each in background_tasks)

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        """Ends all tasks before kopf waits for them and considers them hung."""
        await controller.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _watch_workloads(
    registry: kopf.OperatorRegistry, controller: Controller, *, leader_worker_sets: bool
) -> None:
    async def workload(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        """Handles changes of a workload: engines became ready or ended, or it was changed or
        deleted."""
        controller.nudge((namespace or "", labels.get(names.MODEL_SERVICE, "")))

    watched = [("apps/v1", "deployments"), ("apps/v1", "statefulsets")]
    if leader_worker_sets:
        watched.append((names.LEADER_WORKER_SETS, "leaderworkersets"))
    ours = {names.MANAGED_BY: names.FIELD_MANAGER}
    for api_version, plural in watched:
        kopf.on.event(api_version, plural, registry=registry, labels=ours)(workload)


def register_nodes(registry: kopf.OperatorRegistry, notices: NodeNotices) -> None:
    """Adds the handler of nodes."""

    @kopf.on.event("v1", "nodes", registry=registry)
    async def node(type: str | None, name: str | None, body: kopf.Body, **_: Any) -> None:
        """Handles changes of a node's taints, and its end."""
        taints = () if type == "DELETED" else body.spec.get("taints") or ()
        await notices.note(name or "", taints)


def configure(settings: kopf.OperatorSettings) -> None:
    """Configures kopf to write nothing on objects: no finalizer, no annotation, no Event.

    A Lease ensures that one operator works at a time, so kopf's peering and its CRDs are not used.
    """
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.request_timeout = 30
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
