"""Frames, control messages and outcomes as bytes: compact msgpack lists, checked when read.

A frame is `[version, engine, [reply, ...]]`, a reply `[kind, request id, attempt, ...]`. Elements
after the known ones are ignored, unknown kinds and versions refused. Decoding never trusts a
count: every list is checked before it is used.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import MessageError
from ..wire.decoding import (
    FAILED,
    FINISH_REASONS,
    MAX_TEXT_CHARS,
    SYNC,
    TAKEOVER,
    TOKENS,
    at_least,
    count,
    identifier,
    items_of,
    to_positions,
    to_reply,
    to_states,
    unpack,
    versioned,
)
from ..wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ChoiceState,
    Control,
    Disown,
    Drain,
    Failed,
    Frame,
    Logprobs,
    Recall,
    Reply,
    Reroute,
    Resend,
    Resume,
    StopChoice,
    Sync,
    Takeover,
    Tokens,
    Watch,
    pack_message,
    pack_tokens,
)
from .base import Outcome

# Kinds of control messages.
CANCEL, STOP_CHOICE, RESUME, RESEND, REROUTE, DISOWN, DRAIN, RECALL, WATCH = range(10, 19)


def encode_frame(frame: Frame) -> bytes:
    """Packs a frame. Raises MessageError if it exceeds the size limit."""
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
    """Drops log probabilities of a very long output, so that its tokens fit into a message."""
    return tuple(replace(state, logprobs=None) for state in states)


def decode_frame(data: bytes, model: str = "") -> Frame:
    """Unpacks and checks a frame from a stream to which `model`'s engines write.

    Raises MessageError (UnknownVersion for a newer protocol).
    """
    body = versioned(data, 3)
    return Frame(identifier(body[1]), tuple(map(to_reply, items_of(body[2]))), model)


def encode_control(control: Control) -> bytes:
    """Packs a control message. Raises MessageError if it exceeds the size limit."""
    try:
        return pack_message([PROTOCOL_VERSION, *_control(control)])
    except MessageError:
        if not isinstance(control, Resume):
            raise
        lighter = replace(control, choices=_without_logprobs(control.choices))
        return pack_message([PROTOCOL_VERSION, *_control(lighter)])


def decode_control(data: bytes) -> Control:
    """Unpacks and checks a control message. Raises MessageError."""
    body = versioned(data, 2)
    kind = body[1]
    if kind == DRAIN:
        return Drain(within_ms=count(body[2]) if len(body) > 2 else None)
    if kind == RECALL:
        return Recall()
    if kind == WATCH:
        at_least(body, 3)
        return Watch(duration_ms=count(body[2]))
    reader = _CONTROLS.get(kind) if isinstance(kind, int) else None
    if reader is None:
        raise MessageError(f"control message of unknown kind {kind!r:.40}")
    length, make = reader
    at_least(body, length)
    control: Control = make(identifier(body[2]), body)
    return control


def is_of_operator(data: bytes) -> bool:
    """Whether it is Drain or Recall, which the operator sends; they contain no data of requests."""
    try:
        return isinstance(decode_control(data), Drain | Recall)
    except MessageError:
        return False


def encode_outcome(outcome: Outcome) -> bytes:
    """Packs an outcome. Raises MessageError if it exceeds the size limit."""
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
    body = versioned(data, 4)
    failed = None if body[3] is None else to_reply(body[3])
    if failed is not None and not isinstance(failed, Failed):
        raise MessageError("outcome: its failure is another kind of message")
    return Outcome(choices=to_states(body[1]), cached_tokens=count(body[2]), failed=failed)


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
    if reason not in FINISH_REASONS or (stop and not stop.isdigit()):
        raise MessageError("journal: a choice ended in an unknown way")
    return reason, int(stop) if stop else None


def encode_logprobs(logprobs: Sequence[Logprobs] | None) -> bytes:
    """Packs log probabilities for the journal; empty if there are none or too many to fit."""
    if logprobs is None:
        return b""
    try:
        return pack_message(_positions(logprobs))
    except MessageError:
        return b""


def decode_logprobs(data: bytes, tokens: int) -> tuple[Logprobs, ...]:
    """Inverse of encode_logprobs for that many tokens. Raises MessageError."""
    return to_positions(unpack(data), tokens) or ()


def _reply(reply: Reply) -> list[object]:
    if isinstance(reply, Tokens):
        return _tokens(reply)
    head = [reply.request_id, reply.attempt]
    match reply:
        case Takeover():
            return [TAKEOVER, *head, reply.round, reply.rounds_in_tokens]
        case Sync():
            return [SYNC, *head, [_state(choice) for choice in reply.choices], reply.cached_tokens]
        case Failed():
            return [FAILED, *head, reply.failure.value, reply.message[:MAX_TEXT_CHARS]]


def _tokens(t: Tokens) -> list[object]:
    """Packs new tokens, the most frequent reply; trailing default values are left out."""
    item: list[object] = [TOKENS, t.request_id, t.attempt, t.choice, t.index, t.token_ids]
    rest = (t.embedding, t.prompt_logprobs, t.took_ms)
    more = t.logprobs is not None or rest != (None, None, None)
    if not (t.finish_reason or t.cached_tokens or more):
        return [*item, t.round] if t.round else item
    item += [t.finish_reason, t.stop_token, t.cached_tokens, _positions(t.logprobs)]
    item += [*rest, t.round or None]
    while item[-1] is None and len(item) > 10:
        item.pop()
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
            return [DRAIN] if control.within_ms is None else [DRAIN, control.within_ms]
        case Recall():
            return [RECALL]
        case Watch():
            return [WATCH, control.duration_ms]
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


def _to_resume(request_id: str, body: list[Any]) -> Resume:
    return Resume(
        request_id=request_id,
        attempt=count(body[3]),
        choices=to_states(body[4]),
        round=count(body[5]),
    )


def _to_disown(request_id: str, body: list[Any]) -> Disown:
    if not isinstance(body[4], bool):
        raise MessageError("disown: superseded must be true or false")
    return Disown(request_id=request_id, attempt=count(body[3]), superseded=body[4])


# kind -> minimal number of elements, and decoder: [version, kind, request id, ...]
_CONTROLS: dict[int, tuple[int, Any]] = {
    CANCEL: (3, lambda rid, b: Cancel(request_id=rid)),
    STOP_CHOICE: (4, lambda rid, b: StopChoice(request_id=rid, choice=count(b[3]))),
    RESUME: (6, _to_resume),
    RESEND: (5, lambda rid, b: Resend(request_id=rid, choice=count(b[3]), index=count(b[4]))),
    REROUTE: (4, lambda rid, b: Reroute(request_id=rid, gateway_id=identifier(b[3]))),
    DISOWN: (5, _to_disown),
}
