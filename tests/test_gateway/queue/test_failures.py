"""The errors that clients get if the queue or an engine fails, and cancellation if a client
leaves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace_common.errors import (
    BackendUnavailable,
    FailureCode,
    HeadraceError,
    QueueFull,
    RequestConflict,
)
from headrace_gateway.errors import to_api_error
from headrace_testing.gateway import ANSWER, Gateway, events, failed, serve
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (QueueFull("full", retry_after=0.2), 503, "queue_full", "1"),
        (QueueFull("yours", retry_after=7.1, tenant=True), 429, "tenant_queue_full", "8"),
        (BackendUnavailable("redis at 10.0.0.1 is gone"), 503, "backend_unavailable", "2"),
        (RequestConflict("twice"), 409, "request_conflict", None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_comes_before_any_stream(
    gateway: Gateway,
    error: HeadraceError,
    status: int,
    code: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    gateway.engine.refusal = error

    answer = await gateway.chat(stream=stream)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get("retry-after") == retry_after
    assert "10.0.0.1" not in answer.text


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (FailureCode.DEADLINE, 504),
        (FailureCode.INVALID, 400),
        (FailureCode.POISONED, 500),
        (FailureCode.MALFORMED, 500),
        (FailureCode.INTERNAL, 500),
        (FailureCode.LOST, 503),
    ],
)
async def test_a_failed_request_has_its_status(
    gateway: Gateway, code: FailureCode, status: int
) -> None:
    gateway.engine.script = lambda _: []
    gateway.engine.failure = failed(code)

    answer = await gateway.chat()

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code.value)


@pytest.mark.parametrize("code", list(FailureCode))
async def test_every_failure_has_a_status(code: FailureCode) -> None:
    assert 400 <= to_api_error(failed(code)).status < 600


async def test_of_several_prompts_a_refused_one_cancels_the_others(gateway: Gateway) -> None:
    accept = gateway.engine.submit

    async def second_is_refused(request: object) -> object:
        if gateway.engine.submitted:
            raise QueueFull("full", retry_after=1)
        return await accept(request)  # type: ignore[arg-type]

    gateway.engine.submit = second_is_refused  # type: ignore[method-assign, assignment]
    try:
        answer = await gateway.complete(prompt=["a", "b"])
    finally:
        del gateway.engine.submit

    assert answer.status_code == 503
    assert gateway.engine.cancellations == [gateway.engine.submitted[0].request_id]


@pytest.mark.parametrize("stream", [True, False])
async def test_of_several_prompts_a_failed_one_ends_all(gateway: Gateway, stream: bool) -> None:
    gateway.engine.script = lambda request: (
        gateway.engine.say(ANSWER)(request) if request.prompt_token_ids != (5,) else []
    )
    gateway.engine.failure = failed(FailureCode.INTERNAL)

    answer = await gateway.complete(prompt=[[4], [5]], stream=stream, max_tokens=400)

    last = list(events(answer.text))[-1] if stream else answer.json()
    assert last["error"]["code"] == "internal_error"


@asynccontextmanager
async def request(gateway: Gateway, *, stream: bool) -> AsyncIterator[asyncio.StreamWriter]:
    """A raw request whose answer the engine holds back, closed at the end."""
    gateway.engine.gate.clear()
    body = json.dumps({"prompt": ["x", "y"], "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def taken() -> bool:
        return len(gateway.engine.submitted) == 2

    async with gateway.connect() as (reader, writer):
        writer.write(head + body)
        await eventually(taken)
        if stream:
            await reader.readuntil(b"\r\n\r\n")
        yield writer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("abruptly", [True, False])
async def test_a_disconnect_cancels(gateway: Gateway, stream: bool, abruptly: bool) -> None:
    async with request(gateway, stream=stream) as writer:
        if abruptly:
            writer.transport.abort()

    async with asyncio.timeout(30):
        await gateway.engine.cancelled.wait()
    await eventually(gateway.is_idle)
    assert sorted(gateway.engine.cancellations) == sorted(
        r.request_id for r in gateway.engine.submitted
    )


async def test_errors_contain_the_request_id_of_the_logs(gateway: Gateway) -> None:
    gateway.engine.failure = failed(FailureCode.INTERNAL)
    gateway.engine.script = lambda request: []
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}

    chat = await gateway.chat()
    message = await gateway.http.post("/v1/messages", json=body)
    named = await gateway.http.post("/v1/messages", json=body, headers={"x-request-id": "mine"})

    ids = [request.request_id for request in gateway.engine.submitted]
    assert [answer.status_code for answer in (chat, message, named)] == [500] * 3
    assert chat.headers["x-request-id"] == ids[0] and "request-id" not in chat.headers
    assert message.headers["x-request-id"] == message.headers["request-id"] == ids[1]
    assert named.headers["x-request-id"] == named.headers["request-id"] == "mine"


PIPELINED = {
    "whole": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
    "half": b"GET /v1/models HTTP/1.1\r\nhost: ",
    "body": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n" + b" " * 9,
}


@pytest.mark.parametrize("more", PIPELINED.values(), ids=PIPELINED.keys())
async def test_a_disconnect_cancels_though_more_was_sent_ahead(
    gateway: Gateway, more: bytes
) -> None:
    async with request(gateway, stream=False) as writer:
        writer.write(more)
        await writer.drain()
        assert (await gateway.http.get("/v1/models")).status_code == 200

    async with asyncio.timeout(30):
        await gateway.engine.cancelled.wait()
    await eventually(gateway.is_idle)


@pytest.mark.parametrize(
    "more", [b"x" * 300_000, PIPELINED["whole"] * 50, PIPELINED["body"] + b" " * 90_000]
)
async def test_a_client_that_pipelines_too_much_is_dropped(gateway: Gateway, more: bytes) -> None:
    async with request(gateway, stream=False) as writer, asyncio.timeout(60):
        writer.write(more)
        await gateway.engine.cancelled.wait()
        await eventually(gateway.is_idle)


async def test_a_finished_request_is_not_cancelled(gateway: Gateway) -> None:
    await gateway.complete()
    await gateway.complete(stream=True)

    assert gateway.engine.cancellations == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_drain_lets_answers_end(checkpoint: Path, stream: bool) -> None:
    async with serve(checkpoint, drain_timeout=60) as gateway:
        gateway.engine.gate.clear()
        asking = asyncio.create_task(gateway.complete(stream=stream))

        async def taken() -> bool:
            return bool(gateway.engine.submitted)

        await eventually(taken)
        gateway.server.stop()
        gateway.engine.gate.set()
        answer = await asking

    assert answer.status_code == 200
    assert not gateway.engine.cancellations


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_that_outlast_the_drain_get_an_error(checkpoint: Path, stream: bool) -> None:
    async with serve(checkpoint, drain_timeout=0.01) as gateway:
        gateway.engine.gate.clear()
        asking = asyncio.create_task(gateway.complete(stream=stream))

        async def taken() -> bool:
            return bool(gateway.engine.submitted)

        await eventually(taken)
        gateway.server.stop()
        answer = await asking

    assert answer.status_code == 503  # nothing was sent yet, so a status can still report it
    assert answer.json()["error"]["code"] == "shutting_down"
    assert len(gateway.engine.cancellations) == 1


async def test_an_internal_fault_ends_the_connection_with_an_error(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection closes, so that its client sends no further request on it."""

    def fail(self: object, *args: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("headrace_gateway.models.models.Models.find", fail)
    answer = await gateway.complete()
    monkeypatch.undo()

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["connection"] == "close"
    assert (await gateway.complete()).status_code == 200
