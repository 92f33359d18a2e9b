"""A conversation that is built from items.

All items of an assistant between two other messages become one message.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..schemas.chat_messages import FunctionCall, ImagePart, Message, TextPart, ToolCall

Role = Literal["system", "developer", "user"]
Parts = str | list[TextPart | ImagePart]


class Transcript:
    """Takes the items in order. `messages` closes the assistant's open message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def extend(self, messages: list[Mapping[str, Any]]) -> None:
        """Adds messages that `plain` has made."""
        self._close()
        self._messages += [Message.model_validate(message) for message in messages]

    def say(self, role: Role, content: Parts) -> None:
        self._close()
        self._messages.append(Message(role=role, content=content))

    def reason(self, text: str) -> None:
        if self._texts or self._calls:
            self._close()
        self._reasoning.append(text)

    def answer(self, text: str) -> None:
        if self._calls:
            self._close()
        self._texts.append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        function = FunctionCall(name=name, arguments=arguments)
        self._calls.append(ToolCall(id=call_id, function=function))

    def result(self, call_id: str, content: Parts) -> None:
        self._close()
        self._messages.append(Message(role="tool", tool_call_id=call_id, content=content))

    def messages(self) -> list[Message]:
        self._close()
        return list(self._messages)

    def plain(self) -> list[dict[str, Any]]:
        """Returns the messages as JSON."""
        return [message.model_dump(exclude_none=True) for message in self.messages()]

    def _close(self) -> None:
        if not (self._reasoning or self._texts or self._calls):
            return
        self._messages.append(
            Message(
                role="assistant",
                content="".join(self._texts),
                reasoning_content="".join(self._reasoning) or None,
                tool_calls=self._calls or None,
            )
        )
        self._reasoning, self._texts, self._calls = [], [], []


def joined(parts: Sequence[TextPart | ImagePart]) -> Parts:
    """Returns parts as a message has them: as one text if there is no image."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "\n".join(texts) if len(texts) == len(parts) else list(parts)


def text_part(text: str) -> TextPart:
    return TextPart(type="text", text=text)
