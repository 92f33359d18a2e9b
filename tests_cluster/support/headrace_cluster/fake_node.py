"""A node without a kubelet: its pods only pretend to run. They turn ready after some seconds, serve
nothing, and end at once when they are deleted."""

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from .kubectl import Manifest, run
from .sampling import Sampling

TAINT: dict[str, str] = {"key": "headrace.dev/fake", "value": "true", "effect": "NoSchedule"}
# What an engine's section of a ModelService says, so that its pods come to fake nodes.
PLACEMENT: dict[str, Any] = {
    "nodeSelector": {"headrace.dev/fake": "true"},
    "tolerations": [{"key": TAINT["key"], "operator": "Exists"}],
}
CAPACITY = {"cpu": "64", "memory": "256Gi", "pods": "200"}
RENEW_S = 10.0


@dataclass
class FakeNode(Sampling):
    """Exists while its block runs. A pod is ready `start_s` seconds after it was bound."""

    INTERVAL_S = 0.25

    name: str
    start_s: float
    address: str = "127.0.0.1"
    _bound: dict[str, float] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)
    _renewed: float = 0.0

    def __enter__(self) -> "FakeNode":
        labels = {"headrace.dev/fake": "true"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
            "spec": {"taints": [TAINT]},
        }
        run("kubectl", "apply", "-f", "-", stdin=json.dumps(node))
        super().__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        for pod in self._pods():
            self._end(pod)
        run("kubectl", "delete", "node", self.name, "--wait=false")

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
        chosen = f"spec.nodeName={self.name}"
        text = run(
            "kubectl", "get", "pods", "--all-namespaces", "--field-selector", chosen, "-o", "json"
        )
        found: list[Manifest] = json.loads(text)["items"]
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
        patch = json.dumps({"status": status})
        run("kubectl", "patch", "node", self.name, "--subresource=status", "--patch", patch)

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
            "podIP": self.address,
            "startTime": _now(),
            "conditions": conditions,
            "containerStatuses": states,
        }
        self._change(
            pod, "patch", "--subresource=status", "--patch", json.dumps({"status": status})
        )

    def _end(self, pod: Manifest) -> None:
        self._change(
            pod, "delete", "--grace-period=0", "--force", "--wait=false", "--ignore-not-found"
        )

    def _change(self, pod: Manifest, verb: str, *flags: str) -> None:
        place = ("--namespace", pod["metadata"]["namespace"])
        run("kubectl", verb, "pod", pod["metadata"]["name"], *place, *flags)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
