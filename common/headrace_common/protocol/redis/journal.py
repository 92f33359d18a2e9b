"""Reads the known output of a request whose gateway is gone, over Redis."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ...errors import MessageError
from ...sealing.sealer import Binding, PayloadKind, Sealer, opened
from ...wire import keys
from ...wire.keys import ShardKeys
from ...wire.messages import ChoiceState, Frame, decode_request
from ..frames import decode_frame
from ..journal import EntryId, rebuild
from .client.client import Command

logger = logging.getLogger(__name__)

Pipeline = Callable[..., Awaitable[list[Any]]]


class JournalReader:
    """Reads journals of one model's requests. `pipeline` runs commands in one round trip."""

    def __init__(self, pipeline: Pipeline, sealer: Sealer, model: str) -> None:
        self._pipeline = pipeline
        self._sealer = sealer
        self._model = model

    async def read(self, shard: ShardKeys, request_id: str) -> tuple[ChoiceState, ...] | None:
        """The journal's output and later frames; None if nothing is known or it is unusable.

        Errors of `pipeline` are raised.
        """
        commands: list[Command] = [
            ("HMGET", shard.record(request_id), "je", "g", "gs"),
            ("HGETALL", shard.journal(request_id)),
            ("GET", shard.payload(request_id)),
        ]
        (writer, gateway, former), journal, payload = await self._pipeline(*commands)
        if not writer or payload is None:
            return None
        names = dict.fromkeys([*former.decode().split(), gateway.decode()])
        engine = writer.decode().rpartition("/")[0]
        try:
            binding = (self._model, request_id)
            request = decode_request(await self._opened(PayloadKind.PAYLOAD, binding, payload))
            pieces = self._pieces(journal, (*binding, writer.decode()))
            frames = [frame for name in names for frame in await self._frames_to(name, engine)]
            return rebuild(request_id, writer.decode(), request.sampling.n, pieces, frames)
        except MessageError as error:
            logger.warning(
                "journal unreadable; the request is computed again",
                extra={"request_id": request_id, "error": str(error)},
            )
            return None

    def _pieces(self, journal: Mapping[bytes, bytes], binding: Binding) -> dict[bytes, bytes]:
        return {
            name: data if (piece := journal_piece(name)) is None
            else self._sealer.open(piece[0], (*binding, *piece[1]), data)
            for name, data in journal.items()
        }  # fmt: skip

    async def _frames_to(self, gateway_id: str, engine_id: str) -> list[tuple[EntryId, Frame]]:
        stream = keys.frames_between(gateway_id, engine_id, self._model)
        (found,) = await self._pipeline(("XRANGE", stream, "-", "+"))
        return [
            (entry_id(name.decode()), decode_frame(await self._frame(gateway_id, fields)))
            for name, fields in found
        ]

    async def _frame(self, gateway_id: str, fields: Mapping[bytes, bytes]) -> bytes:
        return await self._opened(PayloadKind.FRAME, (gateway_id,), fields.get(b"f", b""))

    async def _opened(self, kind: PayloadKind, binding: Binding, data: bytes) -> bytes:
        return await opened(self._sealer, kind, binding, data)


def journal_piece(name: bytes) -> tuple[PayloadKind, Binding] | None:
    """The kind, choice and position of a journal's field; None for a count."""
    choice, colon, index = name.decode().partition(":")
    if choice.endswith("f"):
        return PayloadKind.JOURNAL_ENDING, (int(choice[:-1]),)
    if choice.endswith("l"):
        return PayloadKind.JOURNAL_LOGPROBS, (int(choice[:-1]), int(index))
    return (PayloadKind.JOURNAL, (int(choice), int(index))) if colon else None


def entry_id(text: str) -> EntryId:
    """A stream entry's id as numbers."""
    ms, _, sequence = text.partition("-")
    return int(ms), int(sequence or 0)
