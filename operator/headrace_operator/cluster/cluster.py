"""The client of the Kubernetes API; apart from it only kopf's watches use that API.

Objects are plain dictionaries. Every failure is a ClusterError; nothing is repeated here, because
the next reconciliation repeats it.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import ApiException

from .. import names
from ..errors import ClusterError, Conflict, NotFound, Refused, Unreachable

Manifest = dict[str, Any]

REQUEST_TIMEOUT = 20.0
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_CREATED = "application/json"

_PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
}


class Cluster:
    """One connection pool to the API server, as `configuration` names it. Close it at the end."""

    def __init__(self, configuration: Configuration) -> None:
        self._client: Any = ApiClient(configuration)  # its methods have no annotations

    async def close(self) -> None:
        await self._client.close()

    async def get(self, api_version: str, kind: str, namespace: str, name: str) -> Manifest:
        """An object. Raises NotFound if the object or its kind does not exist."""
        return await self._request("GET", path(api_version, kind, namespace, name))

    async def list(
        self, api_version: str, kind: str, namespace: str | None, labels: Mapping[str, str]
    ) -> list[Manifest]:
        """The objects with these labels in `namespace`; None: in all namespaces."""
        query = {"labelSelector": names.selector_text(labels)} if labels else {}
        found = await self._request("GET", path(api_version, kind, namespace), query=query)
        items: list[Manifest] = found.get("items", [])
        return items

    async def serves(self, api_version: str) -> bool:
        """Whether the cluster has this group and version of an API."""
        try:
            await self._request("GET", f"/apis/{api_version}")
        except NotFound:
            return False
        return True

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply; also resets fields that other clients have changed."""
        meta = manifest["metadata"]
        target = path(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"])
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self._request("PATCH", target, query=query, body=manifest, content=_APPLY)

    async def create(self, manifest: Manifest) -> Manifest:
        """Creates an object. Raises Conflict if it exists."""
        target = path(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"])
        return await self._request("POST", target, body=manifest, content=_CREATED)

    async def replace(self, manifest: Manifest) -> Manifest:
        """Replaces an object. Raises Conflict if it has changed since it was read."""
        meta = manifest["metadata"]
        target = path(manifest["apiVersion"], manifest["kind"], meta["namespace"], meta["name"])
        return await self._request("PUT", target, body=manifest, content=_CREATED)

    async def delete(self, api_version: str, kind: str, namespace: str, name: str) -> bool:
        """Deletes an object; False if it did not exist."""
        body = {"propagationPolicy": "Background"}
        try:
            target = path(api_version, kind, namespace, name)
            await self._request("DELETE", target, body=body, content=_CREATED)
        except NotFound:
            return False
        return True

    async def patch_status(self, namespace: str, name: str, status: Manifest) -> None:
        """Merges into a ModelService's status. Raises NotFound if the ModelService was deleted."""
        target = path(names.API_VERSION, names.KIND, namespace, name) + "/status"
        query = {"fieldManager": names.FIELD_MANAGER}
        await self._request("PATCH", target, query=query, body={"status": status}, content=_MERGE)

    async def annotate_pod(self, namespace: str, name: str, annotations: Mapping[str, str]) -> None:
        body = {"metadata": {"annotations": dict(annotations)}}
        await self._request("PATCH", path("v1", "Pod", namespace, name), body=body, content=_MERGE)

    async def event(
        self, owner: Mapping[str, Any], *, kind: str, reason: str, message: str
    ) -> None:
        """Writes a Kubernetes Event about a ModelService; `kind` is Normal or Warning."""
        await self.create(event_manifest(owner, kind, reason, message, datetime.now(UTC)))

    async def _request(
        self,
        method: str,
        target: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content: str | None = None,
    ) -> Manifest:
        host = self._client.configuration.host
        url = f"{host}{target}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "User-Agent": names.FIELD_MANAGER}
        headers |= await self._authorization()
        if content is not None:
            headers["Content-Type"] = content
        try:
            reply = await self._client.call_api(
                method, url, headers, body, _request_timeout=REQUEST_TIMEOUT
            )
            data = await reply.read()
        except ApiException as error:
            raise failure(
                error.status, f"{method} {target}: {error.body or error.reason}"
            ) from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            raise Unreachable(f"{method} {target}: {text}") from error
        if not 200 <= reply.status < 300:
            raise failure(reply.status, f"{method} {target}: {_message(data)}")
        found: Manifest = json.loads(data or b"{}")
        return found

    async def _authorization(self) -> dict[str, str]:
        """The bearer token, read again by the configuration when a service account's has rolled."""
        found = await self._client.configuration.auth_settings()
        return {auth["key"]: auth["value"] for auth in found.values() if auth["in"] == "header"}


def path(api_version: str, kind: str, namespace: str | None, name: str | None = None) -> str:
    """The URL path of a collection, or of one object in it."""
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    parts = [root]
    if namespace is not None:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(_PLURALS.get(kind, f"{kind.lower()}s"))
    if name is not None:
        parts.append(quote(name, safe=""))
    return "/".join(parts)


def failure(status: int | None, text: str) -> ClusterError:
    """The error for an answer of the API server."""
    if status == 404:
        return NotFound(text)
    if status == 409:
        return Conflict(text)
    if status is not None and 400 <= status < 500 and status not in (401, 408, 429):
        return Refused(text)
    return Unreachable(text)


def _message(data: bytes) -> str:
    """The API server's message, without the object's name."""
    try:
        body = json.loads(data)
    except ValueError:
        return data[:300].decode(errors="replace")
    return str(body.get("message", body)) if isinstance(body, dict) else str(body)


def event_manifest(
    owner: Mapping[str, Any], kind: str, reason: str, message: str, now: datetime
) -> Manifest:
    meta = owner["metadata"]
    stamp = now.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "generateName": f"{meta['name']}.",
            "namespace": meta["namespace"],
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta.get("uid", ""),
        },
        "type": kind,
        "reason": reason,
        "message": message[:1024],
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "reportingInstance": "",
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
