"""The registry of models: engines register them with their files, gateways read them.

An entry outlives its engines, so that a model scaled to zero stays known; it is removed with its
owner. Implemented over Redis and, with the same contract tests, in memory.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ..errors import HeadraceError

Files = Mapping[str, bytes]


class RegistryError(HeadraceError):
    """An entry or its files cannot be used; the message says which and why."""

    code = "model_registry_invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """One model under the name that clients use.

    `digest` is that of its files (`digest_of`), `max_model_len` is in tokens, `created` in Unix
    seconds. `owner` is "namespace/name" of its ModelService, "" if there is none. `adapters` are
    its engines' LoRA adapters, each of which is a model of its own to clients. `holds`: once the
    entry is removed, waiting requests for the model continue to wait instead of being failed.
    `images`: its engines take requests with images.
    """

    name: str
    digest: str
    max_model_len: int
    created: int
    owner: str = ""
    adapters: tuple[str, ...] = ()
    holds: bool = False
    images: bool = False

    def since(self, known: "RegisteredModel | None") -> "RegisteredModel":
        """This entry, with the `created` of `known` if both have the same files and owner."""
        if known is None or (known.digest, known.owner) != (self.digest, self.owner):
            return self
        return replace(self, created=known.created)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationGrant:
    """The registrations that engines with a Redis user for one model may make.

    They may register that model, for this owner, with adapters of these names.
    """

    owner: str = ""
    adapters: tuple[str, ...] = ()


class RegisteredModels(dict[str, RegisteredModel]):
    """The registry's entries by name.

    `store` is the id of this incarnation of the data, "" before the first entry. If it has changed,
    Redis has lost its data, and a missing entry may not have been removed on purpose.
    """

    def __init__(self, models: Iterable[RegisteredModel], store: str) -> None:
        super().__init__({model.name: model for model in models})
        self.store = store


class ModelRegistry(Protocol):
    """The registry of models. Raises BackendUnavailable if Redis cannot be reached."""

    async def models(self) -> RegisteredModels:
        """All entries by name; one cheap read. Unreadable entries are logged and left out."""

    async def files(self, model: RegisteredModel) -> Files:
        """Tokenizer and configuration files by name; do not trust the names as paths.

        Raises RegistryError if they are gone, too large, or do not match `model.digest`, since the
        model may have been registered again meanwhile.
        """

    async def registered(self, name: str) -> RegisteredModel | None:
        """The present entry that this process may write; None if there is none."""

    async def register(self, model: RegisteredModel, files: Files) -> None:
        """Adds or replaces an entry together with its files. Idempotent.

        Raises RegistryError if the files are too large or do not match `model.digest`.
        """

    async def remove(self, name: str, owner: str) -> bool:
        """Removes an entry, its files and its grant; False if there is none or another owns it."""

    async def grant(self, name: str, grant: RegistrationGrant) -> None:
        """Writes the grant for engines with a Redis user for this model."""

    async def revoke(self, name: str) -> None:
        """Removes a grant, whatever its owner, and the entry registered under it."""


def digest_of(files: Files) -> str:
    """SHA-256 over names and contents, independent of their order."""
    total = hashlib.sha256()
    for name, content in sorted(files.items()):
        part = f"{len(name)}:{name}:{hashlib.sha256(content).hexdigest()};"
        total.update(part.encode())
    return total.hexdigest()
