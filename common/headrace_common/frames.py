"""Frames, control messages and outcomes as bytes: compact msgpack lists, checked when read.

A frame is `[version, engine, [reply, ...]]`, a reply `[kind, request id, attempt, ...]`. Elements
behind the known ones are ignored, unknown kinds and versions refused. Decoding never trusts a
count: every list is checked before it is used.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgpack

from .errors import FailureCode, MessageError
from .messages import (
    MAX_ID_CHARS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    ChoiceState,
    Control,
    Disown,
    Drain,
    Failed,
    Frame,
    Logprobs,
    Reply,
    Reroute,
    Resend,
    Resume,
    StopChoice,
    Sync,
    Takeover,
    Tokens,
    UnknownVersion,
    pack_message,
    pack_tokens,
    unpack_tokens,
)
from .pooling import MAX_EMBEDDING_SIZE
from .protocol.base import Outcome
from .sampling import MAX_CHOICES, MAX_LOGPROBS

MAX_TEXT_CHARS = 4096
MAX_TOKEN_ID = 2**32 - 1
_MAX_EMBEDDING = 4 * MAX_EMBEDDING_SIZE
_FINISH_REASONS = frozenset({"stop", "length"})

TOKENS, TAKEOVER, SYNC, FAILED = 0, 2, 3, 4
CANCEL, STOP_CHOICE, RESUME, RESEND, REROUTE, DISOWN, DRAIN = range(10, 17)


def encode_frame(frame: Frame) -> bytes:
    """Packs a frame. Raises MessageError where it is over the size limit."""
    try:
        return _pack_frame(frame)
    except MessageError:
        lighter = tuple(
            replace(reply, choices=_without_logprobs(reply.choices))
            if isinstance(reply, Sync)
            else reply
            for reply in frame.replies
        )
        return _pack_frame(replace(frame, replies=lighter))


def _pack_frame(frame: Frame) -> bytes:
    return pack_message(
        [PROTOCOL_VERSION, frame.engine_id, [_reply(reply) for reply in frame.replies]]
    )


def _without_logprobs(states: Sequence[ChoiceState]) -> tuple[ChoiceState, ...]:
    """Tokens must arrive; log probabilities of very long outputs are what can be left out."""
    return tuple(replace(state, logprobs=None) for state in states)


def decode_frame(data: bytes) -> Frame:
    """Unpacks and checks a frame. Raises MessageError (UnknownVersion for a newer protocol)."""
    body = _versioned(data, 3)
    return Frame(_identifier(body[1]), tuple(map(_to_reply, _items(body[2]))))


def encode_control(control: Control) -> bytes:
    """Packs a control message. Raises MessageError where it is over the size limit."""
    try:
        return pack_message([PROTOCOL_VERSION, *_control(control)])
    except MessageError:
        if not isinstance(control, Resume):
            raise
        lighter = replace(control, choices=_without_logprobs(control.choices))
        return pack_message([PROTOCOL_VERSION, *_control(lighter)])


def decode_control(data: bytes) -> Control:
    """Unpacks and checks a control message. Raises MessageError."""
    body = _versioned(data, 2)
    kind = body[1]
    if kind == DRAIN:
        return Drain()
    reader = _CONTROLS.get(kind) if isinstance(kind, int) else None
    if reader is None:
        raise MessageError(f"control message of unknown kind {kind!r:.40}")
    length, make = reader
    _at_least(body, length)
    control: Control = make(_identifier(body[2]), body)
    return control


def encode_outcome(outcome: Outcome) -> bytes:
    """Packs an outcome. Raises MessageError where it is over the size limit."""
    try:
        return _pack_outcome(outcome)
    except MessageError:
        return _pack_outcome(replace(outcome, choices=_without_logprobs(outcome.choices)))


def _pack_outcome(outcome: Outcome) -> bytes:
    failed = outcome.failed
    return pack_message(
        [
            PROTOCOL_VERSION,
            [_state(choice) for choice in outcome.choices],
            outcome.cached_tokens,
            None if failed is None else _reply(failed),
        ]
    )


def decode_outcome(data: bytes) -> Outcome:
    """Unpacks and checks an outcome. Raises MessageError."""
    body = _versioned(data, 4)
    failed = None if body[3] is None else _to_reply(body[3])
    if failed is not None and not isinstance(failed, Failed):
        raise MessageError("outcome: its failure is another kind of message")
    return Outcome(choices=_to_states(body[1]), cached_tokens=_count(body[2]), failed=failed)


def encode_ending(choice: ChoiceState) -> bytes:
    """How a choice ended, for the journal; empty while it runs."""
    if choice.finish_reason is None:
        return b""
    stop = "" if choice.stop_token is None else str(choice.stop_token)
    return f"{choice.finish_reason}:{stop}".encode()


def decode_ending(data: bytes) -> tuple[str | None, int | None]:
    """Inverse of encode_ending: finish reason and stop token. Raises MessageError."""
    if not data:
        return None, None
    reason, _, stop = data.decode("ascii", "replace").partition(":")
    if reason not in _FINISH_REASONS or (stop and not stop.isdigit()):
        raise MessageError("journal: a choice ended in an unknown way")
    return reason, int(stop) if stop else None


def encode_logprobs(logprobs: Sequence[Logprobs] | None) -> bytes:
    """Log probabilities for the journal; empty where there are none, or too many for a message."""
    if logprobs is None:
        return b""
    try:
        return pack_message(_positions(logprobs))
    except MessageError:
        return b""


def decode_logprobs(data: bytes, tokens: int) -> tuple[Logprobs, ...]:
    """Inverse of encode_logprobs for that many tokens. Raises MessageError."""
    return _to_positions(_unpack(data), tokens) or ()


def _reply(reply: Reply) -> list[object]:
    if isinstance(reply, Tokens):
        return _tokens(reply)
    head = [reply.request_id, reply.attempt]
    match reply:
        case Takeover():
            return [TAKEOVER, *head, reply.round]
        case Sync():
            return [SYNC, *head, [_state(choice) for choice in reply.choices], reply.cached_tokens]
        case Failed():
            return [FAILED, *head, reply.failure.value, reply.message[:MAX_TEXT_CHARS]]


def _tokens(t: Tokens) -> list[object]:
    """The hot one: what is at its default is left out."""
    item: list[object] = [TOKENS, t.request_id, t.attempt, t.choice, t.index, t.token_ids]
    more = t.prompt_logprobs is not None
    if t.finish_reason or t.logprobs is not None or t.cached_tokens or more:
        item += [t.finish_reason, t.stop_token, t.cached_tokens, _positions(t.logprobs)]
        if t.embedding is not None or more:
            item.append(t.embedding)
        if more:
            item.append(t.prompt_logprobs)
    return item


def _state(choice: ChoiceState) -> list[object]:
    item: list[object] = [pack_tokens(choice.token_ids), choice.finish_reason, choice.stop_token]
    if choice.embedding is not None:
        return [*item, _positions(choice.logprobs), choice.embedding]
    return item if choice.logprobs is None else [*item, _positions(choice.logprobs)]


def _positions(logprobs: Sequence[Logprobs] | None) -> list[object] | None:
    return None if logprobs is None else [[p.logprob, p.rank, p.top] for p in logprobs]


def _control(control: Control) -> list[object]:
    match control:
        case Drain():
            return [DRAIN]
        case Cancel():
            return [CANCEL, control.request_id]
        case StopChoice():
            return [STOP_CHOICE, control.request_id, control.choice]
        case Resume():
            states = [_state(choice) for choice in control.choices]
            return [RESUME, control.request_id, control.attempt, states, control.round]
        case Resend():
            return [RESEND, control.request_id, control.choice, control.index]
        case Reroute():
            return [REROUTE, control.request_id, control.gateway_id]
        case Disown():
            return [DISOWN, control.request_id, control.attempt, control.superseded]


def _unpack(data: bytes) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    try:
        return msgpack.unpackb(data, use_list=True, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack: {error}") from error


def _versioned(data: bytes, length: int) -> list[Any]:
    body = _items(_unpack(data))
    if not body or body[0] != PROTOCOL_VERSION:
        version = body[0] if body else None
        raise UnknownVersion(f"protocol version {version!r:.40} is not {PROTOCOL_VERSION}")
    _at_least(body, length)
    return body


def _at_least(body: list[Any], length: int) -> None:
    if len(body) < length:
        raise MessageError(f"message has {len(body)} elements, not {length}")


def _items(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise MessageError(f"must be a list, not {type(value).__name__}")
    return value


def _count(value: object, most: int = 2**53) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise MessageError(f"must be a whole number from 0 to {most}, not {value!r:.40}")
    return value


def _identifier(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARS:
        raise MessageError(f"an id must be a string of 1 to {MAX_ID_CHARS} characters")
    return value


def _finish_reason(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or value not in _FINISH_REASONS:
        raise MessageError(f"unknown finish reason {value!r:.40}")
    return value


def _token(value: object) -> int | None:
    return None if value is None else _count(value, MAX_TOKEN_ID)


def _to_reply(value: object) -> Reply:
    item = _items(value)
    _at_least(item, 4)
    kind, request_id, attempt = item[0], _identifier(item[1]), _count(item[2])
    if kind == TOKENS:
        return _to_tokens(item, request_id, attempt)
    if kind == TAKEOVER:
        return Takeover(request_id=request_id, attempt=attempt, round=_count(item[3]))
    if kind == SYNC:
        cached = _count(item[4]) if len(item) > 4 else 0
        choices = _to_states(item[3])
        return Sync(request_id=request_id, attempt=attempt, choices=choices, cached_tokens=cached)
    if kind == FAILED:
        return _to_failed(item, request_id, attempt)
    raise MessageError(f"reply of unknown kind {kind!r:.40}")


def _to_tokens(item: list[Any], request_id: str, attempt: int) -> Tokens:
    _at_least(item, 6)
    ids = _token_ids(_items(item[5]))
    choice, index = _count(item[3], MAX_CHOICES - 1), _count(item[4])
    if len(item) < 10:
        return Tokens(request_id, attempt, choice, index, ids)
    return Tokens(
        request_id=request_id,
        attempt=attempt,
        choice=choice,
        index=index,
        token_ids=ids,
        finish_reason=_finish_reason(item[6]),
        stop_token=_token(item[7]),
        cached_tokens=_count(item[8]),
        logprobs=_to_positions(item[9], len(ids)),
        embedding=_to_embedding(item[10]) if len(item) > 10 else None,
        prompt_logprobs=_to_bytes(item[11]) if len(item) > 11 else None,
    )


def _token_ids(items: list[Any]) -> tuple[int, ...]:
    for token in items:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            _count(token, MAX_TOKEN_ID)
    return tuple(items)


def _to_bytes(value: object) -> bytes | None:
    if value is not None and not isinstance(value, bytes):
        raise MessageError(f"must be bytes, not {type(value).__name__}")
    return value


def _to_embedding(value: object) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, bytes) or len(value) % 4 or not 0 < len(value) <= _MAX_EMBEDDING:
        raise MessageError(f"an embedding must be 1 to {MAX_EMBEDDING_SIZE} packed float32")
    return value


def _to_positions(value: object, tokens: int) -> tuple[Logprobs, ...] | None:
    if value is None:
        return None
    logprobs = tuple(map(_to_logprobs, _items(value)))
    if len(logprobs) != tokens:
        raise MessageError(f"{len(logprobs)} log probabilities for {tokens} tokens")
    return logprobs


def _to_failed(item: list[Any], request_id: str, attempt: int) -> Failed:
    _at_least(item, 5)
    if not isinstance(item[4], str):
        raise MessageError("a failure's message must be a string")
    try:
        failure = FailureCode(item[3])
    except ValueError:
        failure = FailureCode.INTERNAL  # a newer peer's code: still a failure
    return Failed(
        request_id=request_id,
        attempt=attempt,
        failure=failure,
        message=item[4][:MAX_TEXT_CHARS],
    )


def _to_logprobs(value: object) -> Logprobs:
    item = _items(value)
    _at_least(item, 3)
    pairs = _items(item[2])
    if len(pairs) > MAX_LOGPROBS + 1:
        raise MessageError(f"{len(pairs)} top log probabilities are over {MAX_LOGPROBS}")
    return Logprobs(_real(item[0]), _count(item[1]), tuple(map(_to_pair, pairs)))


def _to_pair(value: object) -> tuple[int, float]:
    item = _items(value)
    _at_least(item, 2)
    return _count(item[0], MAX_TOKEN_ID), _real(item[1])


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MessageError(f"must be a number, not {type(value).__name__}")
    return float(value)


def _to_states(value: object) -> tuple[ChoiceState, ...]:
    items: Sequence[object] = _items(value)
    if len(items) > MAX_CHOICES:
        raise MessageError(f"{len(items)} choices are over {MAX_CHOICES}")
    return tuple(map(_to_state, items))


def _to_state(value: object) -> ChoiceState:
    item = _items(value)
    _at_least(item, 3)
    if not isinstance(item[0], bytes):
        raise MessageError("a choice's tokens must be packed bytes")
    token_ids = unpack_tokens(item[0])
    return ChoiceState(
        token_ids=token_ids,
        finish_reason=_finish_reason(item[1]),
        stop_token=_token(item[2]),
        logprobs=_to_positions(item[3], len(token_ids)) if len(item) > 3 else None,
        embedding=_to_embedding(item[4]) if len(item) > 4 else None,
    )


def _to_resume(request_id: str, body: list[Any]) -> Resume:
    return Resume(
        request_id=request_id,
        attempt=_count(body[3]),
        choices=_to_states(body[4]),
        round=_count(body[5]),
    )


def _to_disown(request_id: str, body: list[Any]) -> Disown:
    if not isinstance(body[4], bool):
        raise MessageError("disown: superseded must be true or false")
    return Disown(request_id=request_id, attempt=_count(body[3]), superseded=body[4])


# kind -> elements it has at least, and how it is read: [version, kind, request id, ...]
_CONTROLS: dict[int, tuple[int, Any]] = {
    CANCEL: (3, lambda rid, b: Cancel(request_id=rid)),
    STOP_CHOICE: (4, lambda rid, b: StopChoice(request_id=rid, choice=_count(b[3]))),
    RESUME: (6, _to_resume),
    RESEND: (5, lambda rid, b: Resend(request_id=rid, choice=_count(b[3]), index=_count(b[4]))),
    REROUTE: (4, lambda rid, b: Reroute(request_id=rid, gateway_id=_identifier(b[3]))),
    DISOWN: (5, _to_disown),
}
