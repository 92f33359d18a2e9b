"""Builders of ModelServices for tests."""

from typing import Any

from headrace_operator import names
from headrace_operator.desired.defaults import Platform
from headrace_operator.spec.model_service import ModelService

from .kubernetes import NAMESPACE

Manifest = dict[str, Any]
HUB = {"hub": {"id": "Qwen/Qwen3-8B", "revision": "abc123"}}
PLATFORM = Platform(
    engine_image="headrace-engine:1.0", queue_url="redis://queue:6379/0", queue_ports=(6379,)
)


def body(name: str = "qwen", **spec: Any) -> Manifest:
    """A ModelService's object with a hub model, and further fields of its spec."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": "uid-1", "generation": 1},
        "spec": {"model": HUB, **spec},
    }


def service(name: str = "qwen", **spec: Any) -> ModelService:
    return ModelService.parse(body(name, **spec))
