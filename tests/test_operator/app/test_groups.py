"""Engines that span several pods: the whole operator against an API server in memory."""

from typing import Any

import pytest

from headrace_operator import names
from headrace_testing.kubernetes import User, group_pod, set_pod
from headrace_testing.model_services import body
from headrace_testing.operators import Scene, engine_status, operator
from headrace_testing.waiting import eventually

LWS = "leaderworkerset.x-k8s.io/v1/leaderworkersets"
TWO: dict[str, Any] = {"tensorParallelSize": 2, "nodes": 2}
BY_HAND: dict[str, Any] = {"mode": "none"}


async def until(condition: Any) -> None:
    async def holds() -> bool:
        return bool(condition())

    await eventually(holds, seconds=10)


def replicas(user: User) -> list[int]:
    """The counts of the StatefulSets, by node rank."""
    found = {each["metadata"]["name"]: each for each in user.server.all("statefulsets")}
    return [found[name]["spec"]["replicas"] for name in sorted(found)]


def groups(user: User) -> int | None:
    found = user.server.find("leaderworkersets", "qwen-engine")
    return None if found is None else found["spec"]["replicas"]


def status(user: User) -> dict[str, Any]:
    found: dict[str, Any] = (user.server.find(names.PLURAL, "qwen") or {}).get("status", {})
    return found


def reason(user: User, kind: str) -> str:
    return user.server.conditions("qwen").get(kind, ("", ""))[1]


async def test_without_leader_worker_set_each_node_gets_a_stateful_set(
    user: User, scene: Scene
) -> None:
    for index, rank in ((0, 0), (0, 1), (1, 0)):
        await user.create(set_pod("qwen", index, rank))
    async with operator(user, scene):
        await user.create(body(engine=TWO, replicas=2, scaling=BY_HAND))
        await until(lambda: replicas(user) == [2, 2])
        await until(lambda: status(user).get("replicas") == 2)
        assert status(user)["readyReplicas"] == 1, "engine 1 has no node 1"
        assert names.NODE_RANK in status(user)["selector"]
        assert user.server.find("deployments", "qwen-engine") is None
        await user.create(set_pod("qwen", 1, 1))
        await until(lambda: status(user).get("readyReplicas") == 2)
        await until(lambda: reason(user, "Ready") == "EnginesReady")


async def test_with_leader_worker_set_an_engine_is_a_group(user: User, scene: Scene) -> None:
    user.server.install(LWS, "LeaderWorkerSet")
    for index, rank in ((0, 0), (0, 1)):
        await user.create(group_pod("qwen", index, rank, ready=rank == 0))
    async with operator(user, scene):
        await user.create(body(engine=TWO))
        await until(lambda: groups(user) == 1)
        await until(lambda: status(user).get("replicas") == 1)
        assert status(user)["readyReplicas"] == 0, "node 1 is not ready"
        assert replicas(user) == []
        change = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
        await user.patch("v1", "pods", "qwen-engine-0-1", change)
        await until(lambda: status(user).get("readyReplicas") == 1)


async def test_engines_that_run_stay_when_leader_worker_set_is_installed(
    user: User, scene: Scene
) -> None:
    async with operator(user, scene):
        await user.create(body(engine=TWO))
        await until(lambda: replicas(user) == [1, 1])
    user.server.install(LWS, "LeaderWorkerSet")
    async with operator(user, scene):
        await user.change_spec("qwen", {"replicas": 2, "scaling": BY_HAND})
        await until(lambda: replicas(user) == [2, 2])
    assert groups(user) is None


@pytest.mark.parametrize(
    ("api_version", "plural", "name", "engine"),
    [
        ("apps/v1", "deployments", "qwen-engine", {}),
        ("apps/v1", "statefulsets", "qwen-engine-n1", TWO),
        (names.LEADER_WORKER_SETS, "leaderworkersets", "qwen-engine", TWO),
    ],
)
async def test_a_change_of_a_workload_is_an_event(
    user: User, scene: Scene, api_version: str, plural: str, name: str, engine: dict[str, Any]
) -> None:
    if plural == "leaderworkersets":
        user.server.install(LWS, "LeaderWorkerSet")

    def count() -> Any:
        return (user.server.find(plural, name) or {}).get("spec", {}).get("replicas")

    async with operator(user, scene, interval=3600):
        await user.create(body(engine=engine, replicas=2, scaling=BY_HAND))
        await until(lambda: count() == 2 and status(user).get("conditions"))
        await user.patch(api_version, plural, name, {"spec": {"replicas": 7}})
        await until(lambda: count() == 2)


@pytest.mark.parametrize(
    ("make", "top"), [(set_pod, "qwen-engine-n0-1"), (group_pod, "qwen-engine-1")]
)
async def test_scale_down_drains_the_engine_that_kubernetes_removes(
    user: User, scene: Scene, make: Any, top: str
) -> None:
    if make is group_pod:
        user.server.install(LWS, "LeaderWorkerSet")

    def counts() -> set[int | None]:
        return {groups(user)} if make is group_pod else set(replicas(user))

    for index, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        await user.create(make("qwen", index, rank))
    below = top[:-1] + "0"
    scene.statuses = [engine_status(below), engine_status(top, running=9)]
    async with operator(user, scene):
        await user.create(body(engine=TWO, replicas=2, scaling=BY_HAND))
        await until(lambda: counts() == {2})
        await user.change_spec("qwen", {"replicas": 1})
        await until(lambda: [d["pod"] for d in status(user).get("draining", ())] == [top])
        assert set(scene.drained) == {f"{top}.1.abc"}, "although the other has no work"
        assert counts() == {2}, "the count waits for the engine"
        found = user.server.find("pods", top)
        assert found is not None and "annotations" not in found["metadata"]
        scene.statuses = [scene.statuses[0], engine_status(top, draining=True)]
        await until(lambda: counts() == {1})
        await until(lambda: status(user).get("draining") == [])
        assert scene.recalled == []


async def test_an_engine_drains_when_any_of_its_pods_is_deleted(user: User, scene: Scene) -> None:
    going = set_pod("qwen", 0, 1)
    going["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"]}
    for manifest in (set_pod("qwen", 0, 0), going, set_pod("qwen", 1, 0), set_pod("qwen", 1, 1)):
        await user.create(manifest)
    first, second = (f"qwen-engine-n0-{index}" for index in range(2))
    scene.statuses = [engine_status(first, running=3), engine_status(second, running=4)]
    async with operator(user, scene):
        await user.create(body(engine=TWO, replicas=2, scaling=BY_HAND))
        await until(lambda: scene.drained)
        assert set(scene.drained) == {f"{first}.1.abc"}
        scene.statuses = [engine_status(first, draining=True), scene.statuses[1]]
        await user.change_spec("qwen", {"drain": {"timeoutSeconds": 9}})
        await until(lambda: status(user).get("observedGeneration") == 2)
        assert scene.recalled == [], "its node 1 is about to go"


async def test_a_problem_of_any_node_is_reported(user: User, scene: Scene) -> None:
    broken = set_pod("qwen", 0, 1, ready=False)
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    broken["status"]["containerStatuses"] = [{"name": "engine", "state": {"waiting": waiting}}]
    for manifest in (set_pod("qwen", 0, 0), broken):
        await user.create(manifest)
    async with operator(user, scene):
        await user.create(body(engine=TWO))
        await until(lambda: reason(user, "Degraded") == "ImagePullBackOff")
        assert status(user)["message"].startswith("pod qwen-engine-n1-0: ")


async def test_a_change_of_the_nodes_keeps_the_number_of_engines(user: User, scene: Scene) -> None:
    async with operator(user, scene):
        await user.create(body(replicas=1, scaling={"minReplicas": 1, "maxReplicas": 5}))
        await until(lambda: user.server.find("deployments", "qwen-engine"))
        change = {"spec": {"replicas": 3}}
        await user.patch("apps/v1", "deployments", "qwen-engine", change)
        scene.waiting = None
        await user.change_spec("qwen", {"engine": TWO})
        await until(lambda: replicas(user) == [3, 3])
        await until(lambda: user.server.find("deployments", "qwen-engine") is None)
        four = {"tensorParallelSize": 4, "nodes": 4}
        await user.change_spec("qwen", {"engine": four})
        await until(lambda: replicas(user) == [3, 3, 3, 3])
        await user.change_spec("qwen", {"engine": TWO})
        await until(lambda: replicas(user) == [3, 3])
        await user.change_spec("qwen", {"engine": {"nodes": 1}})
        await until(lambda: replicas(user) == [])
        found = user.server.find("deployments", "qwen-engine")
        assert found is not None and found["spec"]["replicas"] == 3
