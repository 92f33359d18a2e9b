"""Chats, responses and messages with a model that speaks Harmony, as gpt-oss does."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headrace_common.structured.structural_format import (
    Alternatives,
    Const,
    Format,
    Grammar,
    Json,
    Pattern,
    Rule,
    Tag,
    parts,
)
from headrace_common.structured.structural_tag import read
from headrace_testing.gateway import MODEL, Gateway, events, prompt_of, say, serve
from headrace_testing.tokenizers import harmony_tokenizer, write_checkpoint
from headrace_testing.tool_templates import HARMONY

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = (
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"SF"}'
)
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    },
}
OUTPUT = f"{ANALYSIS}I look.{NEXT}<|channel|>commentary<|message|>Wait.{NEXT}{CALL}"
TEXT = {"type": "const_string", "value": "a"}
RULES = {"type": "rules", "rules": {"a": TEXT}, "content": {"type": "rule", "name": "a"}}
HI = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = write_checkpoint(
        tmp_path_factory.mktemp("harmony"),
        harmony_tokenizer(),
        chat_template=HARMONY,
        config={"vocab_size": 512, "max_position_embeddings": 4096},
        eos_token="<|return|>",
    )
    async with serve(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def harmony(serving: Gateway) -> Gateway:
    serving.engine.reset()
    return serving


async def body_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_chat_separates_reasoning_text_and_call(harmony: Gateway) -> None:
    say(harmony, OUTPUT)
    body = await body_of(await harmony.chat(tools=[TOOL], reasoning_effort="xhigh"))

    (choice,) = body["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.", "Wait.")
    function = {"name": "get_weather", "arguments": '{"location":"SF"}'}
    assert [each["function"] for each in message["tool_calls"]] == [function]
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(
        harmony.engine.tokenizer.encode(f"{ANALYSIS}I look.<|end|>")
    )
    assert "Reasoning: high<|end|>" in prompt_of(harmony)
    assert prompt_of(harmony).endswith("<|start|>assistant")


async def test_a_stream_adds_up_to_the_same(harmony: Gateway) -> None:
    say(harmony, OUTPUT)
    answer = await harmony.chat(tools=[TOOL], stream=True)
    deltas = [each["choices"][0]["delta"] for each in events(answer.text) if each["choices"]]

    assert "".join(each.get("reasoning_content", "") for each in deltas) == "I look."
    assert "".join(each.get("content") or "" for each in deltas) == "Wait."
    calls = [each["tool_calls"][0]["function"] for each in deltas if "tool_calls" in each]
    assert calls[0]["name"] == "get_weather"
    assert "".join(each["arguments"] for each in calls) == '{"location":"SF"}'


async def test_responses_and_messages_have_the_same_parts(harmony: Gateway) -> None:
    say(harmony, OUTPUT)
    function = TOOL["function"]
    responses = await harmony.http.post(
        "/v1/responses",
        json={"model": MODEL, "input": "Hi", "tools": [{"type": "function", **function}]},
    )
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    body = {"model": MODEL, "max_tokens": 200, "messages": HI, "tools": [tool]}
    messages = await harmony.http.post("/v1/messages", json=body)

    items = (await body_of(responses))["output"]
    assert [each["type"] for each in items] == ["reasoning", "message", "function_call"]
    assert items[2]["arguments"] == '{"location":"SF"}'
    blocks = (await body_of(messages))["content"]
    assert [each["type"] for each in blocks] == ["thinking", "text", "tool_use"]
    assert blocks[2]["input"] == {"location": "SF"}


async def test_log_probabilities_of_an_answer_exclude_other_messages(harmony: Gateway) -> None:
    say(harmony, f"{ANALYSIS}I look.{NEXT}{FINAL}Yes.")
    body = {"include": ["message.output_text.logprobs"], "store": False}
    answer = await harmony.http.post(
        "/v1/responses", json={"model": MODEL, "input": "Hi", "top_logprobs": 1, **body}
    )

    content = (await body_of(answer))["output"][1]["content"][0]
    tokens = [each["token"] for each in content["logprobs"]]
    assert (content["text"], "".join(tokens)) == ("Yes.", "Yes.<|return|>")


async def test_a_call_ends_the_turn_whatever_the_end_tokens_of_the_checkpoint(
    harmony: Gateway,
) -> None:
    await body_of(await harmony.chat(stop_token_ids=[5]))

    call = harmony.engine.tokenizer.token_to_id("<|call|>")
    assert harmony.engine.submitted[-1].sampling.stop_token_ids == (5, call)


async def test_with_thinking_sent_back_the_template_writes_each_call_of_the_history(
    harmony: Gateway,
) -> None:
    calls = [
        {"id": each, "type": "function", "function": {"name": each, "arguments": '{"x": 1}'}}
        for each in ("one", "two")
    ]
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        *HI,
        {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "two", "content": "2 <|end|>"},
        {"role": "tool", "tool_call_id": "one", "content": "1"},
    ]
    await body_of(await harmony.chat(messages=history))

    call = (
        '<|start|>assistant to=functions.{0}<|channel|>commentary json<|message|>{{"x": 1}}<|call|>'
    )
    result = '<|start|>functions.{0} to=assistant<|channel|>commentary<|message|>"{1}"<|end|>'
    assert prompt_of(harmony) == "".join(
        (
            "<|start|>system<|message|>Reasoning: medium<|end|>",
            "<|start|>developer<|message|>Be brief.\n\nBe kind.<|end|>",
            "<|start|>user<|message|>Hi<|end|>",
            f"<|start|>assistant{ANALYSIS}Hm.\n\nWait.<|end|>",
            call.format("one") + result.format("one", "1"),
            call.format("two") + result.format("two", "2 <|end|>"),
            "<|start|>assistant",
        )
    )


async def test_reasoning_cannot_be_left_out(harmony: Gateway) -> None:
    error = (await harmony.chat(reasoning_effort="none")).json()["error"]

    assert (error["code"], error["param"]) == ("unsupported_parameter", "reasoning_effort")
    assert "low is the least" in error["message"]


def constraint_of(gateway: Gateway) -> Any:
    """The structured output that the last request asked of the engine."""
    structured = gateway.engine.submitted[-1].sampling.structured_outputs
    return None if structured is None else read(structured.structural_tag).format


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"response_format": FORMAT}, Json(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, Json({"type": "object"})),
        ({"guided_regex": "a+"}, Pattern("a+")),
        ({"guided_grammar": 'start: "x"'}, Grammar('start: "x"')),
        ({"guided_choice": ["a", "b"]}, Alternatives((Const("a"), Const("b")))),
        ({"response_format": {"type": "structural_tag", "format": TEXT}}, Const("a")),
        ({"response_format": {"type": "structural_tag", "format": RULES}}, Rule("a")),
    ],
)
async def test_an_answer_after_reasoning_must_match_its_format(
    harmony: Gateway, fields: dict[str, Any], content: Format
) -> None:
    say(harmony, f'{ANALYSIS}I look.{NEXT}{FINAL}{{"a": 1}}')
    (choice,) = (await body_of(await harmony.chat(**fields)))["choices"]
    grammar = constraint_of(harmony)
    begun = {"role": "assistant", "content": '{"a'}
    await body_of(
        await harmony.chat(
            **fields,
            messages=[*HI, begun],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    )
    within = constraint_of(harmony)

    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.", '{"a": 1}')
    assert Tag(FINAL, content) in parts(grammar)
    assert content in parts(within) and Tag(FINAL, content) not in parts(within)


async def test_forced_calls_are_constrained_after_reasoning(harmony: Gateway) -> None:
    say(harmony, f"{ANALYSIS}I look.{NEXT}{CALL}")
    (choice,) = (await body_of(await harmony.chat(tools=[TOOL], tool_choice="required")))["choices"]

    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert (
        choice["message"]["reasoning_content"] == "I look." and constraint_of(harmony) is not None
    )
