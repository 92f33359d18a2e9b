"""The registry of models in a MemoryBackend, which behaves like that in Redis."""

import secrets

from headrace_common.protocol.model_entry import decode_files, encode_entry, encode_files
from headrace_common.protocol.registry import (
    Files,
    RegisteredModel,
    RegisteredModels,
    RegistrationGrant,
    RegistryError,
)

from .backend import MemoryBackend


class MemoryModelRegistry:
    """See ModelRegistry."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend

    async def models(self) -> RegisteredModels:
        self._backend.check()
        entries = (model for model, _ in self._backend.models.values())
        return RegisteredModels(entries, self._backend.models_store)

    async def files(self, model: RegisteredModel) -> Files:
        self._backend.check()
        if model.name not in self._backend.models:
            raise RegistryError(f"model {model.name!r}: its files are gone")
        _, data = self._backend.models[model.name]
        return decode_files(model, data)

    async def registered(self, name: str) -> RegisteredModel | None:
        return (await self.models()).get(name)

    async def grant(self, name: str, grant: RegistrationGrant) -> None:
        """Does nothing: in memory there are no users."""

    async def revoke(self, name: str) -> None:
        """Does nothing: in memory there are no users."""

    async def register(self, model: RegisteredModel, files: Files) -> None:
        encode_entry(model)
        data = encode_files(model, files)
        self._backend.check()
        self._backend.models[model.name] = (model, data)
        self._backend.models_store = self._backend.models_store or secrets.token_hex(8)

    async def remove(self, name: str, owner: str) -> bool:
        self._backend.check()
        known = self._backend.models.get(name)
        if known is None or known[0].owner != owner:
            return False
        del self._backend.models[name]
        return True
