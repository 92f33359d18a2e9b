"""docs/api.md's table of errors: complete, and each error has a test, the rare ones here."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from headrace_common.chat_template import ChatTemplate
from headrace_common.errors import FailureCode, RequestFailed
from headrace_gateway.body import BodyLimit
from headrace_gateway.chat_messages import Message as ChatMessage
from headrace_gateway.errors import ApiError, to_api_error
from headrace_gateway.event_ids import parse_event_id
from headrace_gateway.prompts import ChatOptions, PromptEncoder
from headrace_testing.gateway import MODEL, Gateway

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()
TABLE = API[API.index("## Errors") :]
ROWS = [row.split("|") for row in TABLE.splitlines() if row.startswith("| ") and row[2:5].isdigit()]
DOCUMENTED = sorted({code for row in ROWS for code in re.findall(r"`([a-z_]+)`", row[2])})
GATEWAY = [path.read_text() for path in (ROOT / "service").rglob("*.py")]
TESTS = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]


@pytest.mark.parametrize("code", DOCUMENTED)
def test_a_documented_error_has_a_test(code: str) -> None:
    assert any(f'"{code}"' in text for text in TESTS)


def test_every_error_of_the_gateway_is_documented() -> None:
    made = {code for text in GATEWAY for code in re.findall(r'code="([a-z_]+)"', text)}
    # What probes are told, and no client.
    assert made - set(DOCUMENTED) <= {"not_live", "not_ready"}


def said(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.asyncio(loop_scope="session")
async def test_bodies_that_cannot_be_read(gateway: Gateway) -> None:
    path, json = "/v1/completions", {"content-type": "application/json"}
    broken = await gateway.http.post(path, content=b"{", headers=json)
    packed = await gateway.http.post(path, content=b"x", headers={"content-encoding": "gzip"})
    headers = await gateway.http.get("/v1/models", headers={"x-a": "a" * 70_000})

    assert said(broken) == (400, "invalid_json")
    assert said(packed) == (415, "unsupported_encoding")
    assert said(headers) == (431, "headers_too_large")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_gateway_without_a_store_has_no_files(gateway: Gateway) -> None:
    assert said(await gateway.http.get("/v1/files")) == (400, "no_batches")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (FailureCode.INVALID, 400, "request_invalid"),
        (FailureCode.MALFORMED, 500, "message_malformed"),
    ],
)
async def test_failures_of_the_queue_and_engines(
    gateway: Gateway, failure: FailureCode, status: int, code: str
) -> None:
    gateway.engine.script = lambda request: []
    gateway.engine.failure = RequestFailed(failure, "why")

    assert said(await gateway.complete()) == (status, code)
    assert to_api_error(RequestFailed(failure, "why")).code == code


async def test_a_length_that_is_no_number() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the request came through")

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    limit = BodyLimit(app, max_bytes=10, max_upload_bytes=10, timeout=1.0)
    headers = [(b"content-length", b"many")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await limit(scope, receive, send)

    assert sent[0]["status"] == 400 and b'"invalid_content_length"' in sent[1]["body"]


@pytest.mark.parametrize("event_id", ["nonsense", "other:1-0", "r:" + "1." * 1000])
def test_an_event_id_that_is_of_no_event(event_id: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_event_id(event_id, "0" * 32)

    assert (refused.value.status, refused.value.code) == (400, "invalid_event_id")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("template", "code"),
    [
        (None, "chat_template_missing"),
        ("{{ raise_exception('roles must alternate') }}", "chat_template_error"),
    ],
)
async def test_chats_that_the_template_does_not_take(
    gateway: Gateway, template: str | None, code: str
) -> None:
    services = gateway.app.state.services
    chat_template = None if template is None else ChatTemplate(template)
    model = replace(services.models.get(MODEL), chat_template=chat_template)
    with ThreadPoolExecutor(1) as executor:
        encoding = PromptEncoder(executor).chat(
            model, [ChatMessage(role="user", content="Hi")], ChatOptions()
        )
        with pytest.raises(Exception, match=r"template|alternate") as refused:
            await encoding

    error: Any = refused.value
    answer = error if isinstance(error, ApiError) else to_api_error(error)
    assert (answer.status, answer.code) == (400, code)
