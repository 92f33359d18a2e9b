"""The operator for tests: real except for signals and clock, and with a queue in memory."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import kopf
from kubernetes.aio.client import Configuration

from headrace_common.errors import BackendUnavailable
from headrace_common.observability import telemetry
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.base import CanaryPlan, EngineStatus
from headrace_common.protocol.live import ScalingDecision
from headrace_common.protocol.registry import RegisteredModel, digest_of
from headrace_common.protocol.variants import Agreement
from headrace_operator import names
from headrace_operator.app.controller import Controller
from headrace_operator.app.handlers import configure, register, register_nodes
from headrace_operator.cleaning.registry_cleaner import RegistryCleaner
from headrace_operator.cluster.cluster import Cluster
from headrace_operator.errors import SignalsUnavailable
from headrace_operator.reconciliation.adapter_sync import AdapterSync
from headrace_operator.reconciliation.canary_sync import CanarySync
from headrace_operator.reconciliation.node_notices import NodeNotices
from headrace_operator.reconciliation.reconciler import Reconciler
from headrace_operator.reconciliation.recorder import Recorder
from headrace_operator.reconciliation.registrations import Registrations
from headrace_operator.reconciliation.scaler import Scaler
from headrace_operator.reconciliation.scaling_history import ScalingHistories
from headrace_operator.scaling.observation import EngineSignals, QueueSignals
from headrace_operator.signals.signals import PodAddress, Samples, Signals
from headrace_operator.spec.model_service import ModelService
from headrace_operator.spec.prometheus_urls import PrometheusUrls
from headrace_operator.spec.reserved import Reserved

from .kubernetes import NAMESPACE, User
from .memory_queue.adapters import MemoryAdapterSets
from .memory_queue.backend import MemoryBackend
from .memory_queue.registry import MemoryModelRegistry
from .model_services import PLATFORM


@dataclass(slots=True)
class Scene:
    """The operator's surroundings besides the API server. `waiting` None means no metrics."""

    now: float = 1_000_000.0
    age: float = 0.0
    waiting: int | None = 0
    running: int = 0
    engines: int = 1
    soon: float | None = None  # seconds until the next reconciliation, if the last one said so
    statuses: list[EngineStatus] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)
    notices: list[tuple[str, float]] = field(default_factory=list)  # of drained engines
    recalled: list[str] = field(default_factory=list)
    shown: dict[str, ScalingDecision] = field(default_factory=dict)
    metrics: dict[str, Samples] = field(default_factory=dict)  # of engines, by pod
    plans: dict[str, CanaryPlan | None] = field(default_factory=dict)  # of canaries
    answers: Agreement = Agreement()
    backend: MemoryBackend = field(default_factory=MemoryBackend)
    prometheus_urls: PrometheusUrls = field(default_factory=PrometheusUrls)
    reserved: Reserved = Reserved(NAMESPACE)

    @property
    def queue_down(self) -> bool:
        return not self.backend.available

    @queue_down.setter
    def queue_down(self, down: bool) -> None:
        self.backend.available = not down

    @property
    def registry(self) -> MemoryModelRegistry:
        return MemoryModelRegistry(self.backend)

    def clock(self) -> float:
        return self.now

    async def read(self, service: ModelService, pods: Sequence[PodAddress]) -> Signals:
        if self.waiting is None:
            raise SignalsUnavailable("no gateway pod is running")
        queue = QueueSignals(waiting=self.waiting, oldest_age=self.waiting / 10)
        engines = EngineSignals(running=self.running, capacity=64 * max(1, self.engines))
        return Signals(at=self.now - self.age, queue=queue, engines=engines)

    async def agreement(self, model: str) -> Agreement:
        return self.answers

    async def set_plan(self, model: str, plan: CanaryPlan | None) -> None:
        if self.queue_down:
            raise BackendUnavailable("redis: connection refused")
        self.plans[model] = plan

    async def pages(self, model: str, pods: Sequence[PodAddress]) -> Mapping[str, Samples]:
        return {each.pod: self.metrics[each.pod] for each in pods if each.pod in self.metrics}

    async def write(self, model: str, decision: ScalingDecision) -> None:
        if self.queue_down:
            raise BackendUnavailable("redis: connection refused")
        self.shown[model] = decision

    def forget(self, key: tuple[str, str]) -> None:
        """Does nothing: a scene remembers nothing of a ModelService."""


@dataclass(slots=True)
class Directory:
    """The engines of a scene."""

    scene: Scene

    async def engines(self, model: str) -> Sequence[EngineStatus]:
        if self.scene.queue_down:
            raise BackendUnavailable("redis: connection refused")
        return self.scene.statuses

    async def drain(self, engine_id: str, model: str, within: float = math.inf) -> None:
        self.scene.drained.append(engine_id)
        self.scene.notices.append((engine_id, within))

    async def recall(self, engine_id: str, model: str) -> None:
        self.scene.recalled.append(engine_id)


async def register_model(scene: Scene, name: str, owner: str) -> None:
    """Registers a model as an engine of this owner does at its start."""
    model = RegisteredModel(
        name=name, digest=digest_of({}), max_model_len=4096, created=0, owner=owner
    )
    await scene.registry.register(model, {})


def engine_status(
    pod: str, *, running: int = 0, draining: bool = False, sleep_level: int = 0
) -> EngineStatus:
    """The status that the engine in a pod reports."""
    return EngineStatus(
        engine_id=f"{pod}.1.abc",
        model="qwen",
        max_model_len=4096,
        running=running,
        capacity=64,
        kv_utilization=0.0,
        tokens_per_second=0.0,
        last_step_age=0.0,
        draining=draining,
        version="1",
        sleep_level=sleep_level,
    )


@asynccontextmanager
async def operator(
    user: User, scene: Scene, interval: float = 0.05
) -> AsyncIterator[set[tuple[str, str]]]:
    """Runs the operator until the block ends; yields the keys that it manages. Without an event it
    reconciles every `interval` seconds.

    It runs in a thread with its own event loop: kopf waits at its end for every task of its loop,
    and the API server's would be among them.
    """
    stop, keys = threading.Event(), set[tuple[str, str]]()
    running = asyncio.create_task(
        asyncio.to_thread(lambda: asyncio.run(_operate(user.url, scene, stop, keys, interval)))
    )
    try:
        yield keys
    finally:
        stop.set()
        await running


async def _operate(
    url: str, scene: Scene, stop: threading.Event, keys: set[tuple[str, str]], interval: float
) -> None:
    cluster = Cluster(Configuration(host=url))
    histories = ScalingHistories(cluster)
    directory = Directory(scene)
    notices = NodeNotices(cluster, directory, NAMESPACE)
    scaler = Scaler(cluster, scene, directory, histories, notices)
    recorder = Recorder(telemetry.disabled().meter)
    registrations = Registrations(cluster, scene.registry, NAMESPACE)
    reconciler = Reconciler(
        cluster,
        PLATFORM,
        scaler,
        registrations,
        recorder,
        scene.clock,
        prometheus_urls=scene.prometheus_urls,
        reserved=scene.reserved,
        decisions=scene,
        adapters=AdapterSync(
            AdapterControl(MemoryAdapterSets(scene.backend), directory.engines, scene.clock),
            lambda _model: asyncio.sleep(0),
        ),
        canaries=CanarySync(scene, scene),
    )
    cleaner = RegistryCleaner(cluster, scene.registry, directory, NAMESPACE, scene.clock)

    async def reconcile(key: tuple[str, str]) -> float | None:
        scene.soon = await reconciler.reconcile(key)
        return scene.soon

    controller = _Watched(keys, reconcile, interval=interval, gap=0.01)
    registry, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    configure(settings)
    settings.queueing.idle_timeout = settings.queueing.exit_timeout = 0.05
    register(
        registry,
        controller,
        reconciler,
        [cleaner],
        0.05,
        leader_worker_sets=await cluster.serves(names.LEADER_WORKER_SETS),
    )
    register_nodes(registry, notices)

    @kopf.on.login(registry=registry)
    def log_in(**_: object) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=url)

    try:
        await kopf.operator(
            registry=registry,
            settings=settings,
            namespaces=(NAMESPACE,),
            standalone=True,
            stop_flag=stop,
        )
    finally:
        await cluster.close()


class _Watched(Controller):
    """A controller that records the keys that it manages."""

    def __init__(
        self,
        watched: set[tuple[str, str]],
        reconcile: Callable[[tuple[str, str]], Awaitable[float | None]],
        *,
        interval: float,
        gap: float,
    ) -> None:
        super().__init__(reconcile, interval=interval, gap=gap)
        self._watched = watched

    def wake(self, key: tuple[str, str]) -> None:
        super().wake(key)
        self._watched.add(key)

    def forget(self, key: tuple[str, str]) -> None:
        super().forget(key)
        self._watched.discard(key)
