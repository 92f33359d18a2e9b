"""Log lines: one JSON object each, with the fields of the current task, and without secrets."""

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from opentelemetry.trace import use_span

from headrace_common.errors import SettingsError
from headrace_common.observability import logs
from headrace_testing.telemetry import SpanMemory

Lines = Callable[[], list[dict[str, Any]]]

log = logging.getLogger("headrace_test")


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


@pytest.fixture
def lines() -> Lines:
    stream = io.StringIO()
    logs.configure("INFO", "json", stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_a_constant_message_and_fields(lines: Lines) -> None:
    log.info("request ended", extra={"output_tokens": 7, "finish_reason": "stop"})
    (line,) = lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "headrace_test",
        "message": "request ended",
        "output_tokens": 7,
        "finish_reason": "stop",
    }


def test_a_newline_in_a_message_stays_in_its_line(lines: Lines) -> None:
    log.info("said %s", 'a\nb\u2028c"')
    assert lines()[0]["message"] == 'said a\nb\u2028c"'


def test_an_exception_is_fields_of_the_same_line(lines: Lines) -> None:
    try:
        raise ValueError("no such block")
    except ValueError:
        log.exception("step failed")
    (line,) = lines()
    assert line["exception.type"] == "ValueError"
    assert line["exception.message"] == "no such block"
    assert "test_logs.py" in line["exception.stacktrace"]


async def test_bound_fields_follow_their_task_and_no_other(lines: Lines) -> None:
    both = asyncio.Barrier(2)

    async def serve(request_id: str) -> None:
        with logs.bound(request_id=request_id):
            await both.wait()
            log.info("served")

    await asyncio.gather(serve("a"), serve("b"))
    log.info("idle")
    assert sorted(line.get("request_id", "") for line in lines()) == ["", "a", "b"]


def test_the_current_span_is_named(lines: Lines) -> None:
    span = SpanMemory().tracer.start_span("chat")
    with use_span(span):
        log.info("inside")
    log.info("outside")
    inside, outside = lines()
    assert inside["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert inside["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert "trace_id" not in outside


def test_secrets_and_prompts_do_not_reach_a_line(lines: Lines) -> None:
    log.warning(
        "redis at %s refused",
        "redis://user:hunter2@127.0.0.1:6379/0",
        extra={"api_key": "sk-hunter2", "prompt": "hunter2", "error": "Bearer hunter2.hunter2"},
    )
    try:
        raise ValueError("redis://:hunter2@127.0.0.1")
    except ValueError:
        log.exception("failed")
    assert "hunter2" not in json.dumps(lines())
    assert lines()[0]["message"] == "redis at redis://user:[redacted]@127.0.0.1:6379/0 refused"


def test_a_url_without_a_password_is_kept(lines: Lines) -> None:
    log.info("listening", extra={"url": "http://127.0.0.1:8000/v1?to=a@b"})
    assert lines()[0]["url"] == "http://127.0.0.1:8000/v1?to=a@b"


def test_lines_below_the_level_are_dropped(lines: Lines) -> None:
    log.debug("detail")
    assert lines() == []


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(SettingsError, match="LOUD"):
        logs.configure("LOUD")


def test_uvicorns_log_lines_have_the_same_format(lines: Lines) -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        """Must never be called."""

    uvicorn.Config(app, log_config=None)
    logging.getLogger("uvicorn.error").info("started", extra={"color_message": "\x1b[1mstarted"})
    logging.getLogger("uvicorn.access").info(
        '%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/v1/models?api_key=hunter2", "1.1", 200
    )
    started, access = lines()
    assert (started["message"], "color_message" in started) == ("started", False)
    assert access["message"] == "http request"
    assert access["url.path"] == "/v1/models"
    assert access["http.response.status_code"] == 200


def test_configuring_twice_logs_once(lines: Lines) -> None:
    stream = io.StringIO()
    logs.configure("INFO", "json", stream)
    log.info("once")
    assert len(stream.getvalue().splitlines()) == 1
    assert lines() == []


def test_text_is_for_people_and_still_one_line() -> None:
    stream = io.StringIO()
    logs.configure("INFO", "text", stream)
    log.warning("queue full", extra={"model": "demo\nforged line"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("WARNING headrace_test  queue full  model=demo\\nforged line")


def test_auto_is_json_without_a_terminal() -> None:
    stream = io.StringIO()
    logs.configure("INFO", "auto", stream)
    log.info("hello")
    assert json.loads(stream.getvalue())["message"] == "hello"
