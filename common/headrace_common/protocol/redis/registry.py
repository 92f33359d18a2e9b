"""The registry of models over Redis: a hash of entries, and a key with the files of each model.

Engines whose Redis user is limited to one model have a key of their own instead, which is read only
for models with a grant. There they cannot register under another model's name or owner.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from ...errors import BackendUnfit
from ...sealing.sealer import Binding, PayloadKind, SealingError
from ...wire import keys
from ..model_entry import (
    MAX_ENTRY_BYTES,
    MAX_PACKED_BYTES,
    as_granted,
    decode_entry,
    decode_files,
    decode_grant,
    encode_entry,
    encode_files,
    encode_grant,
)
from ..registry import Files, RegisteredModel, RegisteredModels, RegistrationGrant, RegistryError
from .client.client import Argument, Command
from .client.connection import Connection

logger = logging.getLogger(__name__)

TRIES = 3


class RedisModelRegistry:
    """A ModelRegistry over Redis. Every call may be repeated."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._refused: dict[tuple[str, bytes], object] = {}
        self._grants: Mapping[bytes, bytes] = {}
        self._granted: set[str] = set()  # models whose entries are in their engines' own keys

    async def models(self) -> RegisteredModels:
        entries, grants = map(dict, await self._pipeline(
            ("HGETALL", keys.MODELS), ("HGETALL", keys.GRANTS)
        ))  # fmt: skip
        store = entries.pop(keys.MODELS_STORE, b"")
        grants = await self._kept(grants)
        store = grants.pop(keys.MODELS_STORE, store)
        found = [self._shared(name, data) for name, data in entries.items()]
        granted = await self._all_granted(grants)
        self._granted = {model.name for model in granted}
        names = {("entry", name) for name in entries} | {("grant", name) for name in grants}
        self._refused = {name: self._refused[name] for name in self._refused.keys() & names}
        return RegisteredModels([*filter(None, found), *granted], store.decode(errors="replace"))

    async def _kept(self, grants: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """Writes grants again if Redis has lost them."""
        if self._grants and keys.MODELS_STORE not in grants:
            again = {**self._grants, keys.MODELS_STORE: _new_store()}
            await self._pipeline(
                *(("HSETNX", keys.GRANTS, name, data) for name, data in again.items())
            )
            grants = {**again, **grants}
        self._grants = {name: grants[name] for name in grants if name != keys.MODELS_STORE}
        return grants

    async def _all_granted(self, grants: Mapping[bytes, bytes]) -> list[RegisteredModel]:
        """The entries of models with a grant whose engines have registered them."""
        names = [name.decode(errors="replace") for name in grants]
        calls: list[tuple[list[str], list[Argument]]] = [
            ([keys.granted_model(name)], ["e", MAX_ENTRY_BYTES]) for name in names
        ]

        async def read() -> list[Any]:
            return await (await self._connection.scripts()).run_many("granted", calls)

        values = await self._connection.attempt(read, tries=TRIES) if calls else []
        found = zip(grants.items(), names, values, strict=True)
        models = [self._own(name, data, grant, value) for (name, grant), data, value in found]
        return [model for model in models if model is not None]

    def _own(self, key: bytes, name: str, grant: bytes, value: Any) -> RegisteredModel | None:
        if value is None:
            return None
        try:
            if isinstance(value, int):
                raise RegistryError(f"model entry of {value} bytes is over {MAX_ENTRY_BYTES}")
            return as_granted(decode_entry(value), name, decode_grant(grant))
        except RegistryError as error:
            self._refuse(("grant", key), (grant, value), error)
            return None

    async def files(self, model: RegisteredModel) -> Files:
        if model.name in self._granted:
            data = await self._connection.run(
                "granted", [keys.granted_model(model.name)], ["f", MAX_PACKED_BYTES], tries=TRIES
            )
        else:
            (data,) = await self._pipeline(("GET", keys.model_files(model.name)))
        if data is None:
            raise RegistryError(f"model {model.name!r}: its files are gone from redis")
        if isinstance(data, int):
            raise RegistryError(
                f"model {model.name!r}: its files have {data} bytes, over {MAX_PACKED_BYTES}"
            )
        return await asyncio.to_thread(self._decoded_files, model, data)

    async def registered(self, name: str) -> RegisteredModel | None:
        try:
            (data,) = await self._pipeline(("HGET", keys.MODELS, name))
        except BackendUnfit:  # this user may write nothing that other users write
            (data,) = await self._pipeline(("HGET", keys.granted_model(name), "e"))
        try:
            return None if data is None else decode_entry(data)
        except RegistryError:
            return None

    async def register(self, model: RegisteredModel, files: Files) -> None:
        data = await asyncio.to_thread(self._encoded_files, model, files)
        entry = encode_entry(model)
        arguments = [model.name, entry, data, _new_store()]
        try:
            await self._connection.run("register", _keys(model.name), arguments, tries=TRIES)
        except BackendUnfit:  # as above
            own = keys.granted_model(model.name)
            await self._pipeline(("HSET", own, "e", entry, "f", data))

    async def grant(self, name: str, grant: RegistrationGrant) -> None:
        await self._pipeline(
            ("HSETNX", keys.GRANTS, keys.MODELS_STORE, _new_store()),
            ("HSET", keys.GRANTS, name, encode_grant(grant)),
        )

    def _encoded_files(self, model: RegisteredModel, files: Files) -> bytes:
        packed = encode_files(model, files)
        return self._connection.sealer.seal(PayloadKind.MODEL_FILES, _binding(model), packed)

    def _decoded_files(self, model: RegisteredModel, data: bytes) -> Files:
        """Raises RegistryError."""
        try:
            packed = self._connection.sealer.open(PayloadKind.MODEL_FILES, _binding(model), data)
        except SealingError as error:
            raise RegistryError(f"model {model.name!r}: {error}") from error
        return decode_files(model, packed)

    async def remove(self, name: str, owner: str) -> bool:
        grant, data = await self._pipeline(("HGET", keys.GRANTS, name), ("HGET", keys.MODELS, name))
        revoked = grant is not None and _granted_to(grant) == owner
        if revoked:
            await self.revoke(name)
        if data is None or _owner(data) != owner:
            return revoked
        removed = await self._connection.run("unregister", _keys(name), [name, data], tries=TRIES)
        return bool(removed) or revoked

    async def revoke(self, name: str) -> None:
        await self._pipeline(("HDEL", keys.GRANTS, name), ("DEL", keys.granted_model(name)))

    async def _pipeline(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )

    def _shared(self, name: bytes, data: bytes) -> RegisteredModel | None:
        try:
            model = decode_entry(data)
            if model.name.encode() != name:
                raise RegistryError("model entry: is another model's")
        except RegistryError as error:
            self._refuse(("entry", name), data, error)
            return None
        return model

    def _refuse(self, name: tuple[str, bytes], data: object, error: RegistryError) -> None:
        """Logs an unreadable entry once, although entries are read every few seconds."""
        if self._refused.get(name) != data:
            extra = {"model": name[1].decode(errors="replace"), "error": str(error)}
            logger.warning("a registered model cannot be read, skipped", extra=extra)
            self._refused[name] = data


def _binding(model: RegisteredModel) -> Binding:
    return (model.name,)


def _keys(name: str) -> list[str]:
    return [keys.MODELS, keys.model_files(name)]


def _new_store() -> bytes:
    return secrets.token_hex(8).encode()


def _owner(data: bytes) -> str | None:
    try:
        return decode_entry(data).owner
    except RegistryError:
        return None


def _granted_to(data: bytes) -> str | None:
    try:
        return decode_grant(data).owner
    except RegistryError:
        return None
