"""The NetworkPolicy of engines: who may scrape them; they reach DNS, the queue, their model and
the other nodes of their engine."""

from typing import Any

from .. import names
from ..spec.model_service import ModelService
from .defaults import Platform
from .metadata import metadata

Manifest = dict[str, Any]

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
# Cloud metadata services: an engine that loads foreign weights must not get the node's identity.
_LINK_LOCAL = ["169.254.0.0/16"]
_ANYWHERE = [
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": _LINK_LOCAL}},
    {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10", "fd00:ec2::254/128"]}},
]


def network_policy(service: ModelService, platform: Platform) -> Manifest | None:
    """The policy; None if the spec disables it."""
    wanted = service.spec.network_policy
    if not wanted.enabled:
        return None
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(service, names.network_policy(service.name)),
        "spec": {
            "podSelector": {"matchLabels": names.selector(service.name)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [_scrapers(platform), *_fellows(service, "from")],
            "egress": [
                *_egress(service, platform),
                *_fellows(service, "to"),
                *wanted.extra_egress,
            ],
        },
    }


def _scrapers(platform: Platform) -> Manifest:
    peers: list[Manifest] = [{"podSelector": {}}]
    for namespace in platform.metrics_namespaces:
        peers.append({"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: namespace}}})
    return {"from": peers, "ports": [{"protocol": "TCP", "port": names.METRICS_PORT}]}


def _fellows(service: ModelService, direction: str) -> list[Manifest]:
    """The rule for engines that span several pods. It has all ports, since gloo and NCCL choose
    theirs."""
    if service.spec.engine.nodes == 1:
        return []
    return [{direction: [{"podSelector": {"matchLabels": names.selector(service.name)}}]}]


def _egress(service: ModelService, platform: Platform) -> list[Manifest]:
    rules: list[Manifest] = [
        {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]},
        {"ports": [{"protocol": "TCP", "port": port} for port in platform.queue_ports]},
    ]
    if platform.otlp_endpoint is not None:
        rules.append({"ports": [{"protocol": "TCP", "port": _port_of(platform.otlp_endpoint)}]})
    if ports := _download_ports(service):
        rules.append({"to": _ANYWHERE, "ports": [{"protocol": "TCP", "port": p} for p in ports]})
    return rules


def _download_ports(service: ModelService) -> list[int]:
    """Ports of the model's source and of the adapters': HTTPS, or the one in the endpoint."""
    spec = service.spec
    storage = None if spec.lora is None else spec.lora.object_storage
    remotes = [each for each in (spec.model.hub or spec.model.uri, storage) if each is not None]
    ports = (443 if each.endpoint is None else _port_of(each.endpoint) for each in remotes)
    return sorted(set(ports))


def _port_of(url: str) -> int:
    """The port of an HTTP address, given or by its scheme."""
    return port_of(url, 443 if url.startswith("https:") else 80)


def port_of(url: str, default: int) -> int:
    """The port in a URL. An invalid one counts as none, since connecting reports it."""
    port = url.partition("://")[2].partition("/")[0].rpartition("@")[2].rpartition(":")[2]
    return int(port) if port.isdigit() else default
