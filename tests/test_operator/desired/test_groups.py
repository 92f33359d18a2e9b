"""The workloads of engines that span several pods, and what goes with them."""

from dataclasses import replace
from typing import Any

import pytest
from kubernetes import client

from headrace_engine.serving.settings import EngineSettings
from headrace_operator import names
from headrace_operator.desired.companions import disruption_budget
from headrace_operator.desired.companions import service as headless_service
from headrace_operator.desired.environment import PREFIX
from headrace_operator.desired.groups import leader_worker_set, stateful_sets
from headrace_operator.desired.network import network_policy
from headrace_operator.desired.workloads import WorkloadKind, workloads
from headrace_testing.model_services import PLATFORM, service

Manifest = dict[str, Any]
ENGINE: Manifest = {"tensorParallelSize": 4, "nodes": 2}
AFFINITY = "preferredDuringSchedulingIgnoredDuringExecution"


def env(template: Manifest) -> dict[str, Any]:
    variables = template["spec"]["containers"][0]["env"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in variables}


def label(field: str) -> Manifest:
    return {"fieldRef": {"fieldPath": f"metadata.labels['{field}']"}}


def test_each_node_has_a_stateful_set_whose_pods_know_their_rank_and_node_0() -> None:
    found = stateful_sets(service(engine=ENGINE), PLATFORM, replicas=3)
    assert [each["metadata"]["name"] for each in found] == ["qwen-engine-n0", "qwen-engine-n1"]
    for rank, each in enumerate(found):
        spec = each["spec"]
        assert (spec["replicas"], spec["podManagementPolicy"]) == (3, "Parallel")
        assert spec["serviceName"] == "qwen-engine"
        labels = spec["template"]["metadata"]["labels"]
        assert labels[names.NODE_RANK] == str(rank)
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        values = env(spec["template"])
        assert values["HEADRACE_ENGINE_NODE_RANK"] == str(rank)
        assert values["ENGINE_INDEX"] == label("apps.kubernetes.io/pod-index")
        address = "qwen-engine-n0-$(ENGINE_INDEX).qwen-engine"
        assert values["HEADRACE_ENGINE_MASTER_ADDR"] == address
        assert values["HEADRACE_ENGINE_MASTER_PORT"] == "29501"
        assert values["HEADRACE_ENGINE_NNODES"] == "2"
        assert values["HEADRACE_ENGINE_TENSOR_PARALLEL_SIZE"] == "4"
        order = list(values)
        assert order.index("ENGINE_INDEX") < order.index("HEADRACE_ENGINE_MASTER_ADDR"), (
            "Kubernetes expands only what it has read before"
        )
    sets = [each["spec"]["selector"]["matchLabels"] for each in found]
    assert sets[0] != sets[1]


def test_every_variable_of_a_node_is_a_setting_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubernetes replaces the reference in the address."""
    platform = replace(PLATFORM, queue_users=True)
    _, second = stateful_sets(service(engine=ENGINE), platform, replicas=1)
    for name, value in env(second["spec"]["template"]).items():
        if name.startswith(PREFIX):
            assert name.removeprefix(PREFIX).lower() in EngineSettings.model_fields
            monkeypatch.setenv(name, value)
    read = EngineSettings()
    assert (read.nnodes, read.node_rank, read.tensor_parallel_size) == (2, 1, 4)
    assert (read.master_addr, read.master_port) == (
        "qwen-engine-n0-$(ENGINE_INDEX).qwen-engine",
        EngineSettings.model_fields["master_port"].default,
    )
    assert read.node_secret_file == "/etc/headrace/redis-user/password"


@pytest.mark.parametrize("kind", list(WorkloadKind))
def test_kubernetes_knows_every_field_of_the_workloads(kind: WorkloadKind) -> None:
    engine = ENGINE if kind.group_labels else {}
    for found in workloads(service(engine=engine), PLATFORM, kind, replicas=1):
        if kind is WorkloadKind.LEADER_WORKER_SET:
            template = found["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            client.V1PodTemplateSpec.model_validate(template)
        elif kind is WorkloadKind.STATEFUL_SET:
            client.V1StatefulSet.model_validate(found)
        else:
            client.V1Deployment.model_validate(found)


def test_pods_find_node_0_before_it_is_ready() -> None:
    found = headless_service(service(engine=ENGINE))["spec"]
    assert (found["clusterIP"], found["publishNotReadyAddresses"]) == ("None", True)
    for each in stateful_sets(service(engine=ENGINE), PLATFORM, replicas=1):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert found["selector"].items() <= labels.items()


def test_a_group_of_a_leader_worker_set_is_an_engine() -> None:
    rollout = {"maxSurge": 2, "maxUnavailable": 1}
    found = leader_worker_set(service(engine={**ENGINE, "rollout": rollout}), PLATFORM, replicas=3)
    spec = found["spec"]
    assert (found["metadata"]["name"], spec["replicas"]) == ("qwen-engine", 3)
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == rollout
    template = spec["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    values = env(template["workerTemplate"])
    assert values["HEADRACE_ENGINE_NODE_RANK"] == label("leaderworkerset.sigs.k8s.io/worker-index")
    assert values["HEADRACE_ENGINE_MASTER_ADDR"] == "$(LWS_LEADER_ADDRESS)"
    assert values["HEADRACE_ENGINE_NNODES"] == "2"


@pytest.mark.parametrize("kind", [WorkloadKind.LEADER_WORKER_SET, WorkloadKind.STATEFUL_SET])
def test_each_pod_gets_the_gpus_of_its_ranks_in_one_zone_with_its_fellows(
    kind: WorkloadKind,
) -> None:
    given = {"nodeAffinity": {"x": 1}}
    for own in ({}, given):
        wanted = service(engine={**ENGINE, "gpu": {"count": 4}, "affinity": own})
        for found in workloads(wanted, PLATFORM, kind, replicas=1):
            spec = found["spec"]
            if kind is WorkloadKind.LEADER_WORKER_SET:
                spec = {"template": spec["leaderWorkerTemplate"]["workerTemplate"]}
            pod = spec["template"]["spec"]
            (container,) = pod["containers"]
            assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
            assert {"name": "master", "containerPort": 29501} in container["ports"]
            if own:
                assert pod["affinity"] == given
                continue
            ((preferred),) = pod["affinity"]["podAffinity"][AFFINITY]
            term = preferred["podAffinityTerm"]
            assert kind.group_labels is not None
            assert term["matchLabelKeys"] == [kind.group_labels[0]]
            assert term["topologyKey"] == "topology.kubernetes.io/zone"


def test_nodes_know_each_other_by_the_password_of_their_redis_user() -> None:
    secret = "HEADRACE_ENGINE_NODE_SECRET_FILE"
    for users, wanted in ((True, "/etc/headrace/redis-user/password"), (False, None)):
        platform = replace(PLATFORM, queue_users=users)
        for found in stateful_sets(service(engine=ENGINE), platform, replicas=1):
            template = found["spec"]["template"]
            assert env(template).get(secret) == wanted
            mounts = template["spec"]["containers"][0]["volumeMounts"]
            assert users is ("/etc/headrace/redis-user" in {each["mountPath"] for each in mounts})


def test_an_engine_of_one_pod_has_nothing_of_this() -> None:
    (found,) = workloads(service(), PLATFORM, WorkloadKind.DEPLOYMENT, replicas=1)
    pod = found["spec"]["template"]
    assert found["kind"] == "Deployment"
    assert not {name for name in env(pod) if "NODE" in name or "MASTER" in name}
    assert "affinity" not in pod["spec"]
    assert [port["name"] for port in pod["spec"]["containers"][0]["ports"]] == ["metrics"]


def test_the_nodes_of_a_model_service_reach_each_other_on_every_port() -> None:
    peers = [{"podSelector": {"matchLabels": names.selector("qwen")}}]
    found, single = (network_policy(service(engine=each), PLATFORM) for each in (ENGINE, {}))
    assert found is not None and single is not None
    assert {"from": peers} in found["spec"]["ingress"]
    assert {"to": peers} in found["spec"]["egress"]
    assert len(single["spec"]["ingress"]) == len(found["spec"]["ingress"]) - 1
    assert len(single["spec"]["egress"]) == len(found["spec"]["egress"]) - 1


def test_one_engine_at_a_time_leaves_a_drained_machine() -> None:
    """The other pods of an engine that has lost one are not ready, which the budget counts."""
    found = disruption_budget(service(engine=ENGINE))["spec"]
    assert (found["maxUnavailable"], found["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (WorkloadKind.DEPLOYMENT, {}),
        (WorkloadKind.STATEFUL_SET, {names.NODE_RANK: "0"}),
        (WorkloadKind.LEADER_WORKER_SET, {names.WORKER_INDEX: "0"}),
    ],
)
def test_the_selector_for_autoscalers_finds_one_pod_of_each_engine(
    kind: WorkloadKind, more: dict[str, str]
) -> None:
    assert kind.selector("qwen") == names.track_selector("qwen", names.STABLE) | more


@pytest.mark.parametrize("rank", [0, 63])
def test_the_longest_name_leaves_room_for_the_hash_in_a_label(rank: int) -> None:
    assert len(names.stateful_set("x" * names.MAX_NAME_CHARS, rank)) <= 52
