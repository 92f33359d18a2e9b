"""The whole operator, including kopf's watches, against an API server in memory.

One test for each event and each reported problem. A scene provides signals, clock and engines. Not
tested here but on a cluster: the ownership of fields, and what real controllers do with the
objects.
"""

from typing import Any

from headrace_common.protocol.adapters import decode_set
from headrace_common.protocol.base import CanaryPlan
from headrace_common.protocol.variants import Agreement
from headrace_operator import names
from headrace_operator.reconciliation.scaler import SCALING_INTERVAL
from headrace_operator.scaling.reason import Reason
from headrace_operator.signals.signals import Samples
from headrace_testing.kubernetes import User, pod
from headrace_testing.model_services import HUB, body
from headrace_testing.operators import Scene, engine_status, operator, register_model
from headrace_testing.waiting import eventually

CONTROLLED: dict[str, Any] = {"scaling": {"minReplicas": 1, "maxReplicas": 8}}
FROM_ZERO: dict[str, Any] = {"minReplicas": 0, "maxReplicas": 3, "idleSeconds": 60}


async def until(condition: Any) -> None:
    async def holds() -> bool:
        return bool(condition())

    await eventually(holds, seconds=10)


def replicas(user: User, name: str = "qwen-engine") -> int | None:
    found = user.server.find("deployments", name)
    return None if found is None else found["spec"]["replicas"]


def image(user: User) -> str:
    """The image of the stable engines."""
    found: Any = user.server.find("deployments", "qwen-engine")
    return str(found["spec"]["template"]["spec"]["containers"][0]["image"])


def reason(user: User, kind: str) -> str:
    return user.server.conditions("qwen").get(kind, ("", ""))[1]


def status(user: User) -> dict[str, Any]:
    found: dict[str, Any] = (user.server.find(names.PLURAL, "qwen") or {}).get("status", {})
    return found


async def test_a_new_model_service_gets_all_its_objects(user: User, scene: Scene) -> None:
    async with operator(user, scene):
        await user.create(body())
        await until(lambda: status(user).get("conditions"))
    assert replicas(user) == 1
    for plural, name in (
        ("services", "qwen-engine"),
        ("serviceaccounts", "qwen-engine"),
        ("poddisruptionbudgets", "qwen-engine"),
        ("networkpolicies", "qwen-engine"),
    ):
        found = user.server.find(plural, name)
        assert found is not None, plural
        (owner,) = found["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["controller"]) == ("ModelService", "qwen", True)


async def test_a_model_service_created_before_the_operator_starts_is_served(
    user: User, scene: Scene
) -> None:
    await user.create(body())
    async with operator(user, scene):
        await until(lambda: status(user).get("model") == "qwen")
    assert replicas(user) == 1


async def test_an_edit_reaches_the_deployment(user: User, scene: Scene) -> None:
    async with operator(user, scene):
        await user.create(body())
        await until(lambda: replicas(user) == 1)
        await user.change_spec("qwen", {"engine": {"image": "other:2"}})

        def image() -> str:
            found = user.server.find("deployments", "qwen-engine")
            assert found is not None
            return str(found["spec"]["template"]["spec"]["containers"][0]["image"])

        await until(lambda: image() == "other:2")
        await until(lambda: status(user).get("observedGeneration") == 2)


async def test_a_change_of_the_adapters_reaches_the_queue_without_a_rollout(
    user: User, scene: Scene
) -> None:
    def known() -> list[str]:
        found = scene.backend.adapter_sets.get("qwen")
        return [] if found is None else [each.name for each in decode_set(*found).adapters]

    def template() -> Any:
        found = user.server.find("deployments", "qwen-engine")
        return None if found is None else found["spec"]["template"]

    def lora(*names: str) -> dict[str, Any]:
        return {"adapters": [{"name": name, "path": f"/model/{name}"} for name in names]}

    async with operator(user, scene):
        await user.create(body(lora=lora("sql")))
        await until(lambda: known() == ["sql"] and template() is not None)
        before = template()
        await user.change_spec("qwen", {"lora": lora("sql", "tone")})
        await until(lambda: known() == ["sql", "tone"])
        await until(lambda: len(status(user).get("adapters") or ()) == 2)

        assert template() == before
    assert status(user)["adapters"] == [
        {"name": name, "served": False, "engines": 0, "message": ""} for name in ("sql", "tone")
    ]


async def test_a_deleted_model_service_is_left_alone(user: User, scene: Scene) -> None:
    async with operator(user, scene) as keys:
        await user.create(body())
        await until(lambda: keys)
        await user.delete(names.API_VERSION, names.PLURAL, "qwen")
        await until(lambda: not keys)
        await user.create(body("other"))
        await until(lambda: replicas(user, "other-engine") == 1)


async def test_a_model_service_can_always_be_deleted(user: User, scene: Scene) -> None:
    async with operator(user, scene):
        await user.create(body())
        await until(lambda: status(user).get("conditions"))
    found = user.server.find(names.PLURAL, "qwen")
    assert found is not None
    assert "finalizers" not in found["metadata"]
    assert "annotations" not in found["metadata"]


async def test_drift_is_repaired(user: User, scene: Scene) -> None:
    async with operator(user, scene):
        await user.create(body())
        await until(lambda: user.server.find("services", "qwen-engine"))
        await user.delete("v1", "services", "qwen-engine")
        await until(lambda: user.server.find("services", "qwen-engine"))
        change = {"spec": {"selector": {"app": "wrong"}}}
        await user.patch("v1", "services", "qwen-engine", change)

        def selector() -> Any:
            return (user.server.find("services", "qwen-engine") or {})["spec"]["selector"]

        await until(lambda: selector().get(names.MODEL_SERVICE) == "qwen")


async def test_an_invalid_spec_names_the_field_and_leaves_the_engines(
    user: User, scene: Scene
) -> None:
    async with operator(user, scene):
        await user.create(body())
        await until(lambda: replicas(user) == 1)
        before = user.server.find("deployments", "qwen-engine")
        await user.change_spec("qwen", {"scaling": {"minReplicas": 5, "maxReplicas": 2}})
        await until(lambda: reason(user, "Degraded") == "InvalidSpec")
        after = user.server.find("deployments", "qwen-engine")
        assert before is not None and after is not None
        assert after["spec"] == before["spec"]
        (degraded,) = [c for c in status(user)["conditions"] if c["type"] == "Degraded"]
        assert degraded["message"].startswith("spec.scaling: minReplicas must not be above")
        assert "Ready" in user.server.conditions("qwen")
        assert user.server.events().count("InvalidSpec") == 1
        await user.change_spec("qwen", {"scaling": {"minReplicas": 2, "maxReplicas": 2}})
        await until(lambda: reason(user, "Degraded") == "AsExpected")


async def test_a_refused_child_degrades_and_the_others_are_made(user: User, scene: Scene) -> None:
    user.server.refusals["networkpolicies"] = (403, "forbidden: no right to patch networkpolicies")
    async with operator(user, scene):
        await user.create(body())
        await until(lambda: reason(user, "Degraded") == "Refused")
        assert replicas(user) == 1
        user.server.refusals.clear()
        await until(lambda: reason(user, "Degraded") == "AsExpected")


async def test_a_backlog_adds_engines_and_says_why(user: User, scene: Scene) -> None:
    await user.create(pod("p0", "qwen"))
    async with operator(user, scene):
        await user.create(body(**CONTROLLED))
        await until(lambda: reason(user, "ScalingActive") == "Steady")
        scene.now, scene.waiting, scene.running = scene.now + 120, 500, 64
        await until(lambda: (replicas(user) or 0) > 1)
        await until(lambda: status(user).get("desiredReplicas") == replicas(user))
        assert status(user)["backlog"] == 500
        assert status(user)["lastDecision"]["replicas"] == replicas(user)
        assert "ScaledUp" in user.server.events()


async def test_a_model_with_work_is_decided_again_soon(user: User, scene: Scene) -> None:
    await user.create(pod("p0", "qwen"))
    scene.waiting = 1
    async with operator(user, scene):
        await user.create(body(**CONTROLLED))
        await until(lambda: scene.soon == SCALING_INTERVAL)
        scene.now, scene.waiting = scene.now + SCALING_INTERVAL, 0
        await until(lambda: scene.soon is None)


async def test_a_decision_stands_until_the_next_one_is_due(user: User, scene: Scene) -> None:
    await user.create(pod("p0", "qwen"))
    scene.waiting = 1
    async with operator(user, scene):
        await user.create(body(**CONTROLLED))
        await until(lambda: scene.soon == SCALING_INTERVAL)
        scene.now, scene.waiting, scene.running = scene.now + 3, 500, 64
        await until(lambda: scene.soon == SCALING_INTERVAL - 3)
        assert (replicas(user), status(user)["backlog"]) == (1, 1)
        scene.now += 2
        await until(lambda: (replicas(user) or 0) > 1)


async def test_a_changed_spec_is_decided_at_once(user: User, scene: Scene) -> None:
    await user.create(pod("p0", "qwen"))
    scene.waiting = 1
    async with operator(user, scene):
        await user.create(body(**CONTROLLED))
        await until(lambda: scene.soon == SCALING_INTERVAL)
        await user.change_spec("qwen", {"scaling": {**CONTROLLED["scaling"], "minReplicas": 2}})
        await until(lambda: replicas(user) == 2)


async def test_consoles_see_the_decision_and_its_reason(user: User, scene: Scene) -> None:
    await user.create(pod("p0", "qwen"))
    async with operator(user, scene):
        await user.create(body(**CONTROLLED))
        await until(lambda: "qwen" in scene.shown and scene.shown["qwen"].reason == "Steady")
        assert (scene.shown["qwen"].desired, scene.shown["qwen"].ready) == (1, 1)
        scene.now, scene.waiting, scene.running = scene.now + 120, 500, 64
        await until(lambda: scene.shown["qwen"].desired > 1)
        shown = scene.shown["qwen"]
        assert (shown.reason, shown.message) == (Reason.BACKLOG, Reason.BACKLOG.sentence)
        scene.queue_down = True
        await until(lambda: reason(user, "Degraded") == "RedisUnreachable")


async def test_missing_metrics_freeze_the_count_and_are_reported(user: User, scene: Scene) -> None:
    scene.waiting = None
    await register_model(scene, "qwen", "models/qwen")
    async with operator(user, scene):
        await user.create(body(**CONTROLLED))
        await until(lambda: reason(user, "ScalingActive") == "MetricsMissing")
        assert replicas(user) == 1
        (active,) = [c for c in status(user)["conditions"] if c["type"] == "ScalingActive"]
        assert active["status"] == "False"
        why = "no gateway pod is running; the number of engines stays as it is"
        assert active["message"] == why


async def test_stale_metrics_freeze_the_count_and_are_reported(user: User, scene: Scene) -> None:
    scene.waiting, scene.age = 900, 3600.0
    await register_model(scene, "qwen", "models/qwen")
    async with operator(user, scene):
        await user.create(body(**CONTROLLED))
        await until(lambda: reason(user, "ScalingActive") == "MetricsStale")
        assert replicas(user) == 1


async def test_the_first_request_starts_an_engine_from_zero(user: User, scene: Scene) -> None:
    scene.engines = 0
    await register_model(scene, "qwen", "models/qwen")
    async with operator(user, scene):
        await user.create(body(scaling=FROM_ZERO))
        await until(lambda: reason(user, "Ready") == "ScaledToZero")
        assert replicas(user) == 0
        scene.now, scene.waiting = scene.now + 5, 1
        await until(lambda: replicas(user) == 1)
        await until(lambda: status(user).get("lastDecision", {}).get("reason") == "FirstRequest")


async def test_scale_down_drains_the_idle_engine_first(user: User, scene: Scene) -> None:
    for name in ("busy", "idle"):
        await user.create(pod(name, "qwen"))
    scene.statuses = [engine_status("busy", running=9), engine_status("idle")]
    async with operator(user, scene):
        await user.create(body(replicas=2, scaling={"mode": "none"}))
        await until(lambda: replicas(user) == 2)
        await user.change_spec("qwen", {"replicas": 1})
        await until(lambda: scene.drained)
        assert set(scene.drained) == {"idle.1.abc"}
        await until(lambda: reason(user, "Progressing") == "Draining")
        assert replicas(user) == 2, "the count waits for the engine"
        found = user.server.find("pods", "idle")
        assert found is not None
        assert found["metadata"]["annotations"] == {names.DELETION_COST: names.VICTIM_COST}
        scene.statuses = [scene.statuses[0], engine_status("idle", draining=True)]
        await until(lambda: replicas(user) == 1)
        await until(lambda: status(user).get("draining") == [])
        assert scene.recalled == [], "it is about to go"


async def test_a_drain_continues_after_a_restart_of_the_operator(user: User, scene: Scene) -> None:
    for name in ("a", "b"):
        await user.create(pod(name, "qwen"))
    scene.statuses = [engine_status("a", running=3), engine_status("b", running=4)]
    async with operator(user, scene):
        await user.create(body(replicas=2, scaling={"mode": "none"}))
        await until(lambda: replicas(user) == 2)
        await user.change_spec("qwen", {"replicas": 1})
        await until(lambda: [d["pod"] for d in status(user).get("draining", ())] == ["a"])
    scene.statuses = [engine_status("a", draining=True), engine_status("b")]
    async with operator(user, scene):
        await until(lambda: replicas(user) == 1)
    assert set(scene.drained) == {"a.1.abc"}


async def test_an_engine_that_drains_without_having_to_go_is_recalled(
    user: User, scene: Scene
) -> None:
    for name in ("a", "b"):
        await user.create(pod(name, "qwen"))
    scene.statuses = [engine_status("a", running=3), engine_status("b", running=4)]
    async with operator(user, scene):
        await user.create(body(replicas=2, scaling={"mode": "none"}))
        await until(lambda: replicas(user) == 2)
        await user.change_spec("qwen", {"replicas": 1})
        await until(lambda: scene.drained)
        assert scene.recalled == []
        scene.statuses = [engine_status("a", running=3, draining=True), scene.statuses[1]]
        await user.change_spec("qwen", {"replicas": 2})
        await until(lambda: scene.recalled)
        assert set(scene.recalled) == {"a.1.abc"}
        assert replicas(user) == 2


async def test_an_engine_whose_pod_is_deleted_gets_drain(user: User, scene: Scene) -> None:
    going = pod("going", "qwen")
    going["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"]}
    for manifest in (going, pod("stays", "qwen")):
        await user.create(manifest)
    scene.statuses = [engine_status("going", running=3), engine_status("stays", running=4)]
    async with operator(user, scene):
        await user.create(body(replicas=1, scaling={"mode": "none"}))
        await until(lambda: scene.drained)
        assert set(scene.drained) == {"going.1.abc"}


async def test_the_status_says_which_of_two_services_sleeps(user: User, scene: Scene) -> None:
    sharing = {"group": "gpu"}
    await user.create(pod("a", "qwen"))
    scene.statuses = [engine_status("a", sleep_level=2)]
    async with operator(user, scene):
        await user.create(body(sharing=sharing))
        await until(lambda: status(user).get("asleepReplicas") == 1)
        scene.statuses = [engine_status("a")]
        await until(lambda: status(user).get("asleepReplicas") == 0)


async def test_an_engine_that_has_no_pod_goes_before_one_that_serves(
    user: User, scene: Scene
) -> None:
    await user.create(pod("a", "qwen"))
    scene.statuses = [engine_status("a")]
    async with operator(user, scene):
        await user.create(body(replicas=2, scaling={"mode": "none"}))
        await until(lambda: replicas(user) == 2)
        await user.change_spec("qwen", {"replicas": 1})
        await until(lambda: replicas(user) == 1)
        assert scene.drained == []


async def test_scale_down_waits_while_the_queue_is_down(user: User, scene: Scene) -> None:
    await user.create(pod("a", "qwen"))
    scene.queue_down = True
    async with operator(user, scene):
        await user.create(body(replicas=2, scaling={"mode": "none"}))
        await until(lambda: replicas(user) == 2)
        await user.change_spec("qwen", {"replicas": 1})
        await until(lambda: status(user).get("observedGeneration") == 2)
        assert replicas(user) == 2
        scene.queue_down = False
        await until(lambda: replicas(user) == 1)


async def test_an_autoscaler_sets_the_model_service_and_the_operator_follows(
    user: User, scene: Scene
) -> None:
    async with operator(user, scene):
        scaling = {"mode": "hpa", "minReplicas": 1, "maxReplicas": 5}
        await user.create(body(scaling=scaling))
        await until(lambda: user.server.find("horizontalpodautoscalers", "qwen-engine"))
        await user.change_spec("qwen", {"replicas": 4})
        await until(lambda: replicas(user) == 4)
        await user.change_spec("qwen", {"scaling": {"mode": "operator"}})
        await until(lambda: not user.server.find("horizontalpodautoscalers", "qwen-engine"))
        own = [data for _, plural, data in user.server.written if plural == names.PLURAL]
        changed = [data for data in own if "spec" in data]
        assert len(changed) == 2, "the operator never writes the spec"


async def test_a_canary_comes_and_goes(user: User, scene: Scene) -> None:
    async with operator(user, scene):
        await user.create(body(canary={"revision": "def456", "replicas": 1}))
        await until(lambda: replicas(user, "qwen-engine-canary") == 1)
        await until(lambda: scene.plans.get("qwen") == CanaryPlan(10))
        await user.change_spec("qwen", {"canary": {"trafficPercent": 25}})
        await until(lambda: scene.plans["qwen"] == CanaryPlan(25))
        await user.change_spec("qwen", {"canary": None})
        await until(lambda: replicas(user, "qwen-engine-canary") is None)
        await until(lambda: scene.plans["qwen"] is None)
        assert replicas(user) == 1


async def test_engines_on_a_node_that_ends_hand_over_and_are_not_recalled(
    user: User, scene: Scene
) -> None:
    scene.statuses = [engine_status("p", running=3), engine_status("q")]
    await user.create(pod("p", "qwen", node="spot-1"))
    await user.create(pod("q", "qwen", node="spot-2"))
    async with operator(user, scene):
        await user.create(body(scaling={"minReplicas": 2, "maxReplicas": 2}))
        await until(lambda: replicas(user) == 2)
        assert scene.drained == []

        await user.add_node("spot-1", "aws-node-termination-handler/spot-itn")
        await user.add_node("spot-3", "node.kubernetes.io/unschedulable")
        await until(lambda: scene.drained)
        assert scene.notices[0] == ("p.1.abc", 120.0)
        scene.statuses = [engine_status("p", draining=True), engine_status("q")]
        scene.drained.clear()
        await user.change_spec("qwen", {"scaling": {"minReplicas": 3, "maxReplicas": 3}})
        await until(lambda: replicas(user) == 3)

    assert scene.recalled == []
    assert scene.drained == []


def served(requests: int, errors: int) -> Samples:
    """An engine's page after so many requests, some of which have failed."""
    return {
        "headrace_engine_requests_ended_total": [
            ({"error_type": ""}, requests - errors),
            ({"error_type": "internal_error"}, errors),
        ]
    }


async def test_a_canary_that_fails_requests_is_rolled_back_by_itself(
    user: User, scene: Scene
) -> None:
    await user.create(pod("old", "qwen"))
    await user.create(pod("new", "qwen", track="canary"))
    scene.metrics = {"old": served(1000, 0), "new": served(0, 0)}
    async with operator(user, scene):
        await user.create(body(canary={"image": "engine:2", "trafficPercent": 20}))
        await until(lambda: scene.plans.get("qwen") == CanaryPlan(20))
        await until(lambda: status(user).get("canary", {}).get("reason") == "Comparing")
        scene.metrics = {"old": served(1100, 1), "new": served(60, 20)}
        await until(lambda: scene.plans["qwen"] is None)
        await until(lambda: replicas(user, "qwen-engine-canary") == 0)
        await until(lambda: status(user)["canary"]["rolledBack"])
        conditions = user.server.conditions("qwen")
        assert conditions["CanaryHealthy"] == ("False", "CanaryFailsRequests")
        assert conditions["Degraded"][0] == "False", "the stable engines serve"
        assert "33.3%" in status(user)["canary"]["message"]
        assert "CanaryFailsRequests" in user.server.events()
        assert replicas(user) == 1

    scene.metrics = {}
    async with operator(user, scene):  # another process knows it from the status
        await user.change_spec("qwen", {"canary": {"trafficPercent": 30}})
        await until(lambda: "qwen" in scene.shown)
        assert replicas(user, "qwen-engine-canary") == 0
        await user.change_spec("qwen", {"canary": {"image": "engine:3"}})
        await until(lambda: replicas(user, "qwen-engine-canary") == 1)
        await until(lambda: scene.plans["qwen"] == CanaryPlan(30))


async def test_a_good_canary_is_promoted_and_the_spec_stays(user: User, scene: Scene) -> None:
    await user.create(pod("old", "qwen"))
    await user.create(pod("new", "qwen", track="canary"))
    scene.metrics = {"old": served(0, 0), "new": served(0, 0)}
    canary = {"image": "engine:2", "trafficPercent": 20, "autoPromotionSeconds": 300}
    async with operator(user, scene):
        await user.create(body(canary=canary))
        await until(lambda: status(user).get("canary", {}).get("reason") == "Comparing")
        scene.metrics = {"old": served(100, 0), "new": served(100, 0)}
        await until(lambda: status(user)["canary"]["reason"] == "AsGoodAsStable")
        assert image(user) != "engine:2"
        scene.now += 301
        await until(lambda: status(user)["canary"]["promoted"])
        assert image(user) == "engine:2"
        assert (replicas(user, "qwen-engine-canary"), scene.plans["qwen"]) == (1, CanaryPlan(20))
        assert "CanaryPromoted" in user.server.events()
        assert user.server.conditions("qwen")["CanaryHealthy"] == ("True", "CanaryPromoted")

        counts = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
        rolled_out = {"status": {**counts, "observedGeneration": 9}}
        await user.patch("apps/v1", "deployments", "qwen-engine", rolled_out)
        await until(lambda: replicas(user, "qwen-engine-canary") == 0)
        await until(lambda: scene.plans["qwen"] is None)

        takes_over = {"engine": {"image": "engine:2"}, "canary": None}
        await user.change_spec("qwen", takes_over)
        await until(lambda: status(user).get("canary") is None)
        assert image(user) == "engine:2"
        engines: Any = user.server.find("deployments", "qwen-engine")
        assert engines["metadata"]["generation"] == 2, "one rollout, that of the promotion"
        own = [data for _, plural, data in user.server.written if plural == names.PLURAL]
        assert [data["spec"] for data in own if "spec" in data] == [takes_over], (
            "the operator never writes the spec"
        )


async def test_a_canary_whose_answers_differ_is_rolled_back(user: User, scene: Scene) -> None:
    analysis = {"minAgreementPercent": 90, "minComparisons": 10, "comparisonsPerMinute": 30}
    scene.answers = Agreement(equal=0, different=50)  # of a canary before this one
    async with operator(user, scene):
        await user.create(body(canary={"image": "engine:2", "analysis": analysis}))
        await until(lambda: scene.plans.get("qwen") == CanaryPlan(10, 30))
        await until(lambda: status(user).get("canary", {}).get("reason") == "Comparing")
        scene.answers = Agreement(equal=7, different=52)
        await until(lambda: "7 of 9" in status(user)["canary"]["message"])
        scene.answers = Agreement(equal=8, different=52)
        await until(lambda: status(user)["canary"]["reason"] == "CanaryAnswersDiffer")
        await until(lambda: scene.plans["qwen"] is None)
        assert status(user)["canary"]["rolledBack"]
        assert "8 of 10" in status(user)["canary"]["message"]


async def test_a_canary_that_does_not_run_is_rolled_back(user: User, scene: Scene) -> None:
    broken = pod("new", "qwen", track="canary", ready=False)
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    broken["status"]["containerStatuses"] = [{"name": "engine", "state": {"waiting": waiting}}]
    await user.create(broken)
    async with operator(user, scene):
        await user.create(body(canary={"image": "engine:2"}))
        await until(lambda: status(user).get("canary", {}).get("rolledBack"))
        assert status(user)["canary"]["reason"] == "CanaryDoesNotRun"
        await until(lambda: replicas(user, "qwen-engine-canary") == 0)


async def test_a_foreign_object_of_a_childs_name_is_not_deleted(user: User, scene: Scene) -> None:
    await user.create(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "qwen-engine-canary", "namespace": "models"},
            "spec": {"replicas": 7},
        }
    )
    async with operator(user, scene):
        await user.create(body())
        await until(lambda: status(user).get("conditions"))
    assert replicas(user, "qwen-engine-canary") == 7


async def test_a_pod_that_cannot_start_degrades_with_its_reason(user: User, scene: Scene) -> None:
    broken = pod("p", "qwen", ready=False)
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    broken["status"]["containerStatuses"] = [{"name": "engine", "state": {"waiting": waiting}}]
    await user.create(broken)
    async with operator(user, scene):
        await user.create(body())
        await until(lambda: reason(user, "Degraded") == "ImagePullBackOff")
        await until(lambda: "ImagePullBackOff" in user.server.events())
    assert reason(user, "Ready") == "ImagePullBackOff"
    assert status(user)["reason"] == "ImagePullBackOff"
    assert user.server.events().count("ImagePullBackOff") == 1


async def test_a_new_model_causes_no_warning_event(user: User, scene: Scene) -> None:
    scene.waiting = None
    async with operator(user, scene):
        await user.create(body(**CONTROLLED))
        await until(lambda: reason(user, "ScalingActive") == "InitialScale")
    assert "MetricsMissing" not in user.server.events()


async def test_an_unknown_model_gets_one_engine_that_makes_it_known_and_goes(
    user: User, scene: Scene
) -> None:
    scene.engines, scene.waiting = 0, None
    async with operator(user, scene):
        await user.create(body(scaling=FROM_ZERO))
        await until(lambda: status(user).get("lastDecision", {}).get("reason") == "InitialScale")
        assert replicas(user) == 1
        assert user.server.conditions("qwen")["ScalingActive"] == ("True", "InitialScale")
        await register_model(scene, "qwen", "models/qwen")
        scene.waiting = 0
        await until(lambda: reason(user, "ScalingActive") == "Steady")
        assert replicas(user) == 1
        scene.now += 61
        await until(lambda: replicas(user) == 0)
        await until(lambda: reason(user, "Ready") == "ScaledToZero")


async def test_keda_finds_a_model_known_before_it_may_scale_to_zero(
    user: User, scene: Scene
) -> None:
    scaling = {"mode": "keda", "minReplicas": 0, "prometheusUrl": "http://prometheus:9090"}
    async with operator(user, scene):
        await user.create(body(scaling=scaling, replicas=0))
        await until(lambda: replicas(user) == 1)
        await register_model(scene, "qwen", "models/qwen")
        await until(lambda: replicas(user) == 0)


async def test_reconciliation_continues_without_redis_and_reports_it(
    user: User, scene: Scene
) -> None:
    scene.queue_down = True
    async with operator(user, scene):
        await user.create(body(scaling=FROM_ZERO))
        await until(lambda: reason(user, "Degraded") == "RedisUnreachable")
        assert user.server.conditions("qwen")["Ready"] == ("False", "RedisUnreachable")
        assert status(user)["reason"] == "RedisUnreachable"
        assert replicas(user) == 0
        scene.queue_down = False
        await until(lambda: reason(user, "Degraded") == "AsExpected")
        assert user.server.events().count("RedisUnreachable") == 1


async def test_a_served_name_of_another_is_not_given_to_new_engines(
    user: User, scene: Scene
) -> None:
    await user.create(body("first", model={**HUB, "servedName": "chat"}))
    await register_model(scene, "chat", "models/first")
    async with operator(user, scene):
        await user.create(body(model={**HUB, "servedName": "chat"}))
        await until(lambda: reason(user, "Degraded") == "ServedNameTaken")
        (degraded,) = [c for c in status(user)["conditions"] if c["type"] == "Degraded"]
        assert "ModelService models/first" in degraded["message"]
        assert "ModelService models/qwen" in degraded["message"]
        assert reason(user, "Ready") == "ServedNameTaken"
        await until(lambda: replicas(user, "first-engine") == 1)
        assert replicas(user) is None
        await user.change_spec("qwen", {"model": {**HUB, "servedName": "other"}})
        await until(lambda: replicas(user) == 1)
        await until(lambda: reason(user, "Degraded") == "AsExpected")


async def test_engines_that_have_a_name_keep_it_when_another_registers_it(
    user: User, scene: Scene
) -> None:
    async with operator(user, scene):
        await user.create(body(replicas=1, scaling={"mode": "none"}))
        await until(lambda: replicas(user) == 1)
        await register_model(scene, "qwen", "")
        await until(lambda: reason(user, "Degraded") == "ServedNameTaken")
        await user.change_spec("qwen", {"replicas": 3})
        await until(lambda: replicas(user) == 3)


async def test_a_name_without_a_claim_is_free(user: User, scene: Scene) -> None:
    await user.create(body("renamed", model={**HUB, "servedName": "new"}))
    await register_model(scene, "chat", "models/renamed")
    async with operator(user, scene):
        await user.create(body(model={**HUB, "servedName": "chat"}))
        await until(lambda: replicas(user) == 1)


async def test_the_model_of_a_deleted_model_service_is_forgotten(user: User, scene: Scene) -> None:
    await register_model(scene, "qwen", "models/qwen")
    async with operator(user, scene) as keys:
        await user.create(body())
        await until(lambda: keys)
        await user.delete(names.API_VERSION, names.PLURAL, "qwen")
        await until(lambda: not keys)

        def gone() -> bool:
            scene.now += 5
            return not scene.backend.models

        await until(gone)
