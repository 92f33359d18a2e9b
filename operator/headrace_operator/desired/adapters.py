"""Where an engine finds its LoRA adapters: settings, volumes and mounts."""

from dataclasses import dataclass, field
from typing import Any

from ..spec.lora_section import AdapterSpec, LoRASpec
from .source import claim_volume, image_volume

Manifest = dict[str, Any]

ADAPTERS_DIR = "/adapters"


@dataclass(frozen=True, slots=True)
class AdapterVolumes:
    """The engine's settings, volumes and mounts for its adapters; empty without adapters."""

    settings: dict[str, object] = field(default_factory=dict)
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()


def adapters(lora: LoRASpec | None) -> AdapterVolumes:
    """The volumes for the adapters of a spec's section."""
    if lora is None:
        return AdapterVolumes()
    folders: dict[str, str] = {}
    volumes: list[Manifest] = []
    mounts: list[Manifest] = []
    for index, adapter in enumerate(lora.adapters):
        folder, volume = _place(adapter, f"adapter-{index}", f"{ADAPTERS_DIR}/{index}")
        folders[adapter.name] = folder
        if volume is not None:
            volumes.append(volume)
            mount = f"{ADAPTERS_DIR}/{index}"
            mounts.append({"name": volume["name"], "mountPath": mount, "readOnly": True})
    settings: dict[str, object] = {
        "enable_lora": True,
        "lora_modules": folders,
        "max_loras": lora.max_loras,
        "max_lora_rank": lora.max_lora_rank,
    }
    if lora.max_cpu_loras is not None:
        settings["max_cpu_loras"] = lora.max_cpu_loras
    return AdapterVolumes(settings, tuple(volumes), tuple(mounts))


def _place(adapter: AdapterSpec, name: str, mount: str) -> tuple[str, Manifest | None]:
    """An adapter's folder in the pod, and the volume that is mounted for it."""
    claim, image = adapter.persistent_volume_claim, adapter.image
    if claim is not None:
        return _inside(mount, claim.path), {"name": name, **claim_volume(claim)}
    if image is not None:
        return _inside(mount, image.path), {"name": name, **image_volume(image)}
    assert adapter.path is not None, "an adapter has exactly one source"
    return adapter.path, None


def _inside(mount: str, path: str) -> str:
    return f"{mount}/{path}" if path else mount
