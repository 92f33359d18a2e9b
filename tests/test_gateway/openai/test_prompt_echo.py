"""Prompts in answers: returned as text and tokens, and the log probabilities of prompts."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from headrace_common.errors import MessageError
from headrace_common.protocol.frames import decode_frame, encode_frame
from headrace_common.wire.messages import Frame, GenerateRequest, Logprobs, Tokens
from headrace_common.wire.prompt_logprobs import pack_prompt_logprobs, unpack_prompt_logprobs
from headrace_gateway.queue_client.client import Delta
from headrace_testing.gateway import ANSWER, Gateway, events

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "Hello world"


def scores(gateway: Gateway, text: str = PROMPT, count: int = 2) -> tuple[Logprobs, ...]:
    """The prompt's log probabilities from an engine: each token with `count` alternatives."""
    ids = gateway.engine.tokenizer.encode(text)
    return tuple(
        Logprobs(-0.5 * place, place, tuple((7 + other, -1.0 - other) for other in range(count)))
        for place in range(1, len(ids))
    )


def say_scores(gateway: Gateway, *texts: str) -> None:
    """Each request's first delta has the log probabilities of its prompt, as engines send them."""
    plain = gateway.engine.say(ANSWER)
    by_prompt = {
        tuple(gateway.engine.tokenizer.encode(text)): scores(gateway, text) for text in texts
    }

    def script(request: GenerateRequest) -> Sequence[Delta]:
        first, *rest = plain(request)
        assert request.sampling.prompt_logprobs is not None
        packed = pack_prompt_logprobs(by_prompt[tuple(request.prompt_token_ids)])
        return [first._replace(prompt_logprobs=packed), *rest]

    gateway.engine.script = script


def text_of(answer: Any, *, stream: bool) -> list[str]:
    texts: dict[int, str] = {}
    for body in events(answer.text) if stream else [answer.json()]:
        for choice in body["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_puts_each_prompt_before_its_choices(gateway: Gateway, stream: bool) -> None:
    answer = await gateway.complete(
        prompt=["a", "b b"], n=2, echo=True, max_tokens=50, stream=stream
    )

    wanted = ["a" + ANSWER, "a" + ANSWER, "b b" + ANSWER, "b b" + ANSWER]
    assert text_of(answer, stream=stream) == wanted


@pytest.mark.parametrize("stream", [True, False])
async def test_with_max_tokens_0_only_the_prompt_is_echoed(gateway: Gateway, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}

    answer = await gateway.complete(echo=True, max_tokens=0, stream=stream, **options)

    assert text_of(answer, stream=stream) == [PROMPT]
    bodies = list(events(answer.text)) if stream else [answer.json()]
    assert bodies[-1]["usage"]["completion_tokens"] == 0
    reasons = [choice["finish_reason"] for body in bodies for choice in body["choices"]]
    assert reasons[-1] == "length"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echoed_tokens_have_log_probabilities_and_offsets(
    gateway: Gateway, stream: bool, max_tokens: int
) -> None:
    say_scores(gateway, PROMPT)

    answer = await gateway.complete(echo=True, logprobs=2, max_tokens=max_tokens, stream=stream)

    lists: dict[str, list[Any]] = {}
    for body in events(answer.text) if stream else [answer.json()]:
        for choice in body["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                lists[name] = lists.get(name, []) + values
    ids = gateway.engine.tokenizer.encode(PROMPT)
    assert len(lists["tokens"]) == len(ids) + max_tokens
    assert "".join(lists["tokens"][: len(ids)]) == PROMPT
    assert lists["token_logprobs"][: len(ids)] == [None, *(one.logprob for one in scores(gateway))]
    assert lists["top_logprobs"][0] is None and len(lists["top_logprobs"][1]) == 3
    assert lists["text_offset"][0] == 0
    assert lists["text_offset"][len(ids) :][:1] == ([len(PROMPT)] if max_tokens else [])


async def test_every_chunk_can_have_the_number_of_tokens(gateway: Gateway) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}

    for ask in (gateway.chat, partial(gateway.complete, prompt=["a", "b b"], n=2)):
        answer = await ask(stream=True, stream_options=options)

        *chunks, last = [body["usage"] for body in events(answer.text)]
        made = [usage["completion_tokens"] for usage in chunks]
        assert made == sorted(made) and made[-1] == last["completion_tokens"]
        assert len(set(made)) > 3, "they come while tokens are made"
        assert {usage["prompt_tokens"] for usage in chunks} == {last["prompt_tokens"]}
        assert all(
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            for usage in chunks
        )


async def test_prompt_logprobs_are_vllms(gateway: Gateway) -> None:
    say_scores(gateway, PROMPT, "a b c")

    answer = await gateway.complete(prompt=[PROMPT, "a b c"], n=2, prompt_logprobs=1, max_tokens=2)

    tokenizer = gateway.engine.tokenizer
    for choice in answer.json()["choices"]:
        text = PROMPT if choice["index"] < 2 else "a b c"
        ids, found = tokenizer.encode(text), choice["prompt_logprobs"]
        assert found[0] is None and len(found) == len(ids)
        for token, position, expected in zip(
            ids[1:], found[1:], scores(gateway, text), strict=True
        ):
            assert position[str(token)]["logprob"] == expected.logprob
            assert position[str(token)]["rank"] == expected.rank
            assert position["7"] == {
                "logprob": -1.0,
                "rank": 1,
                "decoded_token": tokenizer.decode([7]),
            }
            assert len(position) == 2
    assert {one.sampling.prompt_logprobs for one in gateway.engine.submitted} == {1}


async def test_a_chat_returns_prompt_logprobs_next_to_its_choices(gateway: Gateway) -> None:
    plain = gateway.engine.say(ANSWER)

    def script(request: GenerateRequest) -> Sequence[Delta]:
        first, *rest = plain(request)
        expected = [Logprobs(-0.5, 1, ())] * (len(request.prompt_token_ids) - 1)
        return [first._replace(prompt_logprobs=pack_prompt_logprobs(expected)), *rest]

    gateway.engine.script = script
    body = (await gateway.chat(prompt_logprobs=0)).json()

    prompt = gateway.engine.submitted[0].prompt_token_ids
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len(prompt)
    assert body["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 1}])
async def test_prompt_logprobs_are_refused_for_stored_requests(
    gateway: Gateway, fields: dict[str, Any]
) -> None:
    headers = {"Idempotency-Key": "k"}
    body = {"model": "tiny", "prompt": PROMPT, **fields}

    answer = await gateway.http.post("/v1/completions", json=body, headers=headers)

    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(fields))
    assert not gateway.engine.submitted


async def test_prompt_logprobs_are_packed_on_the_wire() -> None:
    expected = (
        Logprobs(-0.25, 3, ((5, -0.125), (9, -math.inf))),
        Logprobs(-8.5, 70_000, ((1, 0.0),) * 2),
    )
    packed = pack_prompt_logprobs(expected)
    tokens = Tokens("r", 1, 0, 0, (4,), prompt_logprobs=packed)

    (reply,) = decode_frame(encode_frame(Frame("e", (tokens,)))).replies

    assert reply == tokens
    assert unpack_prompt_logprobs(packed) == expected
    assert unpack_prompt_logprobs(pack_prompt_logprobs(())) == ()


@pytest.mark.parametrize("data", [None, b"", b"\x01\0\0\0" + b"x" * 9, b"\xff" * 44, b"\0" * 13])
async def test_broken_bytes_are_refused(data: Any) -> None:
    with pytest.raises(MessageError):
        unpack_prompt_logprobs(data)
