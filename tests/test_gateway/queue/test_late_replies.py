"""Which replies say that a request runs again after its end."""

from typing import Any

import pytest

from headrace_common.errors import FailureCode
from headrace_common.protocol.failures import failed
from headrace_common.wire.messages import Reply, Takeover, Tokens
from headrace_gateway.queue_client.late_replies import LateReplies

SILENCE = 0.5


def tokens(finish_reason: str | None = None) -> Tokens:
    fields: dict[str, Any] = {"request_id": "r", "attempt": 2, "choice": 0, "index": 20}
    return Tokens(**fields, token_ids=(1,), finish_reason=finish_reason)


@pytest.mark.parametrize("reply", [Takeover(request_id="r", attempt=2), tokens("length")])
def test_an_engine_that_runs_an_ended_request_later_has_not_heard_of_its_end(reply: Reply) -> None:
    late = LateReplies(SILENCE)
    late.ended("r", 10.0)
    assert late.runs_again(reply, 10.0 + 2 * SILENCE)


@pytest.mark.parametrize("reply", [tokens(), tokens("stop")])
def test_tokens_on_their_way_when_a_request_ended_say_nothing(reply: Reply) -> None:
    late = LateReplies(SILENCE)
    late.ended("r", 10.0)
    assert not late.runs_again(reply, 10.0 + SILENCE / 2)


@pytest.mark.parametrize("reply", [Takeover(request_id="r", attempt=2), tokens("length")])
def test_another_gateway_answers_for_a_request_that_continues_there(reply: Reply) -> None:
    late = LateReplies(SILENCE)
    late.left("r", 10.0)
    late.ended("r", 10.0)
    assert not late.runs_again(reply, 10.0 + 2 * SILENCE)


def test_one_of_an_engines_frames_is_enough() -> None:
    late = LateReplies(SILENCE)
    late.ended("r", 10.0)
    assert not late.runs_again(tokens(), 10.0 + 2 * SILENCE), "the Disown ends it, and Failed comes"
    assert late.runs_again(failed("r", 2, FailureCode.ABANDONED), 10.0 + 2 * SILENCE)
