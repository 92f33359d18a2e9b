"""Engine pods as the API server shows them: readiness, addresses, and what is wrong with them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from headrace_common.protocol.base import EngineStatus

from . import names
from .drain import EnginePod
from .signals import PodAddress

Manifest = dict[str, Any]

CRASHES = 2  # restarts after which a container that is not ready counts as crashing
# Waiting states of a container that do not pass by themselves.
_BAD_WAITS = frozenset(
    {
        *("CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "InvalidImageName"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    }
)


def live(pods: Iterable[Manifest]) -> list[Manifest]:
    """Pods that are neither over nor on their way out."""
    return [
        pod
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        and pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    ]


def of_track(pods: Iterable[Manifest], track: str) -> list[Manifest]:
    return [pod for pod in pods if pod["metadata"].get("labels", {}).get(names.TRACK) == track]


def is_ready(pod: Mapping[str, Any]) -> bool:
    return any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod.get("status", {}).get("conditions", ())
    )


def start_duration(pod: Mapping[str, Any]) -> float | None:
    """Seconds from the pod's creation until it was ready; None where the API does not say."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "Ready" and "lastTransitionTime" in condition:
            ready = datetime.fromisoformat(condition["lastTransitionTime"])
            created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
            return max(0.0, (ready - created).total_seconds())
    return None


def addresses(pods: Iterable[Manifest]) -> list[PodAddress]:
    """Metrics endpoints of the pods that have an address and run."""
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
    """Pods with what their engines tell; of two engines of one pod the one that does not drain."""
    told: dict[str, EngineStatus] = {}
    for status in sorted(statuses, key=lambda status: not status.draining):
        told[names.pod_of_engine(status.engine_id)] = status
    return [
        EnginePod(
            name=pod["metadata"]["name"],
            ready=is_ready(pod),
            created=pod["metadata"].get("creationTimestamp", ""),
            status=told.get(pod["metadata"]["name"]),
            cached_blocks=cached.get(pod["metadata"]["name"], 0.0),
        )
        for pod in pods
    ]


def problem(pods: Iterable[Manifest]) -> tuple[str, str] | None:
    """(reason, message) of the first pod that cannot come up by waiting alone."""
    for pod in pods:
        if found := _unscheduled(pod) or _broken(pod):
            return found[0], f"pod {pod['metadata']['name']}: {found[1]}"
    return None


def _unscheduled(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("reason", "Unschedulable")), condition.get("message", "")
    return None


def _broken(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *_containers(status)):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _BAD_WAITS:
            parts = (waiting.get("message", ""), _last_end(container))
            return waiting["reason"], "; ".join(part for part in parts if part)
        if container.get("restartCount", 0) >= CRASHES and not container.get("ready"):
            return "CrashLoopBackOff", _last_end(container)  # it runs once more, for a moment
    return None


def _containers(status: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return tuple(status.get("containerStatuses", ()))


def _last_end(container: Mapping[str, Any]) -> str:
    """How its last run ended, with the last line that it wrote; nothing where it never ran."""
    ended = container.get("lastState", {}).get("terminated")
    if ended is None:
        return ""
    text = f"container {container.get('name')} ended with exit code {ended.get('exitCode')}"
    reason = ended.get("reason")
    if reason not in (None, "Error"):
        text += f" ({reason})"
    lines = str(ended.get("message") or "").splitlines()
    return f"{text}: {lines[-1][:400]}" if lines else text
