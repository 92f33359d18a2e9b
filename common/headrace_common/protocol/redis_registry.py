"""The registry of models over Redis: a hash of entries, and a key with the files of each model."""

import asyncio
import logging
import secrets

from .. import keys
from .connection import Connection
from .model_entry import decode_entry, decode_files, encode_entry, encode_files
from .registry import Files, RegisteredModel, RegisteredModels, RegistryError

logger = logging.getLogger(__name__)

TRIES = 3


class RedisModelRegistry:
    """See ModelRegistry. Everything here may be repeated."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._refused: dict[bytes, bytes] = {}

    async def models(self) -> RegisteredModels:
        entries = await self._entries()
        store = entries.pop(keys.MODELS_STORE, b"")
        found = [self._decoded(name, data) for name, data in entries.items()]
        self._refused = {name: self._refused[name] for name in self._refused.keys() & entries}
        return RegisteredModels(filter(None, found), store.decode(errors="replace"))

    async def files(self, model: RegisteredModel) -> Files:
        client = self._connection.client
        key = keys.model_files(model.name)
        data = await self._connection.attempt(lambda: client.command("GET", key), tries=TRIES)
        if data is None:
            raise RegistryError(f"model {model.name!r}: its files are gone from redis")
        return await asyncio.to_thread(decode_files, model, data)

    async def register(self, model: RegisteredModel, files: Files) -> None:
        data = await asyncio.to_thread(encode_files, model, files)
        arguments = [model.name, encode_entry(model), data, secrets.token_hex(8)]
        await self._connection.run("register", _keys(model.name), arguments, tries=TRIES)

    async def remove(self, name: str, owner: str) -> bool:
        entries = await self._entries()
        data = entries.get(name.encode())
        if data is None or _owner(data) != owner:
            return False
        removed = await self._connection.run("unregister", _keys(name), [name, data], tries=TRIES)
        return bool(removed)

    async def _entries(self) -> dict[bytes, bytes]:
        client = self._connection.client
        reply = await self._connection.attempt(
            lambda: client.command("HGETALL", keys.MODELS), tries=TRIES
        )
        return dict(reply)

    def _decoded(self, name: bytes, data: bytes) -> RegisteredModel | None:
        try:
            model = decode_entry(data)
            if model.name.encode() != name:
                raise RegistryError("model entry: is another model's")
        except RegistryError as error:
            if self._refused.get(name) != data:  # it is read every few seconds: say it once
                logger.warning(
                    "a registered model cannot be read",
                    extra={"model": name.decode(errors="replace"), "error": str(error)},
                )
                self._refused[name] = data
            return None
        return model


def _keys(name: str) -> list[str]:
    return [keys.MODELS, keys.model_files(name)]


def _owner(data: bytes) -> str | None:
    try:
        return decode_entry(data).owner
    except RegistryError:
        return None
