"""Pods: restricted Pod Security, real settings, probes and ports, enough time to end."""

from typing import Any

import pytest
from pydantic_settings import BaseSettings

from headrace_common.observability.telemetry import TelemetrySettings
from headrace_gateway.settings import GatewaySettings
from headrace_operator.settings import OperatorSettings
from headrace_testing.charts import (
    ROOT,
    SCENARIOS,
    Workload,
    plain_secrets,
    render,
    scenario,
    workload,
    workloads,
)

PROCESSES: dict[str, tuple[str, type[BaseSettings]]] = {
    "gateway": ("HEADRACE_GATEWAY_", GatewaySettings),
    "operator": ("HEADRACE_OPERATOR_", OperatorSettings),
}
SAFE_VOLUMES = {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected"}


@pytest.fixture(params=SCENARIOS)
def pods(request: pytest.FixtureRequest) -> list[Workload]:
    return workloads(render(scenario(request.param)))


def test_pods_pass_the_restricted_pod_security_standard(pods: list[Workload]) -> None:
    for each in pods:
        context = each.spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & each.spec.keys()
        for volume in each.spec.get("volumes", ()):
            assert volume.keys() - {"name"} <= SAFE_VOLUMES


def test_containers_have_no_privilege_and_a_read_only_root(pods: list[Workload]) -> None:
    for container in (c for each in pods for c in each.containers):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any("hostPort" in port for port in container.get("ports", ()))


def test_only_the_operator_gets_a_token_of_the_cluster(pods: list[Workload]) -> None:
    tokens = {each.name: each.spec["automountServiceAccountToken"] for each in pods}

    assert {name for name, mounted in tokens.items() if mounted} == {"headrace-operator"}


def test_claims_can_be_written_by_the_pod_s_user(pods: list[Workload]) -> None:
    assert {each.spec["securityContext"]["fsGroup"] for each in pods} == {10001}


def test_containers_ask_for_memory_and_limit_it(pods: list[Workload]) -> None:
    for container in (c for each in pods for c in each.containers):
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]


def test_images_are_pinned(pods: list[Workload]) -> None:
    for container in (c for each in pods for c in each.containers):
        assert container["image"].rpartition(":")[2] not in ("", "latest")


def test_mounts_have_their_volumes(pods: list[Workload]) -> None:
    for each in pods:
        claims = each.manifest.get("spec", {}).get("volumeClaimTemplates", ())
        volumes = {volume["name"] for volume in each.spec.get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in claims}
        mounted = {m["name"] for c in each.containers for m in c.get("volumeMounts", ())}
        assert mounted == volumes


def test_probes_use_ports_of_their_container(pods: list[Workload]) -> None:
    for container in (c for each in pods for c in each.containers):
        ports = {port["name"] for port in container.get("ports", ())}
        probes = [container[name] for name in container if name.endswith("Probe")]
        probed = {
            (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port") for probe in probes
        }
        assert probed - {None} <= ports


@pytest.mark.parametrize("component", PROCESSES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_settings_of_a_process_exist_and_are_accepted(
    name: str, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, settings = PROCESSES[component]
    environment = workload(render(scenario(name)), f"headrace-{component}").environment
    own = {key: variable for key, variable in environment.items() if key.startswith(prefix)}

    assert {key.removeprefix(prefix).lower() for key in own} <= set(settings.model_fields)
    for key, variable in own.items():
        monkeypatch.setenv(key, variable.get("value", "redis://:a-secret-password@redis:6379/0"))
    settings()


@pytest.mark.parametrize("component", PROCESSES)
def test_telemetry_settings_are_accepted(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = workload(render(scenario("full-values")), f"headrace-{component}").environment
    for key, variable in environment.items():
        if key.startswith("OTEL_"):
            assert key.removeprefix("OTEL_").lower() in TelemetrySettings.model_fields
            monkeypatch.setenv(key, variable["value"])

    telemetry = TelemetrySettings()

    assert telemetry.traces == {"otlp"}
    assert telemetry.metrics == frozenset()


def test_the_operator_passes_the_releases_settings_to_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = scenario("external-redis-values")
    for key, variable in workload(render(values), "headrace-operator").environment.items():
        monkeypatch.setenv(key, variable.get("value", "rediss://redis:6380/0"))

    platform = OperatorSettings().platform

    assert platform.engine_image == "registry.example.com/headrace-engine:0.1.0"
    assert platform.queue_secret == ("queue", "redis-url")
    assert platform.queue_ca_secret == "queue-ca"
    assert platform.queue_ports == (values["redis"]["external"]["port"],)


def test_gateways_and_engines_seal_with_the_same_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render({"redis": {"sealing": {"existingSecret": "keys", "mode": "accept"}}})
    gateway = workload(objects, "headrace-gateway")
    for key, variable in workload(objects, "headrace-operator").environment.items():
        monkeypatch.setenv(key, variable.get("value", "redis://:a-secret-password@redis:6379/0"))

    platform = OperatorSettings().platform

    assert (platform.sealing_secret, platform.sealing_mode) == ("keys", "accept")
    assert gateway.environment["HEADRACE_GATEWAY_SEALING_MODE"]["value"] == "accept"
    path = gateway.environment["HEADRACE_GATEWAY_SEALING_KEYS_FILE"]["value"]
    (mount,) = [one for one in gateway.containers[0]["volumeMounts"] if one["name"] == "sealing"]
    assert path == f"{mount['mountPath']}/keyring"
    assert {"name": "sealing", "secret": {"secretName": "keys"}} in gateway.spec["volumes"]


def test_the_operator_finds_the_gateways_of_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render()
    for key, variable in workload(objects, "headrace-operator").environment.items():
        monkeypatch.setenv(key, variable.get("value", "redis://:a-secret-password@redis:6379/0"))

    labels = OperatorSettings().gateway_labels

    found = [each.name for each in workloads(objects) if labels.items() <= each.labels.items()]
    assert found == ["headrace-gateway"]


def test_a_gateway_has_time_to_leave_the_service_and_finish_its_streams() -> None:
    values = {"gateway": {"settings": {"drain_timeout": 90}, "preStopSleepSeconds": 7}}
    gateway = workload(render(values), "headrace-gateway")
    sleep = gateway.containers[0]["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert gateway.environment["HEADRACE_GATEWAY_DRAIN_TIMEOUT"]["value"] == "90"
    assert gateway.spec["terminationGracePeriodSeconds"] > sleep + 90


def test_a_gateway_without_engines_is_ready() -> None:
    """Otherwise a model with no engines could never be requested, and would stay at zero."""
    container = workload(render(), "headrace-gateway").containers[0]

    assert container["readinessProbe"]["httpGet"] == {"path": "/health/live", "port": "http"}


def test_a_full_gateway_is_not_killed() -> None:
    """The probe uses the metrics port, which clients' connections cannot fill."""
    container = workload(render(), "headrace-gateway").containers[0]

    assert container["livenessProbe"]["httpGet"]["port"] == "metrics"


def test_a_rollout_keeps_all_gateways_until_new_ones_are_ready() -> None:
    strategy = workload(render(), "headrace-gateway").manifest["spec"]["strategy"]

    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_an_autoscaled_gateway_sets_no_replicas() -> None:
    values = {"gateway": {"autoscaling": {"enabled": True}}}

    assert "replicas" not in workload(render(values), "headrace-gateway").manifest["spec"]


def test_gateways_have_no_configured_model_by_default() -> None:
    """Engines register theirs."""
    variables = workload(render(), "headrace-gateway").environment

    assert not [name for name in variables if "MODEL" in name]


@pytest.mark.parametrize("component", PROCESSES)
def test_images_of_the_project_are_targets_of_the_dockerfile(component: str) -> None:
    values: dict[str, Any] = {"image": {"repository": "r.example.com/h", "tag": "1.2.3"}}
    image = workload(render(values), f"headrace-{component}").containers[0]["image"]

    assert image == f"r.example.com/h-{component}:1.2.3"
    assert f"FROM base AS {component}\n" in (ROOT / "Dockerfile").read_text()


def test_secrets_are_referred_to_and_never_in_a_variable() -> None:
    objects = render()
    password = plain_secrets(objects)["headrace-redis"]["password"]
    others = [m for m in objects if m["kind"] != "Secret"]

    assert len(password) >= 32
    assert password not in str(others)
    for role in ("gateway", "operator"):
        variable = workload(objects, f"headrace-{role}").environment[
            f"HEADRACE_{role.upper()}_REDIS_URL"
        ]
        reference = {"name": "headrace-redis", "key": f"{role}-url"}
        assert variable["valueFrom"] == {"secretKeyRef": reference}


@pytest.mark.parametrize("name", SCENARIOS)
def test_secrets_that_pods_read_are_made_or_named_in_the_values(name: str) -> None:
    values = scenario(name)
    objects = render(values)
    made = {secret: set(data) for secret, data in plain_secrets(objects).items()}
    for each in workloads(objects):
        for variable in each.environment.values():
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference and reference["name"] in made:
                assert reference["key"] in made[reference["name"]]
            elif reference:
                assert reference["name"] in str(values)
