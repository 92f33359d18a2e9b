"""The parser of ModelServices: every refusal names the field, and the schema has exactly the fields
that are read."""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel import evaluate
from pydantic import BaseModel

from headrace_engine.attention import BACKENDS
from headrace_engine.scheduler.policies import POLICIES
from headrace_engine.serving.settings import EngineSettings
from headrace_operator.errors import InvalidSpec
from headrace_operator.signals.signals import DEFAULT_CAPACITY
from headrace_operator.spec import schema
from headrace_operator.spec.model_service import ModelService, ModelServiceSpec
from headrace_operator.spec.sections import EngineSettingsSpec
from headrace_testing.model_services import HUB, body, service

APPARMOR = "container.apparmor.security.beta.kubernetes.io/engine"
CRD = Path(__file__).parents[3] / "charts/headrace/files/crds/modelservices.yaml"


def test_a_short_spec_has_defaults_for_the_rest() -> None:
    found = service()
    assert found.served_name == "qwen"
    assert found.spec.scaling.mode == "operator"
    assert found.spec.drain.timeout_seconds == 300


def test_the_served_name_may_differ_from_the_object() -> None:
    assert service(model={**HUB, "servedName": "Qwen/Qwen3"}).served_name == "Qwen/Qwen3"


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        ({"model": {}}, "spec.model", "exactly one of hub"),
        (
            {"model": {**HUB, "image": {"reference": "r/m:1"}}},
            "spec.model",
            "exactly one of hub",
        ),
        ({"model": {"local": {"path": "folder"}}}, "spec.model.local.path", "folder is wrong"),
        ({"model": {"hub": {}}}, "spec.model.hub.id", "required"),
        ({"model": {"hub": {"id": "a b"}}}, "spec.model.hub.id", "a b is wrong"),
        ({"model": {"uri": {"uri": "http://x/y"}}}, "spec.model.uri.uri", "http://x/y"),
        ({"engin": {}}, "spec.engin", "not permitted"),
        ({"lora": {"adapters": [{"name": "a"}]}}, "spec.lora.adapters.0", "exactly one of path"),
        ({"scaling": {"mode": "hpa", "lowPriority": "Yield"}}, "spec.scaling", "needs mode"),
        ({"lora": {"adapters": [{"name": "a", "path": "/a"}] * 2}}, "spec.lora", "must differ"),
        (
            {"lora": {"adapters": [{"name": "a", "uri": "s3://bkt/a"}]}},
            "spec.lora",
            "objectStorage",
        ),
        (
            {"lora": {"adapters": [{"name": "a", "uri": "s3://b"}], "objectStorage": {}}},
            "spec.lora.adapters.0.uri",
            "must be s3://bucket/folder",
        ),
        ({"engine": {"gpu": {"count": 0}}}, "spec.engine.gpu.count", "0 is wrong"),
        (
            {"engine": {"tensorParallelSize": 32}},
            "spec.engine",
            "at most 16 for each of the nodes",
        ),
        (
            {"engine": {"tensorParallelSize": 4, "nodes": 3}},
            "spec.engine",
            "must be a multiple of nodes",
        ),
        ({"engine": {"nodes": 2}}, "spec.engine", "must be a multiple of nodes"),
        ({"engine": {"nodes": 0}}, "spec.engine.nodes", "0 is wrong"),
        (
            {"engine": {"tensorParallelSize": 2, "nodes": 2}, "canary": {"image": "r/m:2"}},
            "spec.engine.nodes",
            "canary does not support engine.nodes above 1",
        ),
        (
            {"engine": {"gpu": {"count": 2}, "tensorParallelSize": 4}},
            "spec.engine",
            "gpu.count must be tensorParallelSize",
        ),
        ({"engine": {"gpu": {"count": 2}}}, "spec.engine", "gpu.count must be tensorParallelSize"),
        (
            {"engine": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}},
            "spec.engine.rollout",
            "must not both be 0",
        ),
        (
            {"engine": {"resources": {"limits": {"memory": "2Gb"}}}},
            "spec.engine.resources.limits.memory",
            "2Gb is wrong: must be a quantity of Kubernetes, as 500m, 4 or 2Gi",
        ),
        (
            {"engine": {"settings": {"kvCacheMemory": "2Gi"}}},
            "spec.engine.settings.kvCacheMemory",
            "2Gi is wrong: must be a number of bytes, as 512MiB or 2GiB",
        ),
        (
            {"engine": {"podAnnotations": {APPARMOR: "unconfined"}}},
            "spec.engine.podAnnotations",
            f"{APPARMOR} is wrong: keys must not begin with container.apparmor.",
        ),
        (
            {"engine": {"podAnnotations": {"headrace.dev/config": "1"}}},
            "spec.engine.podAnnotations",
            "headrace.dev/config is wrong",
        ),
        ({"engine": {"env": [{"value": "3"}]}}, "spec.engine.env.0.name", "required"),
        ({"engine": {"settings": {"dtype": "int3"}}}, "spec.engine.settings.dtype", "int3"),
        ({"replicas": "two"}, "spec.replicas", "'two' is wrong"),
        ({"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "spec.scaling", "minReplicas"),
        ({"scaling": {"mode": "hpa", "minReplicas": 0}}, "spec.scaling", "scale to zero"),
        ({"scaling": {"mode": "keda"}}, "spec.scaling.prometheusUrl", "mode keda needs"),
        ({"scaling": {"mode": "magic"}}, "spec.scaling.mode", "'magic' is wrong"),
        ({"sharing": {"group": "Gpu 0"}}, "spec.sharing.group", "Gpu 0 is wrong"),
        (
            {"sharing": {"group": "gpu", "minAwakeSeconds": 9, "maxAwakeSeconds": 8}},
            "spec.sharing",
            "minAwakeSeconds must not be above",
        ),
        (
            {"sharing": {"group": "gpu"}, "scaling": {"maxReplicas": 2}},
            "spec.scaling.maxReplicas",
            "one at a time",
        ),
        (
            {"sharing": {"group": "gpu"}, "engine": {"tensorParallelSize": 2}},
            "spec.engine.tensorParallelSize",
            "sharing does not support",
        ),
        ({"scaling": {"objective": {}}}, "spec.scaling.objective", "set ttftSeconds"),
        (
            {"scaling": {"objective": {"ttftSeconds": 2}, "targets": {"utilization": 0.5}}},
            "spec.scaling",
            "set objective or targets.utilization",
        ),
        (
            {"scaling": {"objective": {"tpotSeconds": 0.05}, "mode": "keda"}},
            "spec.scaling",
            "objective needs mode operator",
        ),
        ({"canary": {"replicas": 1}}, "spec.canary", "needs an image or a revision"),
        (
            {"model": {"image": {"reference": "r/m:1"}}, "canary": {"revision": "x"}},
            "spec.canary.revision",
            "needs model.hub",
        ),
    ],
)
def test_a_wrong_spec_names_field_and_problem(spec: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        service(**spec)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 41, "a.b"])
def test_a_name_that_is_invalid_for_pods_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match=r"metadata\.name"):
        ModelService.parse(body(name))


def test_a_missing_spec_is_refused() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.model"):
        ModelService.parse({**body(), "spec": None})


def test_the_definition_in_the_chart_is_the_generated_one() -> None:
    assert CRD.read_text() == schema.text(), "run python -m headrace_operator.spec.schema"


@pytest.mark.parametrize(
    ("key", "taken"),
    [(APPARMOR, False), ("controller.kubernetes.io/x", False), ("prometheus.io/scrape", True)],
)
def test_the_api_server_refuses_the_same_annotations(key: str, taken: bool) -> None:
    engine = schema.spec_schema()["properties"]["engine"]["properties"]
    (rule,) = engine["podAnnotations"]["x-kubernetes-validations"]
    assert evaluate(rule["rule"], {"self": {"a": "b", key: "c"}}) is taken


def _fields(model: type[BaseModel]) -> set[str]:
    return {str(field.alias) for field in model.model_fields.values()}


@cache
def written_schema() -> dict[str, Any]:
    """The schema in the chart's file."""
    definition = yaml.load(CRD.read_text(), yaml.CSafeLoader)
    found: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def test_the_schema_has_exactly_the_fields_that_are_read() -> None:
    root = written_schema()
    seen = 0

    def compare(node: dict[str, Any], model: type[BaseModel], path: str) -> None:
        nonlocal seen
        assert set(node["properties"]) == _fields(model), path
        required = {str(f.alias) for f in model.model_fields.values() if f.is_required()}
        assert set(node.get("required", ())) == required, path
        seen += len(node["properties"])
        for name, child in schema._children(model):
            compare(node["properties"][name], child, f"{path}.{name}")

    compare(root["properties"]["spec"], ModelServiceSpec, "spec")
    assert seen > 100


def test_every_field_has_a_description() -> None:
    """`kubectl explain` shows these descriptions."""
    root = written_schema()
    silent: list[str] = []

    def look(node: dict[str, Any], path: str) -> None:
        for name, child in node.get("properties", {}).items():
            silent.extend([f"{path}.{name}"] * ("description" not in child))
            look(child, f"{path}.{name}")
            look(child.get("items", {}), f"{path}.{name}[]")

    look(root, "")
    assert silent == [".metadata"]  # set by the API server


def _walk(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for item in node for found in _walk(item)]
    if not isinstance(node, dict):
        return []
    return [node, *(found for value in node.values() for found in _walk(value))]


def test_the_schema_is_structural() -> None:
    """It has no reference, no union, and a type everywhere, as the API server requires."""
    for node in _walk(schema.spec_schema()):
        assert not {"$ref", "anyOf", "allOf", "oneOf", "title"} & set(node)
        if "properties" in node and isinstance(node.get("type"), str):
            for name, child in node["properties"].items():
                assert "type" in child or "x-kubernetes-int-or-string" in child, name
                assert child.get("description"), f"{name} says nothing of itself"


def test_rules_of_sections_are_rules_of_the_schema() -> None:
    spec = schema.spec_schema()
    found = [rule for node in _walk(spec) for rule in node.get("x-kubernetes-validations", ())]
    ours = {rule["message"] for rule in found if "messageExpression" not in rule}
    assert len(ours) == 22


@pytest.mark.parametrize(
    ("engine", "taken"),
    [
        ({}, True),
        ({"nodes": 2}, False),
        ({"tensorParallelSize": 16}, True),
        ({"tensorParallelSize": 17}, False),
        ({"tensorParallelSize": 32, "nodes": 2}, True),
        ({"tensorParallelSize": 64, "nodes": 2}, False),
        ({"tensorParallelSize": 6, "nodes": 4}, False),
    ],
)
def test_the_api_server_and_the_operator_take_the_same_nodes(
    engine: dict[str, int], taken: bool
) -> None:
    rules = schema.spec_schema()["properties"]["engine"]["x-kubernetes-validations"]
    assert all(evaluate(rule["rule"], {"self": engine}) for rule in rules) is taken
    try:
        service(engine=engine)
    except InvalidSpec:
        assert not taken
    else:
        assert taken


def test_the_api_server_refuses_a_canary_of_engines_that_span_nodes() -> None:
    rules = schema.spec_schema()["x-kubernetes-validations"]
    (rule,) = (each["rule"] for each in rules if each["message"].startswith("canary does not"))
    canary: dict[str, Any] = {"image": "r/m:2"}
    two: dict[str, Any] = {"nodes": 2, "tensorParallelSize": 2}
    assert not evaluate(rule, {"self": {"canary": canary, "engine": two}})
    assert evaluate(rule, {"self": {"engine": two}})
    assert evaluate(rule, {"self": {"canary": canary, "engine": {"nodes": 1}}})


def test_no_error_shows_a_regular_expression() -> None:
    assert not [node for node in _walk(schema.spec_schema()) if "pattern" in node]


@pytest.mark.parametrize(
    "value",
    ["500m", "4", 4, 0, "2Gi", "1.5Gi", "1e3", "2Gb", "2GiB", "50 GB", "", -1, "x" * 40],
)
def test_the_api_server_and_the_operator_take_the_same_quantities(value: str | int) -> None:
    engine = schema.spec_schema()["properties"]["engine"]["properties"]
    limits = engine["resources"]["properties"]["limits"]
    form = limits["additionalProperties"]
    (rule,) = form["x-kubernetes-validations"]
    fits = isinstance(value, int) or len(value) <= form["maxLength"]
    taken = fits and evaluate(rule["rule"], {"self": value})
    try:
        service(engine={"resources": {"limits": {"memory": value}}})
    except InvalidSpec as refusal:
        assert not taken
        message = evaluate(rule["messageExpression"], {"self": value}) if fits else ""
        assert message in str(refusal)
    else:
        assert taken


def test_printer_columns_and_subresources() -> None:
    definition = schema.definition()["spec"]
    (version,) = definition["versions"]
    columns = version["additionalPrinterColumns"]
    usual = [column["name"] for column in columns if column.get("priority", 0) == 0]
    assert usual == ["Model", "Ready", "Desired", "Backlog", "Reason", "Age"]
    wide = [column["name"] for column in columns if column.get("priority") == 1]
    assert wide == ["Tokens/s", "KV %", "Cold start", "Scaling", "Message"]
    assert definition["names"]["shortNames"] == ["ms"]
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"


def test_engine_settings_are_those_of_the_engine() -> None:
    """The section has all settings of the engine, under the same names, except those that the
    operator sets, or that differ between a model's engines."""
    own = {"redis_url", "model", "revision", "served_model_name", "queue_shards", "drain_timeout"}
    own |= {"metrics_host", "metrics_port", "metrics_fd", "owner", "register_model"}
    own |= {"after_drain", "hold_waiting", "display_name", "variant"}
    own |= {"tensor_parallel_size", "enable_expert_parallel"}
    own |= {"nnodes", "node_rank", "master_addr", "master_port"}
    own |= {"node_secret_file", "node_timeout"}
    own |= {"redis_credentials", "sealing_keys_file", "sealing_mode"}
    own |= {"enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras"}
    own |= {"lora_dir", "lora_hub", "lora_object_storage", "lora_experts"}
    own |= {"low_priority_share"}
    own |= {"enable_sleep_mode", "sharing_group", "sharing_sleep_level", "sharing_timeout"}
    own |= {"sharing_min_awake", "sharing_max_awake"}
    assert set(EngineSettingsSpec.model_fields) == set(EngineSettings.model_fields) - own


@pytest.mark.parametrize(
    ("field", "names"), [("attention_backend", BACKENDS), ("policy", POLICIES)]
)
def test_a_description_names_every_choice(field: str, names: Iterable[str]) -> None:
    for settings in (EngineSettings, EngineSettingsSpec):
        described = settings.model_fields[field].description or ""
        assert set(names) <= set(re.findall(r"\w+", described)), settings


def test_the_capacity_guess_is_the_engines_default() -> None:
    assert EngineSettings.model_fields["max_num_seqs"].default == DEFAULT_CAPACITY
