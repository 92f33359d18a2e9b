"""Nodes that are about to end: their engines hand over their requests before that."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from headrace_common.errors import BackendUnavailable

from .. import names
from ..cluster.cluster import Cluster
from ..cluster.drain import EngineControl
from ..errors import ClusterError, NotFound
from .registrations import claimed_name

logger = logging.getLogger(__name__)

Manifest = Mapping[str, Any]

# Taints that say that a node ends, and the seconds until then. Without a limit, its pods are
# evicted and have as long as they ask for.
TAINTS: Mapping[str, float] = {
    "aws-node-termination-handler/spot-itn": 120.0,
    "aws-node-termination-handler/asg-lifecycle-termination": math.inf,
    "aws-node-termination-handler/scheduled-maintenance": math.inf,
    "cloud.google.com/impending-node-termination": 15.0,
    "node.cloudprovider.kubernetes.io/shutdown": 0.0,
    "karpenter.sh/disrupted": math.inf,
    "karpenter.sh/disruption": math.inf,
    "ToBeDeletedByClusterAutoscaler": math.inf,
}


def notice_of(taints: Iterable[Manifest]) -> float | None:
    """The seconds that a node with these taints has left; None if it stays."""
    known = (TAINTS.get(str(taint.get("key"))) for taint in taints)
    return min((seconds for seconds in known if seconds is not None), default=None)


class NodeNotices:
    """The nodes that are about to end. `namespace` is the watched one; None: all."""

    def __init__(self, cluster: Cluster, engines: EngineControl, namespace: str | None) -> None:
        self._cluster = cluster
        self._engines = engines
        self._namespace = namespace
        self._leaving: dict[str, float] = {}

    def of_pod(self, pod: Manifest) -> float | None:
        """The seconds that the node of a pod had left when that became known; None if it stays."""
        return self._leaving.get(str(pod.get("spec", {}).get("nodeName")))

    async def note(self, node: str, taints: Iterable[Manifest]) -> None:
        """Handles a change of a node: engines of one that is about to end are told at once.

        If that fails, the next reconciliation of their ModelServices tells them.
        """
        notice = notice_of(taints)
        if notice is None:
            self._leaving.pop(node, None)
            return
        if notice >= self._leaving.get(node, math.inf) and node in self._leaving:
            return
        self._leaving[node] = notice
        logger.info("node is about to end, its engines drain", extra={"node": node})
        try:
            await self._drain_engines(node, notice)
        except (BackendUnavailable, ClusterError) as error:
            extra = {"node": node, "error": str(error)}
            logger.warning("engines of a node not told yet that it ends", extra=extra)

    async def _drain_engines(self, node: str, notice: float) -> None:
        labels = {names.MANAGED_BY: names.FIELD_MANAGER, names.COMPONENT: "engine"}
        found = await self._cluster.list("v1", "Pod", self._namespace, labels)
        pods: dict[tuple[str, str], set[str]] = {}
        for pod in found:
            if pod.get("spec", {}).get("nodeName") == node:
                meta = pod["metadata"]
                owner = (meta["namespace"], meta["labels"][names.MODEL_SERVICE])
                pods.setdefault(owner, set()).add(meta["name"])
        for owner, own in pods.items():
            await self._drain_pods(*owner, own, notice)

    async def _drain_pods(self, namespace: str, name: str, pods: set[str], notice: float) -> None:
        try:
            body = await self._cluster.get(names.API_VERSION, names.KIND, namespace, name)
        except NotFound:
            return
        model = claimed_name(body)
        for status in await self._engines.engines(model):
            if names.pod_of_engine(status.engine_id) in pods:
                await self._engines.drain(status.engine_id, model, notice)
