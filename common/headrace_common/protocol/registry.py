"""Which models there are, told by those who have their files: the engines register, gateways read.

An entry outlives its engines, so that a model scaled to zero stays known; it goes when its owner
does. Implemented over Redis and, with the same contract tests, in memory.
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

    `digest` is that of its files (`digest_of`), `max_model_len` in tokens, `created` in Unix
    seconds. `owner` is "namespace/name" of its ModelService, "" where there is none. `adapters` are
    LoRA adapters that its engines have, each a model of its own to clients.
    """

    name: str
    digest: str
    max_model_len: int
    created: int
    owner: str = ""
    adapters: tuple[str, ...] = ()

    def since(self, known: "RegisteredModel | None") -> "RegisteredModel":
        """This entry as old as the one before, where that is of the same files and owner."""
        if known is None or (known.digest, known.owner) != (self.digest, self.owner):
            return self
        return replace(self, created=known.created)


class RegisteredModels(dict[str, RegisteredModel]):
    """Entries by name.

    `store` names this life of the store, "" before its first entry: where it is another one than
    before, Redis has lost what it held, and who is missing may not have been removed.
    """

    def __init__(self, models: Iterable[RegisteredModel], store: str) -> None:
        super().__init__({model.name: model for model in models})
        self.store = store


class ModelRegistry(Protocol):
    """Raises BackendUnavailable where Redis cannot be reached."""

    async def models(self) -> RegisteredModels:
        """All entries by name; one cheap read. Those that cannot be read are left out, logged."""

    async def files(self, model: RegisteredModel) -> Files:
        """Tokenizer and configuration files by their names, which are not to be trusted as paths.

        Raises RegistryError where they are gone, too large, or not those of `model.digest`: it may
        have been registered anew meanwhile.
        """

    async def register(self, model: RegisteredModel, files: Files) -> None:
        """Adds or replaces an entry together with its files. Idempotent.

        Raises RegistryError where the files are too large, or not those of `model.digest`.
        """

    async def remove(self, name: str, owner: str) -> bool:
        """Removes an entry and its files; False where there is none or another owns it."""


def digest_of(files: Files) -> str:
    """SHA-256 over names and contents, whatever their order."""
    total = hashlib.sha256()
    for name, content in sorted(files.items()):
        part = f"{len(name)}:{name}:{hashlib.sha256(content).hexdigest()};"
        total.update(part.encode())
    return total.hexdigest()
