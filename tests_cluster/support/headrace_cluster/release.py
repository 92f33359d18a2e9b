"""An installed release of the chart, and what its users see of it."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from headrace_testing.processes import until

from .kubectl import CommandFailed, Kubectl, Manifest, run

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "headrace"
VALUES = CHART / "ci" / "small-values.yaml"
LABEL = "app.kubernetes.io/part-of=headrace"
NAMESPACE = "headrace-test-"
PATIENCE_S = 180.0
GONE_S = 420.0  # pods drain


@dataclass(frozen=True, slots=True)
class Release:
    """A release in its own namespace with restricted Pod Security. Must be installed first."""

    name: str = "headrace"
    namespace: str = field(default_factory=lambda: NAMESPACE + secrets.token_hex(3))

    @property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.namespace)

    @property
    def url(self) -> str:
        """The address of the ingress."""
        return os.environ.get("INGRESS_URL", "http://127.0.0.1:8080")

    def install(self, *flags: str) -> str:
        run("kubectl", "create", "namespace", self.namespace)
        level = "pod-security.kubernetes.io/enforce=restricted"
        run("kubectl", "label", "namespace", self.namespace, level)
        return self._helm("install", *flags)

    def upgrade(self, *flags: str) -> str:
        return self._helm("upgrade", *flags)

    def _helm(self, verb: str, *flags: str) -> str:
        values = ("--values", str(VALUES))
        place = ("--namespace", self.namespace, "--wait", "--timeout", "3m")
        tag = os.environ.get("IMAGE_TAG")
        image = () if tag is None else ("--set", f"image.tag={tag}")
        return run("helm", verb, self.name, str(CHART), *values, *place, *image, *flags)

    def test(self) -> str:
        """Runs `helm test`; returns its output and that of its pod. Raises CommandFailed."""
        place = ("--namespace", self.namespace, "--timeout", "2m")
        return run("helm", "test", self.name, *place, both=True)

    def uninstall(self) -> None:
        run("helm", "uninstall", self.name, "--namespace", self.namespace, "--wait")

    def reset(self) -> None:
        """Deletes all ModelServices, and waits until their engines and events are gone.

        Gateways list the models for some more seconds: the operator looks twice before it removes
        a model's entry.
        """
        self.kubectl("delete", "modelservices", "--all", "--wait=true")
        engines = "app.kubernetes.io/component=engine"
        until(lambda: not self.kubectl.names("pods", engines), "no engine to be left", PATIENCE_S)
        self.kubectl("delete", "events", "--all")

    def remove(self) -> None:
        """Deletes the release, if it still exists, and its namespace."""
        if run("helm", "list", "--namespace", self.namespace, "--short").strip():
            self.uninstall()
        delete_namespace(self.namespace)

    def models(self) -> list[str]:
        """The models that the API lists; none if no gateway answers."""
        try:
            answer = httpx.get(f"{self.url}/v1/models", timeout=10)
        except httpx.TransportError:
            return []
        return [model["id"] for model in answer.json()["data"]] if answer.is_success else []

    def pods(self, component: str) -> list[str]:
        """The chart's own pods of a component: gateway, operator or redis.

        Pods that are ending are left out.
        """
        selector = f"app.kubernetes.io/component={component}"
        return [
            pod["metadata"]["name"]
            for pod in self.kubectl.items("pods", selector)
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def until_rolled_out(self, workload: str) -> None:
        """Waits for a rollout. `workload` is deployment/NAME or statefulset/NAME."""
        self.kubectl("rollout", "status", workload, f"--timeout={PATIENCE_S:.0f}s")


def delete_namespace(name: str) -> None:
    """Deletes a namespace, if it exists, after its pods have ended: Kubernetes, which finds pods in
    one, looks again after half of their grace period."""

    def ended() -> bool:
        pods = Kubectl(name).items("pods")
        return all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods)

    until(ended, f"the pods of {name} to end", GONE_S)
    run("kubectl", "delete", "namespace", name, "--ignore-not-found", "--timeout=120s")


INSTALLED: list[Release] = []


def remove_left_releases() -> None:
    """Deletes the releases of test runs that were interrupted: a cluster has room for one."""
    for found in json.loads(run("helm", "list", "--all-namespaces", "--output", "json")):
        if found["namespace"].startswith(NAMESPACE):
            Release(found["name"], found["namespace"]).remove()


@contextmanager
def installation(*flags: str) -> Iterator[Release]:
    """Installs a release, which is in INSTALLED while the block runs; nothing of it is left
    afterwards. `flags` are flags of helm."""
    release = Release()
    INSTALLED.append(release)
    try:
        release.install(*flags)
        yield release
    finally:
        INSTALLED.remove(release)
        if "KEEP" not in os.environ:
            release.remove()


@dataclass(frozen=True, slots=True)
class Service:
    """A ModelService of a release, whose engines have a pod on each of `nodes`."""

    release: Release
    name: str
    nodes: int = 1

    @property
    def kubectl(self) -> Kubectl:
        return self.release.kubectl

    @property
    def selector(self) -> str:
        return f"headrace.dev/model-service={self.name}"

    @property
    def deployment(self) -> str:
        return f"{self.name}-engine"

    def read(self) -> Manifest:
        return self.kubectl.get("modelservices", self.name)

    @property
    def status(self) -> Manifest:
        found: Manifest = self.read().get("status", {})
        return found

    def condition(self, kind: str) -> Manifest:
        found = [c for c in self.status.get("conditions", ()) if c["type"] == kind]
        return found[0] if found else {}

    def patch(self, spec: Manifest) -> None:
        self.kubectl.patch("modelservice", self.name, {"spec": spec})

    def engines(self) -> list[str]:
        """The names of engine pods, of every node, that are not ending."""
        return sorted(
            pod["metadata"]["name"]
            for pod in self.kubectl.items("pods", self.selector)
            if "deletionTimestamp" not in pod["metadata"]
        )

    def until_ready(self, engines: int) -> None:
        """Waits for exactly `engines` engines, all ready, and the newest spec observed."""

        def settled() -> bool:
            found = self.read()
            status = found.get("status", {})
            return (
                status.get("observedGeneration") == found["metadata"]["generation"]
                and status.get("readyReplicas") == engines
                and status.get("replicas") == engines
                and self.condition("Progressing").get("status") == "False"
                and len(self.engines()) == engines * self.nodes
            )

        until(settled, f"{self.name} to have {engines} ready engines", PATIENCE_S)

    def delete(self) -> None:
        """Deletes the ModelService, and waits until all its objects are gone."""
        self.kubectl("delete", "modelservice", self.name, "--wait=true")
        until(lambda: not self.remains(), f"{self.name} to leave nothing behind", PATIENCE_S)

    def remains(self) -> list[str]:
        """The kinds and names of the objects that the operator has made for it."""
        found = []
        for kind in ("deployments", "statefulsets", "pods", "services", "serviceaccounts",
                     "configmaps", "poddisruptionbudgets", "networkpolicies"):  # fmt: skip
            found += [f"{kind}/{name}" for name in self.kubectl.names(kind, self.selector)]
        return found


def refusal(release: Release, manifest: Manifest) -> str:
    """The API server's message when it refuses a manifest."""
    try:
        release.kubectl.apply(manifest, "--dry-run=server")
    except CommandFailed as refused:
        return str(refused)
    raise AssertionError(f"accepted: {manifest}")


def serve(release: Release, manifest: Manifest) -> Service:
    """The ModelService of a manifest, once its engines are ready and the gateways list it."""
    release.kubectl.apply(manifest)
    spec = manifest["spec"]
    name = spec["model"]["servedName"]
    service = Service(release, manifest["metadata"]["name"], spec["engine"].get("nodes", 1))
    service.until_ready(spec["replicas"])
    until(lambda: name in release.models(), f"{name} to be listed", PATIENCE_S)
    return service
