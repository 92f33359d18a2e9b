"""The engine process's environment: its settings as HEADRACE_ENGINE_*, and the user's on top."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_common.sealing.keyring import SECRET_FIELD

from .. import names
from ..spec.model_service import ModelService
from .adapters import adapters
from .defaults import Platform
from .source import Source

Manifest = dict[str, Any]
PREFIX = "HEADRACE_ENGINE_"
SERVED_NAME = f"{PREFIX}SERVED_MODEL_NAME"
CA_DIR = "/etc/headrace/redis-ca"
USER_DIR = "/etc/headrace/redis-user"
SEALING_DIR = "/etc/headrace/sealing"


def environment(
    service: ModelService,
    platform: Platform,
    source: Source,
    track: str,
    node: Sequence[Manifest] = (),
) -> list[Manifest]:
    """Container `env`, each name once; the user's own variables win.

    `node` are the variables of a pod of an engine that spans several.
    """
    spec = service.spec
    variables: dict[str, Manifest] = {}
    for name, value in _settings(service, source, track).items():
        variables[name] = {"name": name, "value": value}
    queue = _queue(service, platform)
    own = (variable.manifest for variable in spec.engine.env)
    for variable in (
        *node,
        *queue,
        *_sealing(platform),
        *source.env,
        *adapters(spec).env,
        *_identity(service, platform),
        *own,
    ):
        variables[variable["name"]] = dict(variable)
    return list(variables.values())


def _settings(service: ModelService, source: Source, track: str) -> Mapping[str, str]:
    spec = service.spec
    chosen = spec.engine.settings.model_dump(exclude_none=True, by_alias=False)
    chosen.setdefault("device", "cpu" if spec.engine.gpu is None else "cuda")
    # Images of older versions do not know these settings.
    if spec.engine.tensor_parallel_size > 1:
        chosen["tensor_parallel_size"] = spec.engine.tensor_parallel_size
    if spec.engine.enable_expert_parallel:
        chosen["enable_expert_parallel"] = True
    if spec.queue.shards > 1:
        chosen["queue_shards"] = spec.queue.shards
    if spec.deletion.waiting_requests == "Hold":
        chosen["hold_waiting"] = True
    if spec.scaling.low_priority == "Yield":
        chosen["low_priority_share"] = spec.scaling.targets.utilization
    chosen |= adapters(spec).settings | _sharing(service)
    chosen |= {
        "model": source.model,
        "served_model_name": service.served_name,
        "owner": service.owner,
        "drain_timeout": spec.drain.timeout_seconds,
        # otherwise the kubelet would start it again before its pod is removed
        "after_drain": "wait",
        "metrics_host": "0.0.0.0",  # noqa: S104 - the pod's own address; the policy guards it
        "metrics_port": names.METRICS_PORT,
    }
    if source.revision is not None:
        chosen["revision"] = source.revision
    if track == names.CANARY:  # gateways continue with the stable revision's tokenizer and template
        chosen["register_model"] = False
        chosen["variant"] = names.CANARY
    return {f"{PREFIX}{name.upper()}": _text(value) for name, value in chosen.items()}


def _sharing(service: ModelService) -> dict[str, object]:
    sharing = service.spec.sharing
    if sharing is None:
        return {}
    return {
        "sharing_group": service.sharing_group,
        "sharing_sleep_level": sharing.sleep_level,
        "sharing_min_awake": sharing.min_awake_seconds,
        "sharing_max_awake": sharing.max_awake_seconds,
        "sharing_timeout": sharing.timeout_seconds,
    }


def _text(value: object) -> str:
    if isinstance(value, (bool, dict)):
        return json.dumps(value)
    return str(value)


def own_user(service: ModelService, platform: Platform) -> bool:
    """Whether the engines have a Redis user of their own, whose Secret is in their pods."""
    return platform.queue_users and service.spec.queue.url_secret is None


def _queue(service: ModelService, platform: Platform) -> list[Manifest]:
    name = f"{PREFIX}REDIS_URL"
    if own_user(service, platform):
        credentials = {"name": f"{PREFIX}REDIS_CREDENTIALS", "value": USER_DIR}
        return [{"name": name, "value": platform.queue_url}, credentials]
    own = service.spec.queue.url_secret
    secret = (own.name, own.key) if own is not None else platform.queue_secret
    if secret is None:
        return [{"name": name, "value": platform.queue_url}]
    reference = {"name": secret[0], "key": secret[1]}
    return [{"name": name, "valueFrom": {"secretKeyRef": reference}}]


def _sealing(platform: Platform) -> list[Manifest]:
    if platform.sealing_secret is None:
        return []
    return [
        {"name": f"{PREFIX}SEALING_KEYS_FILE", "value": f"{SEALING_DIR}/{SECRET_FIELD}"},
        {"name": f"{PREFIX}SEALING_MODE", "value": platform.sealing_mode},
    ]


def _identity(service: ModelService, platform: Platform) -> list[Manifest]:
    """Environment variables of telemetry: the pod's attributes, and the receiver."""
    found: list[Manifest] = [
        {"name": "K8S_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {
            "name": "OTEL_RESOURCE_ATTRIBUTES",
            "value": f"k8s.namespace.name={service.namespace},k8s.pod.name=$(K8S_POD_NAME),"
            f"headrace.model_service={service.name}",
        },
    ]
    if platform.otlp_endpoint is not None:
        found.append({"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": platform.otlp_endpoint})
        # Metrics are scraped from the pod; if they were also sent, they would count twice.
        found.append({"name": "OTEL_METRICS_EXPORTER", "value": "none"})
    return found
