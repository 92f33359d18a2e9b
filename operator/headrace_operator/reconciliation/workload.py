"""Reads the objects that run a ModelService's engines, and chooses their kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import names
from ..cluster.cluster import Cluster
from ..desired.environment import SERVED_NAME
from ..desired.workloads import WorkloadKind
from ..errors import NotFound
from ..spec.model_service import ModelService

Manifest = dict[str, Any]
Problem = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The objects of a ModelService's engines, canaries left out.

    `kind` is the wanted kind, and `objects` are those of it. `obsolete` are to be deleted: they are
    of another kind, or of a node that is no longer wanted.
    """

    kind: WorkloadKind
    objects: tuple[Manifest, ...] = ()
    obsolete: tuple[Manifest, ...] = ()

    @property
    def replicas(self) -> int | None:
        """The engines asked for; None if there are no objects yet."""
        first = next(iter((*self.objects, *self.obsolete)), None)
        return None if first is None else int(first["spec"].get("replicas", 1))

    @property
    def updated(self) -> int:
        """The engines of the newest revision."""
        counts = (found.get("status", {}).get("updatedReplicas", 0) for found in self.objects)
        return min(counts, default=0)

    @property
    def rolled_out(self) -> bool:
        """Whether all engines asked for are of the newest revision, and ready."""
        return bool(self.objects) and all(map(_is_rolled_out, self.objects))

    @property
    def problem(self) -> Problem | None:
        """The problem that a Deployment itself reports; other kinds report none."""
        if self.kind is not WorkloadKind.DEPLOYMENT:
            return None
        for found in self.objects:
            for condition in found.get("status", {}).get("conditions", ()):
                bad = {"Progressing": "False", "ReplicaFailure": "True"}.get(condition["type"])
                if bad == condition["status"]:
                    return condition.get("reason", condition["type"]), condition.get("message", "")
        return None

    def serves(self, name: str) -> bool:
        """Whether its engines have this served name."""
        return any(
            (variable["name"], variable.get("value")) == (SERVED_NAME, name)
            for found in (*self.objects, *self.obsolete)
            for container in _pod_template(found)["spec"]["containers"]
            for variable in container.get("env", ())
        )


def _is_rolled_out(found: Manifest) -> bool:
    status, wanted = found.get("status", {}), found["spec"].get("replicas", 1)
    seen = status.get("observedGeneration", 0) >= found["metadata"].get("generation", 0)
    fewest = min(status.get("updatedReplicas", 0), status.get("readyReplicas", 0))
    return bool(seen and fewest >= wanted and status.get("replicas", 0) <= wanted)


async def workload_of(cluster: Cluster, service: ModelService) -> Workload:
    """The workload of a ModelService.

    Several nodes need LeaderWorkerSet if the cluster has it, unless there are StatefulSets already:
    engines that run are not made anew because it was installed.
    """
    deployments = await _found(
        cluster, service, "apps/v1", WorkloadKind.DEPLOYMENT, names.deployment(service.name)
    )
    sets = await _stateful_sets(cluster, service)
    groups = await _found(
        cluster,
        service,
        names.LEADER_WORKER_SETS,
        WorkloadKind.LEADER_WORKER_SET,
        names.leader_worker_set(service.name),
    )
    nodes = service.spec.engine.nodes
    wanted, surplus = sets[:nodes], sets[nodes:]
    if nodes == 1:
        kind = WorkloadKind.DEPLOYMENT
        return Workload(kind=kind, objects=deployments, obsolete=(*sets, *groups))
    if not sets and (groups or await cluster.serves(names.LEADER_WORKER_SETS)):
        return Workload(kind=WorkloadKind.LEADER_WORKER_SET, objects=groups, obsolete=deployments)
    return Workload(
        kind=WorkloadKind.STATEFUL_SET,
        objects=wanted,
        obsolete=(*surplus, *deployments, *groups),
    )


async def _found(
    cluster: Cluster, service: ModelService, api_version: str, kind: WorkloadKind, name: str
) -> tuple[Manifest, ...]:
    try:
        found = await cluster.get(api_version, kind, service.namespace, name)
    except NotFound:
        return ()
    return (found,) if is_owned(found, service) else ()


async def _stateful_sets(cluster: Cluster, service: ModelService) -> tuple[Manifest, ...]:
    """The StatefulSets of the nodes, by rank."""
    found = await cluster.list(
        "apps/v1", WorkloadKind.STATEFUL_SET, service.namespace, names.labels(service.name)
    )
    ranks = {
        int(each["metadata"]["labels"][names.NODE_RANK]): each
        for each in found
        if is_owned(each, service) and names.NODE_RANK in each["metadata"]["labels"]
    }
    return tuple(each for _, each in sorted(ranks.items()))


def is_owned(found: Mapping[str, Any], service: ModelService) -> bool:
    owners = found["metadata"].get("ownerReferences", ())
    return any(owner.get("uid") == service.uid for owner in owners)


def _pod_template(found: Manifest) -> Manifest:
    spec = found["spec"]
    template: Manifest = (
        spec["leaderWorkerTemplate"]["workerTemplate"]
        if "leaderWorkerTemplate" in spec
        else spec["template"]
    )
    return template
