"""Gateways and engines of the previous release work together with today's: `make test-upgrade
FROM=v0.1.0`. Each test has a gateway and an engine of both releases, and runs in both directions:
as an upgrade and as a rollback."""

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_testing.greedy import GreedyCase
from headrace_testing.previous import start_previous
from headrace_testing.processes import start_program, until
from headrace_testing.resuming import Bodies, ReceivedStream, by_choice, stream_all
from headrace_testing.stack import MODEL, EngineProcess, GatewayProcess, Stack

STREAMS = 16
TOKENS = 160

pytestmark = pytest.mark.previous


@dataclass(frozen=True, slots=True)
class Side:
    """The processes of one release."""

    gateway: GatewayProcess
    engine: EngineProcess


@dataclass(frozen=True, slots=True)
class Both:
    """A stack of two releases, of which `old` is the one that is replaced."""

    stack: Stack
    old: Side
    new: Side


@pytest.fixture(params=["upgrade", "rollback"])
def both(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[Both]:
    stack = Stack(checkpoint, tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = "--resume-window", "30", "--chat-template", str(template)
    try:
        sides = []
        for start in (start_previous, start_program):
            # An engine that is told to end gives its streams back.
            engine = stack.add_engine("--drain-timeout", "0", start=start)
            sides.append(Side(stack.add_gateway(*flags, start=start), engine))
        stack.await_engines(2)
        if request.param == "rollback":
            sides.reverse()
        yield Both(stack, *sides)
    finally:
        stack.close()


def bodies(cases: list[GreedyCase]) -> Bodies:
    plain = {
        "model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": True,
    }  # fmt: skip
    return [("/v1/completions", {**plain, "prompt": list(case.prompt)}) for case in cases]


def assert_right(streams: list[ReceivedStream], cases: list[GreedyCase]) -> None:
    for received, case in zip(streams, cases, strict=True):
        (events,) = by_choice(received)
        tokens = [t for event in events for t in event["choices"][0]["token_ids"]]
        assert tuple(tokens) == case.output[:TOKENS]


def test_each_gateway_streams_from_both_engines(both: Both, cases: list[GreedyCase]) -> None:
    wanted = cases[:STREAMS]
    for side in (both.old, both.new):
        for engine in (both.old.engine, both.new.engine):
            other = both.new.engine if engine is both.old.engine else both.old.engine
            other.signal(signal.SIGSTOP)
            try:
                streams = asyncio.run(stream_all([side.gateway.url], bodies(wanted)))
            finally:
                other.signal(signal.SIGCONT)
            assert_right(streams, wanted)


@pytest.mark.parametrize("part", ["gateway", "engine"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_streams_continue_at_the_other_release(
    both: Both, cases: list[GreedyCase], part: str, number: signal.Signals
) -> None:
    wanted = cases[:STREAMS]
    goes: GatewayProcess | EngineProcess = getattr(both.old, part)

    def disturb() -> None:
        goes.signal(number)
        goes.wait()

    urls = [both.old.gateway.url, both.new.gateway.url]
    streams = asyncio.run(stream_all(urls, bodies(wanted), disturb))

    assert_right(streams, wanted)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "once", "max_tokens": 20, "background": True}),
        ("/v1/responses", {"input": "once", "max_output_tokens": 20, "background": True}),
    ],
)
def test_each_gateway_reads_requests_that_the_other_stored(
    both: Both, path: str, body: dict[str, Any]
) -> None:
    body = {"model": MODEL, "temperature": 0, **body}
    stored = httpx.post(both.old.gateway.url + path, json=body, timeout=60)
    assert stored.status_code < 300, stored.text
    where = stored.headers.get("location") or f"{path}/{stored.json()['id']}"

    def read(side: Side) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(side.gateway.url + where).raise_for_status().json()
        return found

    until(lambda: read(both.old)["status"] == "completed", "it to be completed")
    assert read(both.new) == read(both.old)


def test_a_key_is_one_request_for_both_gateways(both: Both) -> None:
    body = {"model": MODEL, "prompt": "once", "max_tokens": 20}
    answers = [
        httpx.post(f"{side.gateway.url}/v1/completions", json=body,
                   headers={"idempotency-key": "one"}, timeout=60)
        for side in (both.old, both.new)
    ]  # fmt: skip
    assert answers[0].raise_for_status().content == answers[1].raise_for_status().content


def test_a_batch_that_one_gateway_began_is_ended_by_the_other(
    both: Both, cases: list[GreedyCase]
) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": path, "body": {**body, "stream": False}}
        for number, (path, body) in enumerate(bodies(cases[:STREAMS]))
    ]
    files = {"file": ("batch.jsonl", "\n".join(map(json.dumps, lines)).encode())}
    old, new = both.old.gateway, both.new.gateway
    with httpx.Client(timeout=60) as client:
        file = client.post(f"{old.url}/v1/files", files=files, data={"purpose": "batch"})
        batch_request = {
            "input_file_id": file.raise_for_status().json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        batch = client.post(f"{old.url}/v1/batches", json=batch_request).raise_for_status().json()
        old.kill()

        def read() -> dict[str, Any]:
            found: dict[str, Any] = client.get(f"{new.url}/v1/batches/{batch['id']}").json()
            return found

        until(lambda: read()["status"] == "completed", "the batch to be completed")
        output = client.get(f"{new.url}/v1/files/{read()['output_file_id']}/content")

    found = {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]["token_ids"]
        for answer in map(json.loads, output.raise_for_status().text.splitlines())
    }
    wanted = {str(n): list(case.output[:TOKENS]) for n, case in enumerate(cases[:STREAMS])}
    assert found == wanted
