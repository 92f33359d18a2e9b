"""The operator process: reads its settings, waits for its turn to lead, works until SIGTERM."""

import asyncio
import logging
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from headrace_common import telemetry
from headrace_common.errors import HeadraceError, SettingsError
from headrace_common.process import EXIT_CONFIG, EXIT_FAILED, read_settings

from .cluster import Cluster
from .lease import Lease, LeaseConfig
from .operator_app import run
from .settings import OperatorSettings

logger = logging.getLogger("headrace_operator")


def main(arguments: list[str] | None = None) -> int:
    """Returns the process's exit code."""
    settings = read_settings(OperatorSettings, "headrace operator", arguments)
    if settings is None:
        return EXIT_CONFIG
    # kopf tells of every event that its handler took it.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    try:
        return asyncio.run(serve(settings))
    except HeadraceError as error:
        logger.error("operator cannot work", extra={"code": error.code, "error": str(error)})
        return EXIT_CONFIG


async def serve(settings: OperatorSettings) -> int:
    """Leads or waits to, until SIGTERM; EXIT_FAILED where the leadership was lost."""
    heart = Heartbeat()
    measures = telemetry.setup(
        "headrace-operator",
        version=version("headrace"),
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        live=heart.stuck,
    )
    cluster = Cluster(await configuration())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    beating = asyncio.create_task(heart.run())
    try:
        return await lead(settings, cluster, measures, stop)
    finally:
        beating.cancel()
        await cluster.close()
        await asyncio.to_thread(measures.shutdown)


async def lead(
    settings: OperatorSettings, cluster: Cluster, measures: telemetry.Telemetry, stop: asyncio.Event
) -> int:
    """Works while the Lease is held."""
    if not settings.leader_election:
        await run(settings, cluster, measures, vault_login=None, stop=stop, ready=asyncio.Event())
        return 0
    identity = settings.identity or f"{socket.gethostname()}_{secrets.token_hex(4)}"
    lease = Lease(
        cluster,
        LeaseConfig(
            namespace=settings.namespace,
            name=settings.lease_name,
            identity=identity,
            duration=settings.lease_duration,
        ),
    )
    if not await _before(lease.acquire(), stop):
        return 0
    keeping = asyncio.create_task(_stop_when_lost(lease, stop))
    try:
        await run(settings, cluster, measures, vault_login=None, stop=stop, ready=asyncio.Event())
    finally:
        lost = keeping.done()
        keeping.cancel()
        if not lost:
            await lease.release()
    return EXIT_FAILED if lost else 0


async def _stop_when_lost(lease: Lease, stop: asyncio.Event) -> None:
    await lease.keep()
    stop.set()


async def _before(awaited: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Whether it came to its end before `stop`."""
    goal = asyncio.create_task(awaited)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({goal, stopped}, return_when=asyncio.FIRST_COMPLETED)
    for task in (goal, stopped):
        task.cancel()
    await asyncio.gather(goal, stopped, return_exceptions=True)
    return not goal.cancelled() and goal.exception() is None


class Heartbeat:
    """Tells whether the event loop still turns; asked from the metrics server's threads."""

    INTERVAL = 5.0
    LIMIT = 60.0

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat_at = self._loop.time()

    async def run(self) -> None:
        while True:
            self._beat_at = self._loop.time()
            await asyncio.sleep(self.INTERVAL)

    def stuck(self) -> str | None:
        silent = self._loop.time() - self._beat_at
        return None if silent < self.LIMIT else f"the event loop stands still for {silent:.0f} s"


async def configuration() -> Configuration:
    """The pod's service account, else the kubeconfig. Raises SettingsError where there is none."""
    found = Configuration()
    loaders: Any = config  # its functions have no annotations
    try:
        loaders.load_incluster_config(client_configuration=found)
    except config.ConfigException:
        try:
            await loaders.load_kube_config(client_configuration=found)
        except config.ConfigException as error:
            raise SettingsError(f"no way to the Kubernetes API: {error}") from error
    return found


if __name__ == "__main__":
    sys.exit(main())
