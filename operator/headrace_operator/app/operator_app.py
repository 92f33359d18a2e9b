"""Builds the operator from its settings and connections, and runs it until it is stopped."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import kopf

from headrace_common.observability.telemetry import Telemetry
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.live import RedisDecisionWriter
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_common.protocol.redis.variants import RedisCanary
from headrace_common.wire import keys

from .. import names
from ..cleaning.redis_users import RedisUsers
from ..cleaning.registry_cleaner import RegistryCleaner
from ..cluster.cluster import Cluster
from ..cluster.drain import QueueEngineControl
from ..reconciliation import engine_pods
from ..reconciliation.adapter_sync import AdapterSync
from ..reconciliation.canary_sync import CanarySync
from ..reconciliation.node_notices import NodeNotices
from ..reconciliation.reconciler import Reconciler
from ..reconciliation.recorder import Recorder
from ..reconciliation.registrations import Registrations
from ..reconciliation.scaler import Scaler
from ..reconciliation.scaling_history import ScalingHistories
from ..settings import OperatorSettings
from ..signals import fetch
from ..signals.prometheus import PrometheusSignals
from ..signals.scrape import ScrapedSignals
from ..signals.signals import PodAddress, Signals
from ..spec.model_service import ModelService
from .controller import Controller
from .handlers import BackgroundTask, configure, register, register_nodes

logger = logging.getLogger(__name__)


class ChosenSignals:
    """Signals from Prometheus if the ModelService or the operator names one, otherwise from
    pods."""

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
async def build(
    settings: OperatorSettings, cluster: Cluster, telemetry: Telemetry
) -> AsyncIterator[tuple[Controller, Reconciler, list[BackgroundTask], NodeNotices | None]]:
    """Builds the controller, the reconciler, the background tasks and what watches nodes, with
    their open connections."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(fetch.session())
        remote = await stack.enter_async_context(fetch.session(local=False))
        connection = Connection(ConnectionConfig(url=settings.redis_url))
        stack.push_async_callback(connection.close)
        histories = ScalingHistories(cluster)
        scraped = ScrapedSignals(
            session,
            lambda: _gateways(cluster, settings),
            timeout=settings.signal_timeout,
            page_limit=settings.max_metrics_page_bytes,
        )
        urls = settings.prometheus_urls
        prometheus = PrometheusSignals(session, remote, urls, timeout=settings.signal_timeout)
        signals = ChosenSignals(prometheus, scraped, everywhere=urls.own is not None)
        directory = QueueEngineControl(connection)
        namespace = None if settings.watch_all_namespaces else settings.namespace
        notices = NodeNotices(cluster, directory, namespace) if settings.watch_nodes else None
        scaler = Scaler(cluster, signals, directory, histories, notices)
        recorder = Recorder(telemetry.meter)
        registry = RedisModelRegistry(connection)
        registrations = Registrations(cluster, registry, namespace)
        adapters = AdapterSync(
            AdapterControl(RedisAdapterSets(connection), directory.engines, connection.clock.now),
            lambda model: connection.measure_clock(keys.adapter_set(model)),
        )
        canaries = CanarySync(RedisCanary(connection), scraped)
        reconciler = Reconciler(
            cluster,
            settings.platform,
            scaler,
            registrations,
            recorder,
            prometheus_urls=urls,
            reserved=settings.reserved,
            decisions=RedisDecisionWriter(connection),
            adapters=adapters,
            canaries=canaries,
        )
        cleaner = RegistryCleaner(
            cluster, registry, directory, namespace, adapters=adapters, canaries=canaries
        )
        controller = Controller(reconciler.reconcile, interval=settings.resync_interval)
        stack.push_async_callback(controller.close)
        background_tasks: list[BackgroundTask] = [cleaner]
        if settings.redis_admin_url is not None:
            admin = Connection(ConnectionConfig(url=settings.redis_admin_url))
            stack.push_async_callback(admin.close)
            background_tasks.append(
                RedisUsers(cluster, admin, settings.password_key, registry, directory, namespace)
            )
        yield controller, reconciler, background_tasks, notices


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
    """Watches and reconciles until `stop`. `vault_login` replaces kopf's own login."""
    registry = kopf.OperatorRegistry()
    operator_settings = kopf.OperatorSettings()
    configure(operator_settings)
    _log_in(registry, vault_login)
    async with build(settings, cluster, telemetry) as (controller, reconciler, tasks, notices):
        register(
            registry,
            controller,
            reconciler,
            tasks,
            settings.resync_interval,
            leader_worker_sets=await cluster.serves(names.LEADER_WORKER_SETS),
        )
        if notices is not None:
            register_nodes(registry, notices)
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
