"""Reads the statuses of a model's engines, which may have written anything."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from ...errors import MessageError
from ...wire.keys import ShardKeys
from ..base import EngineStatus
from ..status import MAX_STATUS_BYTES, decode_status

logger = logging.getLogger(__name__)

MOST_ENGINES = 1024  # the number of a model's engines whose statuses are read
Pipeline = Callable[..., Awaitable[list[Any]]]


async def read_statuses(pipeline: Pipeline, model: str) -> Sequence[EngineStatus]:
    """The readable statuses. `pipeline` runs commands that may be repeated in one round trip."""
    try:
        return [status for status in await _statuses(pipeline, model) if status is not None]
    except ResponseError as error:
        extra = {"model": model, "error": str(error)}
        logger.warning("statuses of a model's engines cannot be read", extra=extra)
        return []


async def _statuses(pipeline: Pipeline, model: str) -> Iterable[EngineStatus | None]:
    """Reads the statuses of at most `MOST_ENGINES` engines, each within its bound in bytes."""
    shard = ShardKeys(model)
    (members,) = await pipeline(("SRANDMEMBER", shard.engines, MOST_ENGINES))
    names = [(engine, shard.status(engine.decode(errors="replace"))) for engine in members]
    values = await pipeline(*(("GETRANGE", name, 0, MAX_STATUS_BYTES) for _, name in sorted(names)))
    found = list(zip(sorted(names), values, strict=True))
    if lapsed := [engine for (engine, _), value in found if not value]:
        await pipeline(("SREM", shard.engines, *lapsed))
    return (_status(model, value) for _, value in found if value)


def _status(model: str, data: bytes) -> EngineStatus | None:
    """An engine's status; None if it is unreadable or of another model."""
    try:
        status = decode_status(data)
        if status.model != model:
            raise MessageError("engine status: is of another model")
    except MessageError as error:
        logger.warning(
            "status of an engine unreadable, skipped", extra={"model": model, "error": str(error)}
        )
        return None
    return status
