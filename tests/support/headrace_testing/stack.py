"""A complete Headrace of real processes on loopback: Valkey, engines, gateways."""

import asyncio
import re
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headrace_common.protocol.base import EngineStatus
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.gateway import RedisGatewayQueue

from .processes import HeadraceProcess, Starter, start_program, until
from .valkey import ValkeyServer, free_port

MODEL = "tiny"
LEASE_S = 2.0


def _metric(port: int, name: str, labels: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    pattern = rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$"
    found = re.findall(pattern, text, re.MULTILINE)
    assert found, f"{name} is not exported:\n{text[:2000]}"
    return sum(float(value) for own, value in found if labels in own)


class EngineProcess(HeadraceProcess):
    """`python -m headrace_engine` with a metrics port."""

    def __init__(
        self,
        checkpoint: Path,
        redis_url: str,
        log: Path,
        *flags: str,
        model: str = MODEL,
        env: Mapping[str, str] | None = None,
        start: Starter = start_program,
    ) -> None:
        self.metrics_port = free_port()
        arguments = ["--model", str(checkpoint), "--served-model-name", model]
        arguments += ["--redis-url", redis_url, "--dtype", "float32", "--threads", "1"]
        arguments += ["--lease", str(LEASE_S), "--beat-interval", "0.5", "--num-blocks", "2048"]
        arguments += ["--metrics-port", str(self.metrics_port), *flags]
        super().__init__("headrace_engine", arguments, log, env, start)

    def metric(self, name: str, labels: str = "") -> float:
        """The sum of a metric's samples whose labels contain the text `labels`."""
        return _metric(self.metrics_port, name, labels)

    @property
    def idle(self) -> bool:
        """Whether there is no sequence and no used KV block."""
        return (
            self.metric("headrace_engine_requests") == 0
            and self.metric("headrace_engine_kv_blocks", 'state="used"') == 0
        )


class GatewayProcess(HeadraceProcess):
    """`python -m headrace_gateway` on a free port; without `checkpoint` for registered models."""

    def __init__(
        self,
        checkpoint: Path | None,
        redis_url: str,
        log: Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        start: Starter = start_program,
        port: int | None = None,
    ) -> None:
        self.port, self.metrics_port = port or free_port(), free_port()
        arguments = ["--redis-url", redis_url, "--port", str(self.port)]
        if checkpoint is not None:
            arguments += ["--model", str(checkpoint), "--served-model-name", MODEL]
        arguments += ["--metrics-port", str(self.metrics_port), *flags]
        super().__init__("headrace_gateway", arguments, log, env, start)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str, labels: str = "") -> float:
        """Like EngineProcess.metric."""
        return _metric(self.metrics_port, name, labels)

    @property
    def ready(self) -> bool:
        """Whether the gateway is ready; fails the test if the process has died."""
        if not self.alive:
            raise AssertionError(f"{self.name} ended:\n{self.log.read_text()[-4000:]}")
        return _ready(self.url)


class RedisServers(Protocol):
    """One Redis server, or several that work together, not yet started."""

    @property
    def url(self) -> str: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Stack:
    """Processes that serve one checkpoint; `close` ends them all. `env` extends their environment.

    Without `servers` there is one Valkey (`valkey`). `start` starts engines and gateways. Engines
    take from `queue_shards` of the model's queue.
    """

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        env: Mapping[str, str] | None = None,
        servers: RedisServers | None = None,
        start: Starter = start_program,
        queue_shards: int = 1,
    ) -> None:
        self._checkpoint = checkpoint
        self.queue_shards = queue_shards
        self._folder = folder
        self._env = env
        self._start = start
        self._count = 0
        self.servers = servers or ValkeyServer(folder / "valkey")
        self.servers.start()
        self.redis_url = self.servers.url
        self.engines: list[EngineProcess] = []
        self.gateways: list[GatewayProcess] = []

    @property
    def valkey(self) -> ValkeyServer:
        """The server, if there is only one."""
        assert isinstance(self.servers, ValkeyServer)
        return self.servers

    def add_engine(
        self, *flags: str, env: Mapping[str, str] | None = None, start: Starter | None = None
    ) -> EngineProcess:
        """Starts an engine. `env` further extends its environment; `start` None is the stack's."""
        engine = EngineProcess(
            self._checkpoint,
            self.redis_url,
            self._log("engine"),
            *("--queue-shards", str(self.queue_shards)),
            *flags,
            env={**(self._env or {}), **(env or {})},
            start=start or self._start,
        )
        self.engines.append(engine)
        return engine

    def add_gateway(
        self,
        *flags: str,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        start: Starter | None = None,
    ) -> GatewayProcess:
        """Starts a gateway. `port` None is any free one; `env` further extends its environment;
        `start` None is the stack's."""
        gateway = GatewayProcess(
            self._checkpoint,
            self.redis_url,
            self._log("gateway"),
            *flags,
            env={**(self._env or {}), **(env or {})},
            start=start or self._start,
            port=port,
        )
        self.gateways.append(gateway)
        return gateway

    def _log(self, kind: str) -> Path:
        self._count += 1
        return self._folder / f"{kind}-{self._count}.log"

    def await_engines(self, count: int) -> None:
        """Waits until `count` engines announce themselves in the queue and gateways are ready."""
        for engine in self.engines:
            engine.await_log("engine ready")
        until(lambda: len(self.engine_status()) >= count, f"{count} engines in the queue")
        for gateway in self.gateways:
            until(lambda g=gateway: g.ready, f"{gateway.name} to be ready")  # type: ignore[misc]

    def engine_status(self) -> Sequence[EngineStatus]:
        async def ask() -> Sequence[EngineStatus]:
            connection = Connection(ConnectionConfig(url=self.servers.url))
            try:
                return await RedisGatewayQueue(connection, "test").engines(MODEL)
            finally:
                await connection.close()

        return asyncio.run(ask())

    def queue_is_empty(self) -> bool:
        """Whether no request waits in the queue and no engine owns one."""

        async def ask() -> bool:
            connection = Connection(ConnectionConfig(url=self.servers.url))
            try:
                queue = RedisGatewayQueue(connection, "test", shards=self.queue_shards)
                depth = await queue.depth(MODEL)
                return depth.waiting == 0 and depth.pending == 0
            finally:
                await connection.close()

        return asyncio.run(ask())

    def retire(self, engine: EngineProcess) -> None:
        """Kills an engine and removes it from the stack."""
        engine.kill()
        self.engines.remove(engine)

    def close(self) -> None:
        for process in (*self.engines, *self.gateways):
            process.kill()
        self.servers.stop()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=10) as answer:
            return int(answer.status) == 200
    except OSError:
        return False
