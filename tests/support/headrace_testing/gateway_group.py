"""Several gateways that keep requests, on one queue."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from headrace_common.protocol.base import QueueLimits
from headrace_gateway.http.app import AppDependencies, DurableStores, create_app
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.client import ClientConfig, GenerationClient
from headrace_gateway.settings import GatewaySettings

from .backends import MODEL, Backend
from .gateway import running

CONFIG = ClientConfig(beat_interval=0.05, silence=1.0, recheck=0.2, longest_recheck=0.5)


class GatewayGroup:
    """Gateways on one queue.

    `window` is the number of seconds for which a kept request runs without a client.
    """

    def __init__(self, backend: Backend, served: Models, window: float, **fields: Any) -> None:
        self.backend = backend
        self._served = served
        self._settings = GatewaySettings(
            port=0,
            drain_timeout=0,
            resume_window=window,
            keep_alive_interval=0.01,
            **fields,
        )
        self.limits = QueueLimits()
        self.ports: dict[str, int] = {}

    @asynccontextmanager
    async def gateway(self, name: str) -> AsyncIterator[httpx.AsyncClient]:
        """Serves until the block is left; yields an HTTP client of the gateway."""
        queue = self.backend.gateway(name)
        client = GenerationClient(queue, self.limits, config=CONFIG)
        await client.start()
        deps = AppDependencies(
            served=self._served,
            client=client,
            queue=queue,
            durable=DurableStores(self.backend.request_store(), queue, self.backend.accounts()),
        )
        app: ASGIApp = create_app(self._settings, deps)
        async with running(app, self._settings) as (_, port):  # type: ignore[arg-type]
            self.ports[name] = port
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                yield http
        await client.close()

    async def is_idle(self) -> bool:
        depth = await self.backend.gateway("observer").depth(MODEL)
        return depth.waiting == 0 and depth.pending == 0
