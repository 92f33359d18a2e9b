"""The debug commands on a running engine: its steps, its requests, and a profile of its work."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from headrace_cli.errors import CliError, UsageError
from headrace_cli.main import app
from headrace_testing.headrace_up import UpProcess
from headrace_testing.processes import until


@pytest.fixture
def engine(served: UpProcess) -> str:
    return f"http://127.0.0.1:{served.metrics_port('engine-0')}"


def debug(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["debug", *arguments], terminal_width=200)


def complete(served: UpProcess, max_tokens: int, prompt: str = "Hello there") -> dict[str, Any]:
    body = {
        "model": "headrace-demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    found: dict[str, Any] = answer.json()
    return found


def test_the_last_steps_are_those_of_the_requests_that_ran(served: UpProcess, engine: str) -> None:
    usage = complete(served, 20)["usage"]

    last = json.loads(debug("steps", "--url", engine, "--last", "20", "--json").output)["last"]

    assert [step["decode_tokens"] for step in last[-19:]] == [1] * 19
    assert last[-20]["prefill_tokens"] > 0
    assert usage["completion_tokens"] == 20
    assert all(step["seconds"] > 0 for step in last)


def test_a_person_reads_the_steps_as_a_table(served: UpProcess, engine: str) -> None:
    complete(served, 4)

    printed = debug("steps", "--url", engine, "--last", "2").output

    assert "prefill" in printed
    assert len(printed.strip().splitlines()) == 3


@contextmanager
def work(served: UpProcess) -> Iterator[None]:
    """Sends one request after the other until the block ends."""
    enough = Event()

    def ask() -> None:
        while not enough.is_set():
            complete(served, 400, prompt="A secret")

    thread = Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def test_a_running_request_is_shown_with_its_state_but_not_its_text(
    served: UpProcess, engine: str
) -> None:
    seen: list[str] = []

    def running() -> bool:
        shown = httpx.get(f"{engine}/debug/requests")
        requests = shown.json()["requests"]
        if requests and requests[0]["sequences"]:
            seen.append(shown.text)
        return bool(seen)

    with work(served):
        until(running, "a request is seen in the engine")

    (shown,) = seen
    (request,) = json.loads(shown)["requests"]
    assert request["sequences"][0]["state"] in ("running", "waiting")
    assert request["sequences"][0]["tokens"] >= request["prompt_tokens"]
    assert request["unmoved_for"] < 60
    assert "secret" not in shown


def test_a_profile_is_a_trace_of_the_next_steps(
    served: UpProcess, engine: str, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    with work(served):
        result = debug("profile", str(file), "--url", engine, "--steps", "3")

    assert result.exit_code == 0, result.output
    events = json.loads(file.read_text())["traceEvents"]
    assert sum(event.get("name") == "step" for event in events) >= 3


def test_a_profile_needs_a_folder_for_its_file(tmp_path: Path) -> None:
    result = debug("profile", str(tmp_path / "absent" / "trace.json"), "--url", "http://unasked")

    assert isinstance(result.exception, UsageError)
    assert "the folder of" in str(result.exception)


def test_an_idle_engine_refuses_a_profile_with_the_reason(engine: str, tmp_path: Path) -> None:
    result = debug("profile", str(tmp_path / "trace.json"), "--url", engine, "--timeout", "1")

    assert isinstance(result.exception, CliError)
    assert "fewer than 20 steps in 1 s" in str(result.exception)


@pytest.mark.parametrize(
    ("query", "message"), [("steps=0", "steps must be"), ("steps=5&timeout=x", "timeout must be")]
)
def test_a_bad_query_is_refused_by_field(engine: str, query: str, message: str) -> None:
    answer = httpx.post(f"{engine}/debug/profile?{query}")

    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_a_wrong_method_and_a_wrong_port_are_reported(served: UpProcess, engine: str) -> None:
    assert httpx.get(f"{engine}/debug/profile").status_code == 405
    result = debug("steps", "--url", served.url)
    assert isinstance(result.exception, CliError)
    assert "not an engine's metrics port" in str(result.exception)
