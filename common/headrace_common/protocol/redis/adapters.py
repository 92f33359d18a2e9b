"""The sets of adapters over Redis: one key for each model, and one with the versions of all."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...wire import keys
from ...wire.keys import ShardKeys
from ..adapters import (
    MAX_REPORT_BYTES,
    AdapterError,
    AdapterReport,
    AdapterSet,
    decode_report,
    decode_set,
    encode_report,
    encode_set,
)
from .client.client import Command
from .client.connection import Connection

logger = logging.getLogger(__name__)

TRIES = 3


class RedisAdapterSets:
    """An AdapterSets over Redis. Every call may be repeated. `lease_ms` is that of engines."""

    def __init__(self, connection: Connection, lease_ms: int = keys.LEASE_MS) -> None:
        self._connection = connection
        self._lease_ms = lease_ms

    async def versions(self) -> Mapping[str, str]:
        (found,) = await self._pipeline(("HGETALL", keys.ADAPTER_SETS))
        return {_text(model): _text(version) for model, version in dict(found).items()}

    async def version(self, model: str) -> str:
        (found,) = await self._pipeline(("HGET", keys.adapter_set(model), "v"))
        return _text(found or b"")

    async def read(self, model: str) -> AdapterSet:
        (found,) = await self._pipeline(("HGETALL", keys.adapter_set(model)))
        fields = dict(found)
        if not fields:
            return AdapterSet()
        return decode_set(_text(fields.get(b"v", b"")), fields.get(b"s", b""))

    async def replace(self, model: str, known: AdapterSet, new: AdapterSet) -> bool:
        names = [keys.ADAPTER_SETS, keys.adapter_set(model)]
        arguments = [model, known.version, new.version, encode_set(new)]
        return bool(await self._connection.run("adapt", names, arguments, tries=TRIES))

    async def report(self, model: str, engine_id: str, report: AdapterReport) -> None:
        name = ShardKeys(model).adapter_report(engine_id)
        await self._pipeline(("SET", name, encode_report(report), "PX", self._lease_ms))

    async def reports(self, model: str, engine_ids: Sequence[str]) -> Mapping[str, AdapterReport]:
        shard = ShardKeys(model)
        names = [shard.adapter_report(engine_id) for engine_id in engine_ids]
        if not names:
            return {}
        found = await self._pipeline(*(("GETRANGE", n, 0, MAX_REPORT_BYTES) for n in names))
        reports: dict[str, AdapterReport] = {}
        for engine_id, data in zip(engine_ids, found, strict=True):
            try:
                if data:
                    reports[engine_id] = decode_report(data)
            except AdapterError as error:
                extra = {"engine": engine_id, "error": str(error)}
                logger.warning("report of adapters unreadable, skipped", extra=extra)
        return reports

    async def _pipeline(self, *commands: Command) -> list[Any]:
        return await self._connection.attempt(
            lambda: self._connection.client.pipeline(commands), tries=TRIES
        )


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
