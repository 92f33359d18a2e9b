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
from .spec import ModelService

Manifest = dict[str, Any]

READY = "Ready"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"
SCALING_ACTIVE = "ScalingActive"
SCALING_LIMITED = "ScalingLimited"

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
    """After an error nothing is known anew: Degraded is set, the rest stays as it was."""
    degraded = Condition(DEGRADED, "True", error.code, str(error))
    old = [raw for raw in previous.get("conditions", ()) if raw["type"] != DEGRADED]
    new = merged([degraded], previous.get("conditions", ()), generation, now)
    return {"observedGeneration": generation, "conditions": [*old, *new]}


def conditions(service: ModelService, seen: Seen) -> list[Condition]:
    return [
        _ready(seen),
        _progressing(seen),
        _degraded(seen),
        _scaling_active(service, seen),
        _scaling_limited(seen),
    ]


def _ready(seen: Seen) -> Condition:
    if seen.ready > 0:
        return Condition(READY, "True", "EnginesReady", f"{seen.ready} engines are ready")
    if seen.desired == 0:
        text = "no engine runs; the first request starts one"
        return Condition(READY, "True", "ScaledToZero", text)
    return Condition(READY, "False", "NoEngineReady", f"none of {seen.desired} engines is ready")


def _progressing(seen: Seen) -> Condition:
    if seen.draining:
        pods = ", ".join(victim.pod for victim in seen.draining)
        return Condition(PROGRESSING, "True", "Draining", f"engines finish their work: {pods}")
    if seen.updated < seen.desired:
        text = f"{seen.updated} of {seen.desired} engines are of the newest revision"
        return Condition(PROGRESSING, "True", "RollingOut", text)
    if seen.ready < seen.desired:
        text = f"{seen.ready} of {seen.desired} engines are ready"
        return Condition(PROGRESSING, "True", "EnginesStarting", text)
    return Condition(PROGRESSING, "False", "Complete", "all engines are as wanted")


def _degraded(seen: Seen) -> Condition:
    if seen.problem is not None:
        return Condition(DEGRADED, "True", *seen.problem)
    return Condition(DEGRADED, "False", "AsExpected", "")


def _scaling_active(service: ModelService, seen: Seen) -> Condition:
    mode = service.spec.scaling.mode
    if mode != "operator":
        reason = {"none": "ScaledByHand", "hpa": "ScaledByHPA", "keda": "ScaledByKEDA"}[mode]
        return Condition(SCALING_ACTIVE, "True", reason, "spec.replicas is followed")
    if seen.signals_problem is not None:
        return Condition(SCALING_ACTIVE, "False", "MetricsMissing", seen.signals_problem)
    if seen.decision is None:
        return Condition(SCALING_ACTIVE, "Unknown", "NotDecided", "")
    decision = seen.decision
    status = "False" if decision.frozen else "True"
    return Condition(SCALING_ACTIVE, status, decision.reason.value, decision.reason.sentence)


def _scaling_limited(seen: Seen) -> Condition:
    decision = seen.decision
    if decision is None or decision.limited is None:
        return Condition(SCALING_LIMITED, "False", "WithinLimits", "")
    text = f"signals ask for {decision.wanted} engines, {decision.replicas} are set"
    return Condition(SCALING_LIMITED, "True", decision.limited.value, text)


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
    """What changed between two lists of conditions, status or, where alarming, reason."""
    before = {raw["type"]: raw for raw in old}
    found = []
    for condition in new:
        was = before.get(condition["type"])
        alarming = _ALARMING.get(condition["type"]) == condition["status"]
        if was is None and not alarming:
            continue
        if was is not None and not _changed(was, condition, alarming):
            continue
        text = f"{condition['type']} is {condition['status']}: {condition['message']}"
        kind = "Warning" if alarming else "Normal"
        found.append(Transition(kind, condition["reason"], text))
    return found


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], alarming: bool) -> bool:
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
