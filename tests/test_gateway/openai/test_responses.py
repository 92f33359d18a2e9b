"""/v1/responses with OpenAI's SDK: created, streamed, stored, continued, cancelled, deleted."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.responses import FunctionToolParam, Response

from headrace_common.structured import structural_tag
from headrace_common.structured.structural_format import Json
from headrace_testing.backends import MODEL
from headrace_testing.gateway import Gateway, events
from headrace_testing.kept_gateway import KeptGateway, serve_kept
from headrace_testing.tokenizers import write_tool_checkpoint
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "strict": None,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
EVERYTHING = f"<think>I look.</think>Wait.{CALL}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KeptGateway]:
    folder = write_tool_checkpoint(tmp_path_factory.mktemp("responses"))
    async with serve_kept(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def kept(serving: KeptGateway) -> KeptGateway:
    serving.say("Hello there.")
    serving.engine.thaw()
    return serving


@pytest_asyncio.fixture(loop_scope="session")
async def client(kept: KeptGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{kept.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def ended(client: AsyncOpenAI, name: str) -> Response:
    async def is_over() -> bool:
        return (await client.responses.retrieve(name)).status not in ("queued", "in_progress")

    await eventually(is_over)
    return await client.responses.retrieve(name)


async def test_a_text_is_answered(client: AsyncOpenAI, kept: KeptGateway) -> None:
    response = await client.responses.create(
        model=MODEL,
        input="Hi",
        instructions="Be brief.",
        temperature=0.5,
        max_output_tokens=50,
        metadata={"a": "b"},
    )

    assert response.output_text == "Hello there."
    assert response.status == "completed"
    assert response.id.startswith("resp_")
    assert (response.temperature, response.max_output_tokens) == (0.5, 50)
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert "system\nBe brief.<|im_end|>\n<|im_start|>user\nHi" in kept.prompt


async def test_reasoning_text_and_calls_are_items(client: AsyncOpenAI, kept: KeptGateway) -> None:
    kept.say(EVERYTHING)
    response = await client.responses.create(model=MODEL, input="Hi", tools=[WEATHER])

    reasoning, message, call = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert reasoning.content[0].text == "I look."
    assert message.type == "message" and response.output_text == "Wait."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


async def test_a_stream_adds_up_to_the_response(client: AsyncOpenAI, kept: KeptGateway) -> None:
    kept.say(EVERYTHING)
    async with client.responses.stream(model=MODEL, input="Hi", tools=[WEATHER]) as stream:
        seen = [event async for event in stream]
        final = await stream.get_final_response()

    kinds = [event.type for event in seen]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    texts = [event.delta for event in seen if event.type == "response.output_text.delta"]
    arguments = [e.delta for e in seen if e.type == "response.function_call_arguments.delta"]
    thoughts = [e.delta for e in seen if e.type == "response.reasoning_text.delta"]
    assert "".join(texts) == final.output_text == "Wait."
    assert json.loads("".join(arguments)) == {"city": "Paris"}
    assert "".join(thoughts) == "I look."
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    )
    retrieved = await client.responses.retrieve(final.id)
    assert [item.type for item in retrieved.output] == [item.type for item in final.output]
    assert retrieved.output_text == "Wait."


async def test_a_conversation_continues(client: AsyncOpenAI, kept: KeptGateway) -> None:
    kept.say(EVERYTHING, "It rains.", "Yes.")
    first = await client.responses.create(
        model=MODEL, input="Weather?", tools=[WEATHER], instructions="Once."
    )
    call = next(item for item in first.output if item.type == "function_call")
    second = await client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        tools=[WEATHER],
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
    )
    await client.responses.create(model=MODEL, previous_response_id=second.id, input="Sure?")

    assert second.output_text == "It rains."
    assert "Once." not in kept.prompt
    messages = [part.split("\n", 1) for part in kept.prompt.split("<|im_start|>")[1:]]
    assert [role for role, _ in messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    assert messages[1][1].startswith("<think>I look.</think>Wait.<tool_call>")
    assert [text.split("<|im_end|>")[0] for _, text in messages[2:5]] == [
        "rain",
        "It rains.",
        "Sure?",
    ]


async def test_output_items_can_be_sent_back_as_input(
    client: AsyncOpenAI, kept: KeptGateway
) -> None:
    kept.say(EVERYTHING)
    first = await client.responses.create(model=MODEL, input="Hi", tools=[WEATHER], store=False)
    again: list[Any] = [item.to_dict() for item in first.output]
    await client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "Hi"}, *again, {"role": "user", "content": "?"}],
    )

    assert "<think>I look.</think>Wait.<tool_call>" in kept.prompt


async def test_json_schema_constrains_the_output(client: AsyncOpenAI, kept: KeptGateway) -> None:
    kept.say('{"a": 1}')
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response = await client.responses.create(
        model=MODEL,
        input="Hi",
        text={"format": {"type": "json_schema", "name": "it", "schema": schema, "strict": True}},
    )

    held = kept.requests[-1].sampling.structured_outputs
    assert held is not None and structural_tag.read(held.structural_tag).format == Json(schema)
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"


async def test_the_output_can_end_too_early(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)

    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


async def test_a_background_response_is_read_later(client: AsyncOpenAI, kept: KeptGateway) -> None:
    kept.engine.freeze()
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert response.status in ("queued", "in_progress")
    assert response.output == []
    kept.engine.thaw()
    done = await ended(client, response.id)

    assert done.status == "completed"
    assert done.output_text == "Hello there."
    assert done.background is True


async def test_a_cancelled_response_has_the_status_cancelled(
    client: AsyncOpenAI, kept: KeptGateway
) -> None:
    kept.engine.freeze()
    response = await client.responses.create(model=MODEL, input="Hi", background=True)
    await client.responses.cancel(response.id)
    kept.engine.thaw()

    assert (await ended(client, response.id)).status == "cancelled"
    *_, last = [event async for event in await client.responses.retrieve(response.id, stream=True)]
    assert last.type == "response.failed" and last.response.status == "cancelled"


async def test_a_stored_stream_is_read_again_from_any_event(
    client: AsyncOpenAI, kept: KeptGateway
) -> None:
    kept.say(EVERYTHING)
    stream = await client.responses.create(model=MODEL, input="Hi", tools=[WEATHER], stream=True)
    seen = [event async for event in stream]
    assert seen[0].type == "response.created"
    name = seen[0].response.id

    whole = [event async for event in await client.responses.retrieve(name, stream=True)]
    assert whole == seen
    for after in (0, 5, len(seen) - 2):
        rest = await client.responses.retrieve(name, stream=True, starting_after=after)
        assert [event async for event in rest] == seen[after + 1 :]


async def test_a_deleted_response_is_gone(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model=MODEL, input="Hi")
    await client.responses.delete(response.id)

    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_a_response_that_is_not_stored_cannot_be_found(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model=MODEL, input="Hi", store=False)

    assert response.output_text == "Hello there."
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_input_items_are_listed(client: AsyncOpenAI) -> None:
    response = await client.responses.create(
        model=MODEL, input=[{"role": "user", "content": text} for text in ("one", "two", "three")]
    )
    page = await client.responses.input_items.list(response.id, order="asc", limit=2)
    listed = [item async for item in page]

    assert [item.content for item in listed] == ["one", "two", "three"]  # type: ignore[union-attr]
    assert len(page.data) == 2 and page.has_more


async def test_sealed_reasoning_comes_back_as_the_models_own(
    client: AsyncOpenAI, kept: KeptGateway
) -> None:
    """Codex sends such a request: nothing is stored, so reasoning comes back only in this form."""
    kept.say("<think>I löök.</think>Hello.")
    common: Any = {"model": MODEL, "store": False, "include": ["reasoning.encrypted_content"]}
    stream = await client.responses.create(input="Hi", stream=True, **common)
    *_, last = [event async for event in stream]
    assert last.type == "response.completed"
    reasoning, message = last.response.output
    assert reasoning.type == "reasoning" and reasoning.encrypted_content is not None
    assert "look" not in reasoning.encrypted_content

    sealed: Any = {**reasoning.to_dict(), "content": None}
    message_item: Any = {"role": "user", "content": "Hi"}
    again = [message_item, sealed, message.to_dict(), message_item]
    response = await client.responses.create(input=again, **common)

    assert response.output_text == "Hello."
    assert "<think>I löök.</think>Hello." in kept.prompt
    kept.say("<think>I look.</think>Hello.")
    plain = await client.responses.create(model=MODEL, input="Hi")
    assert "encrypted_content" not in plain.output[0].to_dict()


@pytest.mark.parametrize("sealed", ["", "gAAAA", "hr1.AAAA", "hr1.é"])
async def test_reasoning_that_others_sealed_is_refused(kept: KeptGateway, sealed: str) -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    body = json.dumps({"input": [item]})
    answer = await kept.http.post("/v1/responses", content=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].encrypted_content"
    assert "leave the item out" in answer.json()["error"]["message"]


async def test_logprobs_of_the_text(kept: KeptGateway, gateway: Gateway) -> None:
    body = {
        "input": "Hi",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "stream": True,
    }
    answer = await gateway.http.post("/v1/responses", json=body)
    seen = list(events(answer.text))

    deltas = [event for event in seen if event["type"] == "response.output_text.delta"]
    (part,) = seen[-1]["response"]["output"][0]["content"]
    sent = [entry for event in deltas for entry in event["logprobs"]]
    assert part["logprobs"][: len(sent)] == sent
    assert len(part["logprobs"]) == seen[-1]["response"]["usage"]["output_tokens"]
    assert len(sent[0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["message.everything"]}, "include[0]"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
        ({"input": "x" * 10**6}, "input"),
        ({"input": "Hi", "max_output_tokens": 10**6}, "input"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"client_metadata": {"a": "x" * 40_000}}, "client_metadata.a"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, None),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    kept: KeptGateway, fields: dict[str, Any], param: str | None
) -> None:
    answer = await kept.http.post("/v1/responses", json={"input": "Hi", **fields})

    assert answer.status_code in (400, 404), answer.text
    assert param is None or answer.json()["error"]["param"] == param


@pytest.mark.parametrize("query", ["stream=maybe", "starting_after=-1", "starting_after=x"])
async def test_a_wrong_query_is_refused_by_name(kept: KeptGateway, query: str) -> None:
    answer = await kept.http.get(f"/v1/responses/resp_{'0' * 32}?{query}")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_errors_have_the_names_of_this_api(kept: KeptGateway) -> None:
    answer = await kept.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 10**6})
    unknown = await kept.http.post("/v1/responses", json={"input": "x", "max_tokens": 5})
    absent = {"input": "x", "previous_response_id": "resp_" + "0" * 32}
    refused = (await kept.http.post("/v1/responses", json=absent)).json()["error"]

    assert "or lower max_output_tokens." in answer.json()["error"]["message"]
    assert unknown.json()["error"]["param"] == "max_tokens"
    assert refused["code"] == "previous_response_not_found"


async def test_other_stored_requests_are_not_responses(kept: KeptGateway) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    chat: httpx.Response = await kept.http.post(
        "/v1/chat/completions", json=body, headers={"x-resumable": "true"}
    )
    name = chat.headers["content-location"].rpartition("/")[2]
    answer = await kept.http.get(f"/v1/responses/resp_{name}")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "response_not_found"


async def test_without_a_store_nothing_is_stored(gateway: Gateway) -> None:
    answer = await gateway.http.post("/v1/responses", json={"input": "Hi"})
    refused = await gateway.http.post("/v1/responses", json={"input": "Hi", "store": True})

    assert answer.json()["store"] is False
    assert refused.status_code == 400


async def test_the_sdk_parses_into_a_model(client: AsyncOpenAI, kept: KeptGateway) -> None:
    class City(pydantic.BaseModel):
        name: str

    kept.say('{"name": "Rome"}')
    response = await client.responses.parse(model=MODEL, input="Where?", text_format=City)

    assert response.output_parsed == City(name="Rome")
    assert kept.requests[-1].sampling.structured_outputs is not None


async def test_instructions_and_a_developer_make_one_system_message(
    client: AsyncOpenAI, kept: KeptGateway
) -> None:
    await client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    )

    assert "system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user\nHi" in kept.prompt
