"""All objects that one ModelService owns, and those that it no longer needs."""

from dataclasses import dataclass
from typing import Any

from .. import names
from ..spec.model_service import ModelService
from . import companions
from .autoscaler import autoscaler
from .defaults import Platform
from .deployment import deployment
from .network import network_policy

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """An object that must not exist. `optional`: its kind may be unknown to the cluster."""

    api_version: str
    kind: str
    name: str
    optional: bool = False


def companions_of(service: ModelService, platform: Platform) -> list[Manifest]:
    """All objects that the service owns except workloads, in the order in which they are
    needed."""
    found = [
        companions.service_account(service),
        companions.cache_claim(service),
        network_policy(service, platform),
        companions.service(service),
        companions.disruption_budget(service),
        companions.service_monitor(service),
        autoscaler(service),
    ]
    return [manifest for manifest in found if manifest is not None]


def canary_of(
    service: ModelService, platform: Platform, *, stopped: bool = False
) -> Manifest | None:
    """The canary's Deployment, if there is a canary; without engines if it is `stopped`."""
    canary = service.spec.canary
    if canary is None:
        return None
    return deployment(
        service, platform, replicas=0 if stopped else canary.replicas, track=names.CANARY
    )


def unwanted(service: ModelService) -> list[Unwanted]:
    """Children of features that are off now. The cache's claim stays: it holds data."""
    spec = service.spec
    name = service.name
    candidates = {
        Unwanted(
            api_version="apps/v1",
            kind="Deployment",
            name=names.deployment(name, names.CANARY),
        ): spec.canary is not None,
        Unwanted(
            api_version="networking.k8s.io/v1",
            kind="NetworkPolicy",
            name=names.network_policy(name),
        ): spec.network_policy.enabled,
        Unwanted(
            api_version="monitoring.coreos.com/v1",
            kind="ServiceMonitor",
            name=names.service_monitor(name),
            optional=True,
        ): spec.monitoring.service_monitor,
        Unwanted(
            api_version="autoscaling/v2",
            kind="HorizontalPodAutoscaler",
            name=names.autoscaler(name),
        ): spec.scaling.mode == "hpa",
        Unwanted(
            api_version="keda.sh/v1alpha1",
            kind="ScaledObject",
            name=names.autoscaler(name),
            optional=True,
        ): spec.scaling.mode == "keda",
    }
    return [child for child, wanted in candidates.items() if not wanted]
