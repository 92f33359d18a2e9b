"""A node without a kubelet: its pods only pretend to run. They turn ready after some seconds, serve
nothing, and end at once when they are deleted."""

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from .api import path
from .kubectl import Manifest
from .sampling import Sampling

TAINT: dict[str, str] = {"key": "headrace.dev/fake", "value": "true", "effect": "NoSchedule"}
# What an engine's section of a ModelService says, so that its pods come to fake nodes.
PLACEMENT: dict[str, Any] = {
    "nodeSelector": {"headrace.dev/fake": "true"},
    "tolerations": [{"key": TAINT["key"], "operator": "Exists"}],
}
CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "200"}
ADDRESS = "192.0.2.1"  # of all pods: nothing listens there
RENEW_S = 10.0
PATCH = {"Content-Type": "application/strategic-merge-patch+json"}


@dataclass
class FakeNode(Sampling):
    """Exists while its block runs. A pod is ready `start_s` seconds after it was bound.

    `api` is a client of the API server.
    """

    INTERVAL_S = 0.1

    api: httpx.Client
    name: str
    start_s: float
    _bound: dict[str, float] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)
    _renewed: float = 0.0

    def __enter__(self) -> "FakeNode":
        labels = {"headrace.dev/fake": "true"}
        node = {"metadata": {"name": self.name, "labels": labels}, "spec": {"taints": [TAINT]}}
        self.api.post("/api/v1/nodes", json=node).raise_for_status()
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        for pod in self._pods():
            self._end(pod)
        self.api.delete(f"/api/v1/nodes/{self.name}").raise_for_status()

    def _sample(self) -> None:
        now = time.monotonic()
        if now - self._renewed >= RENEW_S:
            self._renew()
            self._renewed = now
        for pod in self._pods():
            uid = pod["metadata"]["uid"]
            bound = self._bound.setdefault(uid, now)
            if "deletionTimestamp" in pod["metadata"]:
                self._end(pod)
            elif uid not in self._ready and now - bound >= self.start_s:
                self._start(pod)
                self._ready.add(uid)

    def _pods(self) -> list[Manifest]:
        chosen = {"fieldSelector": f"spec.nodeName={self.name}"}
        answer = self.api.get("/api/v1/pods", params=chosen).raise_for_status()
        found: list[Manifest] = answer.json()["items"]
        return found

    def _renew(self) -> None:
        """Says that the node is ready, as a kubelet does."""
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Fake",
            "lastHeartbeatTime": _now(),
            "lastTransitionTime": _now(),
        }
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [ready]}
        self._patch(f"/api/v1/nodes/{self.name}/status", {"status": status})

    def _start(self, pod: Manifest) -> None:
        states = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": _now()}},
            }
            for container in pod["spec"]["containers"]
        ]
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": _now()}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        status = {
            "phase": "Running",
            "podIP": ADDRESS,
            "startTime": _now(),
            "conditions": conditions,
            "containerStatuses": states,
        }
        self._patch(f"{_path(pod)}/status", {"status": status})

    def _end(self, pod: Manifest) -> None:
        answer = self.api.delete(_path(pod), params={"gracePeriodSeconds": 0})
        if answer.status_code != httpx.codes.NOT_FOUND:
            answer.raise_for_status()

    def _patch(self, at: str, patch: Manifest) -> None:
        """Changes an object, unless it was deleted meanwhile."""
        answer = self.api.patch(at, json=patch, headers=PATCH)
        if answer.status_code != httpx.codes.NOT_FOUND:
            answer.raise_for_status()


def _path(pod: Manifest) -> str:
    return path(pod["metadata"]["namespace"], "pods", pod["metadata"]["name"])


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
