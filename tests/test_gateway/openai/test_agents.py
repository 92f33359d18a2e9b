"""Bodies that agents send, with fields and values that need no action here."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, NotFoundError
from pydantic import ValidationError

from headrace_gateway.settings import GatewaySettings
from headrace_testing.backends import MODEL
from headrace_testing.kept_gateway import KeptGateway, serve_kept
from headrace_testing.tokenizers import write_tool_checkpoint
from headrace_testing.tool_templates import CHATML_WITH_TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPLATE = "{% if verbosity %}{{ '<' + verbosity + '>' }}{% endif %}" + CHATML_WITH_TOOLS
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
CALL = '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>'
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "parameters": SCHEMA,
    "strict": False,
    "output_schema": {"type": "string"},
    "allowed_callers": ["direct"],
    "defer_loading": False,
}
TOOL: dict[str, Any] = {
    "name": "shell",
    "input_schema": SCHEMA,
    "input_examples": [{"command": "pwd"}],
    "eager_input_streaming": True,
    "defer_loading": False,
    "cache_control": {"type": "ephemeral", "scope": "global"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def serving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KeptGateway]:
    folder = write_tool_checkpoint(tmp_path_factory.mktemp("agents"), TEMPLATE)
    async with serve_kept(folder) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def kept(serving: KeptGateway) -> KeptGateway:
    serving.say("Hello there.")
    serving.engine.thaw()
    return serving


async def test_an_agent_of_responses_sends_more_than_is_needed(kept: KeptGateway) -> None:
    kept.say(f"Wait.{CALL}")
    call = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"}
    text_part: dict[str, Any] = {"type": "output_text", "text": "One.", "annotations": []}
    answer = await kept.http.post(
        "/v1/responses",
        json={
            "model": MODEL,
            "input": [
                {"type": "message", "role": "user", "content": "Hi"},
                {"role": "assistant", "phase": "commentary", "content": [text_part]},
                {**call, "namespace": None, "caller": {"type": "direct"}, "async": False},
                {"type": "function_call_output", "call_id": "c1", "name": "shell", "output": "x"},
            ],
            "tools": [FUNCTION],
            "store": False,
            "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
            "reasoning": {"effort": "high", "summary": "detailed", "mode": "standard"},
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-turn-metadata": "{}" * 1000},
            "prompt_cache_key": "one",
            "prompt_cache_retention": "24h",
        },
    )

    response = answer.json()
    assert answer.status_code == 200, answer.text
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert response["reasoning"] == {"effort": "high", "summary": "detailed", "mode": "standard"}
    assert response["tools"] == [{"description": None, **FUNCTION}]
    assert "client_metadata" not in response
    assert kept.prompt.startswith("<low>")
    assert "One." in kept.prompt and '"name": "shell", "arguments": {}' in kept.prompt


async def test_a_chat_accepts_messages_from_other_servers_answers(kept: KeptGateway) -> None:
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    async with AsyncOpenAI(base_url=f"{kept.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [
            {"role": "user", "content": [part]},
            {"role": "assistant", "content": None, "refusal": "I would rather not."},
            {"role": "user", "content": "Please."},
        ]
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            verbosity="high",
            metadata={"turn": "1"},
            prompt_cache_retention="24h",
            prompt_cache_options={"mode": "implicit"},
        )

    assert answer.choices[0].message.content == "Hello there."
    assert kept.prompt.startswith("<high>")
    assert "assistant\nI would rather not.<|im_end|>" in kept.prompt


async def test_an_agent_of_messages_sends_more_than_is_needed(kept: KeptGateway) -> None:
    kept.say(f"<think>I look.</think>Wait.{CALL}")
    arguments: Any = {
        "model": MODEL,
        "max_tokens": 200,
        "tools": [TOOL],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "extra_body": {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        },
    }
    hi: Any = {"role": "user", "content": "Hi"}
    async with AsyncAnthropic(base_url=kept.url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(messages=[hi], **arguments)
        async with client.messages.stream(messages=[hi], **arguments) as stream:
            seen = [event async for event in stream]
            streamed = await stream.get_final_message()
        assert '"examples": [{"command": "pwd"}]' in kept.prompt
        again: Any = [hi, {"role": "assistant", "content": whole.content}, hi]
        await client.messages.create(messages=again, **arguments)

    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    thought = whole.content[0]
    assert thought.type == "thinking" and thought.thinking == ""
    assert streamed.content[0] == thought and "thinking" not in {event.type for event in seen}
    # Omitted reasoning comes back in the signature, and is shown to the model.
    assert "<think>I look.</think>Wait." in kept.prompt


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/messages",
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management.edits[0].type: 'compact_20260112' is not supported: shorten",
        ),
        (
            "/v1/messages",
            {"tools": [{**TOOL, "defer_loading": True}]},
            "tools[0].defer_loading: is not supported: there is no search for tools",
        ),
        (
            "/v1/responses",
            {"tools": [{**FUNCTION, "allowed_callers": ["programmatic"]}]},
            "tools[0].allowed_callers: is not supported: tools are called by the model itself",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]},
            "messages[0].audio: is not supported: this server reads text, images and frames",
        ),
    ],
)
async def test_fields_that_need_missing_features_are_refused_with_a_reason(
    kept: KeptGateway, path: str, fields: dict[str, Any], message: str
) -> None:
    rest: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    body = {"input": "Hi"} if path == "/v1/responses" else {**rest, "max_tokens": 5}
    answer = await kept.http.post(path, json={**body, **fields})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


async def test_a_conversation_that_is_too_long_loses_its_first_turns(kept: KeptGateway) -> None:
    """Whole turns are removed, so that no tool result is left without its call."""
    call = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"}
    turns: list[list[dict[str, Any]]] = [
        [
            {"role": "user", "content": f"turn {number} " + "word " * 150},
            {**call, "call_id": f"c{number}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}"},
            {"role": "assistant", "content": "Done."},
        ]
        for number in range(40)
    ]
    body = {
        "instructions": "Be brief.",
        "input": [item for turn in turns for item in turn] + [{"role": "user", "content": "Now?"}],
        "max_output_tokens": 100,
    }
    whole = await kept.http.post("/v1/responses", json=body)
    cut = await kept.http.post("/v1/responses", json={**body, "truncation": "auto"})

    assert whole.json()["error"]["code"] == "context_length_exceeded"
    response = cut.json()
    assert cut.status_code == 200, cut.text
    assert response["truncation"] == "auto"
    left = [number for number in range(40) if f"turn {number} " in kept.prompt]
    assert left and left == list(range(left[0], 40))
    assert [n for n in range(40) if f"result {n}<" in kept.prompt] == left
    assert "system\nBe brief.<" in kept.prompt and kept.prompt.rstrip().endswith("assistant")
    # As many turns as fit.
    used = response["usage"]["input_tokens"]
    assert 4096 - 100 - used < used / len(left)
    huge = [{"role": "user", "content": "word " * 5000}]
    none = await kept.http.post("/v1/responses", json={"input": huge, "truncation": "auto"})
    assert none.json()["error"]["code"] == "context_length_exceeded"


async def test_the_tokens_of_an_input_can_be_counted_first(kept: KeptGateway) -> None:
    async with AsyncOpenAI(base_url=f"{kept.url}/v1", api_key="none", max_retries=0) as client:
        arguments: Any = {"model": MODEL, "input": "Hi", "instructions": "Be brief."}
        tool: Any = FUNCTION
        counted = await client.responses.input_tokens.count(**arguments, tools=[tool])
        response = await client.responses.create(**arguments, tools=[tool])

    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens
    assert counted.object == "response.input_tokens"


async def test_a_server_can_be_set_to_ignore_unknown_fields(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """At any depth; fields that are known but not supported are still refused.

    Codex offers a web search to every server, and models need not call tools.
    """
    folder = write_tool_checkpoint(tmp_path_factory.mktemp("lenient"))
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}], "mood": "good"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "x": 1}, "x": 1}
    search = {"type": "web_search", "external_web_access": False}
    block = {"type": "text", "text": "Hi", "x": 1}
    bodies = {
        "/v1/chat/completions": {"messages": [message], "response_format": form, "mirostat": 2},
        "/v1/responses": {"input": [message], "tools": [search, {**FUNCTION, "x": 1}], "x": {}},
        "/v1/messages": {
            "messages": [{"role": "user", "content": [block]}],
            "max_tokens": 5,
            "tools": [{"type": "web_search_20250305", "name": "web_search"}, TOOL],
        },
    }
    async with serve_kept(folder, strict_requests=False) as kept:
        answers = {path: await kept.http.post(path, json=body) for path, body in bodies.items()}
        refused = await kept.http.post(
            "/v1/chat/completions", json={"messages": [message], "x": 1, "audio": {"voice": "a"}}
        )

    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(
        bodies, 200
    ), [answer.text for answer in answers.values()]
    assert refused.json()["error"]["param"] == "audio"


async def test_clients_that_know_one_name_only_find_the_model_by_an_alias(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_tool_checkpoint(tmp_path_factory.mktemp("aliases"))
    async with serve_kept(folder, model_aliases={"gpt-4o": MODEL, "lost": "nothing"}) as kept:
        async with AsyncOpenAI(base_url=f"{kept.url}/v1", api_key="x", max_retries=0) as client:
            hi: Any = [{"role": "user", "content": "Hi"}]
            answer = await client.chat.completions.create(model="gpt-4o", messages=hi)
            listed = [model.id async for model in client.models.list()]
            card = await client.models.retrieve("gpt-4o")
            own = await client.models.retrieve(MODEL)
            with pytest.raises(NotFoundError, match="'lost' is not served here"):
                await client.chat.completions.create(model="lost", messages=hi)

    assert (answer.model, listed) == (MODEL, [MODEL, "gpt-4o"])
    assert {**own.to_dict(), "id": "gpt-4o"} == card.to_dict()
    with pytest.raises(ValidationError, match="is a model's own name"):
        GatewaySettings(model=str(folder), served_model_name="a", model_aliases={"a": "b"})


async def test_a_choice_of_allowed_tools_shows_no_others(kept: KeptGateway) -> None:
    """The choice changes from turn to turn while the list of tools stays."""
    kept.say(CALL)
    names = ("shell", "browse")
    choice = {"type": "allowed_tools", "mode": "required"}
    functions = [{"name": name, "parameters": SCHEMA} for name in names]
    chat = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function} for function in functions],
    }
    allowed = [{"type": "function", "function": {"name": "shell"}}]
    tools = {"mode": "required", "tools": allowed}
    answer = await kept.http.post(
        "/v1/chat/completions",
        json={**chat, "tool_choice": {"type": "allowed_tools", "allowed_tools": tools}},
    )
    shown, held = kept.prompt, kept.requests[-1].sampling.structured_outputs
    response = await kept.http.post(
        "/v1/responses",
        json={
            "input": "Hi",
            "tools": [{"type": "function", **function} for function in functions],
            "tool_choice": {**choice, "tools": [{"type": "function", "name": "shell"}]},
        },
    )
    wrong = {**tools, "tools": [{"type": "function", "function": {"name": "rm"}}]}
    refused = await kept.http.post(
        "/v1/chat/completions",
        json={**chat, "tool_choice": {"type": "allowed_tools", "allowed_tools": wrong}},
    )

    message = answer.json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["shell"]
    assert '"shell"' in shown and "browse" not in shown and held is not None
    assert response.json()["output"][0]["name"] == "shell"
    assert response.json()["tool_choice"]["mode"] == "required"
    assert len(response.json()["tools"]) == 2 and "browse" not in kept.prompt
    assert "'rm' is not one of the tools: shell, browse." in refused.json()["error"]["message"]
