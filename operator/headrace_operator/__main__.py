"""The operator process: reads its settings, waits for leadership, works until SIGTERM."""

if __name__ == "__main__":
    from headrace_common.termination import exit_on_signal

    exit_on_signal()  # before imports that take seconds

import asyncio
import logging
import secrets
import signal
import socket
import sys
from importlib.metadata import version
from typing import Any

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

from headrace_common.config.process import EXIT_CONFIG, EXIT_FAILED, before, read_settings
from headrace_common.errors import HeadraceError, SettingsError
from headrace_common.observability import telemetry

from .app.operator_app import run
from .cluster.cluster import Cluster
from .cluster.lease import LeaderLease, LeaderLeaseConfig
from .settings import OperatorSettings

logger = logging.getLogger("headrace_operator")


def main(arguments: list[str] | None = None) -> int:
    """Returns the process's exit code."""
    settings = read_settings(OperatorSettings, "headrace operator", arguments)
    if settings is None:
        return EXIT_CONFIG
    # kopf logs every handled event.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    try:
        return asyncio.run(serve(settings))
    except HeadraceError as error:
        logger.error("operator ends", extra={"code": error.code, "error": str(error)})
        return EXIT_CONFIG


async def serve(settings: OperatorSettings) -> int:
    """Leads, or waits to lead, until SIGTERM; returns EXIT_FAILED if the leadership was lost."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    heart = Heartbeat()
    measures = telemetry.setup(
        "headrace-operator",
        version=version("headrace"),
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        live=heart.stuck,
    )
    cluster = Cluster(await configuration())
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
    lease = LeaderLease(
        cluster,
        LeaderLeaseConfig(
            namespace=settings.namespace,
            name=settings.lease_name,
            identity=identity,
            duration=settings.lease_duration,
        ),
    )
    if not await before(lease.acquire(), stop):
        await lease.release()  # this process may have just acquired it
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


async def _stop_when_lost(lease: LeaderLease, stop: asyncio.Event) -> None:
    await lease.keep()
    stop.set()


class Heartbeat:
    """Checks that the event loop still runs; called from the metrics server's threads."""

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
    """The pod's service account, or the kubeconfig. Raises SettingsError if there is neither."""
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
