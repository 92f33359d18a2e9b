"""Prompts of the offline API, in vLLM's forms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from ..core.errors import ConfigError, RequestError
from .arguments import NO_MEDIA
from .tokenizer import ChatTokenizer


class TextPrompt(TypedDict):
    """A text. Prompts with different `cache_salt` share no cached prefixes."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids; `prompt` may be their text, for the output. `cache_salt` as in TextPrompt."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt

_NAMES = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
# Fields that vLLM has and Headrace refuses, with what to use.
UNSUPPORTED_PROMPT = {
    "multi_modal_data": NO_MEDIA,
    "multi_modal_uuids": NO_MEDIA,
    "mm_processor_kwargs": NO_MEDIA,
    "prompt_embeds": "send prompt or prompt_token_ids",
    "encoder_prompt": "models with an encoder and a decoder are not supported",
    "decoder_prompt": "models with an encoder and a decoder are not supported",
    "token_type_ids": "leave it out",
}
# Parts of a chat message that are text.
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt's tokens, and its text if it has one."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""


def read_prompt(
    prompt: Any, tokenizer: ChatTokenizer | None, *, special: bool = True
) -> ReadPrompt:
    """Reads any form of a prompt. `special`: texts get the tokenizer's special tokens.

    Raises RequestError for a form or a field that is not supported, and ConfigError for a text
    without a tokenizer.
    """
    if isinstance(prompt, str):
        return read_prompt({"prompt": prompt}, tokenizer, special=special)
    if not isinstance(prompt, Mapping):
        raise _not_a_prompt(prompt)
    _check_names(prompt)
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a text, not {salt!r:.60}")
    text = prompt.get("prompt")
    if prompt.get("prompt_token_ids") is not None:
        return ReadPrompt(text, list(prompt["prompt_token_ids"]), salt)
    if not isinstance(text, str):
        raise _not_a_prompt(prompt)
    if tokenizer is None:
        raise ConfigError("skip_tokenizer_init is set: send prompt_token_ids instead of a text")
    return ReadPrompt(text, tokenizer.encode(text, add_special_tokens=special), salt)


def listed(prompts: Any) -> list[Any]:
    return [prompts] if isinstance(prompts, str | Mapping) else list(prompts)


def text_messages(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose contents are texts: parts of text are joined with line breaks, as in vLLM.

    Raises RequestError for a part that is not text.
    """
    return [
        {**message, "content": _joined(message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in conversation
    ]


def _joined(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in _TEXT_PARTS:
            raise RequestError(
                f"messages: a part of type {kind!r:.60} is not supported: send text only"
            )
        texts.append(str(part["text"]) if isinstance(part, Mapping) else str(part))
    return "\n".join(texts)


def _check_names(prompt: Mapping[str, Any]) -> None:
    for name, value in prompt.items():
        if name in UNSUPPORTED_PROMPT and value is not None:
            raise RequestError(f"{name}: {UNSUPPORTED_PROMPT[name]}")
        if name not in _NAMES and name not in UNSUPPORTED_PROMPT:
            raise _not_a_prompt(prompt)


def _not_a_prompt(prompt: Any) -> RequestError:
    return RequestError(
        "a prompt must be a text, {'prompt': text} or {'prompt_token_ids': [...]}, not "
        f"{prompt!r:.80}"
    )
