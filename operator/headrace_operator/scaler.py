"""How many engines a ModelService is to have now, and the way down: decide, then drain.

Reads signals and the engines' status; the only writes are marks on pods and drain messages. The
reconciler writes the count.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import EngineStatus

from . import engine_pods, names
from .cluster import Cluster
from .drain import Draining, DrainPlan, EngineDirectory, EnginePod, plan
from .errors import NotFound, SignalsUnavailable
from .memory import ScalingMemory
from .scaling.decision import Decision, decide
from .scaling.observation import Observation
from .scaling_policy import scaling_policy
from .signals import Signals, SignalSource, observation
from .spec import ModelService

logger = logging.getLogger(__name__)
Manifest = dict[str, Any]

DRAIN_MARGIN = 20.0  # seconds beyond the engine's own drain time until it is removed anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """`replicas` is the Deployment's count from now on: `desired`, and those that still drain."""

    replicas: int
    desired: int
    draining: tuple[Draining, ...] = ()
    decision: Decision | None = None
    backlog: int | None = None
    signals_problem: str | None = None


class Scaler:
    """Collaborators are shared by all ModelServices; one call at a time for each of them."""

    def __init__(
        self,
        cluster: Cluster,
        signals: SignalSource,
        directory: EngineDirectory,
        memory: ScalingMemory,
    ) -> None:
        self._cluster = cluster
        self._signals = signals
        self._directory = directory
        self._memory = memory

    async def scale(
        self,
        service: ModelService,
        pods: Sequence[Manifest],
        *,
        deployed: int | None,
        draining: Sequence[Draining],
        now: float,
        registered: bool = True,
    ) -> Scaled:
        """`deployed` is the Deployment's count, None where there is none yet.

        `registered` False: gateways cannot know the model before an engine has told them.
        """
        signals, problem = await self._read(service, pods)
        problem = problem or _unmeasured(signals, pods)
        backlog = _backlog(signals)
        if deployed is None:
            first = initial_replicas(service, registered=registered)
            return Scaled(replicas=first, desired=first, backlog=backlog, signals_problem=problem)
        asked = max(0, deployed - len(draining))
        decision = await self._decide(service, pods, signals, asked, draining, now, registered)
        desired = followed(service, registered) if decision is None else decision.replicas
        replicas, still = deployed, tuple(draining)
        if desired >= deployed and not draining:
            replicas = desired
        else:
            cached = {} if signals is None else signals.cached_blocks
            replicas, still = await self._down(
                service, pods, cached, deployed=deployed, desired=desired, draining=still, now=now
            )
        return Scaled(
            replicas=replicas,
            desired=desired,
            draining=still,
            decision=decision,
            backlog=backlog,
            signals_problem=problem,
        )

    def forget(self, key: tuple[str, str]) -> None:
        self._signals.forget(key)
        self._memory.forget(key)

    async def _read(
        self, service: ModelService, pods: Sequence[Manifest]
    ) -> tuple[Signals | None, str | None]:
        try:
            return await self._signals.read(service, engine_pods.addresses(pods)), None
        except SignalsUnavailable as error:
            return None, str(error)

    async def _decide(
        self,
        service: ModelService,
        pods: Sequence[Manifest],
        signals: Signals | None,
        asked: int,
        draining: Sequence[Draining],
        now: float,
        registered: bool,
    ) -> Decision | None:
        """None in the modes where somebody else decides."""
        if service.spec.scaling.mode != "operator":
            return None
        leaving = {victim.pod for victim in draining}
        ready = sum(
            engine_pods.is_ready(pod) and pod["metadata"]["name"] not in leaving for pod in pods
        )
        if signals is None:
            seen = Observation(
                at=now, replicas=asked, ready=ready, queue=None, registered=registered
            )
        else:
            seen = observation(signals, replicas=asked, ready=ready, registered=registered)
        history = await self._memory.load(service)
        decision = decide(seen, scaling_policy(service.spec.scaling), history, now)
        await self._memory.keep(service, decision.history, now)
        return decision

    async def _down(
        self,
        service: ModelService,
        pods: Sequence[Manifest],
        cached: Mapping[str, float],
        *,
        deployed: int,
        desired: int,
        draining: tuple[Draining, ...],
        now: float,
    ) -> tuple[int, tuple[Draining, ...]]:
        """The Deployment's count, and who drains now."""
        try:
            statuses = await self._directory.engines(service.served_name)
            surplus = deployed - desired
            absent = min(max(0, surplus), _absent(pods, draining, deployed))
            planned, engines = _plan(service, pods, statuses, cached, surplus - absent, now,
                                     draining)  # fmt: skip
            await self._mark(service.namespace, planned)
            for engine_id in planned.tell(engines):
                await self._directory.drain(engine_id)
        except BackendUnavailable as error:
            logger.warning("scale-down waits for redis", extra={"error": str(error)})
            return max(deployed, desired), draining
        kept = deployed - absent - len(planned.ended)
        still = (*planned.waiting, *planned.start)
        return max(kept, desired), still

    async def _mark(self, namespace: str, planned: DrainPlan) -> None:
        """Sets the deletion costs that make Kubernetes remove the right pods."""
        marks = [
            *((victim, names.VICTIM_COST) for victim in planned.start),
            *((victim, names.ENDED_COST) for victim in planned.ended),
            *((victim, names.NO_COST) for victim in planned.cancelled),
        ]
        for victim, cost in marks:
            try:
                await self._cluster.annotate_pod(namespace, victim.pod, {names.DELETION_COST: cost})
            except NotFound:
                continue  # it has gone by itself


def _absent(pods: Sequence[Manifest], draining: Sequence[Draining], deployed: int) -> int:
    """Engines that are asked for and have no pod, as under a quota: nothing is lost with them."""
    present = {pod["metadata"]["name"] for pod in pods}
    gone = sum(victim.pod not in present for victim in draining)
    return max(0, deployed - len(present) - gone)


def _plan(
    service: ModelService,
    pods: Sequence[Manifest],
    statuses: Sequence[EngineStatus],
    cached: Mapping[str, float],
    surplus: int,
    now: float,
    draining: tuple[Draining, ...],
) -> tuple[DrainPlan, list[EnginePod]]:
    engines = engine_pods.engine_pods(pods, statuses, cached)
    timeout = service.spec.drain.timeout_seconds + DRAIN_MARGIN
    return plan(engines, draining, surplus=surplus, now=now, timeout=timeout), engines


def _unmeasured(signals: Signals | None, pods: Sequence[Manifest]) -> str | None:
    """What is missing from signals that could be read: engines that serve and tell nothing of it,
    or a pod's page."""
    if signals is None:
        return None
    ready = sum(engine_pods.is_ready(pod) for pod in pods)
    if signals.engines is not None or not ready:
        return signals.problem
    detail = "" if signals.problem is None else f" ({signals.problem})"
    return f"no engine of {ready} ready ones gives metrics{detail}"


def _backlog(signals: Signals | None) -> int | None:
    return None if signals is None or signals.queue is None else signals.queue.waiting


def initial_replicas(service: ModelService, *, registered: bool = True) -> int:
    """Of a new ModelService: the least in mode operator, else what spec.replicas says."""
    if service.spec.scaling.mode != "operator":
        return followed(service, registered)
    return max(service.spec.scaling.min_replicas, 0 if registered else 1)


def followed(service: ModelService, registered: bool) -> int:
    """spec.replicas, but one engine instead of KEDA's zero for a model that is not known yet: KEDA
    would wait for its requests for ever."""
    wanted = service.spec.replicas
    return max(1, wanted) if service.spec.scaling.mode == "keda" and not registered else wanted
