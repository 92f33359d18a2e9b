"""Stored requests, whose answers any gateway can serve, even if the accepting one is gone.

The request and the form of its answer are stored; the output is in the queue's records. Under an
idempotency key the request that was stored first counts. Implemented over Redis and, with the same
contract tests, in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from ..errors import MessageError
from ..wire.messages import MAX_MESSAGE_BYTES, GenerateRequest, decode_request, encode_request

VERSION = 1
SALT_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest:
    """One HTTP request under the id that clients know, with its `requests` in the queue.

    `fingerprint` detects another body under the same key. `created` is in Unix seconds,
    `expires_ms` in Unix milliseconds. `stop` are the stop strings, which the queue's requests do
    not have. `background`: it runs to its end, with or without a client. `form` is the gateway's
    own text about how the output is parsed and answered. `generation` distinguishes it from an
    earlier one with some of the same `requests`.
    """

    request_id: str
    operation: str
    fingerprint: bytes
    created: int
    expires_ms: int
    requests: tuple[GenerateRequest, ...]
    stop: tuple[str, ...] = ()
    include_usage: bool = False
    return_token_ids: bool = False
    background: bool = False
    form: str = ""
    generation: str = ""

    @property
    def name(self) -> str:
        """A name that differs from those of other requests stored under the same id, before or
        after."""
        return self.generation or self.requests[0].request_id

    @property
    def model(self) -> str:
        return self.requests[0].served_model

    @property
    def queue(self) -> str:
        """The model whose engines run it."""
        return self.requests[0].model

    @property
    def window(self) -> float:
        """Seconds for which it continues without a client."""
        return self.requests[0].window_ms / 1000


class RequestStore(Protocol):
    """The store of such requests. Raises BackendUnavailable if Redis cannot be reached."""

    async def salt(self) -> bytes:
        """SALT_BYTES random bytes, the same for all gateways."""

    async def put(
        self, stored: StoredRequest, replaces: StoredRequest | None = None
    ) -> StoredRequest:
        """Stores it if there is none, or only the one that it `replaces`; returns what is stored
        now. Raises SealingError if that cannot be opened."""

    async def get(self, request_id: str) -> StoredRequest | None:
        """The request stored under this id. Raises SealingError if it cannot be opened."""

    async def remove(self, stored: StoredRequest) -> None:
        """Removes exactly this request."""

    async def set_presence(self, request_id: str, seconds: float) -> None:
        """Notes that a client is connected, or may reconnect within `seconds`."""

    async def presence_left(self, request_id: str) -> float:
        """The seconds for which the last noted presence still holds; 0 if there is none."""

    async def begin_read(self, stored: StoredRequest, gateway_id: str) -> Sequence[str]:
        """Notes that a gateway starts to rebuild the answer; returns the others that are noted."""

    async def end_read(self, stored: StoredRequest, gateway_id: str) -> None:
        """Notes that the gateway has rebuilt the answer and is still alive."""


def encode_stored(stored: StoredRequest) -> bytes:
    """Packs a stored request. Raises MessageError if it exceeds the size limit."""
    data: bytes = msgpack.packb(
        {
            "v": VERSION,
            "id": stored.request_id,
            "operation": stored.operation,
            "fingerprint": stored.fingerprint,
            "created": stored.created,
            "expires": stored.expires_ms,
            "requests": [encode_request(request) for request in stored.requests],
            "stop": list(stored.stop),
            "include_usage": stored.include_usage,
            "return_token_ids": stored.return_token_ids,
            "background": stored.background,
            "form": stored.form,
            "generation": stored.generation,
        }
    )
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"request of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    return data


def decode_stored(data: bytes) -> StoredRequest:
    """Unpacks and checks a stored request; unknown fields are ignored. Raises MessageError."""
    body = _unpacked(data)
    return StoredRequest(
        request_id=_field(body, "id", str),
        operation=_field(body, "operation", str),
        fingerprint=_field(body, "fingerprint", bytes),
        created=_field(body, "created", int),
        expires_ms=_field(body, "expires", int),
        requests=tuple(decode_request(item) for item in _items(body, "requests", bytes)),
        stop=tuple(_items(body, "stop", str)),
        include_usage=_field(body, "include_usage", bool),
        return_token_ids=_field(body, "return_token_ids", bool),
        background=_field(body, "background", bool),
        form=_field({"form": "", **body}, "form", str),
        generation=_field({"generation": "", **body}, "generation", str),
    )


def _unpacked(data: bytes) -> dict[str, Any]:
    try:
        body = msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(f"stored request: not msgpack: {error}") from error
    if not isinstance(body, dict) or body.get("v") != VERSION:
        raise MessageError("stored request: of another version")
    if not body.get("requests"):
        raise MessageError("stored request: has no requests")
    return body


def _field(body: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = body.get(name)
    if type(value) is not kind:
        raise MessageError(f"stored request: {name} is missing or of another type")
    return value


def _items(body: dict[str, Any], name: str, kind: type[Any]) -> list[Any]:
    items: list[Any] = _field(body, name, list)
    if not all(type(item) is kind for item in items):
        raise MessageError(f"stored request: {name} has items of another type")
    return items
