"""Frames, control messages, outcomes, statuses: encoded and decoded, and invalid bytes only cause
an error."""

import math
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import FailureCode, MessageError
from headrace_common.protocol.base import Outcome
from headrace_common.protocol.frames import (
    decode_control,
    decode_ending,
    decode_frame,
    decode_outcome,
    encode_control,
    encode_ending,
    encode_frame,
    encode_outcome,
)
from headrace_common.protocol.status import decode_status, encode_status
from headrace_common.wire.messages import (
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
    UnknownVersion,
    decode_request,
    encode_request,
)
from headrace_testing.backends import make_request, make_status

counts = st.integers(0, 2**31)
token = st.integers(0, 2**32 - 1)
ids = st.text(min_size=1, max_size=40)
reasons = st.sampled_from([None, "stop", "length"])
logprobs = st.builds(
    Logprobs,
    logprob=st.floats(allow_nan=False),
    rank=counts,
    top=st.lists(st.tuples(token, st.floats(allow_nan=False)), max_size=3).map(tuple),
)


@st.composite
def choice_states(draw: st.DrawFn) -> ChoiceState:
    token_ids = draw(st.lists(token, max_size=8))
    size = len(token_ids)
    return ChoiceState(
        token_ids=tuple(token_ids),
        finish_reason=draw(reasons),
        stop_token=draw(st.none() | token),
        logprobs=draw(st.none() | st.lists(logprobs, min_size=size, max_size=size).map(tuple)),
    )


choices = st.lists(choice_states(), max_size=4).map(tuple)


@st.composite
def token_messages(draw: st.DrawFn) -> Tokens:
    token_ids = draw(st.lists(token, max_size=4))
    size = len(token_ids)
    return Tokens(
        request_id=draw(ids),
        attempt=draw(counts),
        choice=draw(st.integers(0, 127)),
        index=draw(counts),
        token_ids=tuple(token_ids),
        logprobs=draw(st.none() | st.lists(logprobs, min_size=size, max_size=size).map(tuple)),
        finish_reason=draw(reasons),
        cached_tokens=draw(counts),
        took_ms=draw(st.none() | counts),
        round=draw(counts),
    )


failures = st.builds(
    Failed,
    request_id=ids,
    attempt=counts,
    failure=st.sampled_from(FailureCode),
    message=st.text(max_size=50),
)
replies: st.SearchStrategy[Reply] = (
    token_messages()
    | st.builds(
        Takeover, request_id=ids, attempt=counts, round=counts, rounds_in_tokens=st.booleans()
    )
    | st.builds(Sync, request_id=ids, attempt=counts, choices=choices, cached_tokens=counts)
    | failures
)
controls: st.SearchStrategy[Control] = (
    st.builds(Drain, within_ms=st.none() | st.integers(0, 2**31))
    | st.just(Recall())
    | st.builds(Cancel, request_id=ids)
    | st.builds(StopChoice, request_id=ids, choice=counts)
    | st.builds(Resume, request_id=ids, attempt=counts, choices=choices, round=counts)
    | st.builds(Resend, request_id=ids, choice=counts, index=counts)
    | st.builds(Reroute, request_id=ids, gateway_id=ids)
    | st.builds(Disown, request_id=ids, attempt=counts, superseded=st.booleans())
)


@given(ids, st.lists(replies, max_size=2).map(tuple))
def test_a_frame_is_decoded_unchanged(engine_id: str, items: tuple[Reply, ...]) -> None:
    frame = Frame(engine_id, items)
    assert decode_frame(encode_frame(frame)) == frame


@given(controls)
def test_a_control_message_is_decoded_unchanged(control: Control) -> None:
    assert decode_control(encode_control(control)) == control


@given(choices, counts, st.none() | failures)
def test_an_outcome_is_decoded_unchanged(
    states: tuple[ChoiceState, ...], cached: int, failed: Failed | None
) -> None:
    outcome = Outcome(choices=states, cached_tokens=cached, failed=failed)
    assert decode_outcome(encode_outcome(outcome)) == outcome


def test_a_reply_over_the_limit_arrives_without_log_probabilities() -> None:
    """Otherwise it would not arrive at all: 20 alternatives for 60,000 tokens exceed the limit."""
    position = Logprobs(-1.5, 1, tuple((2**31 + i, -1.5) for i in range(20)))
    long = ChoiceState(token_ids=(7,) * 60_000, logprobs=(position,) * 60_000)
    bare = (ChoiceState(token_ids=long.token_ids),)
    sync = Sync(request_id="r", attempt=1, choices=(long,))
    (reply,) = decode_frame(encode_frame(Frame("e", (sync,)))).replies
    assert reply == Sync(request_id="r", attempt=1, choices=bare)
    assert decode_outcome(encode_outcome(Outcome(choices=(long,)))).choices == bare
    resume = decode_control(encode_control(Resume(request_id="r", attempt=1, choices=(long,))))
    assert isinstance(resume, Resume) and resume.choices == bare


@given(reasons, token)
def test_an_ending_is_decoded_unchanged(reason: str | None, stop: int) -> None:
    state = ChoiceState(finish_reason=reason, stop_token=stop if reason == "stop" else None)
    assert decode_ending(encode_ending(state)) == (state.finish_reason, state.stop_token)


def test_a_status_is_decoded_unchanged() -> None:
    assert decode_status(encode_status(make_status())) == make_status()


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_a_time_to_a_turn_that_no_client_could_wait_is_refused(seconds: float) -> None:
    with pytest.raises(MessageError, match="time_to_turn"):
        decode_status(encode_status(replace(make_status(), time_to_turn=seconds)))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | ids | st.binary(),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(ids, inner, max_size=4),
    max_leaves=20,
)
DECODERS = (decode_frame, decode_control, decode_outcome, decode_request, decode_status)


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(decode: object, data: bytes) -> None:
    _decodes_or_refuses(decode, data)


@pytest.mark.parametrize("decode", DECODERS)
@given(body=plain, kind=st.integers(0, 20))
def test_random_structures_are_refused(decode: object, body: object, kind: int) -> None:
    _decodes_or_refuses(decode, msgpack.packb(body))
    _decodes_or_refuses(decode, msgpack.packb([1, kind, "id", body, body, body]))
    _decodes_or_refuses(decode, msgpack.packb([1, "engine", [[kind, "id", 1, 0, 0, body]]]))


def _decodes_or_refuses(decode: object, data: bytes) -> None:
    assert callable(decode)
    try:
        decode(data)
    except MessageError:
        pass


@given(data=st.data())
def test_a_damaged_request_is_refused_or_read(data: st.DataObject) -> None:
    body = bytearray(encode_request(make_request()))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _decodes_or_refuses(decode_request, bytes(body))


@pytest.mark.parametrize("data", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1", b""])
@pytest.mark.parametrize("decode", DECODERS)
def test_a_huge_or_broken_length_allocates_nothing(decode: object, data: bytes) -> None:
    assert callable(decode)
    with pytest.raises(MessageError):
        decode(data)


def test_extension_types_are_refused() -> None:
    data = msgpack.packb([1, "e", [msgpack.ExtType(4, b"x")]])
    with pytest.raises(MessageError):
        decode_frame(data)


def test_a_newer_version_has_its_own_error() -> None:
    with pytest.raises(UnknownVersion):
        decode_frame(msgpack.packb([2, "e", []]))


def test_fields_that_a_newer_peer_adds_are_ignored() -> None:
    frame = decode_frame(msgpack.packb([1, "e", [[2, "r", 3, 4, "new"]], "new"]))
    assert frame == Frame("e", (Takeover(request_id="r", attempt=3, round=4),))


def test_logprobs_must_match_their_tokens() -> None:
    with pytest.raises(MessageError, match="0 log probabilities for 1 tokens"):
        decode_frame(msgpack.packb([1, "e", [[0, "r", 1, 0, 0, [5], None, None, 0, []]]]))
