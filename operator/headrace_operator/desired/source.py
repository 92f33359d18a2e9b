"""Where an engine finds its checkpoint: environment, volumes and the container that fetches it."""

from dataclasses import dataclass
from typing import Any

from ..spec.sections import ClaimModel, HubModel, ImageModel, ModelSpec, UriModel
from .security import CONTAINER_SECURITY

Manifest = dict[str, Any]

MODEL_DIR = "/model"
_VOLUME = "model"
_COPIER_BACKENDS = {"s3": "s3", "gs": "gcs"}


@dataclass(frozen=True, slots=True)
class Source:
    """A source. `model` and `revision` are the engine's settings of these names."""

    model: str
    revision: str | None = None
    env: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    init_containers: tuple[Manifest, ...] = ()


def source(model: ModelSpec, *, downloader_image: str, revision: str | None = None) -> Source:
    """The one source that the spec names; `revision` replaces a hub id's."""
    if model.hub is not None:
        return _hub(model.hub, revision)
    if model.persistent_volume_claim is not None:
        return _claim(model.persistent_volume_claim)
    if model.image is not None:
        return _image(model.image)
    if model.uri is not None:
        return _uri(model.uri, downloader_image)
    assert model.local is not None, "the spec has exactly one source"
    return Source(model=model.local.path)


def _hub(hub: HubModel, revision: str | None) -> Source:
    env: list[Manifest] = []
    if hub.token_secret is not None:
        key = {"name": hub.token_secret.name, "key": hub.token_secret.key}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    if hub.endpoint is not None:
        env.append({"name": "HF_ENDPOINT", "value": hub.endpoint})
    return Source(model=hub.id, revision=revision or hub.revision, env=tuple(env))


def _claim(claim: ClaimModel) -> Source:
    return _mounted({"name": _VOLUME, **claim_volume(claim)}, claim.path)


def _image(image: ImageModel) -> Source:
    return _mounted({"name": _VOLUME, **image_volume(image)}, image.path)


def claim_volume(claim: ClaimModel) -> Manifest:
    """A volume without its name."""
    return {"persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}}


def image_volume(image: ImageModel) -> Manifest:
    """A volume without its name."""
    reference = image.reference.removeprefix("oci://")
    return {"image": {"reference": reference, "pullPolicy": image.pull_policy}}


def _mounted(volume: Manifest, path: str) -> Source:
    folder = f"{MODEL_DIR}/{path}" if path else MODEL_DIR
    return Source(model=folder, volumes=(volume,), mounts=(_mount(read_only=True),))


def _uri(uri: UriModel, downloader_image: str) -> Source:
    room = {} if uri.size_limit is None else {"sizeLimit": uri.size_limit}
    return Source(
        model=MODEL_DIR,
        volumes=({"name": _VOLUME, "emptyDir": room},),
        mounts=(_mount(read_only=True),),
        init_containers=(_copier(uri, downloader_image),),
    )


def _mount(*, read_only: bool) -> Manifest:
    mount: Manifest = {"name": _VOLUME, "mountPath": MODEL_DIR}
    return {**mount, "readOnly": True} if read_only else mount


def _copier(uri: UriModel, image: str) -> Manifest:
    """rclone, which compares checksums and continues where a restarted pod's copy stopped."""
    scheme, _, path = uri.uri.partition("://")
    container: Manifest = {
        "name": "fetch-model",
        "image": image,
        "args": [
            *("copy", f":{_COPIER_BACKENDS[scheme]}:{path.rstrip('/')}", MODEL_DIR),
            *("--config", "/tmp/rclone.conf", "--transfers", "8", "--retries", "10"),  # noqa: S108
            *("--use-json-log", "--stats", "30s", "--stats-log-level", "NOTICE"),
        ],
        "env": _copier_env(uri, scheme),
        "volumeMounts": [_mount(read_only=False), {"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
        "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": CONTAINER_SECURITY,
    }
    if uri.credentials_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": uri.credentials_secret}}]
    return container


def _copier_env(uri: UriModel, scheme: str) -> list[Manifest]:
    env = {"HOME": "/tmp", f"RCLONE_{_COPIER_BACKENDS[scheme].upper()}_ENV_AUTH": "true"}  # noqa: S108
    if scheme == "s3":
        env["RCLONE_S3_PROVIDER"] = "AWS" if uri.endpoint is None else "Other"
    if uri.endpoint is not None:
        env[f"RCLONE_{_COPIER_BACKENDS[scheme].upper()}_ENDPOINT"] = uri.endpoint
    if uri.region is not None and scheme == "s3":
        env["RCLONE_S3_REGION"] = uri.region
    return [{"name": name, "value": value} for name, value in env.items()]
