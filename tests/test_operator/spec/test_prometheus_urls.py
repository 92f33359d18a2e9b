"""The Prometheus servers that a ModelService may name."""

import pytest
from pydantic import ValidationError

from headrace_operator.errors import InvalidSpec
from headrace_operator.settings import OperatorSettings
from headrace_operator.spec.prometheus_urls import PrometheusUrls, shown
from headrace_testing.kubernetes import User
from headrace_testing.model_services import body, service
from headrace_testing.operators import Scene, operator
from headrace_testing.waiting import eventually

LISTED = PrometheusUrls(
    own="http://own:9090", allowed=("http://prom:9090", "https://shared/team-a/")
)


def check(urls: PrometheusUrls, url: str) -> None:
    urls.check(service(scaling={"prometheusUrl": url}))


@pytest.mark.parametrize(
    "url",
    [
        "http://prom:9090",
        "http://prom:9090/",
        "http://PROM:9090/select/0/prometheus",
        "http://user:password@prom:9090",
        "https://shared:443/team-a",
        "https://shared/team-a/sub",
        "http://own:9090",
    ],
)
def test_listed_urls_and_paths_below_them_are_allowed(url: str) -> None:
    check(LISTED, url)


@pytest.mark.parametrize(
    "url",
    [
        "https://prom:9090",
        "http://prom",
        "http://prom:9091",
        "http://prom.evil:9090",
        "http://prom:9090@evil:9090",
        "https://shared/team-b",
        "https://shared/team-alpha",
        "https://shared/team-a/../team-b",
        "https://shared/team-a/%2e%2e/team-b",
        "https://shared",
    ],
)
def test_unlisted_urls_are_refused_with_field_and_remedy(url: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        check(LISTED, url)
    assert refusal.value.field == "spec.scaling.prometheusUrl"
    assert "prometheus_allowed_urls; name one of them" in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://prom:9090/?x=",
        "http://prom:9090/admin?",
        "http://prom:9090/#",
        "http://:9090",
        "http://prom:port",
        "http:///path",
    ],
)
def test_a_url_that_leads_a_query_elsewhere_is_refused(url: str) -> None:
    for urls in (LISTED, PrometheusUrls()):
        with pytest.raises(InvalidSpec, match=r"^spec\.scaling\.prometheusUrl: "):
            check(urls, url)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254",
        "http://169.254.170.2:80/x",
        "http://127.0.0.1:9400",
        "http://[::1]:9400",
        "http://[::ffff:169.254.169.254]",
        "http://[64:ff9b::a9fe:a9fe]",
        "http://[fe80::1]",
        "http://[fd00:ec2::254]",
        "http://100.100.100.200",
        "http://0.0.0.0:9400",
    ],
)
def test_without_a_list_the_node_and_metadata_services_are_refused(url: str) -> None:
    with pytest.raises(InvalidSpec, match="the node or of a metadata service; name the Service"):
        check(PrometheusUrls(), url)
    check(PrometheusUrls(allowed=(url,)), url)


@pytest.mark.parametrize(
    "url", ["http://prometheus.monitoring:9090", "http://10.0.0.7:9090/prom", "http://[fd12::7]"]
)
def test_without_a_list_everything_else_is_allowed(url: str) -> None:
    check(PrometheusUrls(), url)


def test_only_the_address_is_shown() -> None:
    assert shown("https://user:password@prom:9090/secret/path") == "https://prom:9090"


def test_settings_name_urls_that_could_be_asked() -> None:
    given = {"engine_image": "e", "prometheus_allowed_urls": ("http://prom:9090",)}
    assert OperatorSettings.model_validate(given).prometheus_urls.allowed == ("http://prom:9090",)
    for wrong in ("prom:9090", "ftp://prom", "http://prom?x=1"):
        with pytest.raises(ValidationError, match="prometheus_allowed_urls"):
            OperatorSettings.model_validate({**given, "prometheus_allowed_urls": (wrong,)})


async def test_a_refused_url_becomes_a_condition(user: User, scene: Scene) -> None:
    scene.prometheus_urls = LISTED

    async def degraded() -> bool:
        return user.server.conditions("qwen").get("Degraded") == ("True", "InvalidSpec")

    async with operator(user, scene):
        await user.create(body(scaling={"prometheusUrl": "http://elsewhere:9090"}))
        await eventually(degraded)
    assert user.server.find("deployments", "qwen-engine") is None
