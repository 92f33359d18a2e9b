"""Reconciles one ModelService: reads, decides, applies and writes the status.

Level-triggered: nothing depends on which event came, and the next call completes one that was
interrupted. It never changes the spec.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace_common.errors import HeadraceError
from headrace_common.protocol.live import DecisionWriter

from .. import names
from ..cluster.cluster import Cluster
from ..desired.children import canary_of, companions_of, unwanted
from ..desired.defaults import Platform
from ..desired.workloads import workloads
from ..errors import ClusterError, InvalidSpec, NotFound, OperatorError, ServedNameTaken
from ..spec.model_service import ModelService
from ..spec.prometheus_urls import PrometheusUrls
from ..spec.reserved import Reserved, check_cache, possible_caches
from . import engine_pods, pod_problems
from .adapter_sync import AdapterSync
from .canary_sync import CanarySync, CanaryTrial
from .engine_pods import Engine
from .recorder import Recorder
from .registrations import Registrations, RegistrationStatus
from .scaler import Scaled, Scaler
from .status import (
    REDIS_UNREACHABLE,
    Observations,
    counted,
    drains,
    failed_status,
    shown_decision,
    status_of,
    transitions,
    why_scaled,
)
from .workload import Workload, is_owned, workload_of

logger = logging.getLogger(__name__)
Manifest = dict[str, Any]
Key = tuple[str, str]
Problem = tuple[str, str]

DRAIN_INTERVAL = 1.0  # seconds, so that a drained engine is removed soon


class Reconciler:
    """Reconciles all ModelServices; make one call at a time for each. `clock`: Unix seconds.

    `decisions` shows the numbers of engines to consoles. `adapters` writes adapters to the queue,
    `canaries` the canaries' shares of the requests.
    """

    def __init__(
        self,
        cluster: Cluster,
        platform: Platform,
        scaler: Scaler,
        registrations: Registrations,
        recorder: Recorder,
        clock: Callable[[], float] = time.time,
        *,
        prometheus_urls: PrometheusUrls,
        reserved: Reserved,
        decisions: DecisionWriter | None = None,
        adapters: AdapterSync | None = None,
        canaries: CanarySync | None = None,
    ) -> None:
        self._prometheus_urls = prometheus_urls
        self._reserved = reserved
        self._decisions = decisions
        self._adapters = adapters
        self._canaries = canaries
        self._cluster = cluster
        self._platform = platform
        self._scaler = scaler
        self._registrations = registrations
        self._recorder = recorder
        self._clock = clock
        self._soon: dict[Key, float] = {}
        """Seconds until the next time, of ModelServices that are not left alone for long."""

    def forget(self, key: Key) -> None:
        """Forgets a deleted ModelService; Kubernetes deletes its children."""
        self._scaler.forget(key)
        if self._canaries is not None:
            self._canaries.forget(key)
        self._recorder.forget(key)
        self._soon.pop(key, None)

    async def reconcile(self, key: Key) -> float | None:
        """Reconciles; returns the seconds until the next time if that should be soon.

        Raises ClusterError if the API server does not answer.
        """
        done = False
        self._soon.pop(key, None)
        try:
            done = await self._attempt(key)
        finally:
            self._recorder.reconciled(key, ok=done)
        return self._soon.get(key)

    async def _attempt(self, key: Key) -> bool:
        """One attempt; False if an object was refused."""
        try:
            body = await self._cluster.get(names.API_VERSION, names.KIND, *key)
        except NotFound:
            return True
        if "deletionTimestamp" in body["metadata"]:
            return True
        try:
            service = ModelService.parse(body)
            self._prometheus_urls.check(service)
            self._reserved.check(service)
            await self._check_caches(service)
            registration = await self._registrations.of(service)
            current = await workload_of(self._cluster, service)
            taken = _taken(service, registration)
            if taken is not None and not current.serves(service.served_name):
                raise taken
        except (InvalidSpec, ServedNameTaken) as error:
            logger.warning(
                "ModelService is invalid", extra={"model_service": key[1], "error": str(error)}
            )
            await self._tell(body, self._failed(body, error))
            return True
        return await self._reconcile(service, body, current, registration)

    async def _check_caches(self, service: ModelService) -> None:
        """Reads the claims, since a user's own may be called like a cache."""
        for reference in possible_caches(service):
            try:
                claim = await self._cluster.get(
                    "v1", "PersistentVolumeClaim", service.namespace, reference[1]
                )
            except NotFound:
                claim = None
            check_cache(reference, claim)

    async def _reconcile(
        self,
        service: ModelService,
        body: Manifest,
        current: Workload,
        registration: RegistrationStatus,
    ) -> bool:
        now = self._clock()
        previous = body.get("status") or {}
        found = await self._cluster.list(
            "v1", "Pod", service.namespace, names.selector(service.name)
        )
        pods = engine_pods.live(found)
        nodes = service.spec.engine.nodes
        stable, canary = (
            engine_pods.engines(engine_pods.of_track(pods, track), current.kind, nodes)
            for track in (names.STABLE, names.CANARY)
        )
        deployed = current.replicas
        scaled = await self._scaler.scale(
            service,
            stable,
            deployed=deployed,
            draining=drains(previous),
            now=now,
            registered=registration.registered is not False,
            terminating=engine_pods.terminating(found, current.kind),
        )
        if scaled.draining:
            self._soon[service.key] = DRAIN_INTERVAL
        elif scaled.due is not None and _has_work(scaled):
            self._soon[service.key] = max(0.0, scaled.due - now)
        trial = await self._judge(service, pods, previous, now, rolled_out=current.rolled_out)
        promoted = trial is not None and trial.promoted
        refused = await self._apply(service.promoted if promoted else service, current, scaled)
        if trial is not None and refused is not None:
            trial = replace(trial, replaced=False)  # by engines that could not be applied
        refused = await self._apply_canary(service, trial) or refused
        if trial is not None and promoted and not _was_promoted(previous):
            await self._event(body, "Normal", trial.reason, trial.message)
        problem = refused or _problem(service, registration) or pod_problems.problem(pods)
        seen = _seen(current, scaled, stable, canary, problem)
        seen = replace(seen, trial=trial)
        if self._adapters is not None and registration.rival is None:
            seen = replace(seen, adapters=await self._adapters.sync(service))
        if self._canaries is not None and registration.rival is None:
            await self._canaries.share(service, trial)
        await self._announce(body, service, deployed, scaled)
        await self._show(service, seen)
        await self._tell(body, status_of(service, seen, previous, now))
        self._recorder.record(service, seen)
        self._recorder.record_starts(service, [*stable, *canary])
        return refused is None

    async def _judge(
        self,
        service: ModelService,
        pods: Sequence[Manifest],
        previous: Mapping[str, Any],
        now: float,
        *,
        rolled_out: bool,
    ) -> CanaryTrial | None:
        if self._canaries is None:
            return None
        return await self._canaries.judge(service, pods, previous, now, rolled_out=rolled_out)

    async def _apply_canary(
        self, service: ModelService, trial: CanaryTrial | None
    ) -> Problem | None:
        stopped = trial is not None and trial.stopped
        canary = canary_of(service, self._platform, stopped=stopped)
        return None if canary is None else await self._applied(canary)

    async def _apply(
        self, service: ModelService, current: Workload, scaled: Scaled
    ) -> Problem | None:
        """Applies every child but the canary, also after a refusal; returns the first refusal."""
        wanted = [
            *companions_of(service, self._platform),
            *workloads(service, self._platform, current.kind, replicas=scaled.replicas),
        ]
        refused = [await self._applied(manifest) for manifest in wanted]
        refused += [await self._removed(service, child) for child in unwanted(service)]
        refused += [await self._deleted(child) for child in current.obsolete]
        return next((problem for problem in refused if problem is not None), None)

    async def _applied(self, manifest: Manifest) -> Problem | None:
        try:
            await self._cluster.apply(manifest)
        except ClusterError as error:
            return _refusal(f"{manifest['kind']} {manifest['metadata']['name']}", error)
        return None

    async def _removed(self, service: ModelService, child: Any) -> Problem | None:
        """Removes a child unless another owner made it."""
        try:
            found = await self._cluster.get(
                child.api_version, child.kind, service.namespace, child.name
            )
            if is_owned(found, service):
                await self._cluster.delete(
                    child.api_version, child.kind, service.namespace, child.name
                )
        except NotFound:
            return None
        except ClusterError as error:
            return None if child.optional else _refusal(f"{child.kind} {child.name}", error)
        return None

    async def _deleted(self, child: Manifest) -> Problem | None:
        meta = child["metadata"]
        try:
            await self._cluster.delete(
                child["apiVersion"], child["kind"], meta["namespace"], meta["name"]
            )
        except ClusterError as error:
            return _refusal(f"{child['kind']} {meta['name']}", error)
        return None

    async def _announce(
        self, body: Manifest, service: ModelService, deployed: int | None, scaled: Scaled
    ) -> None:
        """Writes an Event for the first count and for each change of the desired count."""
        before = (body.get("status") or {}).get("desiredReplicas", deployed)
        if before == scaled.desired:
            return
        why = why_scaled(service, scaled.desired, scaled.decision)
        if before is None:
            reason, text = "Created", f"{counted(scaled.desired)} to begin with: {why}"
        else:
            reason = "ScaledUp" if scaled.desired > before else "ScaledDown"
            text = f"from {before} to {counted(scaled.desired)}: {why}"
        logger.info("scaled", extra={"model_service": service.name, "to": scaled.desired,
                                     "was": before, "why": why})  # fmt: skip
        await self._event(body, "Normal", reason, text)

    async def _show(self, service: ModelService, seen: Observations) -> None:
        """Writes the decision for consoles, best effort: the status contains the same."""
        if self._decisions is None:
            return
        try:
            await self._decisions.write(service.served_name, shown_decision(service, seen))
        except HeadraceError as error:
            logger.info("decision not shown to consoles", extra={"error": str(error)})

    def _failed(self, body: Manifest, error: OperatorError) -> Manifest:
        previous = body.get("status") or {}
        generation = body["metadata"].get("generation", 0)
        return failed_status(generation, error, previous, self._clock())

    async def _tell(self, body: Manifest, status: Manifest) -> None:
        """Writes the status if it has changed, and an Event for each transition."""
        previous = body.get("status") or {}
        for change in transitions(previous.get("conditions", ()), status["conditions"]):
            await self._event(body, change.kind, change.reason, change.message)
        changed = {k: v for k, v in status.items() if previous.get(k) != v}
        if changed:
            meta = body["metadata"]
            try:
                await self._cluster.patch_status(meta["namespace"], meta["name"], changed)
            except NotFound:
                logger.info(
                    "ModelService was deleted meanwhile", extra={"model_service": meta["name"]}
                )

    async def _event(self, body: Manifest, kind: str, reason: str, message: str) -> None:
        """Writes an Event, best effort: the conditions contain the same."""
        try:
            await self._cluster.event(body, kind=kind, reason=reason, message=message)
        except ClusterError as error:
            logger.warning("event was not written", extra={"reason": reason, "error": str(error)})


def _was_promoted(previous: Mapping[str, Any]) -> bool:
    return bool((previous.get("canary") or {}).get("promoted"))


def _has_work(scaled: Scaled) -> bool:
    queue = None if scaled.signals is None else scaled.signals.queue
    return queue is not None and bool(queue.waiting or queue.pending or queue.arrival_rate)


def _taken(service: ModelService, registration: RegistrationStatus) -> ServedNameTaken | None:
    if registration.rival is None:
        return None
    return ServedNameTaken(service.served_name, service.owner, registration.rival)


def _problem(service: ModelService, registration: RegistrationStatus) -> Problem | None:
    """Why the model is unusable now; engines that already have the name continue to run."""
    if registration.unreachable is not None:
        text = f"the operator cannot ask Redis, where requests wait: {registration.unreachable}"
        return REDIS_UNREACHABLE, text
    taken = _taken(service, registration)
    return None if taken is None else (taken.code, str(taken))


def _refusal(what: str, error: ClusterError) -> Problem:
    logger.warning(
        "object of a ModelService not applied", extra={"child": what, "error": str(error)}
    )
    return error.code, f"{what}: {error}"


def _seen(
    current: Workload,
    scaled: Scaled,
    stable: Sequence[Engine],
    canary: Sequence[Engine],
    problem: Problem | None,
) -> Observations:
    leaving = {victim.pod for victim in scaled.draining}
    ready = [each for each in stable if each.ready and each.name not in leaving]
    return Observations(
        replicas=len(stable),
        ready=len(ready),
        updated=current.updated,
        desired=scaled.desired,
        canary=len(canary),
        signals=scaled.signals,
        cold_start=_cold_start(scaled, ready),
        decision=scaled.decision,
        draining=scaled.draining,
        problem=problem or current.problem,
        signals_problem=scaled.signals_problem,
        asleep=scaled.asleep,
        kind=current.kind,
    )


def _cold_start(scaled: Scaled, ready: Sequence[Engine]) -> float | None:
    """The cold start that scaling has measured, else the quickest start of the present engines.

    The quickest, because a pod that was temporarily not ready looks like a slow start.
    """
    if scaled.decision is not None and scaled.decision.history.cold_start is not None:
        return scaled.decision.history.cold_start
    starts = [each.start_duration for each in ready]
    return min((start for start in starts if start is not None), default=None)
