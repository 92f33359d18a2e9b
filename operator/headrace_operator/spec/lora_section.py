"""The section of a ModelService's spec about LoRA adapters."""

from typing import ClassVar

from pydantic import Field, model_validator

from .forms import AbsolutePath, HttpUrl, ObjectName, S3Uri
from .sections import ClaimModel, ImageModel, SpecSection

ONE_SOURCE = "an adapter needs exactly one of path, persistentVolumeClaim, image and uri"
NO_STORAGE = "adapters with a uri need objectStorage, which may be empty: {}"


class AdapterSpec(SpecSection):
    name: str = Field(min_length=1, max_length=256)
    """Name that clients ask for, as they do for a model."""
    path: AbsolutePath | None = None
    """Folder inside the pod, such as /model/adapters/sql in the model's volume."""
    persistent_volume_claim: ClaimModel | None = None
    """From a volume."""
    image: ImageModel | None = None
    """From an OCI registry."""
    uri: S3Uri | None = None
    """From a store that speaks S3, s3://bucket/folder, which engines fetch; see objectStorage."""

    @model_validator(mode="after")
    def _one_source(self) -> "AdapterSpec":
        given = [self.path, self.persistent_volume_claim, self.image, self.uri]
        if sum(source is not None for source in given) != 1:
            raise ValueError(ONE_SOURCE)
        return self


class ObjectStorageSpec(SpecSection):
    endpoint: HttpUrl | None = None
    """Address of a store that speaks S3, where it is not Amazon's."""
    region: str | None = Field(None, min_length=1, max_length=64)
    """Region of the buckets."""
    credentials_secret: ObjectName | None = None
    """Secret whose keys become the engines' environment, as AWS_ACCESS_KEY_ID."""


class LoRASpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "self.adapters.all(one, self.adapters.exists_one(other, other.name == one.name))",
            "names of adapters must differ",
        ),
        (
            "self.adapters.all(one, [has(one.path), has(one.persistentVolumeClaim), "
            "has(one.image), has(one.uri)].filter(given, given).size() == 1)",
            ONE_SOURCE,
        ),
        ("has(self.objectStorage) || !self.adapters.exists(one, has(one.uri))", NO_STORAGE),
    )
    adapters: tuple[AdapterSpec, ...] = Field(max_length=128, strict=False)
    """Adapters that every engine has; clients see each one as a separate model. Changed without a
    rollout, unless an adapter needs another volume."""
    object_storage: ObjectStorageSpec | None = None
    """Engines may load adapters from object storage; a change restarts them."""
    max_loras: int = Field(1, ge=1, le=128)
    """Different adapters that one engine runs at once; each takes device memory."""
    max_lora_rank: int = Field(16, ge=1, le=1024)
    """Largest rank of an adapter."""
    experts: bool = False
    """Engines take memory for adapters that change the experts of a mixture."""
    max_cpu_loras: int | None = Field(None, ge=1)
    """Adapters that an engine keeps in host memory; maxLoras where absent."""

    @model_validator(mode="after")
    def _names_differ(self) -> "LoRASpec":
        if len({adapter.name for adapter in self.adapters}) < len(self.adapters):
            raise ValueError(self.cel[0][1])
        return self

    @model_validator(mode="after")
    def _storage_is_given(self) -> "LoRASpec":
        if self.object_storage is None and any(adapter.uri for adapter in self.adapters):
            raise ValueError(NO_STORAGE)
        return self
