"""Structured output through real processes: the page's examples run, and an engine dies midway."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI

from headrace_common.text.checkpoint import demo_folder
from headrace_testing.processes import Starter, until
from headrace_testing.stack import MODEL, Stack

PAGE = (Path(__file__).parents[2] / "docs" / "structured-outputs.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
WORDS = r"([a-z]{3} ){40}end"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, start: Starter) -> Iterator[Stack]:
    """The demo model on two engines behind one gateway."""
    stack = Stack(demo_folder(), tmp_path_factory.mktemp("structured"), start=start)
    try:
        for _ in range(2):
            stack.add_engine()
        stack.add_gateway()
        stack.await_engines(2)
        yield stack
    finally:
        stack.close()


def test_the_examples_of_the_page_run(stack: Stack) -> None:
    names: dict[str, Any] = {}
    for code in EXAMPLES:
        code = code.replace("http://127.0.0.1:8000", stack.gateways[0].url)
        code = code.replace('model="headrace-demo"', f'model="{MODEL}"')
        exec(code.replace(f'LLM(model="{MODEL}")', f"LLM({str(demo_folder())!r})"), names)

    jsonschema.validate(names["mill"], names["schema"])
    assert names["choice"] in ("yes", "no", "it depends")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", names["date"])


def test_a_stream_continues_within_its_grammar_on_another_engine(stack: Stack) -> None:
    body = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 400,
        "temperature": 1.0,
        "seed": 5,
        "structured_outputs": {"regex": WORDS},
    }
    url = f"{stack.gateways[0].url}/v1/completions"
    undisturbed = httpx.post(url, json=body, timeout=60).json()["choices"][0]["text"]
    text, killed = "", False
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            if not killed and len(text) > 30:
                killed = True
                engine = next(e for e in stack.engines if e.metric("headrace_engine_requests"))
                engine.kill()
                stack.engines.remove(engine)

    assert killed
    assert re.fullmatch(WORDS, text) and text == undisturbed
    until(stack.queue_is_empty, "the queue to be empty")


def test_a_grammar_that_becomes_too_costly_is_a_client_error(stack: Stack) -> None:
    body = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": 300,
        "min_tokens": 300,
        "guided_grammar": 'start: a* a* a* a* a*\na: b*\nb: "x"*',
    }

    answer = httpx.post(f"{stack.gateways[0].url}/v1/completions", json=body, timeout=60)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("structured_outputs: ")


def test_prompts_are_scored_and_echoed(stack: Stack) -> None:
    with OpenAI(base_url=f"{stack.gateways[0].url}/v1", api_key="none") as client:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=0, echo=True, logprobs=2
        )

    (choice,) = answer.choices
    assert choice.text == "Once upon a time" and choice.logprobs is not None
    found = choice.logprobs.token_logprobs or []
    assert found[0] is None and len(found) == answer.usage.prompt_tokens
    assert all(value is not None and value <= 0 for value in found[1:])
