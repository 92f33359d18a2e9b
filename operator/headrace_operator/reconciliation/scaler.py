"""Decides how many engines a ModelService should have now, and drains those that must go.

Reads signals and the engines' status; it writes only marks on pods and drain messages. The
reconciler writes the count.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace_common.errors import BackendUnavailable

from .. import names
from ..cluster.cluster import Cluster
from ..cluster.drain import (
    Draining,
    DrainPlan,
    EngineControl,
    EnginePod,
    engines_to_recall,
    highest_kept,
    plan,
    plan_from_top,
)
from ..errors import NotFound, SignalsUnavailable
from ..scaling.decision import Decision, decide
from ..scaling.observation import ScalingObservation
from ..signals.signals import Signals, SignalSource, observation
from ..spec.model_service import ModelService
from ..spec.scaling_policy import scaling_policy
from . import engine_pods
from .engine_pods import Engine
from .node_notices import NodeNotices
from .scaling_history import ScalingHistories

logger = logging.getLogger(__name__)

SCALING_INTERVAL = 5.0  # seconds between two decisions while a model has work
EARLY = 0.5  # seconds by which a decision may be early, instead of late by a reconciliation
DRAIN_MARGIN = 20.0  # seconds after the engine's own drain time until it is removed anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The result. `replicas` is the workload's new count: `desired` plus draining engines.

    The next decision is due at `due`, Unix seconds; None where another controller or a person
    decides. `asleep` engines sleep while others have their accelerator.
    """

    replicas: int
    desired: int
    draining: tuple[Draining, ...] = ()
    decision: Decision | None = None
    due: float | None = None
    signals: Signals | None = None
    signals_problem: str | None = None
    asleep: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """A decision made at `at`, Unix seconds, and what it was made from.

    `decision` is None in modes in which another controller or a person decides.
    """

    at: float
    generation: int
    registered: bool
    signals: Signals | None
    problem: str | None
    decision: Decision | None

    def stands(self, service: ModelService, asked: int, registered: bool, now: float) -> bool:
        """Whether the next decision is not due yet, and nothing was changed from outside.

        None stands while there is no engine, because the first request starts one at once.
        """
        return (
            self.decision is not None
            and not self.decision.frozen
            and 0 <= now - self.at < SCALING_INTERVAL - EARLY
            and 0 < asked == self.decision.replicas
            and registered == self.registered
            and service.generation == self.generation
        )


class Scaler:
    """Scales all ModelServices; make one call at a time for each of them.

    A decision stands for SCALING_INTERVAL seconds, however many calls there are meanwhile.
    `notices` knows the nodes that are about to end.
    """

    def __init__(
        self,
        cluster: Cluster,
        signals: SignalSource,
        directory: EngineControl,
        histories: ScalingHistories,
        notices: NodeNotices | None = None,
    ) -> None:
        self._notices = notices
        self._cluster = cluster
        self._signals = signals
        self._directory = directory
        self._histories = histories
        self._verdicts: dict[tuple[str, str], _Verdict] = {}

    async def scale(
        self,
        service: ModelService,
        engines: Sequence[Engine],
        *,
        deployed: int | None,
        draining: Sequence[Draining],
        now: float,
        registered: bool = True,
        terminating: Mapping[str, float] | None = None,
    ) -> Scaled:
        """Decides and drains. `deployed` is the workload's count; None if there is none yet.

        `terminating` are engines that Kubernetes is ending, with their grace periods. `registered`
        False: gateways do not know the model until an engine registers it.
        """
        if deployed is None:
            signals, problem = await self._read(service, engines)
            first = initial_replicas(service, registered=registered)
            return Scaled(replicas=first, desired=first, signals=signals, signals_problem=problem)
        asked = max(0, deployed - len(draining))
        verdict = self._verdicts.get(service.key)
        if verdict is None or not verdict.stands(service, asked, registered, now):
            verdict = await self._decide(service, engines, asked, draining, now, registered)
            self._verdicts[service.key] = verdict
        decision, signals = verdict.decision, verdict.signals
        desired = followed(service, registered) if decision is None else decision.replicas
        replicas, still = deployed, tuple(draining)
        if desired >= deployed and not draining:
            replicas = desired
        else:
            cached = {} if signals is None else signals.cached_blocks
            replicas, still = await self._down(
                service,
                engines,
                cached,
                deployed=deployed,
                desired=desired,
                draining=still,
                now=now,
            )
        asleep = 0
        if len(engines) <= replicas:  # otherwise Kubernetes has not yet chosen the pods to delete
            asleep = await self._set_right(
                service, engines, [victim.pod for victim in still], terminating or {}
            )
        return Scaled(
            replicas=replicas,
            desired=desired,
            draining=still,
            decision=decision,
            due=None if decision is None else verdict.at + SCALING_INTERVAL,
            signals=signals,
            signals_problem=verdict.problem,
            asleep=asleep,
        )

    def forget(self, key: tuple[str, str]) -> None:
        self._signals.forget(key)
        self._histories.forget(key)
        self._verdicts.pop(key, None)

    async def _read(
        self, service: ModelService, engines: Sequence[Engine]
    ) -> tuple[Signals | None, str | None]:
        """The signals, and what is missing of them."""
        try:
            pods = engine_pods.first_pods(engines)
            signals = await self._signals.read(service, engine_pods.addresses(pods))
        except SignalsUnavailable as error:
            return None, str(error)
        return signals, _unmeasured(signals, engines)

    async def _decide(
        self,
        service: ModelService,
        engines: Sequence[Engine],
        asked: int,
        draining: Sequence[Draining],
        now: float,
        registered: bool,
    ) -> _Verdict:
        signals, problem = await self._read(service, engines)
        decision = None
        if service.spec.scaling.mode == "operator":
            decision = await self._decision(
                service, engines, signals, asked, draining, now, registered
            )
        return _Verdict(
            at=now,
            generation=service.generation,
            registered=registered,
            signals=signals,
            problem=problem,
            decision=decision,
        )

    async def _decision(
        self,
        service: ModelService,
        engines: Sequence[Engine],
        signals: Signals | None,
        asked: int,
        draining: Sequence[Draining],
        now: float,
        registered: bool,
    ) -> Decision:
        leaving = {victim.pod for victim in draining}
        ready = sum(each.ready and each.name not in leaving for each in engines)
        if signals is None:
            seen = ScalingObservation(
                at=now, replicas=asked, ready=ready, queue=None, registered=registered
            )
        else:
            seen = observation(signals, replicas=asked, ready=ready, registered=registered)
        history = await self._histories.load(service)
        decision = decide(seen, scaling_policy(service.spec.scaling), history, now)
        await self._histories.save(service, decision.history, now)
        return decision

    async def _down(
        self,
        service: ModelService,
        engines: Sequence[Engine],
        cached: Mapping[str, float],
        *,
        deployed: int,
        desired: int,
        draining: tuple[Draining, ...],
        now: float,
    ) -> tuple[int, tuple[Draining, ...]]:
        """Returns the workload's count and the draining engines, when scaling down."""
        try:
            statuses = await self._directory.engines(service.served_name)
            pods = engine_pods.engine_pods(engines, statuses, cached)
            timeout = service.spec.drain.timeout_seconds + DRAIN_MARGIN
            if service.spec.engine.nodes > 1:
                planned = plan_from_top(pods, draining, deployed=deployed, desired=desired, now=now,
                                        timeout=timeout)  # fmt: skip
                kept = highest_kept(pods, planned, desired=desired)
            else:
                surplus = deployed - desired
                absent = min(max(0, surplus), _absent(pods, draining, deployed))
                planned = plan(pods, draining, surplus=surplus - absent, now=now, timeout=timeout)
                kept = max(deployed - absent - len(planned.ended), desired)
                await self._mark(service.namespace, planned)
            for engine_id in planned.engines_to_drain(pods):
                await self._directory.drain(engine_id, service.served_name)
        except BackendUnavailable as error:
            logger.warning("scale-down waits: redis is unreachable", extra={"error": str(error)})
            return max(deployed, desired), draining
        return kept, (*planned.waiting, *planned.start)

    async def _set_right(
        self,
        service: ModelService,
        engines: Sequence[Engine],
        victims: Sequence[str],
        terminating: Mapping[str, float],
    ) -> int:
        """Recalls draining engines whose pods stay, and drains engines with a pod that goes;
        returns how many engines sleep.

        SIGTERM may not reach an engine, for example if an image runs it below a shell. A pod may
        also have less time than its engine knows: because its node ends, or it was deleted with a
        shorter grace period.
        """
        ending = {**terminating, **self._on_ending_nodes(engines)}
        try:
            statuses = await self._directory.engines(service.served_name)
            pods = engine_pods.engine_pods(engines, statuses, {})
            for engine_id in engines_to_recall(pods, [*victims, *ending]):
                await self._directory.recall(engine_id, service.served_name)
            for status in statuses:
                left = ending.get(names.pod_of_engine(status.engine_id))
                short = left is not None and left < service.spec.drain.timeout_seconds
                if left is not None and (not status.draining or (short and status.running)):
                    await self._directory.drain(status.engine_id, service.served_name, left)
            return sum(status.sleep_level > 0 for status in statuses)
        except BackendUnavailable as error:
            logger.warning(
                "engines neither drained nor recalled: redis is unreachable",
                extra={"error": str(error)},
            )
            return 0

    def _on_ending_nodes(self, engines: Sequence[Engine]) -> dict[str, float]:
        """The engines with a pod whose node is about to end, and the seconds of notice."""
        if self._notices is None:
            return {}
        left: dict[str, float] = {}
        for engine in engines:
            for seconds in map(self._notices.of_pod, engine.pods):
                if seconds is not None:
                    left[engine.name] = min(seconds, left.get(engine.name, seconds))
        return left

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
                continue  # it ended by itself


def _absent(pods: Sequence[EnginePod], draining: Sequence[Draining], deployed: int) -> int:
    """Requested engines without a pod, for example because of a quota; they need no drain."""
    present = {pod.name for pod in pods}
    gone = sum(victim.pod not in present for victim in draining)
    return max(0, deployed - len(present) - gone)


def _unmeasured(signals: Signals, engines: Sequence[Engine]) -> str | None:
    """Names the missing signals: serving engines without metrics, or a pod's page."""
    ready = sum(each.ready for each in engines)
    if signals.engines is not None or not ready:
        return signals.problem
    detail = "" if signals.problem is None else f" ({signals.problem})"
    return f"no engine of {ready} ready ones gives metrics{detail}"


def initial_replicas(service: ModelService, *, registered: bool = True) -> int:
    """The count of a new ModelService: the minimum in mode operator, else spec.replicas."""
    if service.spec.scaling.mode != "operator":
        return followed(service, registered)
    return max(service.spec.scaling.min_replicas, 0 if registered else 1)


def followed(service: ModelService, registered: bool) -> int:
    """spec.replicas, or one engine instead of KEDA's zero for a model that is not registered.

    Otherwise KEDA would wait indefinitely for requests that no gateway accepts.
    """
    wanted = service.spec.replicas
    return max(1, wanted) if service.spec.scaling.mode == "keda" and not registered else wanted
