"""The ValidatingAdmissionPolicy for ModelServices: its CEL, evaluated on whole objects.

An API server also checks types and costs: tests_cluster tests the policy with one.
"""

from typing import Any

import pytest
from cel import evaluate

from headrace_operator.spec.model_service import ModelService
from headrace_operator.spec.sections import ModelSpec
from headrace_testing.charts import Manifest, named, of_kind, render
from headrace_testing.model_services import body

NARROW: dict[str, Any] = {
    "enabled": True,
    "sources": ["hub", "local"],
    "images": ["registry.example.com/llm/*", "registry.example.com/base/engine:1"],
    "secrets": ["hf-token", "team-a-*"],
    "env": ["HF_*", "OMP_NUM_THREADS"],
}
LOCAL = {"local": {"path": "headrace-demo"}}


def policy(values: dict[str, Any]) -> Manifest:
    objects = render({"modelServicePolicy": values})
    (found,) = of_kind(objects, "ValidatingAdmissionPolicy")
    spec: Manifest = found["spec"]
    return spec


def refusals(values: dict[str, Any], spec: Manifest, old: Manifest | None = None) -> list[str]:
    """The messages of the API server, without the chart's remedy."""
    rules = policy(values)
    context: dict[str, Any] = {
        "object": {"spec": spec},
        "oldObject": None if old is None else {"spec": old},
        "request": {"operation": "CREATE" if old is None else "UPDATE"},
        "variables": {},
    }
    if not all(evaluate(each["expression"], context) for each in rules["matchConditions"]):
        return []
    for each in rules["variables"]:
        context["variables"][each["name"]] = evaluate(each["expression"], context)
    return [
        _said(each, context).partition(" is not allowed")[0]
        for each in rules["validations"]
        if not evaluate(each["expression"], context)
    ]


def _said(validation: Manifest, context: dict[str, Any]) -> str:
    if "message" in validation:
        return str(validation["message"])
    return str(evaluate(validation["messageExpression"], context))


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"hub": {"id": "Qwen/Qwen3-8B", "tokenSecret": {"name": "hf-token"}}}},
        {"model": LOCAL, "engine": {"image": "registry.example.com/llm/engine:2"}},
        {"model": LOCAL, "engine": {"image": "registry.example.com/base/engine:1"}},
        {"model": LOCAL, "engine": {"env": [{"name": "HF_HOME", "value": "/tmp"}]}},
        {"model": LOCAL, "queue": {"urlSecret": {"name": "team-a-redis"}}},
        {"model": LOCAL, "lora": {"adapters": [{"name": "sql", "path": "/model/sql"}]}},
        {"model": LOCAL, "engine": {"settings": {"speculativeConfig": {"model": "/model/draft"}}}},
        {"model": LOCAL, "engine": {"extraArgs": []}},
    ],
)
def test_allowed_specs_pass(spec: Manifest) -> None:
    ModelService.parse(body(**spec))
    assert refusals(NARROW, spec) == []


def reference(name: str) -> Manifest:
    return {"secretKeyRef": {"name": name, "key": "k"}}


@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        ({"engine": {"image": "registry.example.com/base/engine:2"}},
         "the image registry.example.com/base/engine:2"),
        ({"engine": {"image": "registry.example.com.evil/llm/x"}},
         "the image registry.example.com.evil/llm/x"),
        ({"canary": {"image": "evil:1"}}, "the image evil:1"),
        ({"lora": {"adapters": [{"name": "a", "image": {"reference": "evil:2"}}]}},
         "the image evil:2"),
        ({"engine": {"imagePullSecrets": ["hf-token", "admin"]}}, "the Secret admin"),
        ({"model": {"hub": {"id": "a/b", "tokenSecret": {"name": "x"}}}}, "the Secret x"),
        ({"queue": {"urlSecret": {"name": "redis"}}}, "the Secret redis"),
        ({"engine": {"env": [{"name": "HF_TOKEN", "valueFrom": reference("other")}]}},
         "the Secret other"),
        ({"engine": {"env": [{"name": "LD_PRELOAD", "value": "/x"}]}},
         "the environment variable LD_PRELOAD"),
        ({"engine": {"envFrom": [{"configMapRef": {"name": "any"}}]}},
         "the environment variable engine.envFrom"),
        ({"model": {"persistentVolumeClaim": {"claimName": "all"}}},
         "the model source persistentVolumeClaim"),
        ({"lora": {"adapters": [{"name": "a", "persistentVolumeClaim": {"claimName": "c"}}]}},
         "the model source persistentVolumeClaim"),
        ({"lora": {"adapters": [], "objectStorage": {}}}, "the model source uri"),
        ({"lora": {"adapters": [], "objectStorage": {"credentialsSecret": "s3"}}},
         "the Secret s3"),
        ({"engine": {"extraArgs": ["--model=/other"]}}, "engine.extraArgs"),
    ],
)  # fmt: skip
def test_forbidden_fields_are_refused_by_name(spec: Manifest, refusal: str) -> None:
    spec = {"model": LOCAL, **spec}
    ModelService.parse(body(**spec))
    assert refusal in refusals(NARROW, spec)


def test_all_errors_are_reported() -> None:
    spec = {
        "model": {"uri": {"uri": "s3://bucket/model", "credentialsSecret": "s3"}},
        "engine": {"envFrom": [{"secretRef": {"name": "all"}}], "image": "evil"},
    }
    assert refusals(NARROW, spec) == [
        "the image evil",
        "the Secret s3",
        "the model source uri",
        "the environment variable engine.envFrom",
    ]


def test_a_draft_model_of_the_hub_needs_the_hub() -> None:
    spec = {"model": LOCAL, "engine": {"settings": {"speculativeConfig": {"model": "a/draft"}}}}
    assert refusals(NARROW, spec) == []
    assert refusals({**NARROW, "sources": ["local"]}, spec) == ["the model source hub"]


def test_by_default_only_the_source_of_weights_may_be_chosen() -> None:
    values = {"enabled": True}
    for source in ("hub", "persistentVolumeClaim", "uri", "local"):
        assert refusals(values, {"model": {source: {}}}) == []
    assert refusals(values, {"model": LOCAL, "engine": {"image": "e"}}) == ["the image e"]
    assert len(refusals(values, {"model": LOCAL, "engine": {"env": [{"name": "A"}]}})) == 1


def test_a_star_allows_everything() -> None:
    values = {"enabled": True, "images": ["*"], "secrets": ["*"], "env": ["*"], "extraArgs": True}
    spec = {
        "model": {"image": {"reference": "anything"}},
        "engine": {
            "image": "evil",
            "imagePullSecrets": ["a"],
            "envFrom": [{"secretRef": {"name": "b"}}],
            "env": [{"name": "LD_PRELOAD", "value": "x"}],
            "extraArgs": ["--model=x"],
        },
    }
    assert refusals(values, spec) == []


def test_an_existing_object_is_refused_only_when_its_spec_changes() -> None:
    old = {"model": LOCAL, "engine": {"image": "evil:1"}}
    assert refusals(NARROW, old, old) == []
    assert refusals(NARROW, {**old, "replicas": 2}, old) == ["the image evil:1"]


def test_the_remedy_is_reported() -> None:
    rules = policy(NARROW)
    texts = [each.get("messageExpression", each.get("message")) for each in rules["validations"]]
    for field in ("sources", "images", "secrets", "env", "extraArgs"):
        assert any(f"modelServicePolicy.{field} of the chart's values" in text for text in texts)


def test_every_source_is_known_to_the_policy() -> None:
    fields = {str(f.alias) for n, f in ModelSpec.model_fields.items() if n != "served_name"}
    (sources,) = (v for v in policy(NARROW)["variables"] if v["name"] == "sources")
    for field in fields:
        assert f'variables.spec.model.{field}) ? ["{field}"]' in sources["expression"]


def test_the_policy_is_off_by_default() -> None:
    assert of_kind(render(), "ValidatingAdmissionPolicy") == []
    assert of_kind(render(), "ValidatingAdmissionPolicyBinding") == []


@pytest.mark.parametrize(
    ("values", "selector"),
    [
        ({}, {"matchLabels": {"kubernetes.io/metadata.name": "llm"}}),
        ({"operator": {"watchAllNamespaces": True}}, None),
        (
            {"modelServicePolicy": {"namespaceSelector": {"matchLabels": {"team": "a"}}}},
            {"matchLabels": {"team": "a"}},
        ),
    ],
)
def test_the_policy_applies_where_the_operator_watches(
    values: dict[str, Any], selector: Manifest | None
) -> None:
    own = {**values.get("modelServicePolicy", {}), "enabled": True}
    objects = render({**values, "modelServicePolicy": own})
    name = "llm-headrace-model-services"
    binding = named(objects, "ValidatingAdmissionPolicyBinding", name)["spec"]
    assert (
        binding["policyName"]
        == named(objects, "ValidatingAdmissionPolicy", name)["metadata"]["name"]
    )
    assert binding["validationActions"] == ["Deny"]
    assert binding.get("matchResources", {}).get("namespaceSelector") == selector
