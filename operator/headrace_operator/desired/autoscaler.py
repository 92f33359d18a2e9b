"""HorizontalPodAutoscaler and ScaledObject for modes hpa and keda.

Both set the ModelService's own scale, never the workload's: the operator follows that number and
drains the engine that has to go.
"""

from collections.abc import Mapping
from typing import Any

from headrace_common.observability import metric_names

from .. import names
from ..scaling.policy import LONGEST_WINDOW, ScalingRules
from ..spec.model_service import ModelService
from ..spec.scaling_policy import scaling_policy
from ..spec.scaling_section import ScalingSpec
from .metadata import metadata

Manifest = dict[str, Any]


def autoscaler(service: ModelService) -> Manifest | None:
    """The object of the mode, or None in the modes operator and none."""
    match service.spec.scaling.mode:
        case "hpa":
            return _horizontal(service)
        case "keda":
            return _scaled_object(service)
        case _:
            return None


def _target(service: ModelService) -> Manifest:
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": service.name}


def _horizontal(service: ModelService) -> Manifest:
    """Scales on waiting plus running requests, since waiting ones can be 0 while all are busy."""
    scaling = service.spec.scaling
    metrics = [
        _external(metric_names.QUEUE_DEPTH, service, scaling),
        _external(metric_names.QUEUE_PENDING, service, scaling),
    ]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(service, names.autoscaler(service.name)),
        "spec": {
            "scaleTargetRef": _target(service),
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": metrics,
            "behavior": behavior(scaling),
        },
    }


def _external(metric: metric_names.Metric, service: ModelService, scaling: ScalingSpec) -> Manifest:
    labels = {"gen_ai_request_model": service.served_name}
    return {
        "type": "External",
        "external": {
            "metric": {
                "name": metric.prometheus_name,
                "selector": {"matchLabels": labels},
            },
            "target": {
                "type": "AverageValue",
                "averageValue": str(scaling.targets.requests_per_engine),
            },
        },
    }


def _scaled_object(service: ModelService) -> Manifest:
    scaling = service.spec.scaling
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(service, names.autoscaler(service.name)),
        "spec": {
            "scaleTargetRef": _target(service),
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            "pollingInterval": 15,
            "cooldownPeriod": scaling.idle_seconds,
            # If Prometheus does not answer, no engines must be removed.
            "fallback": {
                "failureThreshold": 3,
                "replicas": max(1, scaling.min_replicas),
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior(scaling)}},
            "triggers": [_trigger(service)],
        },
    }


def _trigger(service: ModelService) -> Manifest:
    """All gateways report the same queue: max over gateways, then the sum of both gauges."""
    scaling = service.spec.scaling
    return {
        "type": "prometheus",
        "metadata": {
            "serverAddress": scaling.prometheus_url,
            "query": backlog_query(service.served_name),
            "threshold": str(scaling.targets.requests_per_engine),
            "activationThreshold": "0",
        },
    }


def backlog_query(model: str) -> str:
    """PromQL: requests of a model that wait or run."""
    label = f'{{gen_ai_request_model="{escaped(model)}"}}'
    waiting = metric_names.QUEUE_DEPTH.prometheus_name
    pending = metric_names.QUEUE_PENDING.prometheus_name
    return f"max({waiting}{label}) + max({pending}{label})"


def escaped(value: str) -> str:
    """A label's value inside the quotes of PromQL."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def behavior(scaling: ScalingSpec) -> Mapping[str, Manifest]:
    """`behavior` as in a HorizontalPodAutoscaler, the same as in mode operator; the window that the
    operator derives is Kubernetes' default instead."""
    policy = scaling_policy(scaling).for_cold_start(LONGEST_WINDOW)
    return {"scaleUp": _rules(policy.scale_up), "scaleDown": _rules(policy.scale_down)}


def _rules(rules: ScalingRules) -> Manifest:
    return {
        "stabilizationWindowSeconds": int(rules.window),
        "selectPolicy": rules.select_policy,
        "policies": [
            {"type": str(step.kind), "value": step.value, "periodSeconds": int(step.period)}
            for step in rules.policies
        ],
    }
