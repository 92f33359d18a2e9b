"""The headers that let a request outlive its connection: its idempotency key, and `x-resumable`."""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from ..errors import ApiError, invalid
from .event_ids import request_of

KEY_HEADER = "idempotency-key"
RESUMABLE_HEADER = "x-resumable"
LAST_EVENT_HEADER = "last-event-id"
MAX_KEY_CHARS = 255
ID_CHARS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """How a request outlives its connection. `key` None: its client will not send it again."""

    key: str | None
    background: bool
    last_event_id: str | None


def resume_options(
    headers: Mapping[str, str], *, stream: bool, background: bool, stored: bool = False
) -> ResumeOptions | None:
    """Returns None for a request that lives as long as its connection. Raises ApiError.

    `stored`: the request is stored in any case.
    """
    key = _key(headers.get(KEY_HEADER))
    resumable = _switch(headers.get(RESUMABLE_HEADER))
    last_event_id = headers.get(LAST_EVENT_HEADER)
    if last_event_id is not None and key is None:
        raise _needs_key(last_event_id)
    if last_event_id is not None and not stream:
        raise invalid("Last-Event-ID is only for stream: true.", param="Last-Event-ID")
    if key is None and not resumable and not background and not stored:
        return None
    return ResumeOptions(key=key, background=background, last_event_id=last_event_id)


def derived_id(salt: bytes, tenant: str, key: str) -> str:
    """Returns an id that is the same for the same key, and cannot be guessed without the salt."""
    message = f"{len(tenant)}:{tenant}{key}".encode()
    return hmac.new(salt, message, hashlib.sha256).hexdigest()[:ID_CHARS]


def fingerprint(operation: str, body: BaseModel) -> bytes:
    """Returns a hash of the operation and body; JSON's order and blanks do not matter."""
    fields = body.model_dump(mode="json", exclude_unset=True)
    text = json.dumps([operation, fields], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def _key(text: str | None) -> str | None:
    if text is None:
        return None
    if not 0 < len(text) <= MAX_KEY_CHARS or not (text.isascii() and text.isprintable()):
        raise invalid(
            f"Idempotency-Key: must be 1 to {MAX_KEY_CHARS} printable ASCII characters, such as a "
            "UUID.",
            param="Idempotency-Key",
        )
    return text


def _switch(text: str | None) -> bool:
    if text is not None and text.lower() not in ("true", "false"):
        raise invalid(f"{RESUMABLE_HEADER}: must be true or false.", param=RESUMABLE_HEADER)
    return text is not None and text.lower() == "true"


def _needs_key(last_event_id: str) -> ApiError:
    known = request_of(last_event_id)
    where = f"GET /v1/requests/{known or '{id}'}/events"
    return invalid(
        f"Last-Event-ID needs the first request's Idempotency-Key here; or read on with {where}.",
        param="Last-Event-ID",
    )
