"""One engine behind one gateway, with collected traces and a short patience for slow clients."""

import resource
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from .processes import until
from .stack import MODEL, Stack
from .telemetry import Collector

CONTEXT = 16_384
# A request that would take many seconds, so that an early end is not a coincidence.
LONG = 12_000
MAX_CONNECTIONS = 1200
FILES = 8192
GATEWAY_FLAGS = (
    *("--header-timeout", "2", "--body-timeout", "2", "--write-timeout", "1"),
    *("--max-connections", str(MAX_CONNECTIONS)),
)
# Spans are sent soon after they end, metrics only on their port.
OTEL_ENV = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRICS_EXPORTER": "none"}


class SingleStack(Stack):
    """One engine and one gateway. The processes start at once; `until_ready` waits for them."""

    def __init__(self, checkpoint: Path, folder: Path, collector: Collector) -> None:
        _allow_files(FILES)
        env = {**OTEL_ENV, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        super().__init__(checkpoint, folder, env)
        self.collector = collector
        self.engine = self.add_engine()
        self.gateway = self.add_gateway(*GATEWAY_FLAGS)
        self._http = httpx.Client(base_url=self.gateway.url, timeout=60)

    def until_ready(self) -> None:
        self.await_engines(1)

    def close(self) -> None:
        self._http.close()
        super().close()

    def post(
        self, path: str, content: bytes, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        given = {"content-type": "application/json", **(headers or {})}
        return self._http.post(path, content=content, headers=given)

    def complete(self, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
        """Requests a completion of a few tokens, or what `fields` ask for."""
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, **fields}
        return self._http.post("/v1/completions", json=body, headers=headers)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.gateway.port), 60)

    def running(self) -> float:
        return self.engine.metric("headrace_engine_requests", 'state="running"')

    def output_tokens(self) -> float:
        """The number of output tokens that the engine has ever made."""
        return self.engine.metric("headrace_engine_tokens_total", 'type="output"')

    def until_clean(self) -> None:
        """Waits until no sequence, no KV block and no entry of the queue is held."""
        until(lambda: self.engine.idle, "the engine to hold no sequence and no block")
        until(self.queue_is_empty, "the queue to be empty")


def _allow_files(count: int) -> None:
    """Raises the limit of open files for thousands of sockets here and in child processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
