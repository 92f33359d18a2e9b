"""Bad input is answered at once by a 4xx in OpenAI's format, and the next request works.

Covers bodies, counts, sampling numbers, stops and biases, chats. Not covered: broken HTTP, and
memory over hours.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_testing.gateway import MAX_MODEL_LEN, Gateway, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")

BIG = 2**63
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def assert_error(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    if param is not None:
        assert body["error"]["param"] == param
    error: dict[str, Any] = body["error"]
    return error


async def assert_works(gateway: Gateway) -> None:
    assert (await gateway.complete()).status_code == 200


RAW_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not json": b"{nope",
    "a list": b"[]",
    "a number": b"17",
    "nan": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": Infinity}',
    "minus infinity": b'{"prompt": "x", "top_p": -Infinity}',
    "huge exponent": b'{"prompt": "x", "temperature": 1e999}',
    "invalid utf-8": b'{"prompt": "\xff\xfe"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "deep list": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"logit_bias": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "unclosed": b'{"prompt": "x"',
    "two values": b'{"prompt": "x"} {"prompt": "y"}',
    "long number": b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("raw", RAW_BODIES.values(), ids=RAW_BODIES.keys())
async def test_a_broken_body_is_refused(gateway: Gateway, raw: bytes) -> None:
    headers = {"content-type": "application/json"}

    answer = await gateway.http.post(COMPLETIONS, content=raw, headers=headers)

    assert_error(answer, 400)
    await assert_works(gateway)


COMPLETION_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"n": 10**9}, "n"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 10**9}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "stream"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"prompt": ["x"] * 10**5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt[0]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [512]}, "prompt"),
    ({"prompt": [BIG]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], [1.5]]}, "prompt[1]"),
    ({"prompt": [[[1]]]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": BIG}, "max_tokens"),
    ({"max_tokens": "7"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"min_p": 2}, "min_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e308}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": BIG}, "seed"),
    ({"seed": -BIG - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(BIG): 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(50_000)}}, "logit_bias"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 10**5}, "stop_token_ids"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ["x"] * 10**4}, "stop"),
    ({"stop": "x" * 10**6}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"priority": BIG}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": 0}},
        "stream_options.include_obfuscation",
    ),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"echo": 1}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ({"guided_regex": "(a+"}, "guided_regex"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"structured_outputs": {"json": {"$ref": "http://x.example/y"}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "guided_regex": "a"}, "allowed_token_ids"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": ["x"] * 10**4}, "bad_words"),
    ({"bad_words": ["é" * 200]}, "bad_words"),
    ({"messages": []}, "messages"),
    ({"temprature": 1}, "temprature"),
    ({"model": 7}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETION_FIELDS, ids=lambda v: str(v)[:40])
async def test_a_bad_field_is_named(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    answer = await gateway.complete(**fields)

    assert_error(answer, 400, param)
    assert not gateway.engine.submitted
    await assert_works(gateway)


USER = {"role": "user", "content": "x"}
CHAT_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user|>", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "age": 3}]}, "messages[0].age"),
    ({"messages": [USER] * 5000}, "messages"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"store": True}, "store"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"verbosity": "loud"}, "verbosity"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_FIELDS, ids=lambda v: str(v)[:40])
async def test_a_bad_chat_field_is_named(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    answer = await gateway.chat(**fields)

    error = assert_error(answer, 400)
    assert str(error["param"]).startswith(param)
    assert not gateway.engine.submitted


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "it is /v1/chat/completions. Base URLs of OpenAI's clients"),
        ("/v1/v1/messages", "it is /v1/messages. Base URLs of OpenAI's clients end with /v1, tho"),
        ("/v1/chat/completions/", "it is /v1/chat/completions."),
        ("/metrics", "metrics are on a port of their own"),
        ("/v1", "the API is under /v1"),
        ("/v1/audio/speech", "audio is not served; text and embeddings are."),
    ],
)
async def test_a_wrong_base_url_is_recognised_by_the_path(
    gateway: Gateway, path: str, meant: str
) -> None:
    error = assert_error(await gateway.http.post(path, json={}), 404)

    assert error["message"].startswith(f"Invalid URL (POST {path}): {meant}")


async def test_pictures_are_refused_by_name(gateway: Gateway) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret"}}

    answer = await gateway.chat(messages=[{"role": "user", "content": [part]}])

    assert_error(answer, 400)


async def test_a_refused_field_comes_with_a_remedy(gateway: Gateway) -> None:
    error = assert_error(await gateway.complete(suffix="x"), 400)

    assert error["code"] == "unsupported_parameter"
    assert error["message"] == "suffix is not supported: this server does not fill in the middle."


async def test_a_mistyped_field_is_named_beside_the_missing_one(gateway: Gateway) -> None:
    answer = await gateway.http.post(CHAT, json={"model": "tiny", "mesages": []})
    error = assert_error(answer, 400, "messages")
    assert error["message"] == "messages: Field required; 'mesages' is unknown."


async def test_a_byte_order_mark_before_a_body_is_ignored(gateway: Gateway) -> None:
    """PowerShell and .NET write one unless they are told not to."""
    body = b"\xef\xbb\xbf" + json.dumps({"prompt": "x"}).encode()
    answer = await gateway.http.post(COMPLETIONS, content=body)

    assert answer.status_code == 200, answer.text


async def test_too_long_a_prompt_names_both_numbers(gateway: Gateway) -> None:
    error = assert_error(await gateway.complete(prompt=[5] * 600, max_tokens=10), 400)

    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"] and "610" in error["message"]
    assert error["param"] == "prompt"


async def test_a_prompt_that_is_surely_too_long_is_not_tokenized(gateway: Gateway) -> None:
    error = assert_error(await gateway.complete(prompt="x " * 10**6), 400)

    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


async def test_prompts_times_choices_are_bounded(gateway: Gateway) -> None:
    assert_error(await gateway.complete(prompt=["x"] * 64, n=3), 400, "n")


async def test_an_unknown_model_is_a_404(gateway: Gateway) -> None:
    error = assert_error(await gateway.complete(model="gpt-9"), 404, "model")

    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("value", ["0", "-1", "1e9", "nan", "inf", "soon"])
async def test_a_bad_deadline_is_refused(gateway: Gateway, value: str) -> None:
    answer = await gateway.http.post(
        COMPLETIONS, json={"prompt": "x"}, headers={"x-request-timeout": value}
    )

    assert_error(answer, 400, "x-request-timeout")


@pytest.mark.parametrize(
    "value", ["soon", "nan", "inf", "9e99", "2999-01-01T00:00:00Z", "2026-01-31T12:00:00", ""]
)
async def test_an_impossible_deadline_is_refused(gateway: Gateway, value: str) -> None:
    answer = await gateway.http.post(
        COMPLETIONS, json={"prompt": "x"}, headers={"x-request-deadline": value}
    )

    assert_error(answer, 400, "x-request-deadline")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/load_lora_adapter", 403),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/absent", 404),
    ],
)
async def test_wrong_paths_and_methods(
    gateway: Gateway, method: str, path: str, status: int
) -> None:
    assert_error(await gateway.http.request(method, path), status)


@pytest.mark.parametrize(
    ("path", "methods"),
    [(CHAT, "POST"), ("/v1/files/f", "GET, DELETE"), ("/v1/models", "GET, HEAD")],
)
async def test_the_answer_to_a_wrong_method_names_the_right_ones(
    gateway: Gateway, path: str, methods: str
) -> None:
    answer = await gateway.http.request("PATCH", path)

    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


async def test_compressed_bodies_are_refused_unread(gateway: Gateway) -> None:
    bomb = gzip.compress(b" " * 10**7)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}

    assert_error(await gateway.http.post(COMPLETIONS, content=bomb, headers=headers), 415)


async def test_other_media_types_are_refused(gateway: Gateway) -> None:
    assert_error(await gateway.http.post(COMPLETIONS, data={"prompt": "x"}), 415)


async def test_too_large_a_body_is_refused_by_its_length(checkpoint: Path) -> None:
    async with serve(checkpoint, max_body_bytes=2048) as gateway:
        assert_error(await gateway.complete(prompt="x" * 100_000), 413)
        await assert_works(gateway)


async def test_too_large_a_body_is_refused_while_it_comes(checkpoint: Path) -> None:
    async def chunks() -> Any:
        for _ in range(500):
            yield b" " * 100

    async with serve(checkpoint, max_body_bytes=2048) as gateway:
        headers = {"content-type": "application/json"}
        answer = await gateway.http.post(COMPLETIONS, content=chunks(), headers=headers)
        assert_error(answer, 413)
        await assert_works(gateway)


async def test_a_body_in_very_many_chunks_is_read(gateway: Gateway) -> None:
    raw = json.dumps({"prompt": "x" * 50}).encode()

    async def chunks() -> Any:
        yield b" " * 3
        for _ in range(5_000):
            yield b" "
        yield raw

    headers = {"content-type": "application/json"}
    answer = await gateway.http.post(COMPLETIONS, content=chunks(), headers=headers)

    assert answer.status_code == 200


async def test_callers_request_ids_are_never_echoed_raw(gateway: Gateway) -> None:
    for value in ("a b", "x" * 10_000, "a\tb"):
        answer = await gateway.http.post(
            COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": value}
        )
        assert answer.headers["x-request-id"] != value


TOKEN_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "x", "messages": [USER]}),
    ("/tokenize", {"prompt": 7}),
    ("/detokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [2**40]}),
    ("/detokenize", {"tokens": [5, 10**6]}),
    ("/detokenize", {"tokens": "x"}),
]


@pytest.mark.parametrize(("path", "body"), TOKEN_BODIES, ids=lambda v: str(v)[:30])
async def test_bad_token_bodies(gateway: Gateway, path: str, body: dict[str, Any]) -> None:
    assert_error(await gateway.http.post(path, json=body), 400)


async def test_variables_of_templates_have_any_name(gateway: Gateway) -> None:
    names = ("self", "context", "variables", "template", "model", "most", "text", "documents_")
    answer = await gateway.chat(chat_template_kwargs=dict.fromkeys(names, 1))

    assert answer.status_code == 200, answer.text
