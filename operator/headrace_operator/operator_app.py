"""The operator put together from its settings and its connections; runs until told to stop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import kopf

from headrace_common.protocol.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis_registry import RedisModelRegistry
from headrace_common.telemetry import Telemetry

from . import engine_pods, fetch
from .cluster import Cluster
from .controller import Controller
from .drain import QueueDirectory
from .handlers import configure, register
from .memory import ScalingMemory
from .prometheus import PrometheusSignals
from .reconciler import Reconciler
from .recorder import Recorder
from .registrations import Registrations
from .registry_cleaner import RegistryCleaner
from .scaler import Scaler
from .scrape import ScrapedSignals
from .settings import OperatorSettings
from .signals import PodAddress, Signals
from .spec import ModelService

logger = logging.getLogger(__name__)


class ChosenSignals:
    """Prometheus where the ModelService or the operator names one, else the pods themselves."""

    def __init__(
        self, prometheus: PrometheusSignals, scraped: ScrapedSignals, *, everywhere: bool
    ) -> None:
        self._prometheus = prometheus
        self._scraped = scraped
        self._everywhere = everywhere

    async def read(self, service: ModelService, pods: Sequence[PodAddress]) -> Signals:
        if self._everywhere or service.spec.scaling.prometheus_url is not None:
            return await self._prometheus.read(service, pods)
        return await self._scraped.read(service, pods)

    def forget(self, key: tuple[str, str]) -> None:
        self._scraped.forget(key)


@asynccontextmanager
async def parts(
    settings: OperatorSettings, cluster: Cluster, telemetry: Telemetry
) -> AsyncIterator[tuple[Controller, Reconciler, RegistryCleaner]]:
    """The controller and what it drives, with what they need opened around them."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(fetch.session())
        remote = await stack.enter_async_context(fetch.session(local=False))
        connection = Connection(ConnectionConfig(url=settings.redis_url))
        stack.push_async_callback(connection.close)
        memory = ScalingMemory(cluster)
        scraped = ScrapedSignals(
            session,
            lambda: _gateways(cluster, settings),
            timeout=settings.signal_timeout,
            page_limit=settings.max_metrics_page_bytes,
        )
        urls = settings.prometheus_urls
        prometheus = PrometheusSignals(session, remote, urls, timeout=settings.signal_timeout)
        signals = ChosenSignals(prometheus, scraped, everywhere=urls.own is not None)
        directory = QueueDirectory(connection)
        scaler = Scaler(cluster, signals, directory, memory)
        recorder = Recorder(telemetry.meter)
        registry = RedisModelRegistry(connection)
        namespace = None if settings.watch_all_namespaces else settings.namespace
        registrations = Registrations(cluster, registry, namespace)
        reconciler = Reconciler(
            cluster, settings.platform, scaler, registrations, recorder, prometheus_urls=urls
        )
        cleaner = RegistryCleaner(cluster, registry, directory, namespace)
        controller = Controller(reconciler.reconcile, interval=settings.resync_interval)
        stack.push_async_callback(controller.close)
        yield controller, reconciler, cleaner


async def _gateways(cluster: Cluster, settings: OperatorSettings) -> list[PodAddress]:
    namespace = settings.gateway_namespace or settings.namespace
    return engine_pods.addresses(
        await cluster.list("v1", "Pod", namespace, settings.gateway_labels)
    )


async def run(
    settings: OperatorSettings,
    cluster: Cluster,
    telemetry: Telemetry,
    *,
    vault_login: kopf.ConnectionInfo | None,
    stop: asyncio.Event,
    ready: asyncio.Event,
) -> None:
    """Watches and reconciles until `stop`. `vault_login` replaces kopf's own way to the cluster."""
    registry = kopf.OperatorRegistry()
    operator_settings = kopf.OperatorSettings()
    configure(operator_settings)
    _log_in(registry, vault_login)
    async with parts(settings, cluster, telemetry) as (controller, reconciler, cleaner):
        register(registry, controller, reconciler, cleaner, settings.resync_interval)
        await kopf.operator(
            registry=registry,
            settings=operator_settings,
            clusterwide=settings.watch_all_namespaces,
            namespaces=() if settings.watch_all_namespaces else (settings.namespace,),
            standalone=True,
            stop_flag=stop,
            ready_flag=ready,
        )


def _log_in(registry: kopf.OperatorRegistry, given: kopf.ConnectionInfo | None) -> None:
    @kopf.on.login(registry=registry)
    def log_in(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if given is not None:
            return given
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
