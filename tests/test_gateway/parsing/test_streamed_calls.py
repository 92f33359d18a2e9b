"""Calls in every format through every API: a stream adds up to the whole answer."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace_common.text.tokenizer import Tokenizer
from headrace_gateway.openai.answers import AnswerOptions
from headrace_gateway.parsing.output import OutputForm
from headrace_gateway.parsing.tool_calls.catalog import PARSERS
from headrace_gateway.queue_client.run import Piece, Usage
from headrace_gateway.resumable.answer_factory import ANSWERS
from headrace_testing.call_examples import EXAMPLES, MARKED
from headrace_testing.tokenizers import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer(), special_tokens={}, eos_token_ids=[0])
WEATHER = {"city": "Rome", "days": 2}
USAGE = Usage(prompt_tokens=3, completion_tokens=5)


def answer_of(api: str, name: str) -> Any:
    form = OutputForm(
        calls=name,
        tools=("weather", "now"),
        kinds={"weather": {"city": "text", "days": "json"}},
        reasoning="qwen3",
    )
    assert OutputForm.decode(form.encode()) == form  # as it is stored with requests
    options = AnswerOptions(
        answer_id="id", model="model", created=0, tokenizer=TOKENIZER, choices=1, form=form
    )
    return ANSWERS[api](options)


def pieces(text: str, *, whole: bool) -> list[Piece]:
    cut = [text] if whole else list(text)
    last = Piece(choice=0, text="", token_ids=(), logprobs=None, finish_reason="stop")
    return [*(replace(last, text=each, finish_reason=None) for each in cut), last]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("name", PARSERS)
def test_a_streamed_answer_adds_up_to_the_whole_one(name: str, api: str) -> None:
    content = "Well.\n" if name in MARKED else ""
    text = f"<think>\nI look.\n</think>\n\n{content}{EXAMPLES[name]}"
    added = answer_of(api, name)
    for piece in pieces(text, whole=True):
        added.add(piece)
    for whole in (True, False):
        streamed = answer_of(api, name)
        events = [chunk for piece in pieces(text, whole=whole) for chunk in streamed.chunks(piece)]
        events += streamed.closing(USAGE)
        assert READERS[api](events) == CONTENTS[api](added.whole(USAGE)) == expected(content)


def expected(content: str) -> list[tuple[str, Any]]:
    text = [("text", content.strip())] if content else []
    return [("reasoning", "I look."), *text, ("weather", WEATHER), ("now", {})]


def chat_stream(events: Sequence[Any]) -> list[tuple[str, Any]]:
    texts = {"reasoning": "", "text": ""}
    calls: list[list[str]] = []
    for delta in (each["choices"][0]["delta"] for each in events if each["choices"]):
        texts["reasoning"] += delta.get("reasoning_content", "")
        texts["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    found = [(kind, text) for kind, text in texts.items() if text]
    return [*found, *((name, json.loads(arguments)) for name, arguments in calls)]


def chat_whole(body: Any) -> list[tuple[str, Any]]:
    (choice,) = body["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    text = [("text", message["content"])] if message["content"] else []
    calls = [each["function"] for each in message["tool_calls"]]
    return [
        ("reasoning", message["reasoning_content"]),
        *text,
        *((call["name"], json.loads(call["arguments"])) for call in calls),
    ]


def responses_stream(events: Sequence[Any]) -> list[tuple[str, Any]]:
    """Reads the calls from the deltas; every event that repeats them must agree."""
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            deltas[place] = deltas.get(place, "") + event["delta"]
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == deltas[event["output_index"]]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[-1]["type"] == "response.completed"
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    return [
        (item["name"], json.loads(deltas[place]))
        if item["type"] == "function_call"
        else ({"message": "text"}.get(item["type"], item["type"]), deltas[place])
        for place, item in enumerate(items)
    ]


def responses_whole(body: Any) -> list[tuple[str, Any]]:
    assert body["status"] == "completed"
    return [
        (item["name"], json.loads(item["arguments"]))
        if item["type"] == "function_call"
        else ({"message": "text"}.get(item["type"], item["type"]), item["content"][0]["text"])
        for item in body["output"]
    ]


def messages_stream(events: Sequence[Any]) -> list[tuple[str, Any]]:
    blocks: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            blocks.append([block.get("name", block["type"]), ""])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]][1] += delta.get(
                "partial_json", delta.get("text", delta.get("thinking", ""))
            )
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    return [
        ("reasoning", text) if name == "thinking" else (name, _read(name, text))
        for name, text in blocks
    ]


def _read(name: str, text: str) -> Any:
    return text if name == "text" else json.loads(text)


def messages_whole(body: Any) -> list[tuple[str, Any]]:
    assert body["stop_reason"] == "tool_use"
    kinds = {"thinking": "reasoning", "text": "text"}
    return [
        (block["name"], block["input"])
        if block["type"] == "tool_use"
        else (kinds[block["type"]], block[block["type"]])
        for block in body["content"]
    ]


READERS = {"chat": chat_stream, "responses": responses_stream, "messages": messages_stream}
CONTENTS = {"chat": chat_whole, "responses": responses_whole, "messages": messages_whole}
