"""The objects that run a ModelService's engines: Deployment, LeaderWorkerSet or StatefulSets."""

from enum import StrEnum
from typing import Any

from .. import names
from ..spec.model_service import ModelService
from .defaults import Platform
from .deployment import deployment
from .groups import leader_worker_set, stateful_sets

Manifest = dict[str, Any]


class WorkloadKind(StrEnum):
    """The kind of these objects. An engine is a pod of a Deployment, a group of a LeaderWorkerSet,
    or the pods with the same number of one StatefulSet for each node."""

    DEPLOYMENT = "Deployment"
    LEADER_WORKER_SET = "LeaderWorkerSet"
    STATEFUL_SET = "StatefulSet"

    @property
    def group_labels(self) -> tuple[str, str] | None:
        """The labels of a pod with the number of its engine and its node rank; None if engines have
        one pod."""
        return _GROUP_LABELS.get(self)

    def first_pod(self, name: str, index: int) -> str:
        """The name of the pod of node 0 of a ModelService's engine `index`."""
        if self is WorkloadKind.STATEFUL_SET:
            return f"{names.stateful_set(name, 0)}-{index}"
        return f"{names.leader_worker_set(name)}-{index}"

    def selector(self, name: str) -> dict[str, str]:
        """Labels that select one pod of each engine, those of canaries left out."""
        found = names.track_selector(name, names.STABLE)
        if self.group_labels is not None:
            found[self.group_labels[1]] = "0"
        return found


_GROUP_LABELS = {
    WorkloadKind.LEADER_WORKER_SET: (names.GROUP_INDEX, names.WORKER_INDEX),
    WorkloadKind.STATEFUL_SET: (names.POD_INDEX, names.NODE_RANK),
}


def workloads(
    service: ModelService, platform: Platform, kind: WorkloadKind, *, replicas: int
) -> list[Manifest]:
    """The manifests for `replicas` engines; those of a canary are not among them."""
    match kind:
        case WorkloadKind.DEPLOYMENT:
            return [deployment(service, platform, replicas=replicas)]
        case WorkloadKind.LEADER_WORKER_SET:
            return [leader_worker_set(service, platform, replicas=replicas)]
        case WorkloadKind.STATEFUL_SET:
            return stateful_sets(service, platform, replicas=replicas)
