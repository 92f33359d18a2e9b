"""The demo model as `headrace up` serves it without a flag: tools, reasoning, JSON."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from headrace_testing.headrace_up import UpProcess

CALCULATE: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Works out a sum.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MODEL = "headrace-demo"


@pytest.fixture
def client(served: UpProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        yield client


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_is_called_and_its_result_told(client: OpenAI, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 123 * 45?"}]
    asked = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[CALCULATE], tool_choice=choice, temperature=0
    )
    calls: Any = asked.choices[0].message.tool_calls
    (call,) = calls
    messages += [
        asked.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "5535"},
    ]
    told = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[CALCULATE], temperature=0
    )

    assert asked.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "calculate"
    assert json.loads(call.function.arguments) == {"expression": "123 * 45"}
    assert told.choices[0].message.content == "123 * 45 = 5535."


def test_a_call_is_streamed(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 123 * 45?"}],
        tools=[CALCULATE],
        temperature=0,
        stream=True,
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    arguments = "".join(function.arguments or "" for function in calls if function is not None)

    assert json.loads(arguments) == {"expression": "123 * 45"}
    assert not any(delta.content for delta in deltas)


def test_the_effort_decides_how_long_it_thinks(client: OpenAI) -> None:
    thoughts: dict[str, str | None] = {}
    for effort in ("none", "low", "high"):
        given: Any = effort
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is 7 + 8?"}],
            reasoning_effort=given,
            temperature=0,
        )
        message = answer.choices[0].message
        thoughts[effort] = message.model_dump().get("reasoning_content")
        assert message.content == "7 + 8 = 15."

    low, high = thoughts["low"], thoughts["high"]
    assert thoughts["none"] is None
    assert low is not None and high is not None and len(low) < len(high)


def test_a_schema_is_filled_after_thoughts(client: OpenAI) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 7 + 8?"}],
        response_format=form,
        reasoning_effort="low",
        temperature=0,
        max_tokens=200,
    )

    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.model_dump()["reasoning_content"]
    assert json.loads(answer.choices[0].message.content or "") == {"answer": 15}


def test_without_an_effort_no_thoughts_precede_what_a_schema_forces(client: OpenAI) -> None:
    schema: Any = {"enum": ["yes", "no"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "choice", "schema": schema}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is a dog an animal?"}],
        response_format=form,
        temperature=0,
    )

    assert answer.choices[0].message.model_dump().get("reasoning_content") is None
    assert json.loads(answer.choices[0].message.content or "") in ("yes", "no")
