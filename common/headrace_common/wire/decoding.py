"""Decodes msgpack lists from the wire and checks each element before it is used.

Decoding never trusts a count. All functions raise MessageError.
"""

from collections.abc import Sequence
from typing import Any

import msgpack

from ..errors import FailureCode, MessageError
from ..sampling.params import MAX_CHOICES, MAX_LOGPROBS
from ..sampling.pooling import MAX_VECTORS_SIZE
from .messages import (
    MAX_ID_CHARS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    ChoiceState,
    Failed,
    Logprobs,
    Reply,
    Sync,
    Takeover,
    Tokens,
    UnknownVersion,
    unpack_tokens,
)

MAX_TEXT_CHARS = 4096
MAX_TOKEN_ID = 2**32 - 1
_MOST = 2**53
_MAX_EMBEDDING = 4 * MAX_VECTORS_SIZE
FINISH_REASONS = frozenset({"stop", "length"})

# The fields of a reply of tokens that a bare one leaves out.
_BARE = Tokens("", 0, 0, 0, ())[5:]

# Kinds of replies.
TOKENS, TAKEOVER, SYNC, FAILED = 0, 2, 3, 4


def unpack(data: bytes) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    try:
        return msgpack.unpackb(data, use_list=True, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack: {error}") from error


def versioned(data: bytes, length: int) -> list[Any]:
    body = items_of(unpack(data))
    if not body or body[0] != PROTOCOL_VERSION:
        version = body[0] if body else None
        raise UnknownVersion(f"protocol version {version!r:.40} is not {PROTOCOL_VERSION}")
    at_least(body, length)
    return body


def at_least(body: list[Any], length: int) -> None:
    if len(body) < length:
        raise MessageError(f"message has {len(body)} elements, not {length}")


def items_of(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise MessageError(f"must be a list, not {type(value).__name__}")
    return value


def count(value: object, most: int = _MOST) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise MessageError(f"must be a whole number from 0 to {most}, not {value!r:.40}")
    return value


def identifier(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise MessageError(f"an id must be a string of 1 to {MAX_ID_CHARS} characters")
    return value


def _finish_reason(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in FINISH_REASONS:
        raise MessageError(f"unknown finish reason {value!r:.40}")
    return value


def _token(value: object) -> int | None:
    return None if value is None else count(value, MAX_TOKEN_ID)


def to_reply(value: object) -> Reply:
    return _bare_tokens(value) or _to_any(items_of(value))


def _bare_tokens(value: object) -> Tokens | None:
    """A fast path for the usual reply, one token only. None if the reply has more elements."""
    if type(value) is not list or len(value) != 6:
        return None
    kind, request_id, attempt, choice, index, ids = value
    if (
        kind == TOKENS
        and type(request_id) is str
        and 0 < len(request_id) <= MAX_ID_CHARS
        and type(attempt) is type(choice) is type(index) is int
        and 0 <= attempt <= _MOST
        and 0 <= choice < MAX_CHOICES
        and 0 <= index <= _MOST
        and type(ids) is list
        and len(ids) == 1
        and type(ids[0]) is int
        and 0 <= ids[0] <= MAX_TOKEN_ID
    ):
        # without the Python code of NamedTuple, since there is one for every token
        return tuple.__new__(Tokens, (request_id, attempt, choice, index, (ids[0],), *_BARE))
    return None


def _to_any(item: list[Any]) -> Reply:
    at_least(item, 4)
    kind, request_id, attempt = item[0], identifier(item[1]), count(item[2])
    if kind == TOKENS:
        return _to_tokens(item, request_id, attempt)
    if kind == TAKEOVER:
        return Takeover(
            request_id=request_id,
            attempt=attempt,
            round=count(item[3]),
            rounds_in_tokens=len(item) > 4 and item[4] is True,
        )
    if kind == SYNC:
        cached = count(item[4]) if len(item) > 4 else 0
        choices = to_states(item[3])
        return Sync(request_id=request_id, attempt=attempt, choices=choices, cached_tokens=cached)
    if kind == FAILED:
        return _to_failed(item, request_id, attempt)
    raise MessageError(f"reply of unknown kind {kind!r:.40}")


def _to_tokens(item: list[Any], request_id: str, attempt: int) -> Tokens:
    at_least(item, 6)
    ids = _token_ids(items_of(item[5]))
    choice, index = count(item[3], MAX_CHOICES - 1), count(item[4])
    if len(item) < 10:
        number = count(item[6]) if len(item) > 6 else 0
        return Tokens(request_id, attempt, choice, index, ids, round=number)
    return Tokens(
        request_id=request_id,
        attempt=attempt,
        choice=choice,
        index=index,
        token_ids=ids,
        finish_reason=_finish_reason(item[6]),
        stop_token=_token(item[7]),
        cached_tokens=count(item[8]),
        logprobs=to_positions(item[9], len(ids)),
        embedding=_to_embedding(item[10]) if len(item) > 10 else None,
        prompt_logprobs=_to_bytes(item[11]) if len(item) > 11 else None,
        took_ms=None if len(item) < 13 or item[12] is None else count(item[12]),
        round=count(item[13]) if len(item) > 13 else 0,
    )


def _token_ids(items: list[Any]) -> tuple[int, ...]:
    for token in items:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            count(token, MAX_TOKEN_ID)
    return tuple(items)


def _to_bytes(value: object) -> bytes | None:
    if value is not None and not isinstance(value, bytes):
        raise MessageError(f"must be bytes, not {type(value).__name__}")
    return value


def _to_embedding(value: object) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, bytes) or len(value) % 4 or not 0 < len(value) <= _MAX_EMBEDDING:
        raise MessageError(f"an embedding must be 1 to {MAX_VECTORS_SIZE} packed float32")
    return value


def to_positions(value: object, tokens: int) -> tuple[Logprobs, ...] | None:
    if value is None:
        return None
    logprobs = tuple(map(_to_logprobs, items_of(value)))
    if len(logprobs) != tokens:
        raise MessageError(f"{len(logprobs)} log probabilities for {tokens} tokens")
    return logprobs


def _to_failed(item: list[Any], request_id: str, attempt: int) -> Failed:
    at_least(item, 5)
    if not isinstance(item[4], str):
        raise MessageError("a failure's message must be a string")
    try:
        failure = FailureCode(item[3])
    except ValueError:
        failure = FailureCode.INTERNAL  # a code of a newer version is still a failure
    return Failed(
        request_id=request_id,
        attempt=attempt,
        failure=failure,
        message=item[4][:MAX_TEXT_CHARS],
    )


def _to_logprobs(value: object) -> Logprobs:
    item = items_of(value)
    at_least(item, 3)
    pairs = items_of(item[2])
    if len(pairs) > MAX_LOGPROBS + 1:
        raise MessageError(f"{len(pairs)} top log probabilities are over {MAX_LOGPROBS}")
    return Logprobs(_real(item[0]), count(item[1]), tuple(map(_to_pair, pairs)))


def _to_pair(value: object) -> tuple[int, float]:
    item = items_of(value)
    at_least(item, 2)
    return count(item[0], MAX_TOKEN_ID), _real(item[1])


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MessageError(f"must be a number, not {type(value).__name__}")
    return float(value)


def to_states(value: object) -> tuple[ChoiceState, ...]:
    items: Sequence[object] = items_of(value)
    if len(items) > MAX_CHOICES:
        raise MessageError(f"{len(items)} choices are over {MAX_CHOICES}")
    return tuple(map(_to_state, items))


def _to_state(value: object) -> ChoiceState:
    item = items_of(value)
    at_least(item, 3)
    if not isinstance(item[0], bytes):
        raise MessageError("a choice's tokens must be packed bytes")
    token_ids = unpack_tokens(item[0])
    return ChoiceState(
        token_ids=token_ids,
        finish_reason=_finish_reason(item[1]),
        stop_token=_token(item[2]),
        logprobs=to_positions(item[3], len(token_ids)) if len(item) > 3 else None,
        embedding=_to_embedding(item[4]) if len(item) > 4 else None,
    )
