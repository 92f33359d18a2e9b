"""Gateways that keep files and run batches, over one Valkey with a fake engine."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.redis.memory import RedisMemory
from headrace_gateway.batches.assembly import open_storage
from headrace_gateway.http.app import AppDependencies, DurableStores, create_app
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.client import ClientConfig, GenerationClient
from headrace_gateway.settings import GatewaySettings

from .backends import MODEL, OverRedis
from .gateway import running
from .waiting import eventually

CONFIG = ClientConfig(beat_interval=0.05, silence=1.0, recheck=0.2, longest_recheck=0.5)
FINAL = {"completed", "failed", "expired", "cancelled"}


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """A request of a batch's input file."""
    fields = {"model": MODEL, "prompt": [5, 6], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def parsed(content: bytes) -> dict[str, dict[str, Any]]:
    """The lines of an output file by their custom ids, each of which must occur once."""
    lines = [json.loads(one) for one in content.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines), "a line has two results"
    return found


class BatchClient:
    """One client of one gateway. `headers` are sent with every request."""

    def __init__(self, http: httpx.AsyncClient, **headers: str) -> None:
        self.http = http
        self._headers = headers

    async def upload(self, content: bytes, **fields: str) -> httpx.Response:
        return await self.http.post(
            "/v1/files",
            files={"file": ("in.jsonl", content)},
            data={"purpose": "batch", **fields},
            headers=self._headers,
        )

    async def get(self, path: str, **query: Any) -> httpx.Response:
        return await self.http.get(path, params=query, headers=self._headers)

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self.http.post(path, json=body, headers=self._headers)

    async def delete(self, path: str) -> httpx.Response:
        return await self.http.delete(path, headers=self._headers)

    async def begin(self, lines: Sequence[Any], **fields: Any) -> str:
        """The id of a new batch of these requests."""
        uploaded = await self.upload(jsonl(lines))
        assert uploaded.status_code == 200, uploaded.text
        body = {
            "input_file_id": uploaded.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            **fields,
        }
        created = await self.post("/v1/batches", body)
        assert created.status_code == 200, created.text
        batch_id: str = created.json()["id"]
        return batch_id

    async def batch(self, batch_id: str) -> dict[str, Any]:
        body: dict[str, Any] = (await self.get(f"/v1/batches/{batch_id}")).json()
        return body

    async def ended(self, batch_id: str) -> dict[str, Any]:
        """The batch once it has ended."""

        async def over() -> bool:
            return (await self.batch(batch_id))["status"] in FINAL

        await eventually(over)
        return await self.batch(batch_id)

    async def content(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        if file_id is None:
            return {}
        return parsed((await self.get(f"/v1/files/{file_id}/content")).content)


@asynccontextmanager
async def batch_gateway(
    backend: OverRedis, served: Models, name: str, *, keys: KeyFile | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway of this name over the queue of `backend`."""
    chosen = GatewaySettings(port=0, drain_timeout=0, **settings)
    queue = backend.gateway(name)
    client = GenerationClient(queue, QueueLimits(), config=CONFIG)
    await client.start()
    deps = AppDependencies(
        served=served,
        client=client,
        queue=queue,
        keys=keys,
        durable=DurableStores(
            backend.request_store(),
            queue,
            backend.accounts(),
            RedisMemory(backend.connection).read,
        ),
        storage=open_storage(backend.connect(), name),
    )
    async with running(create_app(chosen, deps), chosen) as (_, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield http
    await client.close()
