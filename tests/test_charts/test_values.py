"""values.yaml, its schema and the ci/ scenarios: complete, documented, and typos are refused."""

import re
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmError, HelmValuesError

from headrace_gateway.settings import GatewaySettings
from headrace_operator.settings import OperatorSettings
from headrace_testing.charts import CHART, SCENARIOS, keys_of, render, scenario, workload

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# The chart sets the ports, and the URL comes from a Secret.
GATEWAY_OWNED = {
    *("redis_url", "port", "metrics_port", "metrics_fd", "fd", "api_keys_file"),
    "supervisor_fd",
    *("redis_credentials", "sealing_keys_file", "sealing_mode"),
}
# These are derived from other values.
OPERATOR_OWNED = {
    *("namespace", "watch_all_namespaces", "watch_nodes", "identity", "lease_name", "redis_url"),
    *("engine_redis_secret", "engine_redis_secret_key", "engine_redis_ca_secret"),
    *("redis_admin_url", "engine_redis_url"),
    *("engine_sealing_secret", "engine_sealing_mode"),
    *(
        "engine_redis_ports",
        "engine_image_pull_policy",
        "engine_image_pull_secrets",
        "engine_otlp_endpoint",
    ),
    *("metrics_namespaces", "metrics_port", "gateway_namespace", "gateway_selector"),
    *("reserved_secrets", "reserved_claims"),
}
MAX_LINES = 340


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    with Chart.load(CHART) as chart:
        assert chart.schema is not None
        return chart.schema


def test_values_are_short_enough_to_be_read() -> None:
    assert len((CHART / "values.yaml").read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize("name", ["laptop-values", "production-values"])
def test_values_of_the_examples_are_accepted(name: str) -> None:
    values = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())

    assert len(workload(render(values), "headrace-gateway").containers) == 1


def test_every_value_is_documented() -> None:
    """Each key has a `# --` line right above it, unless it only groups others."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    bare = []
    for above, line in zip(["", *lines], lines, strict=False):
        leaf = re.match(r"^ *[A-Za-z_]\w*: *\S", line)
        documented = above.lstrip().startswith("# -- ")
        if leaf and not documented and not _continues(above):
            bare.append(line)

    assert bare == []


def _continues(above: str) -> bool:
    """Requests and limits are one documented value on two lines."""
    return above.strip() == "resources:" or above.strip().startswith("requests:")


def test_every_value_is_used_by_a_template() -> None:
    templates = "".join(
        path.read_text() for path in sorted((CHART / "templates").rglob("*")) if path.is_file()
    )
    opaque = {"settings", "requests", "limits"}  # passed on unchanged
    unused = [
        ".".join(path)
        for path in keys_of(VALUES)
        if not opaque & set(path) and not re.search(rf"\.{path[-1]}\b", templates)
    ]

    assert unused == []


def test_the_readme_documents_every_section() -> None:
    readme = (CHART / "README.md").read_text()

    assert [key for key in VALUES if f"`{key}" not in readme] == []


def test_every_value_is_in_the_schema(schema: dict[str, Any]) -> None:
    missing = [".".join(path) for path in keys_of(VALUES) if _schema_at(schema, path) is None]

    assert missing == []


def _schema_at(schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    node: dict[str, Any] | None = schema
    for key in path:
        assert node is not None
        node = _resolved(schema, node)
        extra = node.get("additionalProperties", True)
        if key in node.get("properties", {}):
            node = node["properties"][key]
        elif isinstance(extra, dict):
            node = extra
        else:
            return None
    return node


def _resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return node
    name = node["$ref"].removeprefix("#/definitions/")
    found: dict[str, Any] = schema["definitions"][name]
    return found


def test_every_value_of_the_schema_has_a_default(schema: dict[str, Any]) -> None:
    """Exceptions: settings of processes, which have their own defaults, and Helm's `global`."""
    known = set(keys_of(VALUES))
    missing = [
        path
        for path in _schema_paths(schema, ())
        if path not in known and "settings" not in path and path != ("global",)
    ]

    assert missing == []


def _store(memory: str = "384mb", **settings: Any) -> dict[str, Any]:
    """Values with a bundled Redis that has this much memory, and with these gateway settings."""
    return {"redis": {"bundled": {"maxMemory": memory}}, "gateway": {"settings": settings}}


@pytest.mark.parametrize(
    ("values", "store"),
    [
        ({}, str(64 * 2**20)),
        (_store("6gb"), str(2**30)),
        (_store("1000"), "166"),
        (_store(max_tenant_store_bytes="96MiB"), "96MiB"),
        ({"redis": {"mode": "external", "external": {"url": "redis://host"}}}, None),
    ],
)
def test_a_tenant_may_fill_a_sixth_of_the_bundled_redis(
    values: dict[str, Any], store: str | None
) -> None:
    environment = workload(render(values), "headrace-gateway").environment
    setting = environment.get("HEADRACE_GATEWAY_MAX_TENANT_STORE_BYTES")

    assert (None if setting is None else setting["value"]) == store


def _schema_paths(node: dict[str, Any], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    found = []
    for key, child in node.get("properties", {}).items():
        found += [(*path, key), *_schema_paths(child, (*path, key))]
    return found


def test_objects_of_the_chart_refuse_unknown_keys(schema: dict[str, Any]) -> None:
    assert [path for path, node in _closed(schema, ()) if not node] == []


def _closed(node: dict[str, Any], path: tuple[str, ...]) -> list[tuple[tuple[str, ...], bool]]:
    if "properties" not in node:
        return []
    found = [(path, node.get("additionalProperties") is False)]
    for key, child in node["properties"].items():
        found += _closed(child, (*path, key))
    return found


def test_settings_of_the_gateway_are_those_of_its_process(schema: dict[str, Any]) -> None:
    known = schema["properties"]["gateway"]["properties"]["settings"]["properties"]

    assert set(known) == set(GatewaySettings.model_fields) - GATEWAY_OWNED


def test_choices_of_the_gateways_settings_are_those_of_its_process(schema: dict[str, Any]) -> None:
    known = schema["properties"]["gateway"]["properties"]["settings"]["properties"]
    choices = {
        name: list(get_args(field.annotation))
        for name, field in GatewaySettings.model_fields.items()
        if get_origin(field.annotation) is Literal and name not in GATEWAY_OWNED
    }

    assert {name: known[name]["enum"] for name in choices} == choices


def test_settings_of_the_operator_are_those_of_its_process(schema: dict[str, Any]) -> None:
    known = schema["properties"]["operator"]["properties"]["settings"]["properties"]

    assert set(known) == set(OperatorSettings.model_fields) - OPERATOR_OWNED


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_renders(name: str) -> None:
    assert len(render(scenario(name))) > 10


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_lints(name: str) -> None:
    report = lint(CHART, scenario(name), strict=True)
    problems = [m for m in report["messages"] if "icon is recommended" not in str(m)]

    assert problems == []


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"replica": 2}}, "gateway.*replica"),
        ({"gateway": {"replicas": 0}}, "gateway.*replicas"),
        ({"nameOverride": "My_LLM"}, "nameOverride"),
        ({"gateway": {"settings": {"max_queued_request": 5}}}, "gateway.*settings"),
        ({"gateway": {"settings": {"max_queued_requests": 0}}}, "max_queued_requests"),
        ({"gateway": {"settings": {"port": 9000}}}, "gateway.*settings"),
        ({"gateway": {"service": {"port": 70000}}}, "gateway.*service.*port"),
        ({"gateway": {"resources": {"request": {"cpu": "1"}}}}, "gateway.*resources"),
        ({"operator": {"replicas": 9}}, "operator.*replicas"),
        ({"redis": {"mode": "cluster"}}, "redis.*mode"),
        ({"redis": {"external": {"url": "http://redis"}}}, "redis.*external.*url"),
        ({"redis": {"bundled": {"maxMemory": "half"}}}, "redis.*bundled.*maxMemory"),
        ({"ingress": {"timeoutSeconds": 0}}, "ingress.*timeoutSeconds"),
        ({"networkPolicy": {"kubernetesApiCidrs": ["here"]}}, "kubernetesApiCidrs"),
        ({"telemetry": {"traceRatio": 1.5}}, "telemetry.*traceRatio"),
        ({"monitoring": {"prometheusOperator": "yes"}}, "monitoring.*prometheusOperator"),
        ({"image": {"tag": "a tag"}}, "image.*tag"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmValuesError) as refusal:
        render(values)

    assert re.search(named, str(refusal.value), re.DOTALL)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"image": {"repository": ""}}, "make images IMAGE_LOAD="),
        ({"image": {"repository": ""}}, "make push REGISTRY="),
        ({"redis": {"mode": "external"}}, "redis.external.existingSecret"),
        (
            {"redis": {"mode": "external", "external": {"url": "redis://:secret@host:6379/0"}}},
            "holds a password",
        ),
        (
            {
                "redis": {
                    "mode": "external",
                    "external": {"url": "redis://host", "existingSecret": "queue"},
                }
            },
            "leave one empty",
        ),
        (
            {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 20}}},
            "gateway.autoscaling.minReplicas",
        ),
        (
            {"gateway": {"autoscaling": {"enabled": True}, "resources": {"requests": None}}},
            "gateway.resources.requests.cpu",
        ),
        ({"gateway": {"settings": {"served_model_name": "m"}}}, "gateway.settings.model"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"ingress": {"enabled": True, "tlsSecret": "tls"}}, "ingress.hosts"),
        (_store(max_tenant_store_bytes="97MiB"), "gateway.settings.max_tenant_store_bytes"),
        (_store(max_file_bytes=101 * 2**20), "gateway.settings.max_file_bytes"),
        (_store(max_batch_output_bytes="1GB"), "at most 100663296 bytes"),
        (_store("32mb", max_stored_bytes="9 MB"), "gateway.settings.max_stored_bytes"),
        (_store(max_tenant_image_bytes="1GiB"), "gateway.settings.max_tenant_image_bytes"),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_a_remedy(
    values: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(HelmError, match=re.escape(remedy)):
        render(values)


def test_all_contradictions_are_in_one_error() -> None:
    values = {"redis": {"mode": "external"}, "httpRoute": {"enabled": True}}

    with pytest.raises(HelmError, match=r"(?s)redis\.external.*httpRoute"):
        render(values)
