"""Bad input is answered 4xx in OpenAI's form, and costs the service nothing.

After every one the same engine serves the next request; memory stays flat and nothing is left in
KV cache or queue. Bodies here; hostile connections and what others write into Redis are in
test_hostile_clients.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from headrace_testing.bad_bodies import BadBody, bad_bodies
from headrace_testing.single import CONTEXT, SingleStack
from headrace_testing.stack import MODEL

MIB = 2**20
BODIES = bad_bodies()
CHAT: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "x"}),
    ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("messages[0]", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages", {"messages": [{"role": "user", "content": ""}]}),
    ("messages", {"messages": [{"role": "user", "content": "a " * CONTEXT}]}),
    ("n", {"n": 10**9}),
    ("top_logprobs", {"top_logprobs": 5}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 10**6}),
    ("max_completion_tokens", {"max_completion_tokens": 2**63}),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
]


@pytest.fixture(autouse=True)
def _survives(single: SingleStack) -> Iterator[None]:
    """The next request is served, by the process that was there before."""
    yield
    assert single.engine.alive and single.gateway.alive
    answer = single.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.fixture(autouse=True, scope="module")
def _costs_nothing(single: SingleStack) -> Iterator[None]:
    """Over the whole file: no memory beyond what one large body may leave behind, no block."""
    single.complete()
    before = rss(single)
    yield
    single.until_clean()
    assert all(now - then < 192 * MIB for now, then in zip(rss(single), before, strict=True))


def rss(single: SingleStack) -> list[int]:
    """Bytes of the engine and the gateway."""
    return [
        psutil.Process(process.pid).memory_info().rss for process in (single.engine, single.gateway)
    ]


def refused(answer: httpx.Response) -> dict[str, object]:
    """The error object of a 4xx answer."""
    assert 400 <= answer.status_code < 500, f"{answer.status_code} {answer.text[:500]}"
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(answer.content) < 1000
    return error


@pytest.mark.parametrize("body", BODIES, ids=[body.name for body in BODIES])
def test_bad_completion_is_refused(single: SingleStack, body: BadBody) -> None:
    error = refused(single.post("/v1/completions", body.content, dict(body.headers)))
    if body.param is not None:
        assert error["param"] == body.param
        assert body.param.partition("[")[0] in str(error["message"])


@pytest.mark.parametrize(("param", "fields"), CHAT)
def test_bad_chat_is_refused(single: SingleStack, param: str, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    error = refused(single.post("/v1/chat/completions", json.dumps(body).encode()))
    assert error["param"] == param


def test_a_body_in_very_many_chunks(single: SingleStack) -> None:
    lines = (b" " for _ in range(100_000))
    request = httpx.Request(
        "POST",
        f"{single.gateway.url}/v1/completions",
        content=lines,
        headers={"content-type": "application/json"},
    )
    with httpx.Client(timeout=60) as client:
        refused(client.send(request))


@pytest.mark.parametrize("path", ["/v1/files", "/v1/load_lora_adapter", "/v1/embeddings", "/admin"])
def test_there_is_no_other_endpoint(single: SingleStack, path: str) -> None:
    answer = single.post(path, b"{}")
    assert answer.status_code == 404
    refused(answer)


def test_repeating_it_all_takes_no_more_memory(single: SingleStack) -> None:
    def everything() -> None:
        for body in BODIES:
            refused(single.post("/v1/completions", body.content, dict(body.headers)))

    everything()
    before = rss(single)
    for _ in range(2):
        everything()
    assert all(now - then < 24 * MIB for now, then in zip(rss(single), before, strict=True))
