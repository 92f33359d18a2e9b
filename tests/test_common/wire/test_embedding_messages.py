"""Embeddings on the wire: requested, answered, taken over, and never in a frame that is too
large."""

import struct
from dataclasses import replace

import msgpack
import pytest

from headrace_common.errors import MessageError
from headrace_common.protocol.arbiter import Arbiter, Deliver
from headrace_common.protocol.base import Outcome
from headrace_common.protocol.frames import (
    decode_control,
    decode_frame,
    decode_outcome,
    encode_control,
    encode_frame,
    encode_outcome,
)
from headrace_common.protocol.journal import rebuild
from headrace_common.protocol.redis.framing import MAX_EMBEDDING_BYTES, frames_of
from headrace_common.protocol.requests import fingerprint
from headrace_common.sampling.pooling import MAX_VECTORS_SIZE, PoolingParams
from headrace_common.wire.messages import (
    ChoiceState,
    Frame,
    Resume,
    Sync,
    Tokens,
    decode_request,
    encode_request,
    pack_message,
)
from headrace_testing.backends import make_request

VECTOR = struct.pack("<3f", 0.5, -1.0, 2.0)


def tokens_reply(**changes: object) -> Tokens:
    fields = {
        "request_id": "r",
        "attempt": 1,
        "choice": 0,
        "index": 0,
        "token_ids": (),
        "finish_reason": "stop",
        "embedding": VECTOR,
    }
    return Tokens(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", [None, PoolingParams(), PoolingParams(dimensions=64)])
def test_a_request_carries_its_pooling_parameters(pooling: PoolingParams | None) -> None:
    request = replace(make_request(), pooling=pooling)

    assert decode_request(encode_request(request)).pooling == pooling


@pytest.mark.parametrize("raw", [{"dimensions": 0}, {"dimensions": "1"}, {"dimensions": 2**40}, 3])
def test_a_request_for_an_impossible_vector_is_refused(raw: object) -> None:
    body = msgpack.unpackb(encode_request(make_request()), strict_map_key=False)
    with pytest.raises(MessageError, match="pooling"):
        decode_request(pack_message({**body, "pooling": raw}))


def test_a_different_vector_length_is_a_different_request() -> None:
    poolings = (None, PoolingParams(), PoolingParams(dimensions=2))
    requests = [replace(make_request(), pooling=pooling) for pooling in poolings]

    assert len({fingerprint(request) for request in requests}) == 3


def test_only_a_request_with_an_adapter_has_its_name_on_the_wire() -> None:
    request = replace(make_request(), lora="org/sql")

    assert decode_request(encode_request(request)) == request
    assert (request.served_model, make_request().served_model) == ("org/sql", make_request().model)
    assert b"lora" not in encode_request(make_request())
    assert fingerprint(request) != fingerprint(make_request())
    body = msgpack.unpackb(encode_request(request), strict_map_key=False)
    for wrong in ("", 7, None, "x" * 300):
        with pytest.raises(MessageError, match="lora"):
            decode_request(pack_message({**body, "lora": wrong}))


def test_only_a_request_with_an_api_key_has_its_id_on_the_wire() -> None:
    request = replace(make_request(), key="alice")

    assert decode_request(encode_request(request)) == request
    body = msgpack.unpackb(encode_request(make_request()), strict_map_key=False)
    assert "key" not in body
    for wrong in ("", 7, None, "x" * 300):
        with pytest.raises(MessageError, match="key"):
            decode_request(pack_message({**body, "key": wrong}))


def test_vectors_survive_every_message() -> None:
    state = ChoiceState(finish_reason="stop", embedding=VECTOR)
    frame = Frame("e", (tokens_reply(), Sync(request_id="r", attempt=1, choices=(state,))))
    resume = Resume(request_id="r", attempt=1, choices=(state,))

    assert decode_frame(encode_frame(frame)) == frame
    assert decode_control(encode_control(resume)) == resume
    assert decode_outcome(encode_outcome(Outcome(choices=(state,)))).choices == (state,)


@pytest.mark.parametrize("vector", [b"", b"123", b"0" * (4 * MAX_VECTORS_SIZE + 4), "text"])
def test_invalid_vectors_are_refused(vector: object) -> None:
    item = [0, "r", 1, 0, 0, [], "stop", None, 0, None, vector]

    with pytest.raises(MessageError, match="packed float32"):
        decode_frame(pack_message([1, "e", [item]]))


def test_a_client_gets_the_vector_once() -> None:
    arbiter = Arbiter("r", 1)

    (first,) = arbiter.handle("e", tokens_reply())
    again = arbiter.handle("e", tokens_reply())

    assert isinstance(first, Deliver) and first.embedding == VECTOR and first.finish_reason
    assert arbiter.complete and not any(isinstance(action, Deliver) for action in again)
    assert arbiter.states() == (ChoiceState(finish_reason="stop", embedding=VECTOR),)


def test_a_lost_vector_arrives_with_the_outcome_or_a_sync() -> None:
    state = ChoiceState(finish_reason="stop", embedding=VECTOR)
    settled = Arbiter("r", 1).settle(Outcome(choices=(state,)))
    synced = Arbiter("r", 1).handle("e", Sync(request_id="r", attempt=1, choices=(state,)))

    for actions in (settled, synced):
        assert actions is not None
        (action,) = actions
        assert isinstance(action, Deliver) and action.embedding == VECTOR


def test_a_vector_is_rebuilt_from_the_frames_of_its_writer() -> None:
    frames = [((1, 0), Frame("e", (tokens_reply(),)))]

    (known,) = rebuild("r", "e/1", 1, {}, frames)
    (other,) = rebuild("r", "other/1", 1, {}, frames)

    assert known == ChoiceState(finish_reason="stop", embedding=VECTOR)
    assert other == ChoiceState()


def test_many_vectors_are_split_into_frames() -> None:
    vector = bytes(2**20)
    replies = [tokens_reply(request_id=str(index), embedding=vector) for index in range(10)]
    replies.insert(5, tokens_reply(request_id="plain", embedding=None, token_ids=(1,)))

    frames = list(frames_of(replies))

    assert [reply for frame in frames for reply in frame] == replies
    assert len(frames) == 3
    for frame in frames:
        assert sum(len(r.embedding or b"") for r in frame if isinstance(r, Tokens)) <= (
            MAX_EMBEDDING_BYTES
        )


def test_without_vectors_all_replies_are_one_frame() -> None:
    replies = [tokens_reply(embedding=None, token_ids=(1,), request_id=str(i)) for i in range(1000)]

    assert list(frames_of(replies)) == [replies]
    assert list(frames_of([])) == [[]]
