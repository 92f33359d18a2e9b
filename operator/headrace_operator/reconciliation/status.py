"""Pure functions that make the status of a ModelService from observations and decisions.

A condition keeps its lastTransitionTime until its status changes. Only such changes make Events, so
a lasting state is reported once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from headrace_common.protocol.live import ScalingDecision

from .. import names
from ..cluster.drain import Draining
from ..desired.workloads import WorkloadKind
from ..errors import OperatorError
from ..scaling.canary import CanaryReason
from ..scaling.decision import Decision
from ..scaling.reason import Reason, ScalingLimit
from ..signals.signals import Signals
from ..spec.model_service import ModelService
from .adapter_sync import AdapterStatus
from .canary_sync import CanaryTrial

Manifest = dict[str, Any]

READY = "Ready"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"
SCALING_ACTIVE = "ScalingActive"
SCALING_LIMITED = "ScalingLimited"
CANARY_HEALTHY = "CanaryHealthy"
ZERO = "ScaledToZero"
NOT_READY = "NoEngineReady"
SATURATED = "Saturated"
REDIS_UNREACHABLE = "RedisUnreachable"

# The status with which each of these conditions needs attention by a person.
_ALARMING = {READY: "False", DEGRADED: "True", SCALING_ACTIVE: "False", CANARY_HEALTHY: "False"}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition. `status` is True, False or Unknown."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """The observations and actions of a reconciliation. Counts are of the stable track; an
    engine counts once however many pods it has.

    `problem` is (reason, message) of a problem that will not end by itself. `signals_problem` is
    why there are no signals. `cold_start` is the seconds that an engine needs from its start until
    it serves. `adapters` None: unknown. `asleep` engines are ready, but others have their
    accelerator. `trial` is the state of the canary.
    """

    replicas: int
    ready: int
    updated: int
    desired: int
    canary: int = 0
    signals: Signals | None = None
    cold_start: float | None = None
    decision: Decision | None = None
    draining: tuple[Draining, ...] = ()
    problem: tuple[str, str] | None = None
    signals_problem: str | None = None
    adapters: tuple[AdapterStatus, ...] | None = ()
    asleep: int = 0
    kind: WorkloadKind = WorkloadKind.DEPLOYMENT
    trial: CanaryTrial | None = None

    @property
    def backlog(self) -> int | None:
        """The number of requests that wait for an engine; None if unknown."""
        return (
            None
            if self.signals is None or self.signals.queue is None
            else (self.signals.queue.waiting)
        )


@dataclass(frozen=True, slots=True)
class Transition:
    """A change worth an Event. `kind` is Normal or Warning."""

    kind: str
    reason: str
    message: str


def status_of(
    service: ModelService, seen: Observations, previous: Mapping[str, Any], now: float
) -> Manifest:
    """The whole status for a merge patch: removed fields are None."""
    found = conditions(service, seen)
    most_telling = headline(found)
    return {
        "observedGeneration": service.generation,
        "model": service.served_name,
        "selector": names.selector_text(seen.kind.selector(service.name)),
        "replicas": seen.replicas,
        "readyReplicas": seen.ready,
        "desiredReplicas": seen.desired,
        "canaryReplicas": seen.canary,
        "canary": None if seen.trial is None else seen.trial.status,
        "asleepReplicas": None if service.spec.sharing is None else seen.asleep,
        "reason": most_telling.reason,
        "message": most_telling.message,
        "backlog": seen.backlog,
        **_measured(seen),
        "lastDecision": _last_decision(seen, previous.get("lastDecision"), now),
        "adapters": previous.get("adapters") if seen.adapters is None else _adapters(seen.adapters),
        "draining": [
            {"pod": victim.pod, "engine": victim.engine_id, "since": timestamp(victim.since)}
            for victim in seen.draining
        ],
        "conditions": merged(found, previous.get("conditions", ()), service.generation, now),
    }


def _adapters(adapters: Sequence[AdapterStatus]) -> list[Manifest] | None:
    """The adapters in the API's form; None, which leaves the field out, if there are none."""
    return [asdict(each) for each in adapters] or None


def _measured(seen: Observations) -> Manifest:
    """The engines' activity in whole numbers; None if unknown."""
    engines = None if seen.signals is None else seen.signals.engines
    tokens = None if engines is None else engines.tokens_per_second
    return {
        "tokensPerSecond": None if tokens is None else round(tokens),
        "kvCachePercent": None if engines is None else round(100 * engines.kv_utilization),
        "coldStartSeconds": None if seen.cold_start is None else round(seen.cold_start),
    }


def headline(found: Sequence[Condition]) -> Condition:
    """The most important condition: a problem, else waiting work, else progress."""
    ready, progressing, degraded = (
        next(condition for condition in found if condition.type == kind)
        for kind in (READY, PROGRESSING, DEGRADED)
    )
    if ready.status == "True" and degraded.status == "True":
        return degraded
    calm = ready.status == "True" and ready.reason != SATURATED
    return progressing if calm and progressing.status == "True" else ready


def failed_status(
    generation: int, error: OperatorError, previous: Mapping[str, Any], now: float
) -> Manifest:
    """The status after an error: Degraded is set, the numbers of engines stay as they were."""
    before = previous.get("conditions", ())
    found = [
        Condition(DEGRADED, "True", error.code, str(error)),
        Condition(PROGRESSING, "False", error.code, "nothing is changed until that is fixed"),
    ]
    if not any(raw["type"] == READY for raw in before):
        found.append(Condition(READY, "False", error.code, "no engine was ever started"))
    new = merged(found, before, generation, now)
    replaced = {condition.type for condition in found}
    old = [raw for raw in before if raw["type"] not in replaced]
    return {
        "observedGeneration": generation,
        "reason": error.code,
        "message": str(error),
        "conditions": [*new, *old],
    }


def conditions(service: ModelService, seen: Observations) -> list[Condition]:
    return [
        _ready(service, seen),
        _progressing(seen),
        _degraded(seen),
        _scaling_active(service, seen),
        _scaling_limited(seen),
        *(() if seen.trial is None else (_canary_healthy(seen.trial),)),
    ]


_ZERO = {
    "operator": "no engine runs; the first request starts one",
    "keda": "no engine runs; KEDA starts one when a request waits",
    "none": "no engine runs, since spec.replicas is 0; requests wait",
    "hpa": "no engine runs, since spec.replicas is 0; requests wait",
}


def _ready(service: ModelService, seen: Observations) -> Condition:
    if seen.ready > 0:
        text = f"{seen.ready} of {counted(seen.desired)} ready"
        if seen.asleep:
            text += f", {seen.asleep} asleep while another has the accelerator"
        if (why := _why_saturated(service, seen)) is not None:
            return Condition(READY, "True", SATURATED, f"{text}; {why}")
        return Condition(READY, "True", "EnginesReady", text)
    wanted = seen.desired > 0
    if seen.problem is not None and (wanted or seen.problem[0] == REDIS_UNREACHABLE):
        return Condition(READY, "False", *seen.problem)
    if not wanted:
        return Condition(READY, "True", ZERO, _ZERO[service.spec.scaling.mode])
    return Condition(READY, "False", NOT_READY, f"0 of {counted(seen.desired)} ready")


def _why_saturated(service: ModelService, seen: Observations) -> str | None:
    """Why work waits for engines that will not come, or longer than the targets allow."""
    queue = None if seen.signals is None else seen.signals.queue
    if queue is None or queue.waiting == 0:
        return None
    text = "1 request waits" if queue.waiting == 1 else f"{queue.waiting} requests wait"
    text += f", the oldest for {queue.oldest_age:.0f} s"
    awake = seen.asleep == 0
    if awake and seen.decision is not None and seen.decision.limited is ScalingLimit.MAX_REPLICAS:
        return f"{text}, and scaling.maxReplicas allows no more engines"
    if queue.oldest_age > service.spec.scaling.targets.oldest_age_seconds:
        return f"{text}, longer than scaling.targets.oldestAgeSeconds"
    return None


def _progressing(seen: Observations) -> Condition:
    if seen.draining:
        pods = ", ".join(victim.pod for victim in seen.draining)
        return Condition(PROGRESSING, "True", "Draining", f"engines finish their work: {pods}")
    if seen.replicas > seen.updated:
        text = f"{counted(seen.replicas - seen.updated)} of an older revision to be replaced"
        return Condition(PROGRESSING, "True", "RollingOut", text)
    if seen.ready < seen.desired:
        text = f"{seen.desired - seen.ready} of {counted(seen.desired)} starting"
        return Condition(PROGRESSING, "True", "EnginesStarting", text)
    return Condition(PROGRESSING, "False", "Complete", "all engines are as wanted")


def _degraded(seen: Observations) -> Condition:
    if seen.problem is not None:
        return Condition(DEGRADED, "True", *seen.problem)
    return Condition(DEGRADED, "False", "AsExpected", "nothing is wrong")


def _scaling_active(service: ModelService, seen: Observations) -> Condition:
    mode = service.spec.scaling.mode
    if mode != "operator":
        reason = {"none": "ScaledByHand", "hpa": "ScaledByHPA", "keda": "ScaledByKEDA"}[mode]
        return Condition(SCALING_ACTIVE, "True", reason, why_scaled(service, seen.desired, None))
    decision = seen.decision
    if decision is None:
        text = "engines were just asked for; the first decision follows"
        return Condition(SCALING_ACTIVE, "Unknown", "NotDecided", text)
    if decision.frozen and seen.signals_problem is not None:
        text = f"{seen.signals_problem}; the number of engines stays as it is"
        return Condition(SCALING_ACTIVE, "False", decision.reason.value, text)
    status = "False" if decision.frozen else "True"
    return Condition(SCALING_ACTIVE, status, decision.reason.value, decision.reason.sentence)


def _canary_healthy(trial: CanaryTrial) -> Condition:
    known = {
        CanaryReason.COMPARING: "Unknown",
        CanaryReason.AS_GOOD: "True",
        CanaryReason.PROMOTED: "True",
    }
    return Condition(
        CANARY_HEALTHY,
        known.get(CanaryReason(trial.reason), "False"),
        trial.reason,
        trial.message,
    )


def counted(engines: int) -> str:
    return "1 engine" if engines == 1 else f"{engines} engines"


def why_scaled(service: ModelService, desired: int, decision: Decision | None) -> str:
    """A sentence that explains the number of engines."""
    if decision is not None:
        return decision.message
    scaling, given = service.spec.scaling, service.spec.replicas
    if scaling.mode == "operator":
        least = scaling.min_replicas
        return f"minReplicas is {least}." if desired == least else Reason.INITIAL_SCALE.sentence
    if desired != given:
        return Reason.INITIAL_SCALE.sentence
    return f"spec.replicas is {given}."


def shown_decision(service: ModelService, seen: Observations) -> ScalingDecision:
    """The number of engines and the reason for it, as consoles show them."""
    condition = _scaling_active(service, seen)
    return ScalingDecision(
        desired=seen.desired, ready=seen.ready, reason=condition.reason, message=condition.message
    )


def _scaling_limited(seen: Observations) -> Condition:
    decision = seen.decision
    if decision is None or decision.limited is None:
        text = "no bound, window or step holds the number of engines back"
        return Condition(SCALING_LIMITED, "False", "WithinLimits", text)
    text = f"signals ask for {decision.wanted} engines, {decision.replicas} are set: "
    return Condition(
        SCALING_LIMITED, "True", decision.limited.value, text + _LIMITS[decision.limited]
    )


_LIMITS = {
    ScalingLimit.MIN_REPLICAS: "scaling.minReplicas allows no fewer",
    ScalingLimit.MAX_REPLICAS: "scaling.maxReplicas allows no more",
    ScalingLimit.STEP: "the step limits of scaling.behavior spread the change over time",
    ScalingLimit.STABILIZATION: (
        "a stabilization window of scaling.behavior waits for the signals to last"
    ),
}


def _last_decision(
    seen: Observations, old: Mapping[str, Any] | None, now: float
) -> Manifest | None:
    """The last decision, with the time of the first one with this result and reason."""
    decision = seen.decision
    if decision is None:
        return None
    same = (
        old is not None
        and old.get("replicas") == decision.replicas
        and old.get("reason") == decision.reason.value
    )
    return {
        "time": old["time"] if same and old is not None else timestamp(now),
        "replicas": decision.replicas,
        "reason": decision.reason.value,
        "message": decision.message,
    }


def merged(
    found: Sequence[Condition], old: Sequence[Mapping[str, Any]], generation: int, now: float
) -> list[Manifest]:
    """Conditions in the API's form; unchanged ones keep their times."""
    before = {raw["type"]: raw for raw in old}
    return [_condition(new, before.get(new.type), generation, now) for new in found]


def _condition(
    new: Condition, old: Mapping[str, Any] | None, generation: int, now: float
) -> Manifest:
    since = timestamp(now)
    if old is not None and old["status"] == new.status:
        since = old["lastTransitionTime"]
    return {
        "type": new.type,
        "status": new.status,
        "reason": new.reason,
        "message": new.message,
        "observedGeneration": generation,
        "lastTransitionTime": since,
    }


def transitions(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> list[Transition]:
    """The changes between two lists of conditions: a new status or, of alarming ones, a new reason.

    Several changes with one reason give one transition. A new ModelService that is not ready gives
    none, and one that starts from zero gives no warning.
    """
    before = {raw["type"]: raw for raw in old}
    found: list[Transition] = []
    for condition in new:
        was = before.get(condition["type"], _UNKNOWN)
        alarming = _ALARMING.get(condition["type"]) == condition["status"]
        if not _changed(was, condition, alarming):
            continue
        told = any(earlier.reason == condition["reason"] for earlier in found)
        if told or _is_temporary(condition):
            continue
        text = f"{condition['type']} is {condition['status']}: {condition['message']}"
        kind = "Warning" if alarming and was["reason"] != ZERO else "Normal"
        found.append(Transition(kind, condition["reason"], text))
    return found


def _is_temporary(condition: Mapping[str, Any]) -> bool:
    """Whether the condition is temporary: windows and step limits often delay the count."""
    bound = condition["reason"] == ScalingLimit.MAX_REPLICAS.value
    return condition["type"] == SCALING_LIMITED and not bound


_UNKNOWN = {"status": "Unknown", "reason": ""}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], alarming: bool) -> bool:
    if old["status"] == "Unknown":
        return alarming and new["reason"] != NOT_READY
    if old["status"] != new["status"]:
        return True
    return alarming and new["reason"] not in (old["reason"], NOT_READY)


def drains(previous: Mapping[str, Any]) -> list[Draining]:
    """The drains that an earlier reconciliation, perhaps of another operator, has started."""
    return [
        Draining(pod=raw["pod"], engine_id=raw.get("engine", ""), since=seconds(raw["since"]))
        for raw in previous.get("draining") or ()
    ]


def timestamp(now: float) -> str:
    """Unix seconds in the API's format of times."""
    when = datetime.fromtimestamp(now, UTC)
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")


def seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
