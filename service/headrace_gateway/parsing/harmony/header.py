"""Headers of Harmony's messages, gpt-oss's chat format: they say for whom a message is.

`<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>...<|end|>`: the
header is what precedes `<|message|>`. Its recipient may follow the author or the channel.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from headrace_common.text.tokenizer import Tokenizer

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (CHANNEL, START, MESSAGE, END, RETURN, CALL, CONSTRAIN)
# The markers that end a message.
ENDS = (END, CALL, RETURN)
NAMESPACE = "functions."
MAX_HEADER_CHARS = 256
# vLLM's names for this format.
OPENAI, OPENAI_GPTOSS = "openai", "openai_gptoss"

_AUTHOR = re.compile(r"\s*(?!to=)([^\s<]*)")
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*([a-z]*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def is_harmony(template: str) -> bool:
    """Whether a chat template writes Harmony."""
    return CHANNEL in template and MESSAGE in template


class Purpose(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Header:
    author: str
    channel: str
    recipient: str

    @classmethod
    def read(cls, text: str) -> "Header":
        """Reads a header's text, with or without `<|start|>` before it."""
        text = text.rpartition(START)[2]
        author, channel, recipient = (
            found[1] if found else ""
            for found in (_AUTHOR.match(text), _CHANNEL.search(text), _RECIPIENT.search(text))
        )
        return cls(author or "assistant", channel, recipient)

    def function(self, known: Collection[str] | None) -> str | None:
        """Returns the function that the message calls; None if it is not a call.

        `known` are the given functions; without them nothing is a call.
        """
        if known is None or self.author != "assistant":
            return None
        if self.recipient in known:
            return self.recipient
        return self.recipient.removeprefix(NAMESPACE) if self._in_namespace else None

    def purpose(self, known: Collection[str] | None) -> Purpose:
        """Returns the message's purpose: what is not for the user is a call, or reasoning."""
        if self.function(known) is not None:
            return Purpose.CALL
        hidden = self.recipient or self.channel == "analysis" or self.author != "assistant"
        return Purpose.REASONING if hidden else Purpose.TEXT

    @property
    def _in_namespace(self) -> bool:
        return len(self.recipient) > len(NAMESPACE) and self.recipient.startswith(NAMESPACE)


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a text begins: after the header's first words, or (`inside`) in the message."""

    header: str = ""
    inside: bool = False


def begin_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Begin:
    """Returns where the answer to a prompt begins: in its last message, if that has not ended."""
    start, message = tokenizer.token_to_id(START), tokenizer.token_to_id(MESSAGE)
    if start is None or start not in prompt:
        return Begin()
    at = len(prompt) - 1 - list(reversed(prompt)).index(start)
    words: list[int] = []
    inside = False
    for token_id in prompt[at + 1 :]:
        if tokenizer.id_to_token(token_id) in ENDS:
            return Begin()
        inside = inside or token_id == message
        if not inside:
            words.append(token_id)
    header = tokenizer.decode(words, skip_special_tokens=False)
    return Begin("" if header.strip() == "assistant" and not inside else header, inside)
