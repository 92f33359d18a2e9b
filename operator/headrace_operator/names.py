"""Labels, annotations and child names of everything that the operator makes.

Selector labels never change for the life of a ModelService: a workload's selector is immutable.
"""

from collections.abc import Mapping

GROUP = "headrace.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ModelService"
PLURAL = "modelservices"

FIELD_MANAGER = "headrace-operator"
MANAGED_BY = "app.kubernetes.io/managed-by"
NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
PART_OF = "app.kubernetes.io/part-of"
MODEL_SERVICE = f"{GROUP}/model-service"
TRACK = f"{GROUP}/track"
STABLE = "stable"
CANARY = "canary"
NODE_RANK = f"{GROUP}/node-rank"  # of a pod of an engine that spans several
POD_INDEX = "apps.kubernetes.io/pod-index"

# https://lws.sigs.k8s.io
LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io/v1"
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"

# On a ModelService: a new value gives its engines' Redis user a new password.
REDIS_PASSWORD = f"{GROUP}/redis-password"

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
VICTIM_COST = "-1000000"
ENDED_COST = "-2000000"  # pods that have ended are removed before those that still drain
NO_COST = "0"

CONTAINER = "engine"
DOCTOR = "doctor"
METRICS_PORT_NAME = "metrics"
METRICS_PORT = 9400
MASTER_PORT_NAME = "master"
MASTER_PORT = 29501

# A pod's name is its Deployment's plus 17 characters. Engine ids contain the pod's name as a host
# name, which has at most 63 characters.
MAX_NAME_CHARS = 40
REDIS_USER_SUFFIX = "-engine-redis"  # ends the names of Secrets with engines' Redis users
CACHE_SUFFIX = "-cache"  # ends the names of claims for downloads and kernels


def selector(name: str) -> dict[str, str]:
    """Labels that select every engine pod of a ModelService."""
    return {NAME: "headrace-engine", INSTANCE: name, MODEL_SERVICE: name}


def track_selector(name: str, track: str) -> dict[str, str]:
    """Labels that select the engine pods of one of its tracks."""
    return {**selector(name), TRACK: track}


def labels(name: str) -> dict[str, str]:
    """Labels of every child object."""
    return {
        **selector(name),
        COMPONENT: "engine",
        PART_OF: "headrace",
        MANAGED_BY: FIELD_MANAGER,
    }


def selector_text(labels: Mapping[str, str]) -> str:
    """Labels as the query parameter `labelSelector`."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def deployment(name: str, track: str = STABLE) -> str:
    return f"{name}-engine" if track == STABLE else f"{name}-engine-{track}"


def stateful_set(name: str, rank: int) -> str:
    """The StatefulSet of one node of every engine. At most 52 characters: its pods have its name
    and a hash as a label."""
    return f"{name}-engine-n{rank}"


def leader_worker_set(name: str) -> str:
    return f"{name}-engine"


def service(name: str) -> str:
    return f"{name}-engine"


def service_account(name: str) -> str:
    return f"{name}-engine"


def disruption_budget(name: str) -> str:
    return f"{name}-engine"


def network_policy(name: str) -> str:
    return f"{name}-engine"


def service_monitor(name: str) -> str:
    return f"{name}-engine"


def cache_claim(name: str) -> str:
    return f"{name}{CACHE_SUFFIX}"


def redis_secret(name: str) -> str:
    """The name of the Secret with its engines' Redis user."""
    return f"{name}{REDIS_USER_SUFFIX}"


def scaling_history(name: str) -> str:
    return f"{name}-scaling"


def autoscaler(name: str) -> str:
    return f"{name}-engine"


def pod_of_engine(engine_id: str) -> str:
    """The pod of an engine: ids are `<host name>.<pid>.<random>`, the host name is the pod's."""
    return engine_id.rsplit(".", 2)[0]
