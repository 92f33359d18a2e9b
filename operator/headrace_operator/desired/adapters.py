"""Where engines find LoRA adapters: settings, environment, volumes and mounts.

The adapters themselves are in the queue's set, from which engines load them while they serve. So
only a new volume changes the pods. Engines with a queue of their own, which the operator cannot
reach, get their adapters as settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ..spec.lora_section import AdapterSpec, ObjectStorageSpec
from ..spec.model_service import ModelServiceSpec
from .source import claim_volume, image_volume

Manifest = dict[str, Any]

ADAPTERS_DIR = "/adapters"


@dataclass(frozen=True, slots=True)
class AdapterVolumes:
    """The engine's settings, environment, volumes and mounts for its adapters; empty without
    adapters."""

    settings: dict[str, object] = field(default_factory=dict)
    env: tuple[Manifest, ...] = ()
    env_from: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()


def adapters(spec: ModelServiceSpec) -> AdapterVolumes:
    """The settings and volumes for the adapters of a spec."""
    lora = spec.lora
    if lora is None:
        return AdapterVolumes()
    settings: dict[str, object] = {
        "enable_lora": True,
        "max_loras": lora.max_loras,
        "max_lora_rank": lora.max_lora_rank,
    }
    if in_queue(spec):
        settings["lora_dir"] = "/"
        if lora.object_storage is not None:
            settings["lora_object_storage"] = True
    else:
        settings["lora_modules"] = dict(folders(spec))
    if lora.experts:
        settings["lora_experts"] = True
    if lora.max_cpu_loras is not None:
        settings["max_cpu_loras"] = lora.max_cpu_loras
    volumes = {name: volume for each in lora.adapters for name, volume in _volumes(each).items()}
    mounts = (
        {"name": name, "mountPath": f"{ADAPTERS_DIR}/{name}", "readOnly": True}
        for name in sorted(volumes)
    )
    return AdapterVolumes(
        settings,
        *_storage(lora.object_storage),
        volumes=tuple(volumes[name] for name in sorted(volumes)),
        mounts=tuple(mounts),
    )


def _storage(
    storage: ObjectStorageSpec | None,
) -> tuple[tuple[Manifest, ...], tuple[Manifest, ...]]:
    """The environment in which engines find the store: single variables, and a Secret's."""
    if storage is None:
        return (), ()
    values = {"AWS_ENDPOINT_URL": storage.endpoint, "AWS_REGION": storage.region}
    secret = storage.credentials_secret
    return (
        tuple({"name": name, "value": value} for name, value in values.items() if value),
        () if secret is None else ({"secretRef": {"name": secret}},),
    )


def in_queue(spec: ModelServiceSpec) -> bool:
    """Whether engines get their adapters through the queue."""
    return spec.queue.url_secret is None


def folders(spec: ModelServiceSpec) -> Mapping[str, str]:
    """The folders of adapters in the pods, or their s3:// addresses, by name."""
    return {} if spec.lora is None else {each.name: _folder(each) for each in spec.lora.adapters}


def _folder(adapter: AdapterSpec) -> str:
    source = adapter.persistent_volume_claim or adapter.image
    if source is None:
        place = adapter.path or adapter.uri
        assert place is not None, "an adapter has exactly one source"
        return place
    (name,) = _volumes(adapter)
    return f"{ADAPTERS_DIR}/{name}/{source.path}" if source.path else f"{ADAPTERS_DIR}/{name}"


def _volumes(adapter: AdapterSpec) -> dict[str, Manifest]:
    """An adapter's volume by its name, which depends on what it is, so that adapters share it."""
    claim, image = adapter.persistent_volume_claim, adapter.image
    if claim is not None:
        name = _name(f"claim:{claim.claim_name}")
        return {name: {"name": name, **claim_volume(claim)}}
    if image is not None:
        name = _name(f"image:{image.reference}:{image.pull_policy}")
        return {name: {"name": name, **image_volume(image)}}
    return {}


def _name(source: str) -> str:
    return f"adapters-{sha256(source.encode()).hexdigest()[:10]}"
