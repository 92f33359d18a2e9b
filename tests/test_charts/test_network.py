"""NetworkPolicies: together they allow exactly the needed connections.

The policies are evaluated here as Kubernetes defines them, for pods of the release, engine pods as
the operator labels them, and strangers. Addresses outside the cluster are tested one by one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from headrace_operator import names
from headrace_testing.charts import (
    NAMESPACE,
    SCENARIOS,
    Manifest,
    of_kind,
    render,
    scenario,
    selects,
    workloads,
)


@dataclass(frozen=True, slots=True)
class Place:
    """A pod or, if it has only an address, a machine outside the cluster."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    address: str | None = None


ENGINE = Place("engine", names.labels("demo"))
FAR_ENGINE = Place("far engine", names.labels("demo"), namespace="team")
PROMETHEUS = Place("prometheus", {"app": "prometheus"}, namespace="monitoring")
STRANGER = Place("stranger", {"app": "stranger"}, namespace="default")
DNS = Place("dns", {"k8s-app": "kube-dns"}, namespace="kube-system")
HUB = Place("hub", address="18.172.134.88")
METADATA = Place("cloud metadata", address="169.254.169.254")
API = Place("kubernetes api", address="10.96.0.1")
OTHERS = (ENGINE, FAR_ENGINE, PROMETHEUS, STRANGER, DNS, HUB, METADATA, API)
PORTS = (53, 443, 4318, 6379, 6380, 6443, 8000, 9400, 26379)


def own_places(objects: list[Manifest]) -> list[Place]:
    return [Place(each.name.removeprefix("headrace-"), each.labels) for each in workloads(objects)]


def allowed(policies: list[Manifest], source: Place, target: Place, port: int) -> bool:
    leaves = _passes(policies, source, "Egress", target, port)
    return leaves and _passes(policies, target, "Ingress", source, port)


def _passes(
    policies: list[Manifest], subject: Place, direction: str, peer: Place, port: int
) -> bool:
    if subject.address is not None:
        return True
    mine = [p for p in policies if _applies(p, subject, direction)]
    return not mine or any(
        _rule(r, peer, port, direction) for p in mine for r in _rules(p, direction)
    )


def _applies(policy: Manifest, subject: Place, direction: str) -> bool:
    spec = policy["spec"]
    near = policy["metadata"]["namespace"] == subject.namespace
    return (
        near
        and direction in spec["policyTypes"]
        and selects(spec["podSelector"].get("matchLabels", {}), subject.labels)
    )


def _rules(policy: Manifest, direction: str) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = policy["spec"].get(direction.lower()) or []
    return rules


def _rule(rule: dict[str, Any], peer: Place, port: int, direction: str) -> bool:
    ports = rule.get("ports")
    if ports and port not in {p["port"] for p in ports}:
        return False
    peers = rule.get("from" if direction == "Ingress" else "to")
    return not peers or any(_peer(each, peer) for each in peers)


def _peer(wanted: dict[str, Any], peer: Place) -> bool:
    if block := wanted.get("ipBlock"):
        return peer.address is not None and _within(block, peer.address)
    if peer.address is not None:
        return False
    namespaces = wanted.get("namespaceSelector")
    if namespaces is None:
        near = peer.namespace == NAMESPACE
    else:
        labels = {"kubernetes.io/metadata.name": peer.namespace}
        near = selects(namespaces.get("matchLabels", {}), labels)
    return near and selects(wanted.get("podSelector", {}).get("matchLabels", {}), peer.labels)


def _within(block: dict[str, Any], address: str) -> bool:
    inside = ip_address(address) in ip_network(block["cidr"])
    return inside and not any(ip_address(address) in ip_network(n) for n in block.get("except", ()))


def connections(
    objects: list[Manifest], ports: tuple[int, ...] = PORTS
) -> set[tuple[str, str, int]]:
    """All (from, to, port) that the policies allow and that have a pod of the release at one
    end."""
    policies, own = of_kind(objects, "NetworkPolicy"), own_places(objects)
    return {
        (source.name, target.name, port)
        for source, target in _pairs(own)
        for port in ports
        if allowed(policies, source, target, port)
    }


def _pairs(own: list[Place]) -> Iterator[tuple[Place, Place]]:
    for one in own:
        yield from ((one, other) for other in [*own, *OTHERS] if other != one)
        yield from ((other, one) for other in OTHERS)


def test_by_default_exactly_the_needed_connections_pass() -> None:
    callers = ("test-api", "operator", "engine", "far engine", "prometheus", "stranger", "dns")
    api = {(caller, "gateway", 8000) for caller in (*callers, "hub", "cloud metadata")}
    api.add(("kubernetes api", "gateway", 8000))
    # The operator may call any API server on these ports, because it does not know the server's
    # address.
    anywhere = {("operator", place.name, port) for place in OTHERS for port in (443, 6443)}
    api.discard(("operator", "gateway", 8000))

    assert connections(render()) == api | anywhere | {
        ("gateway", "dns", 53),
        ("gateway", "redis", 6379),
        ("operator", "dns", 53),
        ("operator", "redis", 6379),
        ("operator", "gateway", 9400),
        ("operator", "engine", 9400),
        ("engine", "redis", 6379),
        ("engine", "gateway", 9400),
        ("engine", "operator", 9400),
        ("prometheus", "gateway", 9400),
        ("prometheus", "operator", 9400),
        ("test-api", "dns", 53),
        ("test-api", "gateway", 8000),
        ("test-api", "operator", 9400),
    } | {
        # Name servers may be any pod of the cluster.
        (own, place, 53)
        for own in ("gateway", "operator", "test-api")
        for place in ("engine", "far engine", "prometheus", "stranger")
    }


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_pod_reads_cloud_credentials(name: str) -> None:
    """Metadata services speak HTTP; gateways, which download from anywhere, get none of their
    ports."""
    reached = connections(render(scenario(name)), (80, 443))
    pods = {source for source, target, port in reached if target == METADATA.name and port == 80}

    assert pods == set()
    assert ("gateway", METADATA.name, 443) not in reached


@pytest.mark.parametrize(
    ("settings", "fetches"),
    [
        ({"model": "Qwen/Qwen3-8B"}, True),
        ({"extra_models": {"qwen": "Qwen/Qwen3-8B"}}, True),
        ({"model": "/models/qwen"}, False),
        ({"model": "headrace-demo"}, False),
    ],
)
def test_gateways_reach_the_hub_that_their_settings_name(
    settings: dict[str, Any], fetches: bool
) -> None:
    passing = connections(render({"gateway": {"settings": settings}}))

    assert (("gateway", "hub", 443) in passing) == fetches


def test_redis_opens_no_connections() -> None:
    assert not {c for c in connections(render()) if c[0] == "redis"}


def test_servers_with_sentinels_reach_each_other_and_dns() -> None:
    objects = render(scenario("bundled-sentinel-values"))
    passing = connections(objects)
    policies = of_kind(objects, "NetworkPolicy")
    (redis,) = (place for place in own_places(objects) if place.name == "redis")
    reached = [port for port in PORTS if allowed(policies, redis, redis, port)]

    assert reached == [6379, 26379]
    assert {c for c in passing if c[0] == "redis" and c[2] != 53} == set()
    assert {c[0] for c in passing if c[1:] == ("redis", 26379)} == {"gateway", "operator", "engine"}


def test_redis_answers_no_other_pods() -> None:
    callers = {c[0] for c in connections(render()) if c[1] == "redis"}

    assert callers == {"gateway", "operator", "engine"}


def test_engines_of_every_namespace_reach_redis_where_the_operator_watches_all() -> None:
    passing = connections(render(scenario("full-values")))

    assert ("far engine", "redis", 6379) in passing
    assert ("operator", "far engine", 9400) in passing
    assert ("far engine", "otel-collector", 4318) in passing


def test_the_api_can_be_limited_to_the_ingress_and_the_test_pod() -> None:
    ingress = Place("ingress", {}, namespace="ingress-nginx")
    objects = render(scenario("full-values"))
    policies = of_kind(objects, "NetworkPolicy")
    (gateway,) = (place for place in own_places(objects) if place.name == "gateway")

    assert allowed(policies, ingress, gateway, 8000)
    assert {c[0] for c in connections(objects) if c[1:] == ("gateway", 8000)} == {"test-api"}


def test_an_external_redis_is_reached_at_its_addresses_and_nowhere_else() -> None:
    objects = render(scenario("external-redis-values"))
    policies = of_kind(objects, "NetworkPolicy")
    (gateway,) = (place for place in own_places(objects) if place.name == "gateway")

    assert allowed(policies, gateway, Place("redis", address="10.20.1.2"), 6380)
    assert not allowed(policies, gateway, Place("redis", address="10.20.1.2"), 6379)
    assert not allowed(policies, gateway, Place("other", address="10.30.1.2"), 6380)


def test_the_kubernetes_api_can_be_named() -> None:
    passing = connections(render(scenario("full-values")))

    assert ("operator", "kubernetes api", 443) in passing
    assert ("operator", "hub", 443) not in passing
    assert ("operator", "cloud metadata", 443) not in passing


def test_the_operator_reaches_the_ports_of_allowed_prometheus_servers() -> None:
    objects = render(scenario("full-values"))
    policies = of_kind(objects, "NetworkPolicy")
    (operator,) = (place for place in own_places(objects) if place.name == "operator")
    reached = [port for port in range(8_000, 11_000) if allowed(policies, operator, HUB, port)]

    assert reached == [9090, 9091, 10902]
    assert not allowed(policies, operator, METADATA, 9091)


def test_without_policies_no_network_policy_is_rendered() -> None:
    assert of_kind(render({"networkPolicy": {"enabled": False}}), "NetworkPolicy") == []


@pytest.mark.parametrize("labels", [ENGINE.labels, FAR_ENGINE.labels])
def test_engine_pods_are_not_pods_of_the_release(labels: Mapping[str, str]) -> None:
    """The operator makes the engines' policy, so the chart's default deny must not cover them."""
    for policy in of_kind(render(), "NetworkPolicy"):
        assert not selects(policy["spec"]["podSelector"]["matchLabels"], labels)
