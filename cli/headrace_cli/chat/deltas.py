"""The pieces of a chat answer, from the server-sent events of an OpenAI stream."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ..errors import ChatError
from ..sse import event_data


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A piece of an answer: text, or the reasoning before it."""

    content: str = ""
    reasoning: str = ""


async def deltas(lines: AsyncIterator[str]) -> AsyncIterator[ChatDelta]:
    """The pieces of one chat answer until `[DONE]`. Raises ChatError at an error event."""
    async for data in event_data(lines):
        if data == "[DONE]":
            return
        yield _delta(_object(data))


def _object(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ChatError(f"the server sent an event that is not JSON: {data[:200]}") from error
    if not isinstance(value, dict):
        raise ChatError(f"the server sent an event that is not an object: {data[:200]}")
    if "error" in value:
        raise ChatError(error_message(value))
    return value


def error_message(body: Any) -> str:
    """The message of an OpenAI error object."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])
    return str(error or body)[:500]


def _delta(chunk: dict[str, Any]) -> ChatDelta:
    choices = chunk.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    return ChatDelta(content=delta.get("content") or "", reasoning=reasoning or "")
