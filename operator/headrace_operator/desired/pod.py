"""An engine's pod: one container that runs the engine, and what it needs on its node."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import names
from ..spec.model_service import ModelService
from ..spec.sections import EngineSpec
from .adapters import adapters
from .defaults import Platform
from .environment import CA_DIR, SEALING_DIR, USER_DIR, environment, own_user
from .security import CONTAINER_SECURITY, POD_SECURITY
from .source import Source, source

Manifest = dict[str, Any]

CACHE_DIR = "/var/cache/headrace"  # HOME of the image: everything that libraries write by default
# The kernel drops a SIGTERM that the container's first process cannot handle yet; the pod may be
# deleted while Python starts.
PRE_STOP_SECONDS = 1
GRACE_MARGIN = 15  # seconds after the drain, to give back requests and close connections
STARTUP_PERIOD = 2  # the longest that a ready engine waits until Kubernetes knows
GPU_PRODUCT = "nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What distinguishes a pod of an engine that spans several: labels, variables of the container,
    and the affinity that it has unless the spec gives one."""

    labels: dict[str, str]
    env: Sequence[Manifest]
    affinity: Manifest


def pod_template(
    service: ModelService, platform: Platform, track: str, node: Node | None = None
) -> Manifest:
    """`spec.template` of one track's workload. `node` None: the pod is a whole engine."""
    engine = service.spec.engine
    own = {} if node is None else node.labels
    labels = {**engine.pod_labels, **names.labels(service.name), names.TRACK: track, **own}
    metadata: Manifest = {"labels": labels}
    if engine.pod_annotations:
        metadata["annotations"] = dict(engine.pod_annotations)
    return {"metadata": metadata, "spec": _pod(service, platform, track, node)}


def _pod(service: ModelService, platform: Platform, track: str, node: Node | None) -> Manifest:
    spec = service.spec
    canary = spec.canary if track == names.CANARY else None
    found = source(
        spec.model,
        downloader_image=platform.downloader_image,
        revision=None if canary is None else canary.revision,
    )
    image = (canary and canary.image) or spec.engine.image or platform.engine_image
    pull_secrets = (*platform.image_pull_secrets, *spec.engine.image_pull_secrets)
    container = _container(service, platform, found, image, track, node)
    pod: Manifest = {
        "serviceAccountName": names.service_account(service.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.drain.timeout_seconds + GRACE_MARGIN,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": _volumes(service, platform, found),
    }
    before = [*found.init_containers, *([_doctor(container)] if spec.engine.doctor else ())]
    if before:
        pod["initContainers"] = before
    if pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in dict.fromkeys(pull_secrets)]
    affinity = spec.engine.affinity or ({} if node is None else node.affinity)
    return pod | _scheduling(service.name, spec.engine, affinity)


def _container(
    service: ModelService,
    platform: Platform,
    found: Source,
    image: str,
    track: str,
    node: Node | None,
) -> Manifest:
    engine = service.spec.engine
    container: Manifest = {
        "name": names.CONTAINER,
        "image": image,
        "imagePullPolicy": engine.image_pull_policy or platform.engine_image_pull_policy,
        "env": environment(service, platform, found, track, () if node is None else node.env),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
        "ports": [{"name": names.METRICS_PORT_NAME, "containerPort": names.METRICS_PORT}],
        # The end of the log becomes the termination message, and so the ModelService's problem.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(engine),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [*_mounts(service, platform, found), *adapters(service.spec).mounts],
        **_probes(engine),
    }
    if node is not None:
        container["ports"].append(
            {"name": names.MASTER_PORT_NAME, "containerPort": names.MASTER_PORT}
        )
    if engine.extra_args:
        container["args"] = list(engine.extra_args)
    if env_from := [*adapters(service.spec).env_from, *engine.env_from]:
        container["envFrom"] = env_from
    return container


# Fields of the engine's container that its doctor's container shares.
_EXAMINED = (
    *("image", "imagePullPolicy", "env", "envFrom", "resources", "securityContext"),
    *("terminationMessagePolicy", "volumeMounts"),
)


def _doctor(container: Manifest) -> Manifest:
    """An init container that checks the engine's environment, with the engine's image."""
    same = {field: container[field] for field in _EXAMINED if field in container}
    return {"name": names.DOCTOR, "command": ["headrace", "doctor", "--engine"], **same}


def _resources(engine: EngineSpec) -> Manifest:
    """The container's resources. GPUs are limits; Kubernetes sets the same request."""
    limits = dict(engine.resources.limits)
    if engine.gpu is not None:
        limits[engine.gpu.resource_name] = str(engine.ranks_of_a_node)
    found: Manifest = {}
    if engine.resources.requests:
        found["requests"] = dict(engine.resources.requests)
    if limits:
        found["limits"] = limits
    return found


def _probes(engine: EngineSpec) -> Manifest:
    """Liveness is the age of the last step; the metrics port opens when the model is loaded."""
    failures = -(-engine.startup_timeout_seconds // STARTUP_PERIOD)
    return {
        "startupProbe": _probe("live", period=STARTUP_PERIOD, failures=failures),
        "livenessProbe": _probe("live", period=10, failures=3),
        "readinessProbe": _probe("ready", period=5, failures=2),
    }


def _probe(check: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": f"/health/{check}", "port": names.METRICS_PORT_NAME},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(service: ModelService, platform: Platform, found: Source) -> list[Manifest]:
    engine = service.spec.engine
    volumes = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": engine.shared_memory}},
        _cache(service.name, engine),
        *found.volumes,
        *adapters(service.spec).volumes,
    ]
    if own_user(service, platform):
        user = {"secretName": names.redis_secret(service.name)}
        volumes.append({"name": "queue-user", "secret": user})
    if platform.queue_ca_secret is not None:
        volumes.append({"name": "queue-ca", "secret": {"secretName": platform.queue_ca_secret}})
    if platform.sealing_secret is not None:
        volumes.append({"name": "sealing", "secret": {"secretName": platform.sealing_secret}})
    return volumes


def _cache(name: str, engine: EngineSpec) -> Manifest:
    if engine.cache.persistent:
        claim = {"claimName": names.cache_claim(name)}
        return {"name": "cache", "persistentVolumeClaim": claim}
    return {"name": "cache", "emptyDir": {"sizeLimit": engine.cache.size}}


def _mounts(service: ModelService, platform: Platform, found: Source) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "cache", "mountPath": CACHE_DIR},
        *found.mounts,
    ]
    if own_user(service, platform):
        mounts.append({"name": "queue-user", "mountPath": USER_DIR, "readOnly": True})
    if platform.queue_ca_secret is not None:
        mounts.append({"name": "queue-ca", "mountPath": CA_DIR, "readOnly": True})
    if platform.sealing_secret is not None:
        # As a folder, since a single file never gets updates of its Secret.
        mounts.append({"name": "sealing", "mountPath": SEALING_DIR, "readOnly": True})
    return mounts


def _scheduling(name: str, engine: EngineSpec, affinity: Manifest) -> Manifest:
    selector = dict(engine.node_selector)
    if engine.gpu is not None and engine.gpu.product is not None:
        selector[GPU_PRODUCT] = engine.gpu.product
    spread = [
        {"labelSelector": {"matchLabels": names.selector(name)}, **constraint}
        for constraint in engine.topology_spread_constraints
    ]
    fields: Manifest = {
        "nodeSelector": selector,
        "tolerations": list(engine.tolerations),
        "affinity": affinity,
        "topologySpreadConstraints": spread,
        "priorityClassName": engine.priority_class_name,
        "runtimeClassName": engine.runtime_class_name,
        "schedulerName": engine.scheduler_name,
    }
    return {key: value for key, value in fields.items() if value}
