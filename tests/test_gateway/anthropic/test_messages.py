"""/v1/messages with Anthropic's SDK: whole, streamed, with tools, with thinking, and errors in
Anthropic's format."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from anthropic.types import ToolParam

from headrace_common.errors import FailureCode, QueueFull
from headrace_gateway.limits.api_keys import KeyFile
from headrace_testing.api_keys import KeyBook
from headrace_testing.gateway import (
    ANSWER,
    MODEL,
    Gateway,
    events,
    failed,
    gateway_checkpoint,
    prompt_of,
    say,
    serve,
)
from headrace_testing.tokenizers import write_tool_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER: ToolParam = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
EVERYTHING = f"<think>I look.</think>Wait.{CALL}"
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/secret"}}
HI: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = write_tool_checkpoint(tmp_path_factory.mktemp("messages"))
    async with serve(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def tools(serving: Gateway) -> Gateway:
    serving.engine.reset()
    return serving


@pytest_asyncio.fixture(loop_scope="session")
async def client(tools: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=tools.url, api_key="none", max_retries=0) as sdk:
        yield sdk


async def test_a_text_is_answered(client: AsyncAnthropic, tools: Gateway) -> None:
    message = await client.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=HI,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "somebody"},
        extra_body={"temperature": 0.5, "top_k": 5},
    )

    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ANSWER}]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", MODEL)
    assert message.usage.cache_read_input_tokens == 2
    request = tools.engine.submitted[-1]
    assert message.usage.input_tokens == len(request.prompt_token_ids) - 2
    assert (request.sampling.top_k, request.sampling.max_tokens) == (5, 100)
    assert "system\nBe brief.<|im_end|>" in prompt_of(tools)
    assert prompt_of(tools).endswith("</think>\n\n")


async def test_a_stop_sequence_ends_it(client: AsyncAnthropic) -> None:
    message = await client.messages.create(
        model=MODEL, max_tokens=100, messages=HI, stop_sequences=["time"]
    )

    assert message.content[0].to_dict()["text"] == "Once upon a "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "time")


async def test_max_tokens_end_it(client: AsyncAnthropic) -> None:
    message = await client.messages.create(model=MODEL, max_tokens=2, messages=HI)

    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 2


async def test_thinking_text_and_tools_are_blocks(client: AsyncAnthropic, tools: Gateway) -> None:
    say(tools, EVERYTHING)
    message = await client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=HI,
        tools=[WEATHER],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )

    thinking, text, use = message.content
    assert thinking.type == "thinking" and thinking.thinking == "I look."
    assert text.type == "text" and text.text == "Wait."
    assert use.type == "tool_use" and (use.name, use.input) == ("weather", {"city": "Paris"})
    assert use.id.startswith("toolu_")
    assert message.stop_reason == "tool_use"
    assert '"parameters": {"type": "object"' in prompt_of(tools)


async def test_a_stream_adds_up_to_the_message(client: AsyncAnthropic, tools: Gateway) -> None:
    say(tools, EVERYTHING)
    async with client.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=HI,
        tools=[WEATHER],
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        seen = [event async for event in stream]
        final = await stream.get_final_message()

    raw = [event.type for event in seen if event.type.startswith(("message_", "content_block_"))]
    assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]
    assert raw.count("content_block_start") == raw.count("content_block_stop") == 3
    thinking, text, use = final.content
    assert thinking.type == "thinking" and thinking.thinking == "I look."
    assert text.type == "text" and text.text == "Wait."
    assert use.type == "tool_use" and use.input == {"city": "Paris"}
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens > 0
    assert len([event for event in seen if event.type == "input_json"]) > 2


async def test_the_conversation_continues_with_tool_results(
    client: AsyncAnthropic, tools: Gateway
) -> None:
    say(tools, EVERYTHING)
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    first = await client.messages.create(
        model=MODEL, max_tokens=200, messages=HI, tools=[WEATHER], thinking=thinking
    )
    use = first.content[-1]
    assert use.type == "tool_use"
    results: Any = [
        {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": [{"type": "text", "text": "rain"}],
        },
        {"type": "text", "text": "So?"},
    ]
    await client.messages.create(
        model=MODEL,
        max_tokens=100,
        tools=[WEATHER],
        messages=[
            *HI,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ],
    )

    prompt = prompt_of(tools)
    assert "<think>I look.</think>Wait.<tool_call>" in prompt
    assert "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>user\nSo?<|im_end|>" in prompt


async def test_the_beginning_of_the_answer_can_be_prefilled(
    client: AsyncAnthropic, tools: Gateway
) -> None:
    await client.messages.create(
        model=MODEL, max_tokens=100, messages=[*HI, {"role": "assistant", "content": "Once"}]
    )

    assert prompt_of(tools).endswith("assistant\nOnce")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "tool", "name": "weather"},
        {"type": "any", "disable_parallel_tool_use": True},
    ],
)
async def test_a_tool_can_be_forced(client: AsyncAnthropic, tools: Gateway, choice: Any) -> None:
    say(tools, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
    message = await client.messages.create(
        model=MODEL, max_tokens=100, messages=HI, tools=[WEATHER], tool_choice=choice
    )

    (use,) = message.content
    assert use.type == "tool_use" and use.input == {"city": "Rome"}
    assert tools.engine.submitted[-1].sampling.structured_outputs is not None


async def test_tokens_are_counted(client: AsyncAnthropic, tools: Gateway) -> None:
    counted = await client.messages.count_tokens(model=MODEL, messages=HI, tools=[WEATHER])
    await client.messages.create(model=MODEL, max_tokens=9, messages=HI, tools=[WEATHER])

    assert counted.input_tokens == len(tools.engine.submitted[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].source.url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"container": "x"}, "container"),
        ({"stop": ["x"]}, "stop"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    tools: Gateway, fields: dict[str, Any], name: str
) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": HI, **fields}
    answer = await tools.http.post("/v1/messages", json=body)

    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"].startswith(
        (f"{name}:", f"{name} ", f"Unknown field: '{name}")
    )


async def test_errors_are_the_sdks_own_kinds(client: AsyncAnthropic, tools: Gateway) -> None:
    async def ask(**fields: Any) -> None:
        await client.messages.create(**{"model": MODEL, "max_tokens": 9, "messages": HI, **fields})

    with pytest.raises(anthropic.NotFoundError) as missing:
        await ask(model="absent")
    tools.engine.refusal = QueueFull("full", retry_after=3.2, tenant=True)
    with pytest.raises(anthropic.RateLimitError) as limited:
        await ask()
    tools.engine.refusal = QueueFull("full", retry_after=3.2)
    with pytest.raises(anthropic.APIStatusError) as full:
        await ask()

    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": missing.value.body["error"]["message"]},  # type: ignore[index]
    }
    assert limited.value.response.headers["retry-after"] == "4"
    assert full.value.status_code == 503
    assert full.value.type == "overloaded_error"


async def test_a_failure_within_a_stream_is_an_error_event(tools: Gateway) -> None:
    tools.engine.script = tools.engine.say("Once", eos=False)
    whole = tools.engine.script
    tools.engine.script = lambda request: whole(request)[:1]
    tools.engine.failure = failed(FailureCode.LOST)
    body = {"model": MODEL, "max_tokens": 9, "messages": HI, "stream": True}
    answer = await tools.http.post("/v1/messages", json=body)

    *_, last = events(answer.text)
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "it failed"}}
    assert "event: error\n" in answer.text and "[DONE]" not in answer.text


async def test_errors_before_the_body_is_read_have_the_same_shape(tools: Gateway) -> None:
    answers: list[httpx.Response] = [
        await tools.http.post("/v1/messages", content=b"{}", headers={"content-type": "text/html"}),
        await tools.http.post("/v1/messages", content=b"{"),
        await tools.http.get("/v1/messages"),
        await tools.http.post("/v1/messages/absent", json={}),
    ]

    assert [answer.status_code for answer in answers] == [415, 400, 405, 404]
    assert all(answer.json()["type"] == "error" for answer in answers)


async def test_the_sdks_key_is_an_api_key(tools: Gateway, tmp_path: Path) -> None:
    book = KeyBook(tmp_path / "keys.yaml")
    secret = book.add("alice")
    keys = KeyFile(book.path)
    async with serve(gateway_checkpoint(tmp_path / "model"), keys=keys) as guarded:
        async with AsyncAnthropic(base_url=guarded.url, api_key=secret, max_retries=0) as sdk:
            message = await sdk.messages.create(model=MODEL, max_tokens=100, messages=HI)
        async with AsyncAnthropic(base_url=guarded.url, api_key="wrong", max_retries=0) as sdk:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await sdk.messages.create(model=MODEL, max_tokens=100, messages=HI)

    assert message.content[0].to_dict()["text"] == ANSWER
    assert refused.value.type == "authentication_error"


async def test_models_are_listed_as_anthropics_clients_list_them(tmp_path: Path) -> None:
    folder = gateway_checkpoint(tmp_path)
    extra = {"second": str(folder), "third": str(folder)}
    async with (
        serve(folder, extra_models=extra) as gateway,
        AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
    ):
        page = await client.models.list(limit=2)
        assert [model.id for model in page.data] == [page.first_id, page.last_id]
        assert [model.id async for model in page] == [MODEL, "second", "third"]
        before = await client.models.list(limit=1, before_id="third")
        assert ([model.id for model in before.data], before.has_more) == (["second"], True)
        model = await client.models.retrieve("second")
        assert (model.type, model.display_name, model.lifecycle) == ("model", "second", "active")
        assert model.created_at.tzinfo is not None and model.max_input_tokens == 4096
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.models.retrieve("absent")
        assert caught.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            await client.models.list(after_id="absent")
        plain = (await gateway.http.get("/v1/models")).json()
        assert (plain["object"], len(plain["data"])) == ("list", 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_sequences": ["x"] * 99}, "stop_sequences: "),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text: ",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens: "),
    ],
)
async def test_errors_have_the_names_of_anthropics_fields(
    tools: Gateway, fields: dict[str, Any], message: str
) -> None:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **fields}
    answer = await tools.http.post("/v1/messages", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
