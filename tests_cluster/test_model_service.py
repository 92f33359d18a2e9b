"""A ModelService from apply to delete, as kubectl and the openai SDK show it."""

from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from headrace_cluster.load import Load
from headrace_cluster.release import PATIENCE_S, Release, Service, refusal
from headrace_cluster.specs import MODEL, demo_service
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until


def test_a_chat_is_streamed_through_the_ingress(service: Service) -> None:
    with client(service.release) as openai:
        stream = openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello!"}],
            max_tokens=40,
            temperature=0,
            stream=True,
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]

    assert len(pieces) > 2
    assert "".join(pieces).strip()


def test_kubectl_get_ms_shows_what_matters(service: Service) -> None:
    header, row = service.kubectl("get", "ms", MODEL).splitlines()

    assert header.split() == ["NAME", "MODEL", "READY", "DESIRED", "BACKLOG", "REASON", "AGE"]
    assert row.split()[:4] == [MODEL, MODEL, "1", "1"]
    assert row.split()[-2] == "EnginesReady"
    wide, _ = service.kubectl("get", "ms", MODEL, "-o", "wide").splitlines()
    shown = wide.partition(" AGE ")[2].split()
    assert shown == ["TOKENS/S", "KV", "%", "COLD", "START", "SCALING", "MESSAGE"]


def test_conditions_and_events_tell_that_it_is_served(service: Service) -> None:
    conditions = {c["type"]: c["status"] for c in service.status["conditions"]}

    assert conditions["Ready"] == "True"
    assert conditions["Progressing"] == "False"
    assert conditions["Degraded"] == "False"
    assert conditions["ScalingLimited"] == "False"
    assert "EnginesReady" in [event["reason"] for event in service.kubectl.events(MODEL)]


def test_scaled_by_kubectl_scale(service: Service) -> None:
    service.kubectl("scale", "modelservice", MODEL, "--replicas=2")
    service.until_ready(2)
    service.kubectl("scale", "modelservice", MODEL, "--replicas=1")
    service.until_ready(1)

    reasons = [event["reason"] for event in service.kubectl.events(MODEL)]
    assert "ScaledUp" in reasons
    assert "ScaledDown" in reasons


def test_an_edit_reaches_the_engines_without_a_failed_request(
    service: Service, cases: list[GreedyCase]
) -> None:
    before = service.engines()

    with Load(service.release.url, MODEL, cases, clients=6) as load:
        load.await_answers(6)
        service.patch({"engine": {"settings": {"maxNumSeqs": 6}}})
        service.until_ready(1)
        load.await_answers(6)

    assert not set(before) & set(service.engines())


def test_drift_is_repaired(service: Service) -> None:
    kubectl = service.kubectl
    deployment = service.deployment
    uid = kubectl.get("services", deployment)["metadata"]["uid"]
    kubectl("delete", "service", deployment)
    kubectl("delete", "poddisruptionbudget", deployment)
    kubectl("delete", "networkpolicy", deployment)
    kubectl("scale", "deployment", deployment, "--replicas=3")
    kubectl("set", "env", f"deployment/{deployment}", "HEADRACE_ENGINE_MAX_NUM_SEQS=1")

    def repaired() -> bool:
        (container,) = kubectl.get("deployments", deployment)["spec"]["template"]["spec"][
            "containers"
        ]
        seqs = [v for v in container["env"] if v["name"] == "HEADRACE_ENGINE_MAX_NUM_SEQS"]
        return (
            deployment in kubectl.names("services")
            and kubectl.get("services", deployment)["metadata"]["uid"] != uid
            and deployment in kubectl.names("poddisruptionbudgets")
            and deployment in kubectl.names("networkpolicies")
            and seqs[0]["value"] != "1"
        )

    until(repaired, "what was changed to be as the operator wants it")
    service.until_ready(1)


def test_a_second_model_is_served_beside_the_first(service: Service) -> None:
    other = Service(service.release, "other")
    service.kubectl.apply(demo_service("other"))
    other.until_ready(1)
    until(lambda: "other" in service.release.models(), "the second model to be listed")

    with client(service.release) as openai:
        for model in (MODEL, "other"):
            answer = openai.completions.create(model=model, prompt="Hello", max_tokens=4)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
        other.delete()
        until(lambda: "other" not in service.release.models(), "the second model to be gone")
        with pytest.raises(NotFoundError):
            openai.completions.create(model="other", prompt="Hello", max_tokens=4)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"replicas": -1}, "spec.replicas"),
        ({"replicas": "many"}, "spec.replicas"),
        ({"model": {}}, "spec.model"),
        ({"model": {"hub": {"id": "a/b"}, "image": {"reference": "x"}}}, "spec.model"),
        ({"model": {"hub": {"id": "no spaces allowed"}}}, "spec.model.hub.id"),
        ({"model": {"hub": {"id": "a/b"}, "colour": "red"}}, "spec.model.colour"),
        ({"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "spec.scaling"),
        ({"scaling": {"mode": "magic"}}, "spec.scaling.mode"),
        ({"scaling": {"mode": "hpa", "minReplicas": 0, "maxReplicas": 2}}, "spec.scaling"),
        ({"scaling": {"mode": "keda"}}, "spec"),
        ({"scaling": {"targets": {"utilization": 1.5}}}, "spec.scaling.targets.utilization"),
        ({"drain": {"timeoutSeconds": -1}}, "spec.drain.timeoutSeconds"),
        ({"engine": {"settings": {"blockSize": 0}}}, "spec.engine.settings.blockSize"),
        ({"engine": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}}, "spec.engine.rollout"),
        (
            {"engine": {"resources": {"limits": {"memory": "2Gb"}}}},
            "2Gb is wrong: must be a quantity",
        ),
        ({"engine": {"settings": {"kvCacheMemory": "2Gi"}}}, "must be a number of bytes"),
        ({"canary": {"replicas": 1}}, "spec.canary"),
    ],
)
def test_the_api_server_refuses_an_invalid_spec_and_names_the_field(
    release: Release, section: dict[str, Any], field: str
) -> None:
    said = refusal(release, demo_service("invalid", **section))

    assert field in said


def test_a_spec_refused_by_the_operator_leaves_the_engines_alone(service: Service) -> None:
    before = service.engines()
    service.patch({"scaling": {"prometheusUrl": "http://169.254.169.254"}})

    until(lambda: service.condition("Degraded").get("status") == "True", "the spec to be refused")
    assert "spec.scaling.prometheusUrl" in service.condition("Degraded")["message"]
    assert service.engines() == before

    service.patch({"scaling": {"prometheusUrl": None}})
    until(lambda: service.condition("Degraded").get("status") == "False", "the spec to be taken")
    service.until_ready(1)


def test_the_reason_column_says_why_no_engine_is_ready(release: Release) -> None:
    engine = demo_service()["spec"]["engine"]
    reference = {"secretKeyRef": {"name": "absent", "key": "token"}}
    small = {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}
    broken = {
        "ModelNotFound": demo_service("path", model={"local": {"path": "/absent"}}),
        "OOMKilled": demo_service("memory", engine={**engine, "resources": small}),
        "CreateContainerConfigError": demo_service(
            "secret", engine={**engine, "env": [{"name": "TOKEN", "valueFrom": reference}]}
        ),
        "InvalidSpec": demo_service(
            "thief", model={"persistentVolumeClaim": {"claimName": "data-headrace-redis-0"}}
        ),
    }
    for manifest in broken.values():
        release.kubectl.apply(manifest)
    services = [Service(release, each["metadata"]["name"]) for each in broken.values()]

    def shown() -> list[str]:
        return [service.status.get("reason", "") for service in services]

    until(lambda: shown() == list(broken), f"{list(broken)} to be shown", PATIENCE_S)
    messages = {service.name: service.status["message"] for service in services}
    assert "/absent: no such folder" in messages["path"]
    assert "its limit of 64Mi: raise engine.resources.limits.memory" in messages["memory"]
    assert 'secret "absent" not found' in messages["secret"]
    assert "spec.model.persistentVolumeClaim.claimName" in messages["thief"]
    for service in services:
        service.delete()


def test_delete_leaves_nothing_behind(service: Service) -> None:
    service.delete()

    until(lambda: service.release.models() == [], "no model to be listed")


def client(release: Release) -> OpenAI:
    return OpenAI(base_url=f"{release.url}/v1", api_key="none", max_retries=0, timeout=60)
