"""The stack of the tour: a `headrace up` of its own, in a folder and on a port of its own."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from ..engine_inside import EngineInside
from ..errors import CliError, StartFailed
from ..machine import visible_gpus
from ..processes.child import Child, ChildSpec
from ..processes.logs import LogLine
from ..up.up import until_healthy

MODEL = "headrace-demo"
ENGINES = 2
LEASE_SECONDS, BEAT_SECONDS = 4, 1
START_SECONDS = 300.0
_DRAIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine's process, and its debug pages."""

    pid: int
    inside: EngineInside


class DemoStack:
    """A running `up`. It ends with this process."""

    def __init__(self, child: Child, url: str) -> None:
        self._child = child
        self.url = url

    @classmethod
    async def start(cls, folder: Path, on_line: Callable[[LogLine], None]) -> "DemoStack":
        """Starts it; `on_line` gets what it prints. Raises StartFailed."""
        port = _free_port()
        argv = [sys.executable, "-m", "headrace_cli", "up", "--engines", str(ENGINES)]
        argv += ["--port", str(port), "--data-dir", str(folder)]
        argv += ["--lease", str(LEASE_SECONDS), "--beat-interval", str(BEAT_SECONDS)]
        if visible_gpus(os.environ):
            argv.append("--deterministic")  # on CPUs, kernels are deterministic without it
        spec = ChildSpec(name="headrace up", argv=tuple(argv), env={"NO_COLOR": "1"})
        child = await Child.spawn(spec, on_line)
        stack = cls(child, f"http://127.0.0.1:{port}")
        try:
            await stack._until_ready()
        except BaseException:
            await stack.stop()
            raise
        return stack

    async def stop(self) -> None:
        """Drains it, then ends it."""
        self._child.terminate()
        try:
            await asyncio.wait_for(self._child.wait(), _DRAIN_SECONDS)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()

    def engines(self) -> list[RunningEngine]:
        """The engines whose debug pages have a port by now."""
        return list(self._found())

    def _found(self) -> Iterator[RunningEngine]:
        for process in psutil.Process(self._child.pid).children(recursive=True):
            try:
                ports = _listening(process) if "headrace_engine" in process.cmdline() else []
            except psutil.Error:
                continue  # it has just ended
            for port in ports[:1]:
                yield RunningEngine(process.pid, EngineInside(f"http://127.0.0.1:{port}"))

    def engine_of(self, request_id: str) -> RunningEngine | None:
        """The engine that has this request; None if there is none."""
        for engine in self.engines():
            with suppress(CliError):  # an engine that is starting does not answer
                running = engine.inside.requests()["requests"]
                if any(request["request_id"] == request_id for request in running):
                    return engine
        return None

    async def _until_ready(self) -> None:
        ready = asyncio.create_task(self._all_ready())
        ended = asyncio.create_task(self._child.wait())
        try:
            await asyncio.wait(
                {ready, ended}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                lines = "".join(f"\n  {line}" for line in ended.result().tail)
                raise StartFailed(f"headrace up ended ({ended.result().reason}):{lines}")
            if not ready.done():
                raise StartFailed(f"headrace up was not ready in {START_SECONDS:g} s")
            ready.result()
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _all_ready(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            await until_healthy(client, f"{self.url}/health/ready")
            for engine in self.engines():
                await until_healthy(client, f"{engine.inside.url}/health/ready")


def kill(engine: RunningEngine) -> None:
    os.kill(engine.pid, signal.SIGKILL)


def _listening(process: psutil.Process) -> list[int]:
    connections = process.net_connections(kind="tcp")
    return [found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
