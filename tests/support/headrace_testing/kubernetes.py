"""An API server in memory: kmock, extended by features of a real one: server-side apply that
creates, generated names, label selectors, generations and resource versions. Keeps no managed
fields: the ownership of fields is tested on a real cluster."""

import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import kmock
from aiohttp import web

from headrace_operator import names

Manifest = dict[str, Any]
NAMESPACE = "models"
READY_POD = [{"type": "Ready", "status": "True"}]

_KINDS = {
    "headrace.dev/v1alpha1/modelservices": "ModelService",
    "apps/v1/deployments": "Deployment",
    "apps/v1/statefulsets": "StatefulSet",
    # kopf waits for the next two fields, though it does not read them
    "v1/namespaces": "Namespace",
    "apiextensions.k8s.io/v1/customresourcedefinitions": "CustomResourceDefinition",
    "v1/pods": "Pod",
    "v1/services": "Service",
    "v1/serviceaccounts": "ServiceAccount",
    "v1/configmaps": "ConfigMap",
    "v1/secrets": "Secret",
    "v1/persistentvolumeclaims": "PersistentVolumeClaim",
    "v1/events": "Event",
    "v1/nodes": "Node",
    "policy/v1/poddisruptionbudgets": "PodDisruptionBudget",
    "networking.k8s.io/v1/networkpolicies": "NetworkPolicy",
    "autoscaling/v2/horizontalpodautoscalers": "HorizontalPodAutoscaler",
    "coordination.k8s.io/v1/leases": "Lease",
}


class ApiServer(kmock.KubernetesEmulator):
    """kmock with apply, selectors, versions. `refusals` are the codes and texts with which writes
    of a plural are refused."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.refusals: dict[str, tuple[int, str]] = {}
        self.written: list[tuple[str, str, Manifest]] = []
        self._numbers = itertools.count(1)
        for resource, kind in _KINDS.items():
            self.install(resource, kind)

    def install(self, resource: str, kind: str) -> None:
        """Serves a kind, as after its definition was created."""
        self.resources[resource] = kmock.ResourceInfo(
            kind=kind,
            singular=kind.lower(),
            namespaced=kind != "Node",
            verbs={"get", "list", "watch", "create", "patch", "update", "delete"},
        )

    async def _handle(self, request: Any) -> web.StreamResponse:
        if request.resource is None:
            return await super()._handle(request)
        if refused := self._refused(request):
            return refused
        if request.action == kmock.action.CREATE:
            self._complete(request.data)
        if request.method == "PUT":
            return await self._replaced(request)
        if request.action == kmock.action.UPDATE:
            if unchanged := self._unchanged(request):
                return unchanged
            self._note(request)
            applied = "apply-patch" in request.headers.get("Content-Type", "")
            if applied and self.find(request.resource.plural, request.name) is None:
                return await self._create(request)
        if request.action == kmock.action.LIST and "labelSelector" in request.params:
            return self._selected(request)
        return await super()._handle(request)

    def _refused(self, request: Any) -> web.Response | None:
        code, text = self.refusals.get(request.resource.plural, (0, ""))
        if not code or request.method == "GET":
            return None
        return web.json_response({"kind": "Status", "message": text}, status=code)

    async def _replaced(self, request: Any) -> web.Response:
        """Handles PUT, which kmock lacks.

        Refuses old resource versions, and for most kinds missing ones.
        """
        found = self.find(request.resource.plural, request.name)
        if found is None:
            return web.json_response({"message": "not found"}, status=404)
        version = request.data["metadata"].get("resourceVersion")
        unconditional = version is None and request.resource.plural == "secrets"
        if not unconditional and version != found["metadata"]["resourceVersion"]:
            return web.json_response({"message": "the object has been modified"}, status=409)
        self._note(request)
        key = (request.resource, request.namespace, request.name)
        self._objects[key].patch(request.data)
        return web.json_response(request.data)

    def _unchanged(self, request: Any) -> web.Response | None:
        """Handles a write that changes nothing: it makes no new version and no event."""
        found = self.find(request.resource.plural, request.name)
        if found is None or merged(found, request.data) != found:
            return None
        return web.json_response(found)

    def _note(self, request: Any) -> None:
        """Updates the resource version; writes of a spec also update the generation."""
        self.written.append((request.method, request.resource.plural, request.data))
        found = self.find(request.resource.plural, request.name)
        meta = request.data.setdefault("metadata", {})
        meta["resourceVersion"] = str(next(self._numbers))
        if found is not None and request.data.get("spec", found.get("spec")) != found.get("spec"):
            meta["generation"] = found["metadata"].get("generation", 1) + 1

    def _complete(self, body: Manifest) -> None:
        meta = body["metadata"]
        number = next(self._numbers)
        meta.setdefault("name", f"{meta.get('generateName', 'object-')}{number}")
        meta.setdefault("uid", f"uid-{number}")
        meta.setdefault("generation", 1)
        meta["resourceVersion"] = str(number)

    async def _create(self, request: Any) -> web.StreamResponse:
        self._complete(request.data)
        await self.store(request.resource, request.data)
        return web.json_response(request.data, status=201)

    async def store(self, resource: Any, body: Manifest) -> None:
        """Stores an object as if a user had created it."""
        meta = body["metadata"]
        key = (resource, meta.get("namespace"), meta["name"])
        if key in self._objects and self._objects[key].deleted:
            self._objects[key].create(body)
        else:
            self._objects[key] = body
        await self._buses[resource].put({"type": "ADDED", "object": body})

    def _selected(self, request: Any) -> web.Response:
        wanted = dict(pair.split("=", 1) for pair in request.params["labelSelector"].split(","))
        items = [
            body
            for body in self.all(request.resource.plural)
            if wanted.items() <= body["metadata"].get("labels", {}).items()
        ]
        return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}})

    def all(self, plural: str) -> list[Manifest]:
        return [
            json.loads(json.dumps(dict(found.raw)))
            for (resource, _, _), found in self._objects.items()
            if resource.plural == plural and not found.deleted
        ]

    def find(self, plural: str, name: str) -> Manifest | None:
        for (resource, _, known), found in self._objects.items():
            if (resource.plural, known) == (plural, name) and not found.deleted:
                body: Manifest = json.loads(json.dumps(dict(found.raw)))
                return body
        return None

    def conditions(self, name: str) -> dict[str, tuple[str, str]]:
        """The status and reason of each condition of a ModelService, by type."""
        body = self.find(names.PLURAL, name) or {}
        found = body.get("status", {}).get("conditions", ())
        return {raw["type"]: (raw["status"], raw["reason"]) for raw in found}

    def events(self) -> list[str]:
        return [body["reason"] for body in self.all("events")]


@dataclass(slots=True)
class User:
    """Plays a user with kubectl, and the cluster's own controllers."""

    server: ApiServer
    url: str
    session: Any = field(repr=False)

    async def create(self, body: Manifest) -> None:
        plural = "modelservices" if body["kind"] == names.KIND else f"{body['kind'].lower()}s"
        async with self.session.post(self._path(body["apiVersion"], plural), json=body) as reply:
            reply.raise_for_status()

    async def patch(
        self, api_version: str, plural: str, name: str, change: Mapping[str, Any], sub: str = ""
    ) -> None:
        target = f"{self._path(api_version, plural)}/{name}{sub}"
        headers = {"Content-Type": "application/merge-patch+json"}
        async with self.session.patch(target, json=change, headers=headers) as reply:
            reply.raise_for_status()

    async def add_node(self, name: str, *taints: str) -> None:
        """Adds a node with these taints."""
        spec = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec}
        async with self.session.post(f"{self.url}/api/v1/nodes", json=body) as reply:
            reply.raise_for_status()

    async def change_spec(self, name: str, change: Mapping[str, Any]) -> None:
        await self.patch(names.API_VERSION, names.PLURAL, name, {"spec": change})

    async def delete(self, api_version: str, plural: str, name: str) -> None:
        async with self.session.delete(f"{self._path(api_version, plural)}/{name}") as reply:
            reply.raise_for_status()

    def _path(self, api_version: str, plural: str) -> str:
        root = "apis" if "/" in api_version else "api"
        return f"{self.url}/{root}/{api_version}/namespaces/{NAMESPACE}/{plural}"


@asynccontextmanager
async def api_server() -> AsyncIterator[User]:
    import aiohttp

    async with ApiServer() as server, kmock.Server(server):
        async with aiohttp.ClientSession() as session:
            yield User(server, str(server.url).rstrip("/"), session)


def merged(old: Any, change: Any) -> Any:
    """The result of a JSON merge patch."""
    if not isinstance(old, dict) or not isinstance(change, dict):
        return change
    new = {key: merged(old.get(key), value) for key, value in change.items() if value is not None}
    kept = {key: value for key, value in old.items() if key not in change}
    return kept | new


def pod(
    name: str,
    service: str,
    *,
    ready: bool = True,
    track: str = names.STABLE,
    ip: str = "127.0.0.1",
    port: int = names.METRICS_PORT,
    node: str = "node",
    conditions: Sequence[Mapping[str, str]] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Manifest:
    """A running engine pod of a ModelService, with further labels."""
    if conditions is None:
        conditions = READY_POD if ready else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {**names.labels(service), names.TRACK: track, **(labels or {})},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {
            "nodeName": node,
            "containers": [
                {
                    "name": names.CONTAINER,
                    "ports": [{"name": names.METRICS_PORT_NAME, "containerPort": port}],
                }
            ],
        },
        "status": {"phase": "Running", "podIP": ip, "conditions": list(conditions)},
    }


def set_pod(service: str, index: int, rank: int, *, ready: bool = True) -> Manifest:
    """The pod of node `rank` of engine `index`, as its StatefulSet makes it."""
    labels = {names.POD_INDEX: str(index), names.NODE_RANK: str(rank)}
    return pod(f"{service}-engine-n{rank}-{index}", service, ready=ready, labels=labels)


def group_pod(service: str, index: int, rank: int, *, ready: bool = True) -> Manifest:
    """The pod of node `rank` of engine `index`, as LeaderWorkerSet makes it."""
    labels = {names.GROUP_INDEX: str(index), names.WORKER_INDEX: str(rank)}
    name = f"{service}-engine-{index}" + (f"-{rank}" if rank else "")
    return pod(name, service, ready=ready, labels=labels)
