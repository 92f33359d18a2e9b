"""The claims and Secrets of the release, which a ModelService may not use.

The claim of the bundled Redis contains all clients' prompts, and the release's Secrets give access
to it. Both are in the namespace of the ModelServices, where engines could mount them by name. So
are the Secrets with the Redis users of other ModelServices, and the claims of their caches.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import names
from ..errors import InvalidSpec
from .model_service import ModelService

Reference = tuple[str, str]
"""The field of a ModelService, and the name that it has there."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Reserved names in `namespace`, the release's own; a * at the end matches any ending."""

    namespace: str
    secrets: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()

    def check(self, service: ModelService) -> None:
        """Raises InvalidSpec for the first reference to a reserved object."""
        for field, name in _secrets(service):
            if name.endswith(names.REDIS_USER_SUFFIX):
                raise InvalidSpec(
                    field,
                    f"{name} has the name of a Secret with the Redis user of a ModelService's "
                    "engines; leave the field out, since the operator gives engines their own "
                    "user, or give your Secret another name",
                )
        if service.namespace != self.namespace:
            return
        _refuse(_claims(service), self.claims, "PersistentVolumeClaim", "copy the checkpoint to")
        remedy = "leave the field out, since engines have their Redis URL anyway, or make"
        _refuse(_secrets(service), self.secrets, "Secret", remedy)


def possible_caches(service: ModelService) -> Iterator[Reference]:
    """References to claims that have the name of another ModelService's cache, if it has one."""
    for field, name in _claims(service):
        if name.endswith(names.CACHE_SUFFIX) and name != names.cache_claim(service.name):
            yield field, name


def check_cache(reference: Reference, claim: Mapping[str, Any] | None) -> None:
    """Raises InvalidSpec if this claim is, or could become, the cache of another ModelService."""
    field, name = reference
    if claim is None:
        owner = name.removesuffix(names.CACHE_SUFFIX)
        raise InvalidSpec(
            field,
            f"{name} does not exist, and is what the cache of a ModelService {owner} would be "
            "called; create the claim first, or give it another name",
        )
    if names.MODEL_SERVICE in claim["metadata"].get("labels", {}):
        raise InvalidSpec(
            field,
            f"{name} is the cache of another ModelService, which has what that one downloaded; "
            "copy the checkpoint to a PersistentVolumeClaim of its own",
        )


def _refuse(
    references: Iterable[Reference], reserved: tuple[str, ...], kind: str, remedy: str
) -> None:
    for field, name in references:
        if any(_stands_for(entry, name) for entry in reserved):
            raise InvalidSpec(
                field,
                f"{name} is a {kind} of the release itself, which holds what others have asked or "
                f"leads to it; {remedy} one of its own",
            )


def _stands_for(entry: str, name: str) -> bool:
    if entry.endswith("*"):
        return name.startswith(entry[:-1])
    return name == entry


def _claims(service: ModelService) -> Iterator[Reference]:
    spec = service.spec
    if (claim := spec.model.persistent_volume_claim) is not None:
        yield "spec.model.persistentVolumeClaim.claimName", claim.claim_name
    for number, adapter in enumerate(spec.lora.adapters if spec.lora is not None else ()):
        if (claim := adapter.persistent_volume_claim) is not None:
            field = f"spec.lora.adapters.{number}.persistentVolumeClaim.claimName"
            yield field, claim.claim_name


def _secrets(service: ModelService) -> Iterator[Reference]:
    spec = service.spec
    if spec.model.hub is not None and spec.model.hub.token_secret is not None:
        yield "spec.model.hub.tokenSecret.name", spec.model.hub.token_secret.name
    if spec.model.uri is not None and spec.model.uri.credentials_secret is not None:
        yield "spec.model.uri.credentialsSecret", spec.model.uri.credentials_secret
    storage = None if spec.lora is None else spec.lora.object_storage
    if storage is not None and storage.credentials_secret is not None:
        yield "spec.lora.objectStorage.credentialsSecret", storage.credentials_secret
    if spec.queue.url_secret is not None:
        yield "spec.queue.urlSecret.name", spec.queue.url_secret.name
    for number, name in enumerate(spec.engine.image_pull_secrets):
        yield f"spec.engine.imagePullSecrets.{number}", name
    for number, variable in enumerate(spec.engine.env):
        reference = (variable.value_from or {}).get("secretKeyRef")
        yield from _named(f"spec.engine.env.{number}.valueFrom.secretKeyRef", reference)
    for number, origin in enumerate(spec.engine.env_from):
        yield from _named(f"spec.engine.envFrom.{number}.secretRef", origin.get("secretRef"))


def _named(field: str, reference: Any) -> Iterator[Reference]:
    """The names in an object of the Kubernetes API, which is not validated yet."""
    if isinstance(reference, dict) and isinstance(reference.get("name"), str):
        yield f"{field}.name", reference["name"]
