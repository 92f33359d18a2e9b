"""`headrace up`: starts queue server, engines and gateways, keeps them running and drains them.

Start: queue and engines together, since engines load for longer than the server does, and gateways
as soon as the queue answers. Drain: gateways (they stop accepting and let their streams end),
engines, queue. Every wait ends immediately when a child gives up or a signal comes.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from ..datadir import DataDir
from ..machine import usable_cores, visible_gpus
from ..processes.child import ChildSpec
from ..processes.logs import LogFile
from ..processes.report import Report
from ..processes.supervisor import RestartPolicy, Service, Supervisor
from ..running import RunningProcess, RunningSystem, described
from ..servers.queue_server import check_redis, until_answering
from ..servers.valkey import find_server, remove_socket, server_spec, socket_path, socket_url
from ..sockets import FIRST_METRICS_PORT, listen, listen_on_free_ports
from .kill_switch import KillSwitch
from .stack import HostResources, UpConfig, engine_spec, gateway_spec

# Seconds between two health checks of a starting child.
_PROBE_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """A signal asked `up` to end."""


class Up:
    """One run of `up`. `redis_url` None means the embedded server."""

    def __init__(
        self, config: UpConfig, *, data: DataDir, report: Report, redis_url: str | None
    ) -> None:
        self._config = config
        self._data = data
        self._report = report
        self._redis_url = redis_url
        self._policy = RestartPolicy()
        self._supervisor = Supervisor()
        self._stop = asyncio.Event()
        self._groups: list[list[Service]] = []
        self._listener: socket.socket | None = None
        self._metrics: list[socket.socket] = []
        self._kill_switch: KillSwitch | None = None
        self._kills: asyncio.Task[None] | None = None
        self._socket: Path | None = None
        self._described = ExitStack()
        self.killed = False

    def interrupt(self) -> None:
        """First call: drain. Second call: kill."""
        if self._stop.is_set():
            self.killed = True
            self._supervisor.kill()
            return
        self._stop.set()
        self._report.event("draining; once more to kill")

    async def run(self) -> None:
        """Serves; returns after a drain. Raises UsageError or StartFailed if it cannot serve."""
        try:
            with suppress(Stopped):
                await self._start()
                await self._or_stop(asyncio.Event().wait())
        finally:
            await self._drain()

    async def _start(self) -> None:
        self._listener = listen(self._config.host, self._config.port)
        queue: Service | None = None
        redis_url = self._redis_url
        if redis_url is None:
            queue, redis_url = self._queue()
            self._launch([queue])
        else:
            await self._or_stop(check_redis(redis_url))
        engines = self._engines(redis_url)
        self._launch(engines)
        if queue is not None:
            await self._or_stop(queue.ready.wait())
            await self._or_stop(check_redis(redis_url))
        self._launch(self._gateways(redis_url, self._listener.fileno(), engines))
        for service in (service for group in self._groups for service in group):
            await self._or_stop(service.ready.wait())
        async with _client() as client:
            await self._or_stop(until_healthy(client, f"{self._config.url}/health/ready"))
        system = self._system(redis_url)
        self._described.enter_context(described(system, self._data))
        self._report.block(welcome(self._config, system, program()))

    def _system(self, redis_url: str) -> RunningSystem:
        config = self._config
        urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in self._metrics]
        engines, gateways = urls[: config.engines], urls[config.engines :]
        return RunningSystem(
            pid=os.getpid(),
            url=config.url,
            model=config.model_name,
            api_keys=config.arguments.api_keys,
            redis=redis_url,
            engines=_processes("engine", engines),
            gateways=_processes("gateway", gateways),
        )

    def _queue(self) -> tuple[Service, str]:
        """The embedded server, and the URL at which it will answer."""
        path = self._socket = socket_path(self._data.queue)
        spec = server_spec(find_server(), self._data.queue, path)
        url = socket_url(path)
        return self._service(spec, lambda: until_answering(url)), url

    def _engines(self, redis_url: str) -> list[Service]:
        config = self._config
        count = config.engines + config.gateways
        self._metrics = listen_on_free_ports(count, host="127.0.0.1", start=FIRST_METRICS_PORT)
        resources = HostResources(gpus=visible_gpus(os.environ), cores=usable_cores())
        engines = []
        for i, sock in enumerate(self._metrics[: config.engines]):
            spec = engine_spec(
                i, config, redis_url=redis_url, metrics_fd=sock.fileno(), resources=resources
            )
            engines.append(self._http_service(spec, sock))
        return engines

    def _gateways(self, redis_url: str, fd: int, engines: Sequence[Service]) -> list[Service]:
        config = self._config
        gateways = []
        switch = self._kill_switch = KillSwitch(config.gateways, engines, self._report)
        self._kills = asyncio.create_task(switch.serve())
        for i, sock in enumerate(self._metrics[config.engines :]):
            spec = gateway_spec(
                i,
                config,
                redis_url=redis_url,
                metrics_fd=sock.fileno(),
                fd=fd,
                supervisor_fd=switch.fds[i],
            )
            gateways.append(self._http_service(spec, sock))
        return gateways

    def _http_service(self, spec: ChildSpec, metrics: socket.socket) -> Service:
        port = metrics.getsockname()[1]

        async def ready() -> None:
            async with _client() as client:
                await until_healthy(client, f"http://127.0.0.1:{port}/health/ready")

        return self._service(spec, ready)

    def _service(self, spec: ChildSpec, ready: Callable[[], Awaitable[None]]) -> Service:
        log = LogFile(self._data.log(spec.name))
        return Service(spec, log=log, report=self._report, policy=self._policy, ready=ready)

    def _launch(self, services: list[Service]) -> None:
        self._groups.append(services)
        for service in services:
            self._supervisor.start(service)

    async def _or_stop(self, work: Coroutine[Any, Any, Any]) -> None:
        """Waits for `work`. Raises Stopped at a signal and StartFailed if a child gives up."""
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        failed = self._supervisor.failed
        try:
            await asyncio.wait({task, stop, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            if stop.done():
                raise Stopped
            task.result()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _drain(self) -> None:
        """Stops in reverse order of the start; closes the API's socket with the gateways."""
        self._stop.set()
        self._described.close()
        if self._listener is not None:
            self._listener.close()
        for group in reversed(self._groups):
            self._announce(group)
            await self._supervisor.stop(group)
        for sock in self._metrics:
            sock.close()
        if self._kills is not None and self._kill_switch is not None:
            self._kills.cancel()
            await asyncio.gather(self._kills, return_exceptions=True)
            self._kill_switch.close()
        if self._socket is not None:
            remove_socket(self._socket, self._data.queue)

    def _announce(self, group: Sequence[Service]) -> None:
        names = ", ".join(service.spec.name for service in group if service.pid is not None)
        if names and not self.killed:
            self._report.event(f"stopping {names}")


async def run_up(up: Up) -> int:
    """Runs `up` and handles signals. Exit code 0 after a drain, 130 after a kill."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, up.interrupt)
    try:
        await up.run()
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return 130 if up.killed else 0


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=5.0)


async def until_healthy(client: httpx.AsyncClient, url: str) -> None:
    """Returns at the first 200."""
    while True:
        with suppress(httpx.TransportError):
            if (await client.get(url)).status_code == httpx.codes.OK:
                return
        await asyncio.sleep(_PROBE_SECONDS)


def program() -> str:
    """The command that started this process, as a person can type it here.

    It is a path if the `headrace` on the PATH is another one, or none.
    """
    typed, found = Path(sys.argv[0]), shutil.which("headrace")
    if typed.name != "headrace" or not typed.is_file():
        return "headrace"
    if found is not None and typed.samefile(found):
        return "headrace"
    return str(typed)


def welcome(config: UpConfig, system: RunningSystem, headrace: str) -> str:
    """The text that shows how to use the running service. `headrace` is the command to type."""
    url = config.url
    message = {"role": "user", "content": "Hello!"}
    body = json.dumps({"model": config.model_name, "messages": [message]})
    chat = f"{headrace} chat" if config.port == 8000 else f"{headrace} chat --url {url}/v1"
    lines = [f"{config.model_name} is served at {url}/v1 (OpenAI API)"]
    if config.arguments.console:
        lines.append(f"Open {url} in a browser for the console: chat, live view, requests")
    lines.append("")
    key = []
    if system.api_keys:
        lines += [
            f"Requests need an API key; `{headrace} keys create NAME --file FILE` makes one:",
            "  export OPENAI_API_KEY=...",
        ]
        key = ['    -H "Authorization: Bearer $OPENAI_API_KEY" \\']
    lines += [
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        *key,
        f"    -d '{body}'",
        f"  {chat}",
        "",
        *(f"{one.name}: {one.metrics}/metrics, /debug/steps" for one in system.engines),
        *(f"{one.name}: {one.metrics}/metrics" for one in system.gateways),
        "",
        "Ctrl-C drains and stops.",
    ]
    return "\n".join(lines)


def _processes(kind: str, urls: Sequence[str]) -> tuple[RunningProcess, ...]:
    return tuple(RunningProcess(f"{kind}-{i}", url) for i, url in enumerate(urls))
