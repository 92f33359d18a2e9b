"""The table of errors in docs/api.md is complete, and each error has a test; rare errors have
theirs here."""

import ast
import gc
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from headrace_common.errors import FailureCode, RequestFailed
from headrace_common.sealing.sealer import SealingError
from headrace_common.text.chat_template import ChatTemplate
from headrace_gateway.errors import ApiError, to_api_error
from headrace_gateway.generation.prompts import ChatOptions, PromptEncoder
from headrace_gateway.http.body import BodyLimit
from headrace_gateway.limits.work import WorkPool
from headrace_gateway.resumable.event_ids import parse_event_id
from headrace_gateway.schemas.chat_messages import Message as ChatMessage
from headrace_testing.gateway import MODEL, Gateway

ROOT = Path(__file__).parents[3]
API = (ROOT / "docs" / "api.md").read_text()
TABLE = API[API.index("## Errors") :]
ROWS = [row.split("|") for row in TABLE.splitlines() if row.startswith("| ") and row[2:5].isdigit()]
DOCUMENTED = sorted({code for row in ROWS for code in re.findall(r"`([a-z_]+)`", row[2])})
ERRORS = ("ApiError", "invalid", "unavailable")
STATUSES = {int(status) for row in ROWS for status in re.findall(r"\d+", row[1])}


def parsed(folder: str, words: Sequence[str]) -> Iterator[ast.Module]:
    """The modules that contain one of the words."""
    # Python 3.11 cannot parse while it warns about objects of another test that it destroys.
    gc.collect()
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        if any(word in text for word in words):
            yield ast.parse(text)


def asserted() -> Iterator[str]:
    """The strings in all assertions, and in the parameters of tests."""
    codes = [f'"{code}"' for code in DOCUMENTED]
    for tree in (*parsed("tests/test_gateway", codes), *parsed("tests/test_e2e", codes)):
        for statement in tree.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                yield from words(statement)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                yield from words(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for decorator in node.decorator_list:
                    yield from words(decorator)


def words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def error_calls() -> list[ast.Call]:
    """The calls in the gateway's code that create an error."""
    return [
        node
        for tree in parsed("service", ERRORS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id in ERRORS
    ]


def test_every_documented_error_is_asserted_by_a_test() -> None:
    assert set(DOCUMENTED) - set(asserted()) == set()


def test_every_error_of_the_gateway_is_documented(error_calls: list[ast.Call]) -> None:
    codes = {
        word
        for call in error_calls
        for given in call.keywords
        if given.arg == "code"
        for word in words(given.value)
    }
    # Only probes get these codes.
    assert codes - set(DOCUMENTED) == {"not_live", "not_ready"}
    failures = [to_api_error(RequestFailed(failure, "why")) for failure in FailureCode]
    assert {error.code for error in failures} <= set(DOCUMENTED)


def test_temporary_errors_say_when_to_retry(error_calls: list[ast.Call]) -> None:
    for call in error_calls:
        status = call.args[0] if call.args else None
        if isinstance(status, ast.Constant) and status.value in (429, 503):
            assert "retry_after" in {given.arg for given in call.keywords}, ast.unparse(call)


def test_the_openapi_document_has_every_status(gateway: Gateway) -> None:
    paths = gateway.app.openapi()["paths"].values()
    documented = {
        int(status)
        for operations in paths
        for operation in operations.values()
        for status in operation["responses"]
    }
    # These belong to no path: a wrong method, and URLs and headers that are too large.
    assert STATUSES - documented == {405, 414, 431}
    assert documented - STATUSES == {200, 202}


def code_in(body: bytes) -> str:
    code: str = json.loads(body)["error"]["code"]
    return code


def status_and_code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.asyncio(loop_scope="session")
async def test_bodies_that_cannot_be_read(gateway: Gateway) -> None:
    path, media = "/v1/completions", {"content-type": "application/json"}
    broken = await gateway.http.post(path, content=b"{", headers=media)
    packed = await gateway.http.post(path, content=b"x", headers={"content-encoding": "gzip"})
    headers = await gateway.http.get("/v1/models", headers={"x-a": "a" * 70_000})

    nowhere = await gateway.http.get("/nowhere")
    put = await gateway.http.put("/v1/models")

    assert status_and_code(nowhere) == (404, "not_found")
    assert status_and_code(put) == (405, "method_not_allowed")
    assert status_and_code(broken) == (400, "invalid_json")
    assert status_and_code(packed) == (415, "unsupported_encoding")
    assert status_and_code(headers) == (431, "headers_too_large")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_gateway_without_a_store_has_no_files(gateway: Gateway) -> None:
    assert status_and_code(await gateway.http.get("/v1/files")) == (400, "no_batches")


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (FailureCode.INVALID, 400, "request_invalid"),
        (FailureCode.MALFORMED, 500, "message_malformed"),
        (FailureCode.SEALED, 500, "seal_invalid"),
    ],
)
async def test_failures_of_the_queue_and_engines(
    gateway: Gateway, failure: FailureCode, status: int, code: str
) -> None:
    gateway.engine.script = lambda request: []
    gateway.engine.failure = RequestFailed(failure, "why")

    assert status_and_code(await gateway.complete()) == (status, code)
    assert to_api_error(RequestFailed(failure, "why")).code == code


def test_stored_data_that_cannot_be_opened_is_reported() -> None:
    error = to_api_error(SealingError("stored request: it was changed"))

    assert (error.status, error.code) == (500, "seal_invalid")
    assert error.headers["x-should-retry"] == "false"


async def test_a_content_length_that_is_not_a_number_is_refused() -> None:
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

    assert sent[0]["status"] == 400 and code_in(sent[1]["body"]) == "invalid_content_length"


@pytest.mark.parametrize("event_id", ["nonsense", "other:1-0", "r:" + "1." * 1000])
def test_an_invalid_event_id_is_refused(event_id: str) -> None:
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
        work, pipeline = WorkPool(executor, 1).of(""), services.pipeline
        encoding = PromptEncoder(work, pipeline.rendering, pipeline.images).chat(
            model, [ChatMessage(role="user", content="Hi")], ChatOptions()
        )
        with pytest.raises(Exception, match=r"template|alternate") as refused:
            await encoding

    error: Any = refused.value
    answer = error if isinstance(error, ApiError) else to_api_error(error)
    assert (answer.status, answer.code) == (400, code)
