"""The small objects beside the workloads: Service, budget, account, claim, monitor."""

from typing import Any

from .. import names
from ..spec.model_service import ModelService
from .metadata import metadata

Manifest = dict[str, Any]


def service(owner: ModelService) -> Manifest:
    """A headless Service for scrapers, and for the nodes of an engine to find each other. Engines
    pull requests and receive none."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, names.service(owner.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(owner.name),
            "ports": [
                {
                    "name": names.METRICS_PORT_NAME,
                    "port": names.METRICS_PORT,
                    "protocol": "TCP",
                    "targetPort": names.METRICS_PORT_NAME,
                }
            ],
        },
    }


def service_account(owner: ModelService) -> Manifest:
    """A service account without rights, and without a token in the pods."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(owner, names.service_account(owner.name)),
        "automountServiceAccountToken": False,
    }


def disruption_budget(owner: ModelService) -> Manifest:
    """A budget that lets engines leave a drained machine one at a time; the others take over their
    requests. An engine that has lost one of several pods counts as gone, since the others are not
    ready."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(owner, names.disruption_budget(owner.name)),
        "spec": {
            "maxUnavailable": 1,
            # An engine that is not ready has no work, so it must not block a node's drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.selector(owner.name)},
        },
    }


def cache_claim(owner: ModelService) -> Manifest | None:
    """The claim for downloads and kernels, if they are to outlive a pod."""
    cache = owner.spec.engine.cache
    if not cache.persistent:
        return None
    spec: Manifest = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": cache.size}},
    }
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(owner, names.cache_claim(owner.name)),
        "spec": spec,
    }


def service_monitor(owner: ModelService) -> Manifest | None:
    """A ServiceMonitor for the Prometheus operator; None unless the ModelService asks for one."""
    monitoring = owner.spec.monitoring
    if not monitoring.service_monitor:
        return None
    meta = metadata(owner, names.service_monitor(owner.name))
    meta["labels"] = {**monitoring.labels, **meta["labels"]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": names.selector(owner.name)},
            "endpoints": [
                {
                    "port": names.METRICS_PORT_NAME,
                    "path": "/metrics",
                    "interval": f"{monitoring.interval_seconds}s",
                }
            ],
        },
    }
