"""A policy chosen by a flag, in real processes: a request that would end too late."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.processes import Starter, until
from headrace_testing.single import CONTEXT, LONG
from headrace_testing.stack import MODEL, Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, start: Starter) -> Iterator[Stack]:
    """One engine that ends requests 1.5 s before their deadline, one gateway."""
    folder: Path = tmp_path_factory.mktemp("long")
    checkpoint = save_checkpoint(folder, "llama", max_position_embeddings=CONTEXT)
    stack = Stack(checkpoint, tmp_path_factory.mktemp("policies"), start=start)
    try:
        stack.add_engine("--policy", "deadline", "--policy-options", '{"margin": 1.5}')
        stack.add_gateway()
        stack.await_engines(1)
        yield stack
    finally:
        stack.close()


def test_the_client_gets_the_partial_text_of_a_request_past_its_deadline(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": [5], "max_tokens": LONG, "ignore_eos": True}
    answer = httpx.post(
        f"{stack.gateways[0].url}/v1/completions",
        json=body,
        headers={"x-request-timeout": "3"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert 0 < answer.json()["usage"]["completion_tokens"] < LONG
    until(lambda: stack.engines[0].idle, "the engine to be idle")


def test_a_request_that_cannot_meet_its_deadline_is_refused_with_the_reason(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": [5] * 50, "max_tokens": 4}
    answer = httpx.post(
        f"{stack.gateways[0].url}/v1/completions",
        json=body,
        headers={"x-request-timeout": "1.4"},
        timeout=60,
    )
    assert answer.status_code == 504, answer.text
    error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert "deadline" in error["message"]
