"""The workloads of engines that span several pods, their nodes: node 0 is the engine, the others
run only ranks.

With LeaderWorkerSet a group is an engine. Otherwise each node has its own StatefulSet, and pod i of
each belongs to engine i. So Kubernetes alone gives each pod its rank and the address of node 0, and
a rolling update replaces the pods of an engine together.
"""

from typing import Any

from .. import names
from ..spec.model_service import ModelService
from .defaults import Platform
from .environment import PREFIX, USER_DIR, own_user
from .metadata import metadata
from .pod import Node, pod_template

Manifest = dict[str, Any]

# So that the StatefulSets of an engine's nodes, whose pods are not ready at the same moment, go on
# to the next engine together: twice the period of the readiness probe.
MIN_READY_SECONDS = 10
ZONE = "topology.kubernetes.io/zone"


def leader_worker_set(
    service: ModelService, platform: Platform, *, replicas: int, track: str = names.STABLE
) -> Manifest:
    """A LeaderWorkerSet with a group for each engine; a restart in a group recreates its pods."""
    rollout = service.spec.engine.rollout
    rank = {"fieldRef": {"fieldPath": f"metadata.labels['{names.WORKER_INDEX}']"}}
    address = {"value": "$(LWS_LEADER_ADDRESS)"}
    node = Node(
        labels={},
        env=_settings(service, platform, rank={"valueFrom": rank}, address=address),
        affinity=_together(service, names.GROUP_INDEX),
    )
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(service, names.leader_worker_set(service.name)),
        "spec": {
            "replicas": replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "maxSurge": rollout.max_surge,
                    "maxUnavailable": rollout.max_unavailable,
                },
            },
            "leaderWorkerTemplate": {
                "size": service.spec.engine.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": pod_template(service, platform, track, node),
            },
        },
    }


def stateful_sets(
    service: ModelService, platform: Platform, *, replicas: int, track: str = names.STABLE
) -> list[Manifest]:
    """A StatefulSet for each node, by rank."""
    return [
        _stateful_set(service, platform, rank, replicas, track)
        for rank in range(service.spec.engine.nodes)
    ]


def _stateful_set(
    service: ModelService, platform: Platform, rank: int, replicas: int, track: str
) -> Manifest:
    labels = {names.NODE_RANK: str(rank)}
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{names.POD_INDEX}']"}}
    first = names.stateful_set(service.name, 0)
    address = {"value": f"{first}-$(ENGINE_INDEX).{names.service(service.name)}"}
    settings = _settings(service, platform, rank={"value": str(rank)}, address=address)
    node = Node(
        labels=labels,
        env=[{"name": "ENGINE_INDEX", "valueFrom": index}, *settings],
        affinity=_together(service, names.POD_INDEX),
    )
    meta = metadata(service, names.stateful_set(service.name, rank))
    meta["labels"] |= labels
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta,
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 5,
            "serviceName": names.service(service.name),
            "podManagementPolicy": "Parallel",
            "minReadySeconds": MIN_READY_SECONDS,
            "selector": {"matchLabels": names.track_selector(service.name, track) | labels},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": pod_template(service, platform, track, node),
        },
    }


def _settings(
    service: ModelService, platform: Platform, *, rank: Manifest, address: Manifest
) -> list[Manifest]:
    """The engine's settings of its nodes, as variables. The password of the engines' Redis user is
    also the secret by which nodes know each other."""
    found: list[Manifest] = [
        {"name": f"{PREFIX}NNODES", "value": str(service.spec.engine.nodes)},
        {"name": f"{PREFIX}NODE_RANK", **rank},
        {"name": f"{PREFIX}MASTER_ADDR", **address},
        {"name": f"{PREFIX}MASTER_PORT", "value": str(names.MASTER_PORT)},
    ]
    if own_user(service, platform):
        found.append({"name": f"{PREFIX}NODE_SECRET_FILE", "value": f"{USER_DIR}/password"})
    return found


def _together(service: ModelService, index: str) -> Manifest:
    """The affinity that prefers one zone for the pods of an engine, which have the same `index`
    label."""
    term = {
        "topologyKey": ZONE,
        "labelSelector": {"matchLabels": names.selector(service.name)},
        "matchLabelKeys": [index],
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
