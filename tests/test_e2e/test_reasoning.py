"""Reasoning, then an answer that follows a schema, in real processes: an engine dies in either
part."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.text.checkpoint import demo_folder
from headrace_testing.processes import Starter, until
from headrace_testing.stack import MODEL, Stack

WORDS = r"([a-z]{3} ){40}end"
BUDGET = 60
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me of a mill."}],
    "max_tokens": 500,
    "temperature": 1.0,
    "seed": 5,
    "thinking_token_budget": BUDGET,
    "structured_outputs": {"regex": WORDS},
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, start: Starter) -> Iterator[Stack]:
    """The demo model on engines behind one gateway.

    The template opens reasoning with markers that the model does not know, so the budget ends it.
    """
    folder = tmp_path_factory.mktemp("reasoning")
    model = Path(shutil.copytree(demo_folder(), folder / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: [THINK]\n{% endif %}{# [/THINK] #}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (model / "chat_template.jinja").write_text(template)
    stack = Stack(model, folder, start=start)
    try:
        for _ in range(3):
            stack.add_engine()
        stack.add_gateway()
        stack.await_engines(3)
        yield stack
    finally:
        stack.close()


@pytest.mark.parametrize("part", ["reasoning_content", "content"])
def test_an_engine_may_die_in_reasoning_and_in_the_answer(stack: Stack, part: str) -> None:
    url = f"{stack.gateways[0].url}/v1/chat/completions"
    undisturbed = httpx.post(url, json=BODY, timeout=120).json()
    received = {"reasoning_content": "", "content": ""}
    killed = False
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for name in received:
                received[name] += delta.get(name) or ""
            if not killed and len(received[part]) > 20:
                killed = True
                engine = next(e for e in stack.engines if e.metric("headrace_engine_requests"))
                engine.kill()
                stack.engines.remove(engine)

    message = undisturbed["choices"][0]["message"]
    assert killed and received == {name: message[name] for name in received}
    assert re.fullmatch(WORDS, received["content"])
    details = undisturbed["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] >= BUDGET
    until(stack.queue_is_empty, "the queue to be empty")
