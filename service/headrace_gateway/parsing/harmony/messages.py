"""Rewrites a conversation for gpt-oss's chat template, which leaves out what it does not expect.

The template takes one message of instructions and one call in each message. Before a call it takes
either reasoning or text, and writes both as reasoning. Each tool needs a description.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

Message = dict[str, Any]

_INSTRUCTING = ("system", "developer")


def writable(messages: Sequence[Message]) -> list[Message]:
    """Returns the same conversation in that form. Messages are as templates know them."""
    first = [*takewhile(lambda each: each["role"] in _INSTRUCTING, messages)]
    return [*_joined(first), *map(_reasoned, _single_calls(messages[len(first) :]))]


def described(tools: Sequence[Mapping[str, Any]] | None) -> list[Message] | None:
    """Returns the same tools, each with a description."""
    if tools is None:
        return None
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def _joined(instructions: Sequence[Message]) -> list[Message]:
    if len(instructions) < 2:
        return [*instructions]
    return [{**instructions[0], "content": _text(*(each["content"] for each in instructions))}]


def _reasoned(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    text = _text(message.get("reasoning_content"), message.get("content"))
    return {**message, "content": "", "reasoning_content": text or None}


def _single_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """Puts each call into a separate message, followed by its results."""
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results = [*takewhile(lambda each: each["role"] == "tool", left)]
        del left[: len(results)]
        for number, (call, mine) in enumerate(_answered(calls, results)):
            fields = {} if number else message
            yield {"content": "", **fields, "role": "assistant", "tool_calls": [call]}
            yield from mine


def _answered(
    calls: Sequence[Message], results: Sequence[Message]
) -> Iterator[tuple[Message, list[Message]]]:
    """Pairs each call with its results: by their ids, or else in order."""
    places = {call["id"]: place for place, call in enumerate(calls) if call["id"] is not None}
    of_calls: list[list[Message]] = [[] for _ in calls]
    for order, result in enumerate(results):
        place = places.get(result.get("tool_call_id"), min(order, len(calls) - 1))
        of_calls[place].append(result)
    return zip(calls, of_calls, strict=True)


def _text(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))
