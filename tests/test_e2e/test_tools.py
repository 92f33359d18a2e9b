"""Forced tool calls and stored responses in real processes: gateway, queue, engine, grammar."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic
from openai import OpenAI

from headrace_common import demo_model
from headrace_testing.processes import Starter
from headrace_testing.stack import MODEL, GatewayProcess, Stack
from headrace_testing.tool_templates import CHATML_WITH_TOOLS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
HI: Any = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, start: Starter) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("tools")
    template = folder / "template.jinja"
    template.write_text(CHATML_WITH_TOOLS)
    stack = Stack(Path(demo_model.__path__[0]), folder, start=start)
    try:
        stack.add_engine()
        gateway = stack.add_gateway(
            "--chat-template",
            str(template),
            "--tool-call-parser",
            "qwen3_coder",
            "--reasoning-parser",
            "none",
        )
        stack.await_engines(1)
        yield gateway
    finally:
        stack.close()


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_forced_calls_match_their_schema(gateway: GatewayProcess, choice: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HI,
            tools=[tool],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
            n=2,
        )

    for one in answer.choices:
        assert one.message.tool_calls is not None
        (call,) = one.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        assert one.finish_reason == "tool_calls"


def test_with_tools_an_answer_matches_its_format_or_is_calls(gateway: GatewayProcess) -> None:
    parameters = {**SCHEMA, "required": ["city"]}
    tool: Any = {"name": "weather", "parameters": parameters, "strict": True}
    form: Any = {"type": "json_schema", "json_schema": {"name": "days", "schema": SCHEMA}}
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HI,
            tools=[{"type": "function", "function": tool}],
            response_format=form,
            parallel_tool_calls=False,
            max_tokens=200,
            n=4,
            seed=1,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )

    for one in answer.choices:
        if one.message.tool_calls is None:
            jsonschema.validate(json.loads(one.message.content or ""), SCHEMA)
        else:
            (call,) = one.message.tool_calls
            assert call.type == "function" and one.message.content is None
            jsonschema.validate(json.loads(call.function.arguments), parameters)


def test_a_message_with_a_forced_tool_is_streamed(gateway: GatewayProcess) -> None:
    with (
        Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model=MODEL,
            max_tokens=200,
            messages=HI,
            tools=[{"name": "weather", "input_schema": SCHEMA}],
            tool_choice={"type": "tool", "name": "weather"},
        ) as stream,
    ):
        message = stream.get_final_message()

    (use,) = message.content
    assert use.type == "tool_use"
    jsonschema.validate(use.input, SCHEMA)


def test_a_response_is_stored_and_continued(gateway: GatewayProcess) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(model=MODEL, input="Hello!", max_output_tokens=12) as stream:
            events = list(stream)
        first = events[-1]
        assert first.type in ("response.completed", "response.incomplete")
        again = list(client.responses.retrieve(first.response.id, stream=True))
        second = client.responses.create(
            model=MODEL,
            input="And then?",
            previous_response_id=first.response.id,
            max_output_tokens=4,
        )
        kept = client.responses.retrieve(second.id)

    assert [event.type for event in again] == [event.type for event in events]
    assert kept.output_text == second.output_text
    assert second.usage is not None and first.response.usage is not None
    assert second.usage.input_tokens > first.response.usage.total_tokens
