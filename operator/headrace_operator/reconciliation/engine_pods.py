"""Reads engine pods from the API server: readiness, addresses, starts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace_common.protocol.base import EngineStatus

from .. import names
from ..cluster.drain import EnginePod
from ..signals.signals import PodAddress

Manifest = dict[str, Any]


def live(pods: Iterable[Manifest]) -> list[Manifest]:
    """Pods that have not ended and are not terminating."""
    return [
        pod
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    ]


def terminating(pods: Iterable[Manifest]) -> dict[str, float]:
    """Names of the pods that Kubernetes is about to end, and their grace periods in seconds."""
    found = [pod["metadata"] for pod in pods if "deletionTimestamp" in pod["metadata"]]
    return {meta["name"]: meta.get("deletionGracePeriodSeconds", math.inf) for meta in found}


def of_track(pods: Iterable[Manifest], track: str) -> list[Manifest]:
    return [pod for pod in pods if pod["metadata"].get("labels", {}).get(names.TRACK) == track]


def is_ready(pod: Mapping[str, Any]) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod.get("status", {}).get("conditions", ())
    )


def start_duration(pod: Mapping[str, Any]) -> float | None:
    """Seconds from the pod's creation until it was ready; None if unknown."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "Ready" and "lastTransitionTime" in condition:
            ready = datetime.fromisoformat(condition["lastTransitionTime"])
            created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
            return max(0.0, (ready - created).total_seconds())
    return None


def addresses(pods: Iterable[Manifest]) -> list[PodAddress]:
    """Metrics endpoints of the running pods with an address."""
    return [
        PodAddress(pod["metadata"]["name"], pod["status"]["podIP"], _metrics_port(pod))
        for pod in live(pods)
        if pod.get("status", {}).get("podIP") and pod["status"].get("phase") == "Running"
    ]


def _metrics_port(pod: Mapping[str, Any]) -> int:
    for container in pod.get("spec", {}).get("containers", ()):
        for port in container.get("ports", ()):
            if port.get("name") == names.METRICS_PORT_NAME:
                return int(port["containerPort"])
    return names.METRICS_PORT


def engine_pods(
    pods: Iterable[Manifest],
    statuses: Sequence[EngineStatus],
    cached: Mapping[str, float],
) -> list[EnginePod]:
    """Pods with their engines' status; if a pod has two, that of the one that does not drain."""
    by_pod: dict[str, EngineStatus] = {}
    for status in sorted(statuses, key=lambda status: not status.draining):
        by_pod[names.pod_of_engine(status.engine_id)] = status
    return [
        EnginePod(
            name=pod["metadata"]["name"],
            ready=is_ready(pod),
            created=pod["metadata"].get("creationTimestamp", ""),
            status=by_pod.get(pod["metadata"]["name"]),
            cached_blocks=cached.get(pod["metadata"]["name"], 0.0),
        )
        for pod in pods
    ]
