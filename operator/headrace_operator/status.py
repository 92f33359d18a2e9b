"""The status of a ModelService, from what was seen and decided. Pure.

A condition keeps its lastTransitionTime until its status changes; events are made of exactly those
changes, so a state that lasts is told once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from . import names
from .drain import Draining
from .errors import OperatorError
from .scaling.decision import Decision
from .scaling.reason import Limit, Reason
from .spec import ModelService

Manifest = dict[str, Any]

READY = "Ready"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"
SCALING_ACTIVE = "ScalingActive"
SCALING_LIMITED = "ScalingLimited"
ZERO = "ScaledToZero"
NOT_READY = "NoEngineReady"

# The status of a condition that calls for somebody's attention.
_ALARMING = {READY: "False", DEGRADED: "True", SCALING_ACTIVE: "False"}


@dataclass(frozen=True, slots=True)
class Condition:
    """`status` is True, False or Unknown."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a reconciliation found and did. Counts are of the stable track.

    `problem` is (reason, message) of what will not get well by itself. `signals_problem` says why
    there are no signals.
    """

    replicas: int
    ready: int
    updated: int
    desired: int
    canary: int = 0
    backlog: int | None = None
    decision: Decision | None = None
    draining: tuple[Draining, ...] = ()
    problem: tuple[str, str] | None = None
    signals_problem: str | None = None


@dataclass(frozen=True, slots=True)
class Transition:
    """A change worth an Event. `kind` is Normal or Warning."""

    kind: str
    reason: str
    message: str


def status_of(
    service: ModelService, seen: Seen, previous: Mapping[str, Any], now: float
) -> Manifest:
    """The whole status, for a merge: what has gone is None."""
    found = conditions(service, seen)
    return {
        "observedGeneration": service.generation,
        "model": service.served_name,
        "selector": names.selector_text(names.track_selector(service.name, names.STABLE)),
        "replicas": seen.replicas,
        "readyReplicas": seen.ready,
        "desiredReplicas": seen.desired,
        "canaryReplicas": seen.canary,
        "backlog": seen.backlog,
        "lastDecision": _last_decision(seen, previous.get("lastDecision"), now),
        "draining": [
            {"pod": victim.pod, "engine": victim.engine_id, "since": timestamp(victim.since)}
            for victim in seen.draining
        ],
        "conditions": merged(found, previous.get("conditions", ()), service.generation, now),
    }


def failed_status(
    generation: int, error: OperatorError, previous: Mapping[str, Any], now: float
) -> Manifest:
    """After an error nothing is known anew: Degraded is set, the engines stay as they were."""
    before = previous.get("conditions", ())
    found = [
        Condition(DEGRADED, "True", error.code, str(error)),
        Condition(PROGRESSING, "False", error.code, "nothing is changed until that is mended"),
    ]
    if not any(raw["type"] == READY for raw in before):
        found.append(Condition(READY, "False", error.code, "no engine was ever started"))
    new = merged(found, before, generation, now)
    told = {condition.type for condition in found}
    old = [raw for raw in before if raw["type"] not in told]
    return {"observedGeneration": generation, "conditions": [*new, *old]}


def conditions(service: ModelService, seen: Seen) -> list[Condition]:
    return [
        _ready(service, seen),
        _progressing(seen),
        _degraded(seen),
        _scaling_active(service, seen),
        _scaling_limited(seen),
    ]


_ZERO = {
    "operator": "no engine runs; the first request starts one",
    "keda": "no engine runs; KEDA starts one when a request waits",
    "none": "no engine runs, since spec.replicas is 0; requests wait",
    "hpa": "no engine runs, since spec.replicas is 0; requests wait",
}


def _ready(service: ModelService, seen: Seen) -> Condition:
    if seen.ready > 0:
        text = f"{seen.ready} of {counted(seen.desired)} ready"
        return Condition(READY, "True", "EnginesReady", text)
    if seen.desired == 0:
        return Condition(READY, "True", ZERO, _ZERO[service.spec.scaling.mode])
    return Condition(READY, "False", NOT_READY, f"0 of {counted(seen.desired)} ready")


def _progressing(seen: Seen) -> Condition:
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


def _degraded(seen: Seen) -> Condition:
    if seen.problem is not None:
        return Condition(DEGRADED, "True", *seen.problem)
    return Condition(DEGRADED, "False", "AsExpected", "nothing is wrong")


def _scaling_active(service: ModelService, seen: Seen) -> Condition:
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


def counted(engines: int) -> str:
    return "1 engine" if engines == 1 else f"{engines} engines"


def why_scaled(service: ModelService, desired: int, decision: Decision | None) -> str:
    """Why there are to be so many engines, in a sentence."""
    if decision is not None:
        return decision.message
    scaling, given = service.spec.scaling, service.spec.replicas
    if scaling.mode == "operator":
        least = scaling.min_replicas
        return f"minReplicas is {least}." if desired == least else Reason.INITIAL_SCALE.sentence
    if desired != given:
        return Reason.INITIAL_SCALE.sentence
    return f"spec.replicas is {given}."


def _scaling_limited(seen: Seen) -> Condition:
    decision = seen.decision
    if decision is None or decision.limited is None:
        text = "no bound, window or step holds the number of engines back"
        return Condition(SCALING_LIMITED, "False", "WithinLimits", text)
    text = f"signals ask for {decision.wanted} engines, {decision.replicas} are set: "
    return Condition(
        SCALING_LIMITED, "True", decision.limited.value, text + _LIMITS[decision.limited]
    )


_LIMITS = {
    Limit.MIN_REPLICAS: "scaling.minReplicas allows no fewer",
    Limit.MAX_REPLICAS: "scaling.maxReplicas allows no more",
    Limit.STEP: "the step limits of scaling.behavior spread the change over time",
    Limit.STABILIZATION: "a stabilization window of scaling.behavior waits for the signals to last",
}


def _last_decision(seen: Seen, old: Mapping[str, Any] | None, now: float) -> Manifest | None:
    """Its time is that of the first decision with this result for this reason."""
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
    """Conditions as the API has them, with the times of those that have not changed."""
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
    """What changed between two lists of conditions, status or, where alarming, reason.

    What has one reason is told once, by the first of them. That a new one is not ready yet is
    nothing to tell, and that one from zero is not is no alarm.
    """
    before = {raw["type"]: raw for raw in old}
    found: list[Transition] = []
    for condition in new:
        was = before.get(condition["type"], _UNKNOWN)
        alarming = _ALARMING.get(condition["type"]) == condition["status"]
        if not _changed(was, condition, alarming):
            continue
        if any(told.reason == condition["reason"] for told in found) or _passing(condition):
            continue
        text = f"{condition['type']} is {condition['status']}: {condition['message']}"
        kind = "Warning" if alarming and was["reason"] != ZERO else "Normal"
        found.append(Transition(kind, condition["reason"], text))
    return found


def _passing(condition: Mapping[str, Any]) -> bool:
    """Windows and steps hold the count back often, and for a while."""
    bound = condition["reason"] == Limit.MAX_REPLICAS.value
    return condition["type"] == SCALING_LIMITED and not bound


_UNKNOWN = {"status": "Unknown", "reason": ""}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], alarming: bool) -> bool:
    if old["status"] == "Unknown":
        return alarming and new["reason"] != NOT_READY
    if old["status"] != new["status"]:
        return True
    return alarming and old["reason"] != new["reason"]


def drains(previous: Mapping[str, Any]) -> list[Draining]:
    """The drains that an earlier reconciliation, perhaps of another operator, has begun."""
    return [
        Draining(pod=raw["pod"], engine_id=raw.get("engine", ""), since=seconds(raw["since"]))
        for raw in previous.get("draining") or ()
    ]


def timestamp(now: float) -> str:
    """Unix seconds as the API writes times."""
    when = datetime.fromtimestamp(now, UTC)
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")


def seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
