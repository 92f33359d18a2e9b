"""Settings of the process, and the scaling policy that a spec is turned into."""

import pytest
from pydantic import ValidationError

from headrace_common.config.process import EXIT_CONFIG
from headrace_operator.__main__ import main
from headrace_operator.scaling.policy import DEFAULT_DOWN, DEFAULT_UP, StepKind, StepLimit
from headrace_operator.settings import OperatorSettings
from headrace_operator.spec.scaling_policy import scaling_policy
from headrace_testing.model_services import service


def settings(**values: object) -> OperatorSettings:
    return OperatorSettings.model_validate({"engine_image": "engine:1", **values})


def test_the_platform_follows_the_settings() -> None:
    found = settings(
        redis_url="redis://r:7000/1", engine_redis_secret="s", metrics_namespaces=("mon",)
    ).platform
    assert (found.queue_ports, found.queue_secret) == ((7000,), ("s", "url"))
    assert found.metrics_namespaces == ("mon",)


def test_an_operator_of_all_namespaces_may_scrape_from_its_own_namespace() -> None:
    found = settings(namespace="headrace", watch_all_namespaces=True).platform
    assert found.metrics_namespaces == ("headrace",)


def test_gateway_labels_are_read_as_kubectl_writes_them() -> None:
    assert settings(gateway_selector="a=b, c=d").gateway_labels == {"a": "b", "c": "d"}
    with pytest.raises(ValidationError, match="label=value"):
        settings(gateway_selector="a")


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_OPERATOR_ENGINE_IMAGE", "e:2")
    monkeypatch.setenv("HEADRACE_OPERATOR_METRICS_NAMESPACES", '["a","b"]')
    found = OperatorSettings()
    assert (found.engine_image, found.metrics_namespaces) == ("e:2", ("a", "b"))


def test_a_wrong_setting_stops_the_start_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_OPERATOR_ENGINE_IMAGE", raising=False)
    assert main(["--resync-interval", "0"]) == EXIT_CONFIG
    output = capsys.readouterr().err
    assert "engine_image" in output
    assert "resync_interval" in output


def test_the_policy_has_the_specs_values() -> None:
    scaling = {
        "minReplicas": 0,
        "maxReplicas": 7,
        "idleSeconds": 60,
        "targets": {"drainSeconds": 5, "oldestAgeSeconds": 2},
        "forecast": {"enabled": True, "days": 3},
        "behavior": {
            "scaleDown": {
                "stabilizationWindowSeconds": 30,
                "policies": [{"type": "Percent", "value": 10, "periodSeconds": 15}],
            },
            "scaleUp": {"selectPolicy": "Disabled"},
        },
    }
    found = scaling_policy(service(scaling=scaling).spec.scaling)
    assert (found.min_replicas, found.max_replicas, found.idle_time) == (0, 7, 60)
    assert (found.drain_time, found.max_age) == (5, 2)
    assert found.forecast is not None
    assert found.forecast.days == 3
    assert found.scale_down.stabilization_window == 30
    assert found.scale_down.policies == (StepLimit(StepKind.PERCENT, 10, 15),)
    assert found.scale_up.select_policy == "Disabled"
    assert found.scale_up.policies == DEFAULT_UP.policies


def test_an_empty_section_is_the_default_policy_of_one_engine() -> None:
    found = scaling_policy(service().spec.scaling)
    assert (found.min_replicas, found.max_replicas) == (1, 1)
    assert (found.scale_up, found.scale_down, found.forecast) == (DEFAULT_UP, DEFAULT_DOWN, None)
