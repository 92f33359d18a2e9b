"""Reads over Redis what is known of a request whose gateway is gone."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .. import keys
from ..errors import MessageError
from ..frames import decode_frame
from ..keys import ShardKeys
from ..messages import ChoiceState, Frame, decode_request
from .client import Command
from .journal import EntryId, rebuild

logger = logging.getLogger(__name__)

Pipeline = Callable[..., Awaitable[list[Any]]]


async def read_journal(
    pipeline: Pipeline, shard: ShardKeys, request_id: str
) -> tuple[ChoiceState, ...] | None:
    """The journal and the frames behind it; None where nothing is known or it cannot be used.

    `pipeline` runs commands in one round trip. Raises what that does.
    """
    commands: list[Command] = [
        ("HMGET", shard.record(request_id), "je", "g", "gs"),
        ("HGETALL", shard.journal(request_id)),
        ("GET", shard.payload(request_id)),
    ]
    (writer, gateway, former), journal, payload = await pipeline(*commands)
    if not writer or payload is None:
        return None
    names = dict.fromkeys([*former.decode().split(), gateway.decode()])
    try:
        choices = decode_request(payload).sampling.n
        frames = [frame for name in names for frame in await _frames_to(pipeline, name)]
        return rebuild(request_id, writer.decode(), choices, journal, frames)
    except MessageError as error:
        logger.warning("journal unusable", extra={"request_id": request_id, "error": str(error)})
        return None


async def _frames_to(pipeline: Pipeline, gateway_id: str) -> list[tuple[EntryId, Frame]]:
    (found,) = await pipeline(("XRANGE", keys.frames(gateway_id), "-", "+"))
    return [
        (entry_id(name.decode()), decode_frame(fields.get(b"f", b""))) for name, fields in found
    ]


def entry_id(text: str) -> EntryId:
    """A stream entry's id as numbers."""
    ms, _, sequence = text.partition("-")
    return int(ms), int(sequence or 0)
