"""Streams survive their gateway: real gateways die, and clients continue at others."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import frozen, until
from headrace_testing.resuming import Bodies, ReceivedStream, Returning, by_choice, stream_all
from headrace_testing.stack import MODEL, GatewayProcess, Stack

STREAMS = 16
TOKENS = 160
# A flag's value in seconds: other gateways take over from a killed one sooner than by default.
LEASE = "3"


@pytest.fixture
def gateways(stack: Stack) -> Iterator[list[GatewayProcess]]:
    """Two gateways for one test; afterwards nothing may be left in the queue."""
    others = list(stack.gateways)
    own = [stack.add_gateway("--resume-window", "0.2", "--lease", LEASE) for _ in range(2)]
    for _ in range(2 - len(stack.engines)):
        stack.add_engine()
    stack.await_engines(2)
    yield own
    until(stack.queue_is_empty, "the queue to be empty")
    for gateway in own:
        gateway.kill()
    stack.gateways[:] = others


def bodies(cases: Sequence[GreedyCase]) -> Bodies:
    """Streams of every kind whose state another gateway must rebuild."""
    plain = {
        "model": MODEL,
        "max_tokens": len(cases[0].output),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 3}, {"n": 2}, {"stop": ["\n\n"]}]
    return [
        ("/v1/completions", {**plain, "prompt": list(case.prompt), **kinds[number % len(kinds)]})
        for number, case in enumerate(cases)
    ]


def test_streams_of_a_killed_gateway_continue_at_another_one(
    stack: Stack, gateways: list[GatewayProcess], cases: list[GreedyCase]
) -> None:
    dying, other = gateways
    wanted = bodies(cases[:STREAMS])
    undisturbed = asyncio.run(stream_all([other.url], wanted))

    wanted = [(path, dict(body)) for path, body in wanted]
    resumed = asyncio.run(stream_all([dying.url, other.url], wanted, dying.kill))

    assert [received.returned for received in undisturbed] == [0] * STREAMS
    assert sum(received.returned for received in resumed) > 0
    assert max(received.returned for received in resumed) == 1
    for before, after, case in zip(undisturbed, resumed, cases, strict=False):
        assert by_choice(after) == by_choice(before)
        tokens = [t for e in by_choice(after)[1] for t in e["choices"][0]["token_ids"]]
        assert tuple(tokens) == case.output


def test_engine_and_gateway_killed_at_once(
    stack: Stack, gateways: list[GatewayProcess], cases: list[GreedyCase]
) -> None:
    dying, other = gateways
    wanted = bodies(cases[:STREAMS])

    def disturb() -> None:
        dying.kill()
        stack.retire(stack.engines[0])

    resumed = asyncio.run(stream_all([dying.url, other.url], wanted, disturb))

    for received, case in zip(resumed, cases, strict=False):
        usage, *choices = by_choice(received)
        assert usage[0]["usage"]["completion_tokens"] == len(choices) * len(case.output)
        for events in choices:
            tokens = [t for e in events for t in e["choices"][0]["token_ids"]]
            assert tuple(tokens) == case.output
    for event in by_choice(resumed[1])[1]:
        assert len(event["choices"][0]["logprobs"]["tokens"]) == 1


def test_one_key_is_one_generation_for_clients_of_both_gateways(
    stack: Stack, gateways: list[GatewayProcess], cases: list[GreedyCase]
) -> None:
    ((path, body),) = bodies(cases[:1])

    async def ask() -> list[ReceivedStream]:
        async with httpx.AsyncClient(timeout=120) as client:
            headers = {"idempotency-key": "one for all"}
            clients = [
                Returning(client, [gateways[number % 2].url], lambda _: None) for number in range(8)
            ]
            return await asyncio.gather(*(each.stream(path, body, headers) for each in clients))

    before = output_tokens(stack)
    answers = asyncio.run(ask())

    assert all(answer.events == answers[0].events for answer in answers)
    assert len({answer.last_id for answer in answers}) == 1
    assert [answer.returned for answer in answers] == [0] * 8
    until(stack.queue_is_empty, "the queue to be empty")
    assert output_tokens(stack) - before == len(cases[0].output)


def output_tokens(stack: Stack) -> float:
    return sum(e.metric("headrace_engine_tokens_total", 'type="output"') for e in stack.engines)


def test_a_stored_outcome_is_the_same_bytes_everywhere(
    gateways: list[GatewayProcess], cases: list[GreedyCase]
) -> None:
    body = {
        "model": MODEL,
        "prompt": list(cases[0].prompt),
        "max_tokens": 20,
        "logprobs": 2,
        "n": 2,
    }
    headers = {"idempotency-key": "stored"}

    answers = [
        httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60)
        for gateway in (*gateways, *gateways)
    ]

    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.content for answer in answers}) == 1
    location = answers[0].headers["content-location"]
    status = httpx.get(gateways[1].url + location).json()
    assert (status["status"], status["result"]) == ("completed", answers[0].json())


def test_another_body_under_a_used_key_is_refused(
    gateways: list[GatewayProcess], cases: list[GreedyCase]
) -> None:
    body = {"model": MODEL, "prompt": list(cases[0].prompt), "max_tokens": 3}
    headers = {"idempotency-key": "used"}
    httpx.post(f"{gateways[0].url}/v1/completions", json=body, headers=headers, timeout=60)

    other = {**body, "max_tokens": 4}
    refused = httpx.post(f"{gateways[1].url}/v1/completions", json=other, headers=headers)

    assert (refused.status_code, refused.headers["x-should-retry"]) == (422, "false")
    assert refused.json()["error"]["code"] == "idempotency_key_reused"


def test_a_client_that_does_not_return_within_its_window_loses_its_request(
    stack: Stack, gateways: list[GatewayProcess], cases: list[GreedyCase]
) -> None:
    body = {
        "model": MODEL,
        "prompt": list(cases[0].prompt),
        "max_tokens": 900,
        "n": 16,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"x-resumable": "true"}
    url = f"{gateways[0].url}/v1/completions"
    with frozen(stack.engines):  # it must not end before its window does
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            status = gateways[1].url + answer.headers["content-location"]
        until(lambda: httpx.get(status).json()["status"] == "cancelled", "it to be cancelled")
    until(stack.queue_is_empty, "the queue to be empty")


def test_a_background_request_is_read_when_its_gateway_is_gone(
    gateways: list[GatewayProcess], cases: list[GreedyCase]
) -> None:
    body = {
        "model": MODEL,
        "prompt": list(cases[0].prompt),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "background": True,
    }
    queued = httpx.post(f"{gateways[0].url}/v1/completions", json=body, timeout=60)
    assert queued.status_code == 202
    gateways[0].kill()
    url = gateways[1].url + queued.headers["location"]

    until(lambda: httpx.get(url).json()["status"] == "completed", "the background request to end")

    result = httpx.get(url).json()["result"]
    assert tuple(result["choices"][0]["token_ids"]) == cases[0].output[:TOKENS]
    assert json.loads(queued.content)["status"] in ("queued", "in_progress")
