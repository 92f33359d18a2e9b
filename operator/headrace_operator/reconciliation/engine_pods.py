"""Reads engines and their pods from the API server: readiness, addresses, starts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headrace_common.protocol.base import EngineStatus

from .. import names
from ..cluster.drain import EnginePod
from ..desired.workloads import WorkloadKind
from ..signals.signals import PodAddress

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine and its live pods, that of node 0 first. `name` is that pod's, there or not.

    `index` is the engine's number if it spans several `nodes`.
    """

    name: str
    pods: tuple[Manifest, ...]
    nodes: int = 1
    index: int | None = None

    @property
    def ready(self) -> bool:
        """Whether all its pods are there and ready."""
        return len(self.pods) == self.nodes and all(is_ready(pod) for pod in self.pods)

    @property
    def created(self) -> str:
        """The time when the last of its pods was created."""
        return max(str(pod["metadata"].get("creationTimestamp", "")) for pod in self.pods)

    @property
    def made(self) -> tuple[str, str]:
        """Identifies the engine until a pod of it is made anew."""
        return self.name, self.created

    @property
    def start_duration(self) -> float | None:
        """Seconds from its last pod's creation until all were ready; None if unknown."""
        times = [_ready_since(pod) for pod in self.pods]
        known = [time for time in times if time is not None]
        if len(known) < self.nodes:
            return None
        return max(0.0, (max(known) - datetime.fromisoformat(self.created)).total_seconds())


def engines(pods: Iterable[Manifest], kind: WorkloadKind, nodes: int) -> list[Engine]:
    """The engines of a ModelService's pods. Pods of another kind of workload, or of a node that is
    no longer wanted, belong to none: they are about to go."""
    labels = kind.group_labels
    if labels is None:
        single = (pod for pod in pods if _place(pod) is None)
        return [Engine(name=pod["metadata"]["name"], pods=(pod,)) for pod in single]
    groups: dict[int, dict[int, Manifest]] = {}
    for pod in pods:
        place = _place(pod, kind)
        if place is not None and place[1] < nodes:
            groups.setdefault(place[0], {})[place[1]] = pod
    return [
        Engine(
            name=_first_pod(next(iter(members.values())), kind, index),
            pods=tuple(pod for _, pod in sorted(members.items())),
            nodes=nodes,
            index=index,
        )
        for index, members in sorted(groups.items())
    ]


def _place(pod: Manifest, *kinds: WorkloadKind) -> tuple[int, int] | None:
    """The number of the pod's engine and its node rank; None if its engine has one pod."""
    found = pod["metadata"].get("labels", {})
    for kind in kinds or WorkloadKind:
        labels = kind.group_labels
        if labels is not None and all(found.get(label, "").isdigit() for label in labels):
            return int(found[labels[0]]), int(found[labels[1]])
    return None


def _first_pod(pod: Manifest, kind: WorkloadKind, index: int) -> str:
    return kind.first_pod(pod["metadata"]["labels"][names.MODEL_SERVICE], index)


def first_pods(engines: Iterable[Engine]) -> list[Manifest]:
    """The pods of node 0, in which the engines are."""
    return [pod for each in engines for pod in each.pods if pod["metadata"]["name"] == each.name]


def live(pods: Iterable[Manifest]) -> list[Manifest]:
    """Pods that have not ended and are not terminating."""
    return [
        pod
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    ]


def terminating(pods: Iterable[Manifest], kind: WorkloadKind) -> dict[str, float]:
    """Names of the engines with a pod that Kubernetes is about to end, and the shortest grace
    period of such a pod in seconds."""
    found: dict[str, float] = {}
    for pod in pods:
        if "deletionTimestamp" in pod["metadata"]:
            place = _place(pod, kind)
            name = pod["metadata"]["name"]
            name = name if place is None else _first_pod(pod, kind, place[0])
            grace = pod["metadata"].get("deletionGracePeriodSeconds", math.inf)
            found[name] = min(grace, found.get(name, math.inf))
    return found


def of_track(pods: Iterable[Manifest], track: str) -> list[Manifest]:
    return [pod for pod in pods if pod["metadata"].get("labels", {}).get(names.TRACK) == track]


def is_ready(pod: Mapping[str, Any]) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod.get("status", {}).get("conditions", ())
    )


def _ready_since(pod: Mapping[str, Any]) -> datetime | None:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "Ready" and "lastTransitionTime" in condition:
            return datetime.fromisoformat(condition["lastTransitionTime"])
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
    engines: Iterable[Engine],
    statuses: Sequence[EngineStatus],
    cached: Mapping[str, float],
) -> list[EnginePod]:
    """First pods with their engines' status; if a pod has two, that of the one that does not
    drain."""
    by_pod: dict[str, EngineStatus] = {}
    for status in sorted(statuses, key=lambda status: not status.draining):
        by_pod[names.pod_of_engine(status.engine_id)] = status
    return [
        EnginePod(
            name=each.name,
            ready=each.ready,
            created=each.created,
            status=by_pod.get(each.name),
            cached_blocks=cached.get(each.name, 0.0),
            index=each.index,
        )
        for each in engines
    ]
