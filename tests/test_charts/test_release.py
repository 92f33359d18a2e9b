"""The parts of a release that users see: notes, ingress, monitoring, `helm test`."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_common.text.checkpoint import local_source
from headrace_operator import names
from headrace_operator.spec.model_service import ModelService
from headrace_testing.charts import (
    CHART,
    ROOT,
    SCENARIOS,
    named,
    of_kind,
    render,
    render_files,
    scenario,
    workload,
)


def notes(name: str) -> str:
    return render_files(scenario(name))["templates/NOTES.txt"]


def test_the_chart_installs_the_version_of_its_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert chart["appVersion"] == project["version"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_notes_hold_a_modelservice_that_the_operator_understands(name: str) -> None:
    (text,) = re.findall(r"<<EOF\n(.*?)\nEOF\n", notes(name), re.DOTALL)
    body = yaml.safe_load(text)
    body["metadata"]["namespace"] = "llm"
    service = ModelService.parse(body)

    assert service.spec.model.local is not None
    assert Path(local_source(service.spec.model.local.path), "config.json").is_file()


def test_the_notes_show_the_next_command() -> None:
    assert "kubectl -n llm port-forward service/headrace-gateway 8000:80" in notes("default-values")
    assert "curl https://llm.example.com/v1/models" in notes("tls-values")


def test_the_notes_have_a_command_for_an_ingress_without_a_host() -> None:
    text = notes("small-values")
    assert "kubectl -n llm get ingress headrace-gateway" in text
    assert "curl http://ADDRESS/v1/models" in text
    assert "port-forward" not in text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "engines that continue without an operator and without their Redis. Delete"),
        ({}, "kubectl -n llm delete modelservices --all"),
        ({}, "kubectl delete crd modelservices.headrace.dev"),
        ({"operator": {"watchAllNamespaces": True}}, "kubectl -A delete modelservices --all"),
        ({"operator": {"deleteModelServices": True}}, "It deletes the ModelServices first"),
        ({"crds": {"keep": False}}, "with it every ModelService and engine of the cluster"),
        (
            {"redis": {"bundled": {"persistence": {"retain": True}}}},
            "kubectl -n llm delete pvc data-headrace-redis-0",
        ),
    ],
)
def test_the_notes_list_the_objects_that_remain_after_an_uninstall(
    values: dict[str, Any], text: str
) -> None:
    assert text in render_files({**scenario("default-values"), **values})["templates/NOTES.txt"]


def test_a_job_deletes_the_modelservices_before_the_operator_goes() -> None:
    assert of_kind(render(), "Job") == []
    objects = render({"operator": {"deleteModelServices": True}})
    job = named(objects, "Job", "headrace-uninstall")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    (container,) = workload(objects, "headrace-uninstall").containers
    command = [*container["command"], *container["args"]]
    assert command == ["python", "-m", "headrace_operator.uninstall", "--namespace", "llm"]
    role = named(objects, "Role", "headrace-uninstall")
    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [
        (["modelservices"], ["list", "delete"]),
        (["pods"], ["list"]),
    ]
    everywhere = render({"operator": {"deleteModelServices": True, "watchAllNamespaces": True}})
    named(everywhere, "ClusterRoleBinding", "llm-headrace-uninstall")
    (container,) = workload(everywhere, "headrace-uninstall").containers
    assert "args" not in container


def test_the_notes_name_the_images_and_where_a_failed_pull_is_reported() -> None:
    text = notes("full-values")
    for target in ("gateway", "operator", "engine"):
        assert f"- registry.example.com/headrace-{target}:0.1.0\n" in text
    assert "kubectl -n llm get events --field-selector reason=Failed" in text


def test_the_notes_advise_against_the_bundled_redis_in_production() -> None:
    assert "redis.mode=external" in notes("default-values")
    assert "redis.mode=external" not in notes("external-redis-values")


def test_the_ingress_streams_through_nginx() -> None:
    ingress = named(render(scenario("tls-values")), "Ingress", "headrace-gateway")
    prefix = "nginx.ingress.kubernetes.io/"
    annotations = ingress["metadata"]["annotations"]

    assert annotations[f"{prefix}proxy-buffering"] == "off"
    assert int(annotations[f"{prefix}proxy-read-timeout"]) >= 3600
    assert ingress["spec"]["tls"] == [
        {"secretName": "llm-example-com", "hosts": ["llm.example.com"]}
    ]


def test_the_users_annotations_take_precedence() -> None:
    ingress = named(render(scenario("full-values")), "Ingress", "headrace-gateway")

    size = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert size == "128m"


@pytest.mark.parametrize("kind", ["Ingress", "HTTPRoute"])
def test_ingress_and_route_lead_to_the_service_of_the_api(kind: str) -> None:
    objects = render(scenario("full-values"))
    service = named(objects, "Service", "headrace-gateway")
    route = str(named(objects, kind, "headrace-gateway")["spec"]["rules"])

    assert "'name': 'headrace-gateway'" in route
    assert service["spec"]["ports"][0]["port"] == 80


def test_dashboards_are_config_maps_that_grafana_s_sidecar_finds() -> None:
    files = sorted((CHART / "dashboards").glob("*.json"))
    maps = {
        name: json.loads(text)
        for config in of_kind(render(), "ConfigMap")
        if config["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in config["data"].items()
    }

    assert maps == {path.name: json.loads(path.read_text()) for path in files}
    assert maps


def test_alert_rules_are_those_of_the_files() -> None:
    values = {"monitoring": {"prometheusOperator": True, "runbookUrl": "https://docs/run.md"}}
    rules = of_kind(render(values), "PrometheusRule")
    expected = [
        yaml.safe_load(path.read_text().replace("docs/operations.md", "https://docs/run.md"))
        for path in sorted((CHART / "rules").glob("*.yaml"))
    ]

    assert [rule["spec"]["groups"] for rule in rules] == [each["groups"] for each in expected]


def test_every_metrics_port_is_scraped_once() -> None:
    objects = render(scenario("full-values"))
    services = of_kind(objects, "Service")
    scraped = []
    for monitor in of_kind(objects, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        scraped += [s for s in services if labels.items() <= s["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for s in scraped for port in s["spec"]["ports"]}

    found = sorted(service["metadata"]["name"] for service in scraped)
    assert found == ["headrace-gateway-metrics", "headrace-operator-metrics"]
    assert {m["metadata"]["name"] for m in of_kind(objects, "PodMonitor")} == {
        "headrace-engines",
        "headrace-redis",
    }


def test_engines_are_scraped_by_the_labels_and_port_that_the_operator_gives_them() -> None:
    spec = named(render(scenario("full-values")), "PodMonitor", "headrace-engines")["spec"]

    assert spec["selector"]["matchLabels"].items() <= names.labels("demo").items()
    assert [e["port"] for e in spec["podMetricsEndpoints"]] == [names.METRICS_PORT_NAME]


def test_without_the_prometheus_operator_there_are_no_objects_of_its_kinds() -> None:
    groups = {manifest["apiVersion"].partition("/")[0] for manifest in render()}

    assert "monitoring.coreos.com" not in groups


def test_helm_test_runs_in_the_gateway_s_image_and_asks_both_services() -> None:
    objects = render()
    pod = workload(objects, "headrace-test-api")
    variables = {name: each["value"] for name, each in pod.environment.items()}
    services = {
        s["metadata"]["name"]: s["spec"]["ports"][0]["port"] for s in of_kind(objects, "Service")
    }

    assert pod.manifest["metadata"]["annotations"]["helm.sh/hook"] == "test"
    image = workload(objects, "headrace-gateway").containers[0]["image"]
    assert pod.containers[0]["image"] == image
    for url in variables.values():
        host, port = re.findall(r"http://([^:/]+):(\d+)", url)[0]
        assert services[host] == int(port)


def test_only_the_test_s_pod_is_a_hook() -> None:
    """`helm test --logs` asks for the logs of every hook."""
    hooks = [
        each["kind"]
        for each in render()
        if "helm.sh/hook" in each["metadata"].get("annotations", {})
    ]

    assert hooks == ["Pod"]


def test_no_service_selects_the_test_pod() -> None:
    objects = render()
    pod = workload(objects, "headrace-test-api")

    for service in of_kind(objects, "Service"):
        assert not service["spec"]["selector"].items() <= pod.labels.items()
