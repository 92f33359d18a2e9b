"""Tools and reasoning over chat completions: whole, streamed, refused."""

import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace_common.structured.structural_format import (
    Alternatives,
    Json,
    Repeat,
    Tag,
    TriggeredTags,
)
from headrace_common.structured.structural_tag import ReasoningBegin, StructuralTag, read
from headrace_gateway.parsing.harmony.header import OPENAI_GPTOSS
from headrace_gateway.parsing.reasoning.catalog import FAMILIES
from headrace_gateway.parsing.tool_calls.catalog import PARSERS
from headrace_gateway.settings import ReasoningParser, ToolCallParser
from headrace_testing.gateway import MODEL, Gateway, events, prompt_of, say, serve
from headrace_testing.tokenizers import write_tool_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME: Mapping[str, Any] = {"type": "function", "function": {"name": "time"}}
UNKNOWN_CALLS = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = f"<think>\nI look.\n</think>\n\nWait.\n{CALL}\n{CALL}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = write_tool_checkpoint(tmp_path_factory.mktemp("tools"))
    async with serve(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def tools(serving: Gateway) -> Gateway:
    serving.engine.reset()
    return serving


async def message(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


async def test_a_call_is_answered_as_one(tools: Gateway) -> None:
    say(tools, CALL)
    answer = await message(await tools.chat(tools=[WEATHER]))

    (call,) = answer["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert answer["content"] is None
    assert answer["finish_reason"] == "tool_calls"
    assert '"description": "Tells the weather."' in prompt_of(tools)


async def test_text_without_a_call_stays_text(tools: Gateway) -> None:
    say(tools, "It <tool_call> is not.")
    answer = await message(await tools.chat(tools=[WEATHER]))

    assert answer["content"] == "It <tool_call> is not."
    assert "tool_calls" not in answer
    assert answer["finish_reason"] == "stop"


async def test_reasoning_text_and_two_calls_in_one_answer(tools: Gateway) -> None:
    say(tools, THOUGHT)
    response = await tools.chat(tools=[WEATHER])
    answer = await message(response)

    assert answer["reasoning_content"] == answer["reasoning"] == "I look."
    assert answer["content"] == "Wait."
    ids = [call["id"] for call in answer["tool_calls"]]
    assert len(set(ids)) == 2
    usage = response.json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


async def test_a_stream_adds_up_to_the_whole_answer(tools: Gateway) -> None:
    say(tools, THOUGHT)
    answer = await tools.chat(
        tools=[WEATHER],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        return_token_ids=True,
    )
    *chunks, last = events(answer.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]

    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I look."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait."
    starts = [call for call in calls if "id" in call]
    assert [call["index"] for call in starts] == [0, 1]
    assert all(call["function"] == {"name": "weather", "arguments": ""} for call in starts)
    for index in (0, 1):
        pieces = [c["function"]["arguments"] for c in calls if c["index"] == index]
        assert len(pieces) > 2
        assert json.loads("".join(pieces)) == {"city": "Paris"}
    assert choices[-1]["finish_reason"] == "tool_calls"
    tokens = [
        entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert len(tokens) == len(ids) == last["usage"]["completion_tokens"]
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def strict(**fields: Any) -> dict[str, Any]:
    return {**WEATHER, "function": {**WEATHER["function"], "strict": True, **fields}}


def structured_tag(gateway: Gateway) -> StructuralTag | None:
    """The structured output that the last request asked of the engine."""
    held = gateway.engine.submitted[-1].sampling.structured_outputs
    return None if held is None else read(held.structural_tag)


async def test_calls_of_strict_tools_match_their_schemas(tools: Gateway) -> None:
    say(tools, CALL)
    answer = await message(await tools.chat(tools=[strict(), TIME]))
    tag = structured_tag(tools)
    await tools.chat(tools=[WEATHER, TIME])
    loose = structured_tag(tools)

    assert answer["tool_calls"][0]["function"]["name"] == "weather"
    assert loose is None and tag is not None
    assert isinstance(tag.format, TriggeredTags) and tag.format.triggers == ("<tool_call>",)
    weather, time = tag.format.tags
    assert weather.content == Json(WEATHER["function"]["parameters"])
    assert CALL.startswith(weather.begin) and CALL.endswith(weather.end)
    assert time.content == Json({"type": "object"}) and '"time"' in time.begin


@pytest.mark.parametrize(
    ("variables", "begin"),
    [
        ({}, ReasoningBegin.OPEN),
        ({"open_thinking": True}, ReasoningBegin.INSIDE),
        ({"enable_thinking": False}, None),
    ],
)
async def test_strict_calls_are_constrained_after_reasoning(
    tools: Gateway, variables: dict[str, bool], begin: ReasoningBegin | None
) -> None:
    say(tools, "Hello.")
    answer = await tools.chat(tools=[strict()], chat_template_kwargs=variables)
    tag = structured_tag(tools)

    assert answer.status_code == 200 and tag is not None
    assert (None if tag.reasoning is None else tag.reasoning.begin) == begin


async def test_a_strict_schema_that_cannot_be_enforced_is_refused(tools: Gateway) -> None:
    unknown = {"type": "object", "properties": {"x": {"type": "thing"}}}
    for schema in (unknown, {"$ref": "#"}):
        error = (await tools.chat(tools=[strict(parameters=schema)])).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_structured_output", "tools")


CITY = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


@pytest.mark.parametrize(
    "text", [CALL, '{"name": "Paris"}', '<think>Hm.</think>\n\n{"name": "Paris"}']
)
async def test_with_tools_an_answer_with_a_format_may_be_calls(tools: Gateway, text: str) -> None:
    say(tools, text)
    answer = await message(await tools.chat(tools=[WEATHER], response_format=FORMAT))
    tag = structured_tag(tools)

    assert tag is not None and tag.reasoning is not None
    assert isinstance(tag.format, Alternatives) and Json(CITY) in tag.format.elements
    if text is CALL:
        assert (answer["content"], answer["finish_reason"]) == (None, "tool_calls")
    else:
        assert (answer["content"], answer["finish_reason"]) == ('{"name": "Paris"}', "stop")


async def test_with_forced_calls_the_answer_format_is_not_used(tools: Gateway) -> None:
    say(tools, CALL)
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        asking = {"tools": [WEATHER], "tool_choice": choice}
        await message(await tools.chat(**asking, response_format=FORMAT))
        held = structured_tag(tools)
        await message(await tools.chat(**asking))
        assert held is not None and structured_tag(tools) == held


async def test_the_sdk_reads_a_streamed_call(tools: Gateway) -> None:
    say(tools, CALL)
    async with (
        AsyncOpenAI(base_url=f"{tools.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[WEATHER],  # type: ignore[list-item]
        ) as stream,
    ):
        answer = await stream.get_final_completion()

    calls = answer.choices[0].message.tool_calls
    assert calls is not None and calls[0].function.arguments == '{"city": "Paris"}'


TWO_CALLS = f'<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>\n{CALL}'


async def test_required_constrains_the_output_to_calls(tools: Gateway) -> None:
    say(tools, f"<think>Both.</think>\n\n{TWO_CALLS}")
    answer = await message(await tools.chat(tools=[WEATHER, TIME], tool_choice="required"))
    tag = structured_tag(tools)
    await tools.chat(tools=[TIME], tool_choice="required", parallel_tool_calls=False)
    once = structured_tag(tools)

    names = [call["function"]["name"] for call in answer["tool_calls"]]
    assert names == ["time", "weather"] and answer["finish_reason"] == "tool_calls"
    assert answer["reasoning_content"] == "Both." and "</think>" not in prompt_of(tools)
    assert tag is not None and tag.reasoning is not None and tag.reasoning.closed
    assert isinstance(tag.format, Repeat)
    assert isinstance(tag.format.content, Alternatives) and len(tag.format.content.elements) == 2
    assert once is not None and isinstance(once.format, Tag)


async def test_a_named_tool_constrains_the_output_to_one_call_of_it(tools: Gateway) -> None:
    say(tools, CALL)
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await message(await tools.chat(tools=[WEATHER, TIME], tool_choice=choice))
    tag = structured_tag(tools)

    (call,) = answer["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert tag is not None and isinstance(tag.format, Tag)
    assert tag.format.content == Json(WEATHER["function"]["parameters"])


async def test_tool_choice_none_parses_no_calls(tools: Gateway) -> None:
    say(tools, CALL)
    answer = await message(await tools.chat(tools=[WEATHER], tool_choice="none"))

    assert answer["content"] == CALL
    assert answer["finish_reason"] == "stop"


async def test_without_parallel_calls_only_the_first_counts(tools: Gateway) -> None:
    say(tools, CALL * 2)
    answer = await message(await tools.chat(tools=[WEATHER], parallel_tool_calls=False))

    assert len(answer["tool_calls"]) == 1


async def test_a_call_that_is_cut_off_has_finish_reason_length(tools: Gateway) -> None:
    say(tools, CALL)
    answer = await message(await tools.chat(tools=[WEATHER], max_tokens=60))

    assert answer["finish_reason"] == "length"
    assert '{"city": "Paris"}'.startswith(answer["tool_calls"][0]["function"]["arguments"])


async def test_an_answer_with_calls_can_be_sent_back(tools: Gateway) -> None:
    say(tools, THOUGHT)
    first = await message(await tools.chat(tools=[WEATHER]))
    del first["finish_reason"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        for call in first["tool_calls"]
    ]
    await message(
        await tools.chat(
            tools=[WEATHER], messages=[{"role": "user", "content": "Hi"}, first, *results]
        )
    )

    prompt = prompt_of(tools)
    assert "<think>I look.</think>Wait.<tool_call>" in prompt
    assert prompt.count('"arguments": {"city": "Paris"}') == 2
    assert prompt.count("tool\nrain") == 2


async def test_an_answer_that_was_reasoning_alone_comes_back_in_the_history(tools: Gateway) -> None:
    say(tools, "<think>I look and look")
    answer = (await tools.chat(max_tokens=8)).json()["choices"][0]["message"]
    assert answer["content"] is None and answer["reasoning_content"]
    user = {"role": "user", "content": "Hi"}
    again = await tools.chat(messages=[user, answer, user])

    assert again.status_code == 200, again.text
    assert f"<think>{answer['reasoning_content']}</think>" in prompt_of(tools)
    assert "None" not in prompt_of(tools)


async def test_a_template_that_opens_the_reasoning(tools: Gateway) -> None:
    say(tools, "I look.\n</think>\n\nHello")
    answer = await message(await tools.chat(chat_template_kwargs={"open_thinking": True}))

    assert prompt_of(tools).endswith("<think>\n")
    assert (answer["reasoning_content"], answer["content"]) == ("I look.", "Hello")


async def test_reasoning_can_be_switched_off(tools: Gateway) -> None:
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        say(tools, "Hello <think>")
        answer = await message(await tools.chat(**fields))

        assert prompt_of(tools).endswith("</think>\n\n")
        assert answer["content"] == "Hello <think>"
        assert "reasoning_content" not in answer


async def test_reasoning_that_never_ends_leaves_no_content(tools: Gateway) -> None:
    say(tools, "<think>on and on")
    answer = await message(await tools.chat())

    assert (answer["content"], answer["reasoning_content"]) == (None, "on and on")

    only_content = {"role": "assistant", "content": answer["content"]}
    question = {"role": "user", "content": "x"}
    again = await message(await tools.chat(messages=[question, only_content, question]))

    assert again["reasoning_content"] == "on and on"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools", None),
        ({"tool_choice": "required"}, "tool_choice", None),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            None,
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            None,
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", None),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ],
)
async def test_tools_that_cannot_be_used_are_refused_by_name(
    tools: Gateway, fields: dict[str, Any], param: str, code: str | None
) -> None:
    answer = await tools.chat(**fields)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert code is None or answer.json()["error"]["code"] == code
    assert not tools.engine.submitted


async def test_a_template_without_tools_refuses_them(gateway: Gateway) -> None:
    answer = await gateway.chat(tools=[WEATHER])
    effort = await gateway.chat(reasoning_effort="high")
    none = await gateway.chat(reasoning_effort="none")

    assert none.status_code == 200, none.text
    assert answer.status_code == effort.status_code == 400
    assert answer.json()["error"]["code"] == "tools_unsupported"
    assert effort.json()["error"]["code"] == "unsupported_parameter"


def tool_of(name: str, kind: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"type": kind}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


async def test_a_model_whose_calls_are_not_known_takes_only_forced_ones(tmp_path: Path) -> None:
    folder = write_tool_checkpoint(tmp_path / "model", UNKNOWN_CALLS)
    body = {"tools": [tool_of("f", "string"), tool_of("g", "integer")], "tool_choice": "required"}
    async with serve(folder) as running:
        refused = await running.chat(tools=[TIME])
        say(running, "{}")
        named = await running.chat(
            tools=[TIME], tool_choice={"type": "function", "function": {"name": "time"}}
        )
        say(running, '[{"name": "g", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]')
        several = await message(await running.chat(**body))
        await running.chat(**body, parallel_tool_calls=False)
        held = running.engine.submitted[-1].sampling.structured_outputs

    assert refused.json()["error"]["code"] == "tools_unsupported"
    (call,) = (await message(named))["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": "{}"}
    assert [each["function"]["name"] for each in several["tool_calls"]] == ["g", "f"]
    assert held is not None and isinstance(held.json, str)
    _definitions_do_not_meet(json.loads(held.json))


def _definitions_do_not_meet(schema: dict[str, Any]) -> None:
    assert schema["$defs"] == {"0.A": {"type": "string"}, "1.A": {"type": "integer"}}
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    calls = [each["properties"] for each in schema["items"]["anyOf"]]
    assert [each["name"]["const"] for each in calls] == ["f", "g"]
    refs = [each["parameters"]["properties"]["a"]["$ref"] for each in calls]
    assert refs == ["#/$defs/0.A", "#/$defs/1.A"]


async def test_the_settings_name_parsers(tmp_path: Path) -> None:
    folder = write_tool_checkpoint(tmp_path / "model", UNKNOWN_CALLS)
    async with serve(
        folder, tool_call_parser="pythonic", reasoning_parser="deepseek_r1"
    ) as running:
        say(running, "so</think>[time()]")
        answer = await message(await running.chat(tools=[TIME]))
        dashed = {"type": "object", "properties": {"a-b": {"type": "integer"}}}
        refused = await running.chat(tools=[strict(parameters=dashed)])
        say(running, 'so</think>[{"name": "weather", "parameters": {"a-b": 1}}]')
        forced = await message(
            await running.chat(tools=[strict(parameters=dashed)], tool_choice="required")
        )

    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_structured_output", "tools")
    assert "'a-b' of weather is not a Python identifier" in error["message"]
    # In JSON, if the model's own format cannot express it.
    assert forced["tool_calls"][0]["function"]["arguments"] == '{"a-b": 1}'
    assert answer["reasoning_content"] == "so"
    assert answer["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}


async def test_every_parser_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/api.md").read_text()
    firsts = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE)
    rows = {name for first in firsts for name in re.findall(r"\w+", first)}
    others = {"auto", "none"}

    assert {*get_args(ToolCallParser)} - others == {*PARSERS}
    assert {*get_args(ReasoningParser)} - others == {*FAMILIES, OPENAI_GPTOSS}
    assert {*PARSERS, *FAMILIES, OPENAI_GPTOSS} - rows == set()
