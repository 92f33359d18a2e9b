"""The Deployments of a ModelService: its engines, and those of a canary.

`replicas` is always given by the caller: the operator owns the Deployment's count in every mode.
"""

from typing import Any

from .. import names
from ..spec.model_service import ModelService
from .defaults import Platform
from .metadata import metadata
from .pod import pod_template

Manifest = dict[str, Any]


def deployment(
    service: ModelService, platform: Platform, *, replicas: int, track: str = names.STABLE
) -> Manifest:
    """A Deployment; in a rollout an old engine ends only when a new one is ready."""
    engine = service.spec.engine
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, names.deployment(service.name, track)),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 5,
            # Loading a model must not count as a lack of progress.
            "progressDeadlineSeconds": engine.startup_timeout_seconds + 600,
            "selector": {"matchLabels": names.track_selector(service.name, track)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {
                    "maxSurge": engine.rollout.max_surge,
                    "maxUnavailable": engine.rollout.max_unavailable,
                },
            },
            "template": pod_template(service, platform, track),
        },
    }
